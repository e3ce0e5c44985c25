"""What a drafter implements to be trained: predictions at some positions, and how it is saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafters.training.batches import Batch


@dataclass(frozen=True)
class Prediction:
    """What a drafter says at P positions, all at the same draft depth, and what the target thinks there.

    Arguments:
        logits: `[P, Vd]` over the draft vocabulary, with gradients.
        final: `[P, H]` the target's final hidden states whose laws are to be met.
        token: `[P]` int64, the tokens that came.
        position: `[P]` int64, numbers that tell equal positions at other depths.
    """

    logits: Tensor
    final: Tensor
    token: Tensor
    position: Tensor


class Trainable(ABC):
    """A drafter in training.

    Attributes:
        module: what is trained and saved between steps.
        layers: hidden states of the target that it reads, as in `Model.features`.
        whole: whether it reads the prompts, too.
        token_map: `[Vd]` the draft vocabulary as the target's ids; `None` = all.
        discount: weight of depth d+1 in the loss relative to depth d.
    """

    module: nn.Module
    layers: tuple[int, ...] = ()
    whole: bool = False
    token_map: Tensor | None = None
    discount: float = 0.8

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

    @abstractmethod
    def save(self, folder: Path, card: str) -> Path:
        """Write a checkpoint that `drafter.checkpoint=<folder>` loads."""


def soft_cross_entropy(logits: Tensor, law: Tensor) -> Tensor:
    """`[P]`: −Σ p log q; the mass that p has outside the draft vocabulary costs nothing.

    Arguments:
        logits: `[P, Vd]`. law: `[P, Vd]`, sums to at most 1.
    """
    logits = logits.float()
    return law.sum(-1) * logits.logsumexp(-1) - (law * logits).sum(-1)


def divergence(logits: Tensor, law: Tensor) -> Tensor:
    """`[P]`: KL(p ‖ q) over the draft vocabulary, p not renormalised."""
    return soft_cross_entropy(logits, law) - torch.special.entr(law).sum(-1)
