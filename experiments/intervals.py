"""Intervals of ratios of sums: whole units (prompts) are resampled, numerators and denominators together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
from scipy import stats

LEVEL, RESAMPLES = 0.95, 2000

Interval = dict[str, float | None]


def bootstrap(columns: tuple[np.ndarray, ...], statistic: Callable[..., np.ndarray]) -> Interval:
    """Point estimate and bootstrap interval.

    The expanded percentile interval of Hesterberg 2015, "What teachers should know about the bootstrap":
    with n units the percentile interval is narrow by √((n−1)/n) and takes normal for Student quantiles, so
    it is read at a level that makes up for both. BCa covers no better here (see docs/measuring.md).

    Arguments:
        columns: arrays `[units]` that are resampled together (a unit keeps its numbers).
        statistic: of the columns, vectorised over leading axes, with `axis=`.

    Returns:
        `value`, `low`, `high`; no interval with fewer than two units, or where the value is not finite.
    """
    units = len(columns[0])
    value = float(statistic(*columns)) if units else float("nan")
    if units < 2 or not math.isfinite(value):
        return {"value": value, "low": None, "high": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # a resample may hold no trial at all …
        found = stats.bootstrap(
            columns,
            statistic,
            n_resamples=RESAMPLES,
            paired=True,
            vectorized=True,
            method="percentile",
            rng=np.random.default_rng(0),
        ).bootstrap_distribution
    found = found[np.isfinite(found)]  # … and says nothing then
    low, high = np.quantile(found, (tail := tail_probability(units), 1 - tail))
    return {"value": value, "low": float(low), "high": float(high)}


def tail_probability(units: int, level: float = LEVEL) -> float:
    """Φ(−√(n/(n−1)) · t_{n−1}): where to read each tail of the bootstrap distribution of n units."""
    student = stats.t.ppf((1 + level) / 2, units - 1)
    return float(stats.norm.cdf(-math.sqrt(units / (units - 1)) * student))


def ratio(numerator: np.ndarray, denominator: np.ndarray, axis: int = -1) -> np.ndarray:
    """Sum over sum; NaN where the denominator is zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sum(numerator, axis=axis) / np.sum(denominator, axis=axis)


def speedup(
    base_tokens: np.ndarray,
    base_seconds: np.ndarray,
    tokens: np.ndarray,
    seconds: np.ndarray,
    axis: int = -1,
) -> np.ndarray:
    """Tokens per second over the baseline's: a ratio of ratios of sums."""
    return ratio(tokens, seconds, axis) / ratio(base_tokens, base_seconds, axis)


def compare(first: list[np.ndarray], second: list[np.ndarray]) -> Interval:
    """How many times faster the second run is, over the units that both have, paired by unit.

    Arguments:
        first, second: `[tokens, seconds]`, arrays `[units]` in the same order.
    """
    return bootstrap((*first, *second), speedup)
