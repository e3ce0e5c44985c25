"""From a run's samples to its numbers: sums first, ratios last, intervals by resampling whole units.

A unit is what was decoded together: one prompt at batch size 1. Nothing here needs a model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy import stats

from specdec.ledger import position_counts
from specdec.model import Model
from specdec.verify import Rule

LEVEL, RESAMPLES = 0.95, 2000
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
    offered, tried, accepted = acceptance(speculative)
    table = units(records)
    steps = _steps(speculative)
    return {
        "prompts": len({r["prompt"] for r in records}),
        "acceptance_rate": _interval(speculative, _acceptance_rate),
        "block_efficiency": _interval(speculative, _block_efficiency),
        "mean_accepted": _ratio(sum(steps["accepted"]), len(steps["accepted"])),
        "tokens_per_second": {m: _ratio(*table[m].sum(0)) for m in table},
        "speedup": _speedup(table),
        "seconds_to_first_token": {
            m: float(np.median([r["seconds_to_first_token"] for r in records if r["method"] == m]))
            for m in table
        },
        "agreement": dict(Counter(r["agreement"]["verdict"] for r in records if r.get("agreement"))),
        "positions": {"offered": offered, "tried": tried, "accepted": accepted},
        "histogram": np.bincount(steps["accepted"]).tolist() if steps["accepted"] else [],
        "new_tokens": {m: int(table[m].sum(0)[0]) for m in table},
        "seconds": {m: float(table[m].sum(0)[1]) for m in table},
        "phase_seconds": {m: _phases([r for r in records if r["method"] == m]) for m in table},
    }


def acceptance(records: Records) -> tuple[list[int], list[int], list[int]]:
    """`specdec.ledger.position_counts` of stored samples."""
    steps = _steps(records)
    offered, tried, accepted = position_counts(steps["depth"], steps["accepted"])
    return offered.tolist(), tried.tolist(), accepted.tolist()


def units(records: Records) -> dict[str, np.ndarray]:
    """Per method an array `[units, 2]` of new tokens and seconds, the same units for all; repeats are summed."""
    sums: dict[str, dict[int, np.ndarray]] = defaultdict(lambda: defaultdict(lambda: np.zeros(2)))
    seen = set()
    for r in records:
        sums[r["method"]][r["unit"]][0] += len(r["tokens"])
        if (key := (r["method"], r["unit"], r["repeat"])) not in seen:  # the unit's time counts once
            seen.add(key)
            sums[r["method"]][r["unit"]][1] += r["unit_seconds"]
    shared = sorted(set.intersection(*(set(by_unit) for by_unit in sums.values()))) if sums else []
    return {method: np.array([by_unit[u] for u in shared]).reshape(-1, 2) for method, by_unit in sums.items()}


def _speedup(table: dict[str, np.ndarray]) -> dict[str, float | None] | None:
    """Tokens per second over the baseline's: a ratio of ratios of sums, paired by unit."""
    if set(table) != {"autoregressive", "speculative"} or not len(table["speculative"]):
        return None
    columns = (*table["autoregressive"].T, *table["speculative"].T)

    def statistic(base_tokens, base_seconds, tokens, seconds, axis=-1):
        total = lambda x: np.sum(x, axis=axis)  # noqa: E731
        return total(tokens) / total(seconds) * total(base_seconds) / total(base_tokens)

    return _bootstrap(columns, statistic)


def _interval(records: Records, statistic) -> dict[str, float | None]:
    """A statistic of the steps' sums with its interval, units resampled whole."""
    by_unit: dict[int, Records] = defaultdict(list)
    for r in records:
        by_unit[r["unit"]].append(r)
    columns = np.array([_counts(group) for group in by_unit.values()], dtype=float).reshape(-1, 4).T
    return _bootstrap(tuple(columns), statistic)


def _counts(records: Records) -> tuple[int, int, int, int]:
    """(accepted, tried, emitted, steps)."""
    _, tried, accepted = acceptance(records)
    steps = _steps(records)
    return sum(accepted), sum(tried), sum(steps["emitted"]), len(steps["emitted"])


def _acceptance_rate(accepted, tried, emitted, steps, axis=-1):
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sum(accepted, axis=axis) / np.sum(tried, axis=axis)


def _block_efficiency(accepted, tried, emitted, steps, axis=-1):
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sum(emitted, axis=axis) / np.sum(steps, axis=axis)


def _bootstrap(columns: tuple[np.ndarray, ...], statistic) -> dict[str, float | None]:
    """Point estimate and percentile interval."""
    value = float(statistic(*columns)) if len(columns[0]) else float("nan")
    if len(columns[0]) < 2 or not np.isfinite(value):
        return {"value": value, "low": None, "high": None}
    found = stats.bootstrap(
        columns,
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        paired=True,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return {"value": value, "low": float(found.low), "high": float(found.high)}


def _steps(records: Iterable[dict[str, Any]]) -> dict[str, list[int]]:
    """The columns of all steps of some samples, one after the other."""
    joined: dict[str, list[int]] = {"depth": [], "accepted": [], "emitted": [], "nodes": []}
    for r in records:
        for name, column in joined.items():
            column.extend(r["steps"][name])
    return joined


def _phases(records: Records) -> dict[str, float]:
    """Seconds by phase; what several prompts of a unit share counts once."""
    once = {(r["unit"], r["repeat"]): r["phase_seconds"] for r in records}
    total: Counter[str] = Counter()
    for phases in once.values():
        total.update(phases)
    return dict(total)


def _ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator / denominator) if denominator else None
