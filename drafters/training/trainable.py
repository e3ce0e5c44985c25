"""What a drafter implements to be trained: predictions at some positions, and how it is saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drafters.training.batches import Batch


@dataclass(frozen=True)
class Prediction:
    """What a drafter says at P positions of a batch, all at the same draft depth.

    Arguments:
        states: `[P, H]` what enters the head, with gradients.
        head: its matrix `[Vd, H]` over the draft vocabulary and its bias `[Vd]` or none.
        row: `[P]` int64, which sequences.
        place: `[P]` int64, the places whose tokens are guessed; the target's law of them is that of the state
            one place before.
        origin: `[P]` int64, the places from which the draft goes out, equal at all depths of one draft.
        regression: `[P]` what else is to be small there, e.g. the distance of states from the target's.
    """

    states: Tensor
    head: tuple[Tensor, Tensor | None]
    row: Tensor
    place: Tensor
    origin: Tensor
    regression: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """`[P, Vd]`."""
        weight, bias = self.head
        return nn.functional.linear(self.states.to(weight.dtype), weight, bias)


class Trainable(ABC):
    """A drafter in training.

    Attributes:
        module: what is trained and saved between steps.
        layers: hidden states of the target that it reads, as in `Model.features`.
        prompts: what it reads of them: "none", "tokens" (not the target's states there), or "states".
        token_map: `[Vd]` the draft vocabulary as the target's ids; `None` = all.
        discount: weight of depth d+1 in the loss relative to depth d.
        report: what its making is worth telling.
    """

    module: nn.Module
    layers: tuple[int, ...] = ()
    prompts: str = "none"
    token_map: Tensor | None = None
    discount: float = 0.8
    report: dict[str, Any] = {}  # noqa: RUF012

    @abstractmethod
    def predictions(self, batch: Batch) -> Iterator[Prediction]:
        """One prediction per draft depth, depth 1 first."""

    def adapt(self, ranks: Tensor) -> dict[str, Any]:
        """Settle what is not trained by gradients, e.g. the tree.

        Arguments:
            ranks: `[P, D]` the rank each depth gave to the token that came, in held-out greedy answers.

        Returns:
            What to report of it.
        """
        return {}

    @property
    @abstractmethod
    def relative_cost(self) -> float:
        """c: weights read per draft step over those read per target step."""

    @abstractmethod
    def save(self, folder: Path, card: str) -> Path:
        """Write a checkpoint that `drafter.checkpoint=<folder>` loads."""
