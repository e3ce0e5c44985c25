"""The ledger counts, reports divide: raw counts per step and row, and all published conventions from them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    import torch

PHASES = ("draft", "target", "rule", "other")


@dataclass(frozen=True)
class Draft:
    """What was drafted in one step of one row, for whoever wants to look at it.

    Arguments:
        tokens: drafted token ids, node by node. parents: of each node, −1 the root; `None` for a chain.
        path: the nodes that were accepted, from depth 1 downwards.
    """

    tokens: list[int]
    parents: list[int] | None
    path: list[int]


@dataclass
class Row:
    """One row of one decode step.

    Tokens after a stop are not counted as accepted or emitted, nor the positions behind it as tried.

    Arguments:
        sequence: the sequence's identity.
        nodes: drafted nodes. depth: depth of the draft. accepted: accepted drafted tokens that were kept.
        emitted: tokens kept, the correction or bonus token included. discarded: emitted, but behind a stop.
        bonus: the kept tokens end with a bonus token (nothing was rejected).
        prefill: the first step of a sequence, whose only token comes from reading the prompt.
        draft: the draft itself, if the ledger traces.
    """

    sequence: int
    nodes: int
    depth: int
    accepted: int
    emitted: int
    discarded: int
    bonus: bool
    prefill: bool = False
    draft: Draft | None = None


@dataclass(frozen=True)
class Counts:
    """The counts of some decode steps (no prefills), and every convention in use, each under its own name.

    All ratios are sums over sums. With i running over steps, depth D_i, accepted A_i, emitted E_i, nodes N_i:

    - `offered[d]` = #{i: D_i ≥ d}, `tried[d]` = #{i: D_i ≥ d, A_i ≥ d−1}, `accepted[d]` = #{i: A_i ≥ d};
    - `alpha_unconditional[d]` = accepted[d] / offered[d], `alpha_conditional[d]` = accepted[d] / tried[d];
    - `acceptance_rate` α = Σ accepted / Σ tried; `draft_acceptance_rate` = Σ A_i / Σ D_i;
    - `block_efficiency` τ = Σ E_i / steps; `mean_accepted` = Σ A_i / steps;
    - `mean_accepted_when_drafting` = Σ A_i / #{i: D_i ≥ 1}; `node_efficiency` = Σ A_i / Σ N_i.

    Arguments:
        depth, accepted, emitted, nodes, discarded, bonus: `[steps]` as in `Row`.
    """

    depth: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray
    nodes: np.ndarray
    discarded: np.ndarray
    bonus: np.ndarray

    FIELDS: ClassVar = ("depth", "accepted", "emitted", "nodes", "discarded", "bonus")

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[int]]) -> Counts:
        """From one list per field, one entry per step and row."""
        return cls(*(np.asarray(columns[name], dtype=np.int64) for name in cls.FIELDS))

    @property
    def steps(self) -> int:
        """Target forwards of a row."""
        return len(self.depth)

    @cached_property
    def positions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(offered, tried, accepted), each `[deepest draft]`."""
        return position_counts(self.depth, self.accepted)

    @property
    def alpha_unconditional(self) -> np.ndarray:
        offered, _, accepted = self.positions
        return _divide(accepted, offered)

    @property
    def alpha_conditional(self) -> np.ndarray:
        _, tried, accepted = self.positions
        return _divide(accepted, tried)

    @property
    def acceptance_rate(self) -> float:
        _, tried, accepted = self.positions
        return _share(accepted.sum(), tried.sum())

    @property
    def draft_acceptance_rate(self) -> float:
        return _share(self.accepted.sum(), self.depth.sum())

    @property
    def block_efficiency(self) -> float:
        return _share(self.emitted.sum(), self.steps)

    @property
    def mean_accepted(self) -> float:
        return _share(self.accepted.sum(), self.steps)

    @property
    def mean_accepted_when_drafting(self) -> float:
        return _share(self.accepted.sum(), (self.depth > 0).sum())

    @property
    def node_efficiency(self) -> float:
        return _share(self.accepted.sum(), self.nodes.sum())

    @property
    def histogram(self) -> np.ndarray:
        """`[longest + 1]`: how many steps accepted 0, 1, 2, … drafted tokens."""
        return np.bincount(self.accepted) if self.steps else np.zeros(0, dtype=np.int64)


@dataclass
class Ledger:
    """Counts of one or many sequences.

    Attributes:
        rows: one `Row` per step and row, in order.
        seconds: wall time by phase (`PHASES`) of the decode steps, device-synchronised; `prefill` apart.
        step_seconds: (batch, nodes per row, longest context, draft, target, rule, other) per decode step.
        trace: whether the rows keep their drafts.
    """

    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prefill", *PHASES), 0.0))
    step_seconds: list[tuple[int, int, int, float, float, float, float]] = field(default_factory=list)
    trace: bool = False

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
    def counts(self) -> Counts:
        """The counts of all decode steps."""
        rows = self.decode_rows
        return Counts.of({name: [getattr(r, name) for r in rows] for name in Counts.FIELDS})

    @property
    def block_efficiency(self) -> float:
        """τ: tokens kept per target forward of a row, correction and bonus included, prefill excluded."""
        return self.counts.block_efficiency

    @property
    def mean_accepted(self) -> float:
        """Accepted drafted tokens per target forward (τ without the correction or bonus token)."""
        return self.counts.mean_accepted

    def position_counts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Counts per draft depth 1 … D.

        Returns:
            offered: steps whose draft was that deep. tried: those of them whose earlier depths were accepted.
            accepted: of these, those accepted. α is accepted/offered (unconditional) or accepted/tried
            (conditional).
        """
        return self.counts.positions

    @property
    def acceptance_rate(self) -> float:
        """α: accepted over tried positions, all depths pooled (conditional on being reached)."""
        return self.counts.acceptance_rate


def position_counts(
    depth: Sequence[int] | np.ndarray, accepted: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`Ledger.position_counts` from the drafts' depths and accepted lengths, one entry per step and row."""
    deep, taken = np.asarray(depth, dtype=np.int64), np.asarray(accepted, dtype=np.int64)
    levels = np.arange(1, (int(deep.max()) if len(deep) else 0) + 1)[:, None]
    offered = deep >= levels
    return (
        offered.sum(1),
        (offered & (taken >= levels - 1)).sum(1),
        (offered & (taken >= levels)).sum(1),
    )


def _divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Entrywise, NaN where nothing was counted."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return numerator / denominator


def _share(numerator: int, denominator: int) -> float:
    return float(numerator / denominator) if denominator else float("nan")


Lap = tuple[Any, Any]  # two moments of a `Clock`


class Clock:
    """Laps of time; on CUDA those of the device, which notes moments as it passes them.

    Nothing waits at a lap. Reading laps waits until the last one has passed, so read several at once.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.last = self._moment()

    def lap(self) -> Lap:
        """From the last lap's end to what has been asked of the device so far."""
        self.last, start = self._moment(), self.last
        return start, self.last

    def seconds(self, laps: dict[str, Lap]) -> dict[str, float]:
        """How long each took."""
        if self.device.type != "cuda":
            return {phase: end - start for phase, (start, end) in laps.items()}
        self.last.synchronize()
        return {phase: start.elapsed_time(end) / 1e3 for phase, (start, end) in laps.items()}

    def _moment(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
