"""Measured decode steps as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class Steps:
    """One entry per decode step of a batch, from `Ledger.step_seconds`.

    Arguments:
        batch: rows. nodes: drafted nodes per row, so that the forward holds nodes + 1 tokens per row.
        depth: depth of the draft, the number of passes of a sequential drafter.
        context: tokens of the longest row. drafting: 1 where a drafter is at work, 0 in the baseline.
        draft, target, rule, other: seconds.
    """

    batch: np.ndarray
    nodes: np.ndarray
    depth: np.ndarray
    context: np.ndarray
    drafting: np.ndarray
    draft: np.ndarray
    target: np.ndarray
    rule: np.ndarray
    other: np.ndarray

    @classmethod
    def from_rows(
        cls, rows: Sequence[Sequence[float]], depth: Sequence[int] | None = None, drafting=True
    ) -> Steps:
        """From rows (batch, nodes, context, draft, target, rule, other); `depth` is `nodes` for chains."""
        table = np.asarray(rows, dtype=np.float64).reshape(-1, 7).T
        batch, nodes, context, *seconds = table
        deep = nodes if depth is None else np.asarray(depth, dtype=np.float64)
        return cls(batch, nodes, deep, context, np.full(len(nodes), float(drafting)), *seconds)

    @classmethod
    def concatenate(cls, parts: Iterable[Steps]) -> Steps:
        parts = list(parts) or [cls.from_rows([])]
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)))

    def where(self, mask: np.ndarray) -> Steps:
        return Steps(*(getattr(self, f.name)[mask] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def overhead(self) -> np.ndarray:
        """Seconds of everything but drafting and the target's forward."""
        return self.rule + self.other

    @property
    def seconds(self) -> np.ndarray:
        return self.draft + self.target + self.rule + self.other
