"""The ledger counts, reports divide: raw counts per step and row, and every published convention derived from them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

PHASES = ("draft", "target", "rule", "other")


@dataclass
class Row:
    """One row of one decode step.

    Tokens after a stop are not counted as accepted or emitted, nor the positions behind it as tried.

    Arguments:
        sequence: the sequence's identity.
        nodes: drafted nodes. depth: depth of the draft. accepted: accepted drafted tokens that were kept.
        emitted: tokens kept, the correction or bonus token included. discarded: emitted by the rule, cut by a stop.
        bonus: the kept tokens end with a bonus token (nothing was rejected).
        prefill: the first step of a sequence, whose only token comes from reading the prompt.
    """

    sequence: int
    nodes: int
    depth: int
    accepted: int
    emitted: int
    discarded: int
    bonus: bool
    prefill: bool = False


@dataclass
class Ledger:
    """Counts of one or many sequences.

    Attributes:
        rows: one `Row` per step and row, in order.
        seconds: wall time by phase (`PHASES`) of the decode steps, device-synchronised; `prefill` apart.
        step_seconds: (batch, nodes per row, longest context, draft, target, rule, other) of every decode step.
    """

    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prefill", *PHASES), 0.0))
    step_seconds: list[tuple[int, int, int, float, float, float, float]] = field(default_factory=list)

    @classmethod
    def merge(cls, ledgers: Iterable[Ledger]) -> Ledger:
        """The ledger of everything (sums of counts, never means of ratios)."""
        total = cls()
        for ledger in ledgers:
            total.rows += ledger.rows
            total.step_seconds += ledger.step_seconds
            for phase, seconds in ledger.seconds.items():
                total.seconds[phase] += seconds
        return total

    def of(self, sequence: int) -> list[Row]:
        """The rows of one sequence."""
        return [r for r in self.rows if r.sequence == sequence]

    @property
    def decode_rows(self) -> list[Row]:
        """All rows but the prefills."""
        return [r for r in self.rows if not r.prefill]

    @property
    def emitted(self) -> int:
        """New tokens kept, the first one included."""
        return sum(r.emitted for r in self.rows)

    @property
    def block_efficiency(self) -> float:
        """τ: tokens kept per target forward of a row, correction and bonus tokens included, prefill excluded."""
        rows = self.decode_rows
        return sum(r.emitted for r in rows) / len(rows) if rows else float("nan")

    @property
    def mean_accepted(self) -> float:
        """Accepted drafted tokens per target forward (τ without the correction or bonus token)."""
        rows = self.decode_rows
        return sum(r.accepted for r in rows) / len(rows) if rows else float("nan")

    def position_counts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Counts per draft depth 1 … D.

        Returns:
            offered: steps whose draft was that deep. tried: of these, those whose earlier depths were all accepted.
            accepted: of these, those accepted. α is `accepted/offered` (unconditional) or `accepted/tried` (conditional).
        """
        return position_counts([r.depth for r in self.decode_rows], [r.accepted for r in self.decode_rows])

    @property
    def acceptance_rate(self) -> float:
        """α: accepted over tried positions, all depths pooled (conditional on being reached)."""
        _, tried, accepted = self.position_counts()
        return float(accepted.sum() / tried.sum()) if tried.sum() else float("nan")


def position_counts(depth: list[int], accepted: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`Ledger.position_counts` from the drafts' depths and accepted lengths, one entry per step and row."""
    deep, taken = np.asarray(depth, dtype=np.int64), np.asarray(accepted, dtype=np.int64)
    levels = np.arange(1, (int(deep.max()) if len(deep) else 0) + 1)[:, None]
    offered = deep >= levels
    return (
        offered.sum(1),
        (offered & (taken >= levels - 1)).sum(1),
        (offered & (taken >= levels)).sum(1),
    )


class Clock:
    """Laps of wall time, synchronised with the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.last = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = self._now()
        seconds, self.last = now - self.last, now
        return seconds
