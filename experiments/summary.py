"""From a run's samples to its numbers: sums first, ratios last, intervals by resampling whole units.

A unit is what was decoded together: one prompt at batch size 1. Nothing here needs a model, nor torch.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import intervals
from specdec.ledger import Counts

if TYPE_CHECKING:
    from specdec.model import Model
    from specdec.verify import Rule

Records = list[dict[str, Any]]


def flags(rule: Rule, target: Model) -> list[str]:
    """What a reader must know before believing the numbers."""
    said = []
    if not rule.exact:
        said.append(f"LOSSY: verify={rule.name} does not keep the target's law")
    if target.provenance.get("weights") == "random":
        said.append("random weights: timings only, the text means nothing")
    return said


def summarise(records: Records) -> dict[str, Any]:
    """All numbers of a run, overall and per domain."""
    domains = list(dict.fromkeys(r["domain"] for r in records))
    return {
        "overall": numbers(records),
        "domains": {d: numbers([r for r in records if r["domain"] == d]) for d in domains},
    }


def numbers(records: Records) -> dict[str, Any]:
    """The numbers of some samples of both methods."""
    speculative = [r for r in records if r["method"] == "speculative"]
    counts = Counts.of(_steps(speculative))
    offered, tried, accepted = (column.tolist() for column in counts.positions)
    table = units(records)
    return {
        "prompts": len({r["prompt"] for r in records}),
        "acceptance_rate": _interval(speculative, _acceptance_rate),
        "draft_acceptance_rate": _or_none(counts.draft_acceptance_rate),
        "block_efficiency": _interval(speculative, _block_efficiency),
        "mean_accepted": _or_none(counts.mean_accepted),
        "mean_accepted_when_drafting": _or_none(counts.mean_accepted_when_drafting),
        "node_efficiency": _or_none(counts.node_efficiency),
        "tokens_per_second": {m: _ratio(*table[m].sum(0)) for m in table},
        "speedup": _speedup(table),
        "seconds_to_first_token": {
            m: float(np.median([r["seconds_to_first_token"] for r in records if r["method"] == m]))
            for m in table
        },
        "seconds_per_token": {m: _seconds_per_token([r for r in records if r["method"] == m]) for m in table},
        "agreement": dict(Counter(r["agreement"]["verdict"] for r in records if r.get("agreement"))),
        "positions": {
            "offered": offered,
            "tried": tried,
            "accepted": accepted,
            "alpha_conditional": position_intervals(speculative, "tried"),
            "alpha_unconditional": position_intervals(speculative, "offered"),
        },
        "histogram": counts.histogram.tolist(),
        "steps": counts.steps,
        "discarded": int(counts.discarded.sum()),
        "new_tokens": {m: int(table[m].sum(0)[0]) for m in table},
        "seconds": {m: float(table[m].sum(0)[1]) for m in table},
        "phase_seconds": {m: _phases([r for r in records if r["method"] == m]) for m in table},
    }


def acceptance(records: Records) -> tuple[list[int], list[int], list[int]]:
    """`specdec.ledger.position_counts` of stored samples."""
    offered, tried, accepted = Counts.of(_steps(records)).positions
    return offered.tolist(), tried.tolist(), accepted.tolist()


def position_intervals(records: Records, base: str) -> list[intervals.Interval]:
    """α per draft position (tree depth) with its interval: accepted over `base`, "offered" or "tried"."""
    groups = [Counts.of(_steps(group)).positions for group in by_unit(records).values()]
    deepest = max((len(offered) for offered, _, _ in groups), default=0)
    found = []
    for d in range(deepest):
        at = [[int(column[d]) if d < len(column) else 0 for column in group] for group in groups]
        offered, tried, accepted = np.array(at, dtype=float).T
        found.append(
            intervals.bootstrap((accepted, offered if base == "offered" else tried), intervals.ratio)
        )
    return found


def units(records: Records) -> dict[str, np.ndarray]:
    """Per method an array `[units, 2]` of new tokens and seconds; units all methods have, repeats summed."""
    sums = unit_sums(records)
    shared = sorted(set.intersection(*(set(of_unit) for of_unit in sums.values()))) if sums else []
    return {method: np.array([of_unit[u] for u in shared]).reshape(-1, 2) for method, of_unit in sums.items()}


def unit_sums(records: Records) -> dict[str, dict[int, np.ndarray]]:
    """Per method and unit `[new tokens, seconds]`."""
    sums: dict[str, dict[int, np.ndarray]] = defaultdict(lambda: defaultdict(lambda: np.zeros(2)))
    seen = set()
    for r in records:
        sums[r["method"]][r["unit"]][0] += len(r["tokens"])
        if (key := (r["method"], r["unit"], r["repeat"])) not in seen:  # the unit's time counts once
            seen.add(key)
            sums[r["method"]][r["unit"]][1] += r["unit_seconds"]
    return sums


def by_unit(records: Records) -> dict[int, Records]:
    """The samples of each unit."""
    groups: dict[int, Records] = defaultdict(list)
    for r in records:
        groups[r["unit"]].append(r)
    return groups


def _speedup(table: dict[str, np.ndarray]) -> intervals.Interval | None:
    """Speculative over autoregressive, paired by unit."""
    if set(table) != {"autoregressive", "speculative"} or not len(table["speculative"]):
        return None
    return intervals.bootstrap((*table["autoregressive"].T, *table["speculative"].T), intervals.speedup)


def _interval(records: Records, statistic) -> intervals.Interval:
    """A statistic of the steps' sums with its interval."""
    groups = [_counts(group) for group in by_unit(records).values()]
    return intervals.bootstrap(tuple(np.array(groups, dtype=float).reshape(-1, 4).T), statistic)


def _counts(records: Records) -> tuple[int, int, int, int]:
    """(accepted, tried, emitted, steps)."""
    _, tried, accepted = acceptance(records)
    steps = _steps(records)
    return sum(accepted), sum(tried), sum(steps["emitted"]), len(steps["emitted"])


def _acceptance_rate(accepted, tried, emitted, steps, axis=-1):
    return intervals.ratio(accepted, tried, axis)


def _block_efficiency(accepted, tried, emitted, steps, axis=-1):
    return intervals.ratio(emitted, steps, axis)


def _steps(records: Iterable[dict[str, Any]]) -> dict[str, list[int]]:
    """The columns of all steps of some samples, one after the other."""
    joined: dict[str, list[int]] = {name: [] for name in Counts.FIELDS}
    for r in records:
        steps = r["steps"]
        for name, column in joined.items():
            column.extend(steps[name] if name in steps else [0] * len(steps["depth"]))
    return joined


def _seconds_per_token(records: Records) -> float | None:
    """Latency: seconds per token of a sequence after its first one, as its reader sees it."""
    later = [r for r in records if len(r["tokens"]) > 1]
    seconds = sum(r["seconds"] - r["seconds_to_first_token"] for r in later)
    return _ratio(seconds, sum(len(r["tokens"]) - 1 for r in later))


def _phases(records: Records) -> dict[str, float]:
    """Seconds by phase; what several prompts of a unit share counts once."""
    once = {(r["unit"], r["repeat"]): r["phase_seconds"] for r in records}
    total: Counter[str] = Counter()
    for phases in once.values():
        total.update(phases)
    return dict(total)


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator / denominator) if denominator else None
