"""How good a drafter is on held-out answers: acceptance and agreement at every draft depth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafters.training.batches import Batch
from drafters.training.losses import soft_cross_entropy
from drafters.training.teacher import Teacher
from drafters.training.trainable import Prediction, Trainable
from specdec.model import Model


@dataclass
class DepthCounts:
    """Sums over positions; shares are formed only when they are read."""

    positions: int = 0
    overlap: float = 0.0  # Σ over positions of Σ min(p, q)
    agreed: int = 0  # argmax p = argmax q
    hit: int = 0  # argmax q is the token that came
    loss: float = 0.0

    def shares(self) -> dict[str, float]:
        n = max(self.positions, 1)
        return {
            "positions": self.positions,
            "alpha": self.overlap / n,
            "agreement": self.agreed / n,
            "hit": self.hit / n,
            "loss": self.loss / n,
        }


@dataclass
class Validation:
    """The result: counts per depth, and the ranks by which trees are tuned.

    Arguments:
        depths: index 0 is depth 1.
        ranks: `[P, D]` rank of the token that came, at positions where every depth made a prediction.
    """

    depths: list[DepthCounts] = field(default_factory=list)
    ranks: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))

    def report(self) -> list[dict[str, float]]:
        return [depth.shares() for depth in self.depths]

    @property
    def expected_chain(self) -> float:
        """1 + α₁ + α₁α₂ + …: block efficiency of a chain if acceptances were independent."""
        total, product = 1.0, 1.0
        for depth in self.report():
            product *= depth["alpha"]
            total += product
        return total


@torch.no_grad()
def validate(trainable: Trainable, teacher: Teacher, batches: Iterable[Batch]) -> Validation:
    """α = Σ min(p, q) at temperature 1 (q = 0 outside the draft vocabulary) and agreement, by depth."""
    result, ranks = Validation(), []
    trainable.module.eval()
    for batch in batches:
        by_depth: list[tuple[Tensor, Tensor]] = []
        for depth, prediction in enumerate(trainable.predictions(batch)):
            if depth == len(result.depths):
                result.depths.append(DepthCounts())
            rank = _count(result.depths[depth], prediction, batch, trainable, teacher)
            by_depth.append((prediction.row * batch.tokens.shape[1] + prediction.origin, rank))
        ranks.append(_aligned(by_depth))
    trainable.module.train()
    result.ranks = torch.cat(ranks) if ranks else result.ranks
    return result


def _count(
    counts: DepthCounts, prediction: Prediction, batch: Batch, trainable: Trainable, teacher: Teacher
) -> Tensor:
    """Add one prediction's counts; `[P]` the ranks of the tokens that came (Vd if they cannot be drafted)."""
    logits = prediction.logits.float()
    vocab = logits.shape[-1]
    row, place = prediction.row, prediction.place
    everything, token = teacher.law(batch.features[Model.FINAL][row, place - 1]), batch.tokens[row, place]
    token_map = trainable.token_map
    token_map = None if token_map is None else token_map.to(logits.device)
    law = everything if token_map is None else everything[:, token_map]
    q = logits.softmax(-1)
    best = logits.argmax(-1)
    best = best if token_map is None else token_map[best]
    counts.positions += len(logits)
    counts.overlap += float(torch.minimum(law, q).sum())
    counts.agreed += int((best == everything.argmax(-1)).sum())
    counts.hit += int((best == token).sum())
    counts.loss += float(soft_cross_entropy(logits, law).sum())
    known, own = torch.ones_like(token, dtype=torch.bool), token
    if token_map is not None:
        own = torch.searchsorted(token_map, token).clamp(max=vocab - 1)
        known = token_map[own] == token
    own = logits.gather(1, own[:, None])
    return torch.where(known, (logits > own).sum(-1), vocab).cpu()


def _aligned(by_depth: list[tuple[Tensor, Tensor]]) -> Tensor:
    """`[P, D]` ranks at the positions that all depths share."""
    tables = [dict(zip(p.tolist(), r.tolist(), strict=True)) for p, r in by_depth]
    shared = [position for position in tables[0] if all(position in table for table in tables[1:])]
    found = torch.tensor([[table[p] for table in tables] for p in shared], dtype=torch.int64)
    return found.view(len(shared), len(tables))
