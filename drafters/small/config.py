"""Options of `drafter=small`."""

from dataclasses import dataclass, field

from specdec.config import DTYPES, at_least, suggest
from specdec.errors import OptionError

IMPORTANCE = ("loss", "influence")
SIBLINGS = ("with_replacement", "without_replacement", "top_k")


@dataclass
class Config:
    name: str = "small"
    gamma: int = 4  # tokens drafted per step
    path: str | None = None  # local folder or hub id of the small model
    revision: str | None = None
    layers: int | None = None  # without a path: the target's own first layers; task=train: how many to keep
    units: int | None = None  # task=train: MLP units kept per layer, null = all
    groups: int | None = None  # task=train: key/value heads kept per layer, each with its queries, null = all
    importance: str = "loss"  # task=train: layers are ranked by loss (leave one out) | influence (of a block)
    dtype: str = "auto"  # auto = the target's
    # stop after a token with less draft probability (greedily: that at temperature 1) than this; 0 = never
    confidence: float = 0.0
    trust_remote_code: bool = False
    tree: list[int] = field(
        default_factory=list
    )  # children per node, by depth, e.g. [3,2,1]; [] = a chain of gamma
    siblings: str = "without_replacement"  # of a tree: with_replacement | without_replacement | top_k

    @property
    def wants_shipped(self) -> bool:
        return self.path is None and self.layers is None

    def proposes(self) -> tuple[str, bool | None]:
        if not self.tree:
            return "with_replacement", True
        kind = "deterministic" if self.siblings == "top_k" else self.siblings
        return kind, max(self.tree) == 1

    def refuse_loading_options(self) -> None:
        """Only a model of its own is loaded as they say; a pruned one goes with the target.

        Raises:
            OptionError: one of them is given.
        """
        for name in ("revision", "dtype", "trust_remote_code"):
            if getattr(self, name) != getattr(Config, name):
                remedy = "is only for a model of its own, given by drafter.path; leave it out."
                raise OptionError(f"drafter.{name}", getattr(self, name), remedy)

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise OptionError("drafter.gamma", self.gamma, "must be ≥ 1; use drafter=none for no draft.")
        if not 0 <= self.confidence < 1:
            raise OptionError("drafter.confidence", self.confidence, "must lie in [0, 1); 0 switches it off.")
        if self.layers is not None and self.layers < 1:
            raise OptionError("drafter.layers", self.layers, "must be ≥ 1.")
        at_least("drafter", self, units=1, groups=1)
        if self.dtype not in DTYPES:
            raise OptionError("drafter.dtype", self.dtype, f"no such choice; {suggest(self.dtype, DTYPES)}")
        if self.importance not in IMPORTANCE:
            remedy = f"no such choice; {suggest(self.importance, IMPORTANCE)}"
            raise OptionError("drafter.importance", self.importance, remedy)
        if self.path is not None and self.layers is not None:
            raise OptionError(
                "drafter.layers", self.layers, "is only for drafter.path=null; give one of them."
            )
        if self.path is None:
            self.refuse_loading_options()
        if any(children < 1 for children in self.tree):
            raise OptionError("drafter.tree", self.tree, "every position needs at least one child.")
        if self.siblings not in SIBLINGS:
            remedy = f"no such choice; {suggest(self.siblings, SIBLINGS)}"
            raise OptionError("drafter.siblings", self.siblings, remedy)
        if self.tree and self.confidence:
            raise OptionError("drafter.confidence", self.confidence, "is only for chains (drafter.tree=[]).")
