"""Options of `drafter=eagle`."""

from dataclasses import dataclass, field

from drafters.eagle.shape import check_paths
from specdec.config import at_least, suggest
from specdec.errors import OptionError

MODES = ("dynamic", "static", "chain")
SIBLINGS = ("top_k", "coupled", "with_replacement", "without_replacement")
WEIGHTS = ("pretrained", "random")


@dataclass
class Config:
    name: str = "eagle"
    checkpoint: str | None = (
        None  # folder or hub id, any published layout or ours; null = shipped for the target
    )
    revision: str | None = None
    weights: str = "pretrained"  # pretrained | random (for timing and tests)
    mode: str = "dynamic"  # dynamic (EAGLE-2) | static (one shape for all contexts) | chain
    # top_k (nothing drawn) | coupled (dynamic) | with_replacement | without_replacement (static, chain)
    siblings: str = "top_k"
    depth: int = 4  # tokens from the root to the deepest node
    # dynamic: a row gets no further level that will be of use with a smaller chance; 0 = always all levels
    stop_below: float = 0.3
    top_k: int = 8  # children looked at per node; dynamic: also nodes expanded per level
    # to verify, in dynamic trees copied ones included; null = what task=speed_model found best here, else 15,
    # or 9 on a CPU without AMX
    nodes: int | None = None
    tree: list[list[int]] = field(
        default_factory=list
    )  # static: paths of ranks, e.g. [[0],[1],[0,0]]; [] = built in
    # add a branch with what followed the last words the last time they occurred; null = to dynamic trees
    ngram: bool | None = None
    ngram_gamma: int = 8  # its length at most
    ngram_min: int = 2  # words that must match at least
    generation: int = 3  # of weights made here: 1 (also EAGLE-2's) | 3
    layers: int = 1  # of weights made here
    draft_vocab: int | None = None  # of weights made here: tokens that can be drafted; null = all

    @property
    def copies(self) -> bool:
        """Whether a branch is copied from the text."""
        return self.mode == "dynamic" if self.ngram is None else self.ngram

    @property
    def wants_shipped(self) -> bool:
        return self.weights == "pretrained" and self.checkpoint is None

    def proposes(self) -> tuple[str, bool | None]:
        kind = "deterministic" if self.siblings == "top_k" else self.siblings
        if self.copies:
            return kind, False
        if self.mode == "static":
            return kind, None  # as wide as its tree
        return kind, self.mode == "chain" or 1 in (self.top_k, self.nodes)

    def __post_init__(self) -> None:
        for name, choices in {"mode": MODES, "siblings": SIBLINGS, "weights": WEIGHTS}.items():
            if getattr(self, name) not in choices:
                value = getattr(self, name)
                raise OptionError(f"drafter.{name}", value, f"no such choice; {suggest(value, choices)}")
        if self.weights == "random" and self.checkpoint is not None:
            remedy = "is only for drafter.weights=pretrained; give one of them."
            raise OptionError("drafter.checkpoint", self.checkpoint, remedy)
        if self.generation not in (1, 3):
            raise OptionError(
                "drafter.generation", self.generation, "is 1 (EAGLE and EAGLE-2) or 3 (EAGLE-3)."
            )
        at_least(
            "drafter", self, depth=1, top_k=1, nodes=1, ngram_gamma=1, ngram_min=1, layers=1, draft_vocab=1
        )
        if not 0 <= self.stop_below <= 1:
            raise OptionError("drafter.stop_below", self.stop_below, "is a chance, from 0 to 1.")
        if self.siblings not in ("top_k", "coupled") and self.mode == "dynamic":
            remedy = (
                "would be biased: a dynamic tree drops tokens after drawing them; use drafter.mode=static."
            )
            raise OptionError("drafter.siblings", self.siblings, remedy)
        if self.siblings == "coupled" and self.mode != "dynamic":
            remedy = "is for drafter.mode=dynamic; drawn siblings are coupled by verify=gumbel itself."
            raise OptionError("drafter.siblings", self.siblings, remedy)
        if self.siblings not in ("top_k", "coupled") and self.ngram:
            raise OptionError(
                "drafter.ngram", True, "a copied branch is not drawn; use drafter.siblings=top_k."
            )
        if self.tree and self.mode != "static":
            raise OptionError("drafter.tree", self.tree, f"is for drafter.mode=static, not {self.mode}.")
        if problem := check_paths(self.tree, drawn=self.siblings != "top_k"):
            raise OptionError("drafter.tree", self.tree, problem)
