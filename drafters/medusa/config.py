"""Options of `drafter=medusa`."""

from dataclasses import dataclass

from specdec.config import at_least, suggest
from specdec.errors import OptionError

SIBLINGS = ("top_k", "without_replacement", "with_replacement")
WEIGHTS = ("pretrained", "random")


@dataclass
class Config:
    name: str = "medusa"
    checkpoint: str | None = None  # folder, file or hub id of trained heads; null = the shipped ones
    revision: str | None = None
    weights: str = "pretrained"  # pretrained | random (untrained heads, for timing and certificates)
    siblings: str = "top_k"  # top_k (nothing drawn) | without_replacement | with_replacement
    choices: list[list[int]] | None = (
        None  # the tree as paths of ranks, e.g. [[0],[1],[0,0]]; null = the heads' own
    )
    nodes: int = 11  # size of the heads' own tree, which is cut to its best nodes
    # of new heads (weights=random, task=train):
    heads: int = 3  # tokens guessed ahead
    resblocks: int = 1  # residual blocks per head
    own_head: bool = False  # every head has a vocabulary matrix of its own instead of the target's
    sees_root: bool = True  # heads also see the last committed token, as in Hydra (Ankner et al. 2402.05109)
    draft_vocab: int | None = None  # only the target's most frequent tokens are guessed; null = all

    @property
    def wants_shipped(self) -> bool:
        return self.weights == "pretrained" and self.checkpoint is None

    def proposes(self) -> tuple[str, bool | None]:
        return (
            "deterministic" if self.siblings == "top_k" else self.siblings
        ), None  # the heads bring a tree

    def __post_init__(self) -> None:
        at_least("drafter", self, nodes=1, heads=1, resblocks=1, draft_vocab=1)
        if self.siblings not in SIBLINGS:
            remedy = f"no such choice; {suggest(self.siblings, SIBLINGS)}"
            raise OptionError("drafter.siblings", self.siblings, remedy)
        if self.weights not in WEIGHTS:
            remedy = f"no such choice; {suggest(self.weights, WEIGHTS)}"
            raise OptionError("drafter.weights", self.weights, remedy)
        if self.weights == "random" and self.checkpoint is not None:
            remedy = "is only for drafter.weights=pretrained; give one of them."
            raise OptionError("drafter.checkpoint", self.checkpoint, remedy)
        if self.choices is not None:
            _check_tree(self.choices)


def _check_tree(choices: list[list[int]]) -> None:
    paths = {tuple(path) for path in choices}
    if not paths or () in paths or len(paths) < len(choices):
        raise OptionError("drafter.choices", choices, "must be distinct paths, e.g. [[0],[1],[0,0]].")
    for path in paths:
        if min(path) < 0:
            raise OptionError("drafter.choices", list(path), "ranks begin with 0.")
        if len(path) > 1 and path[:-1] not in paths:
            remedy = f"its parent {list(path[:-1])} is not in the tree; add it."
            raise OptionError("drafter.choices", list(path), remedy)
