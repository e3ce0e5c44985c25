"""What a drafter's tokens are worth: the acceptance vector, with no assumption that positions are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specdec.ledger import position_counts

SHARES = ("offered", "tried", "accepted", "drafted")


def block_efficiency_iid(alpha: float, gamma: int) -> float:
    """τ = (1 − α^{γ+1})/(1 − α) if every position is accepted with α, independently (2211.17192, equation
    1).
    """
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def textbook_speedup(alpha: float, gamma: int, c: float) -> float:
    """(1 − α^{γ+1})/((1 − α)(γc + 1)) (2211.17192, theorem 3.8); c: seconds of a draft pass per target
    step.
    """
    return block_efficiency_iid(alpha, gamma) / (gamma * c + 1)


@dataclass(frozen=True)
class Acceptance:
    """Shares of decode steps, by draft depth 1 … D.

    Arguments:
        offered: whose draft was at least d deep.
        tried: that got so far: the draft was so deep, and all before was accepted.
        accepted: that accepted at least d tokens (unconditional, so no independence is assumed).
        drafted: whose forward held at least d drafted positions (`offered` before the end of the room cut
            it).
        extra: tokens a step emits beyond the accepted ones: 1, less what a stop cut off.
        steps: how many steps these shares were counted in (0: given, not counted).
    """

    offered: np.ndarray
    tried: np.ndarray
    accepted: np.ndarray
    drafted: np.ndarray
    extra: float = 1.0
    steps: int = 0

    @classmethod
    def given(cls, conditional: Sequence[float]) -> Acceptance:
        """Every step drafts `len(conditional)` tokens; each has its rate once the ones before are
        accepted.
        """
        accepted, ones = np.cumprod(conditional, dtype=np.float64), np.ones(len(conditional))
        return cls(ones, np.concatenate([[1.0], accepted])[:-1], accepted, ones)

    @classmethod
    def counted(
        cls,
        depth: Sequence[int],
        accepted: Sequence[int],
        emitted: Sequence[int] | None = None,
        nodes: Sequence[int] | None = None,
    ) -> Acceptance:
        """From drafts' depths, accepted and emitted lengths, one entry per step and row (no prefills)."""
        steps = len(depth)
        if not steps:
            return cls(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0))
        offered, tried, taken = (n / steps for n in position_counts(list(depth), list(accepted)))
        levels = np.arange(1, len(offered) + 1)[:, None]
        drafted = offered if nodes is None else (np.asarray(nodes)[None] >= levels).sum(1) / steps
        extra = 1.0 if emitted is None else (sum(emitted) - sum(accepted)) / steps
        return cls(offered, tried, taken, np.maximum(drafted, offered), extra, steps)

    @classmethod
    def pool(cls, parts: Sequence[Acceptance]) -> Acceptance:
        """Runs of several draft lengths as one: each depth from the runs that drafted so deep."""
        weights = np.array([max(p.steps, 1) for p in parts], dtype=np.float64)
        deepest = max(p.gamma for p in parts)
        known = np.array([[p.gamma > d for d in range(deepest)] for p in parts])  # [runs, D]

        def mean(name: str) -> np.ndarray:
            table = np.array([np.pad(getattr(p, name), (0, deepest - p.gamma)) for p in parts])
            return np.minimum.accumulate((weights @ table) / (weights @ known))

        columns = {name: mean(name) if deepest else np.zeros(0) for name in SHARES}
        extra = float(weights @ [p.extra for p in parts] / weights.sum())
        return cls(**columns, extra=extra, steps=sum(p.steps for p in parts))

    @property
    def gamma(self) -> int:
        """D, the deepest draft."""
        return len(self.offered)

    @property
    def conditional(self) -> np.ndarray:
        """Acceptance rate of depth d among the steps that tried it (0 where none did)."""
        return np.divide(self.accepted, self.tried, out=np.zeros(self.gamma), where=self.tried > 0)

    @property
    def rate(self) -> float:
        """α: accepted over tried, all depths pooled."""
        return float(self.accepted.sum() / self.tried.sum()) if self.tried.sum() else 0.0

    @property
    def block_efficiency(self) -> float:
        """τ: tokens per target forward."""
        return float(self.extra + self.accepted.sum())

    def at(self, gamma: int) -> Acceptance:
        """The same drafter with drafts of at most `gamma`: cut, or carried on.

        Further depths are offered as often as the deepest one was, and accepted, once reached, at the pooled
        rate of the deeper half of the known ones.
        """
        known = self.gamma
        if gamma <= known or known == 0:
            return replace(self, **{name: getattr(self, name)[:gamma] for name in SHARES})
        tried = self.tried[known // 2 :].sum()
        rate = float(self.accepted[known // 2 :].sum() / tried) if tried else 0.0
        accepted = np.concatenate(
            [self.accepted, self.accepted[-1] * rate ** np.arange(1, gamma - known + 1)]
        )
        tried = np.concatenate([self.tried, accepted[known - 1 : -1]])
        offered, drafted = (np.pad(x, (0, gamma - known), mode="edge") for x in (self.offered, self.drafted))
        return replace(self, offered=offered, tried=tried, accepted=accepted, drafted=drafted)

    def drafts(self) -> tuple[np.ndarray, np.ndarray]:
        """Chain drafts by length 0 … D: (lengths, share of steps)."""
        at_least = np.concatenate([[1.0], self.drafted, [0.0]])
        return np.arange(self.gamma + 1), -np.diff(at_least)
