"""Goodness of fit that drops nothing, and what it can see: support, χ², G-test, power, Holm, uniformity.

Every distribution function is scipy's. Nothing here knows of models or rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, stats

LEAST_EXPECTED = 5.0  # cells with less are pooled: below it the chi-square law is a poor approximation


@dataclass(frozen=True)
class Fit:
    """Observed counts against their exact law.

    Arguments:
        observations: N.
        cells: outcomes of positive probability. pooled: how many of them share a bin.
        df: bins − 1; 0 if there is nothing to test beyond the support.
        chi2, p: Pearson's statistic and its p-value (0 if an impossible outcome was observed).
        g, g_p: the likelihood-ratio statistic and its p-value.
        impossible: observed outcomes of probability zero, with their counts.
    """

    observations: int
    cells: int
    pooled: int
    df: int
    chi2: float
    p: float
    g: float
    g_p: float
    impossible: dict[Any, int]

    @classmethod
    def sum(cls, fits: Sequence[Fit]) -> Fit:
        """The fits of independent strata as one: statistics and degrees of freedom add up."""
        df = sum(f.df for f in fits)
        chi2, g = math.fsum(f.chi2 for f in fits), math.fsum(f.g for f in fits)
        impossible: dict[Any, int] = {(i, k): n for i, f in enumerate(fits) for k, n in f.impossible.items()}
        return cls(
            observations=sum(f.observations for f in fits),
            cells=sum(f.cells for f in fits),
            pooled=sum(f.pooled for f in fits),
            df=df,
            chi2=chi2,
            p=0.0 if impossible else survival(chi2, df),
            g=g,
            g_p=0.0 if impossible else survival(g, df),
            impossible=impossible,
        )


def survival(statistic: float, df: int) -> float:
    """P(χ²_df ≥ statistic); 1 without degrees of freedom."""
    return float(stats.chi2.sf(statistic, df)) if df else 1.0


def bins(expected: np.ndarray, least: float = LEAST_EXPECTED) -> np.ndarray:
    """Which bin each cell belongs to, `[K]` int64.

    Cells with less than `least` expected share one bin; if that has less, it joins the smallest kept cell.
    """
    small = expected < least
    bin_of = np.cumsum(~small) - 1
    kept = int((~small).sum())
    if small.any():
        home = kept
        if kept and expected[small].sum() < least:
            home = bin_of[np.where(small, np.inf, expected).argmin()]
        bin_of = np.where(small, home, bin_of)
    return bin_of


def fit(counts: Mapping[Any, int], law: Mapping[Any, float]) -> Fit:
    """Test observed counts against their exact law: support first, before any pooling, then chi-square and G.

    Arguments:
        counts: observations per outcome; every observed outcome counts.
        law: probability per outcome, summing to one; outcomes that are missing have probability zero.
    """
    impossible = {outcome: n for outcome, n in counts.items() if n and not law.get(outcome, 0.0) > 0.0}
    outcomes = [outcome for outcome, probability in law.items() if probability > 0.0]
    total = sum(counts.values())
    expected = total * np.array([law[o] for o in outcomes])
    observed = np.array([counts.get(o, 0) for o in outcomes], dtype=np.float64)
    bin_of = bins(expected)
    seen, due = np.bincount(bin_of, observed), np.bincount(bin_of, expected)
    df = len(due) - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        chi2 = float(np.where(due > 0, (seen - due) ** 2 / due, 0.0).sum())
        g = float(2.0 * np.where(seen > 0, seen * np.log(seen / due), 0.0).sum())
    g = max(g, 0.0)
    return Fit(
        observations=total,
        cells=len(outcomes),
        pooled=int((np.bincount(bin_of)[bin_of] > 1).sum()),
        df=df,
        chi2=chi2,
        p=0.0 if impossible else survival(chi2, df),
        g=g,
        g_p=0.0 if impossible else survival(g, df),
        impossible=impossible,
    )


def detectable_tv(observations: int, df: int, alpha: float, power: float = 0.99) -> float:
    """The total-variation distance that a chi-square test sees with this power whatever its direction.

    Of all deviations with distance TV the least visible has noncentrality λ = 4·N·TV² (Cauchy-Schwarz).
    """
    if df == 0 or observations == 0:
        return math.inf
    critical = stats.chi2.isf(alpha, df)

    def missing(noncentrality: float) -> float:
        return float(stats.ncx2.sf(critical, df, noncentrality)) - power

    high = 1.0
    while missing(high) < 0:
        high *= 2.0
    return math.sqrt(optimize.brentq(missing, 0.0, high, xtol=1e-9) / (4.0 * observations))


def power_against(
    alternative: Mapping[Any, float], law: Mapping[Any, float], observations: int, alpha: float
) -> float:
    """The probability that `fit` rejects `law` at level `alpha` when the outcomes follow `alternative`.

    An impossible outcome rejects by itself; otherwise the statistic is noncentral chi-square with
    λ = N·Σ (a − p)²/p over the bins.
    """
    leak = math.fsum(a for outcome, a in alternative.items() if a > 0 and not law.get(outcome, 0.0) > 0.0)
    by_support = -math.expm1(observations * math.log1p(-min(leak, 1.0))) if leak < 1 else 1.0
    outcomes = [outcome for outcome, probability in law.items() if probability > 0.0]
    p = np.array([law[o] for o in outcomes])
    a = np.array([alternative.get(o, 0.0) for o in outcomes])
    bin_of = bins(observations * p)
    due, real = np.bincount(bin_of, p), np.bincount(bin_of, a)
    df = len(due) - 1
    if df == 0:
        return by_support
    noncentrality = observations * float(((real - due) ** 2 / due).sum())
    critical = stats.chi2.isf(alpha, df)
    by_chi2 = float(stats.ncx2.sf(critical, df, noncentrality)) if noncentrality else alpha
    if math.isnan(by_chi2):  # scipy gives up far out; there the noncentral law is normal
        spread = math.sqrt(2.0 * (df + 2.0 * noncentrality))
        by_chi2 = float(stats.norm.sf(critical, df + noncentrality, spread))
    return max(by_support, by_chi2)


def total_variation(a: Mapping[Any, float], b: Mapping[Any, float]) -> float:
    """½·Σ |a − b|."""
    return 0.5 * math.fsum(abs(a.get(o, 0.0) - b.get(o, 0.0)) for o in a.keys() | b.keys())


def tv_of_noise(law: Mapping[Any, float], observations: int) -> float:
    """The total variation of the frequencies of an exact sample of this size, on average (normal limit)."""
    spread = (math.sqrt(p * (1.0 - p)) for p in law.values())
    return 0.5 * math.sqrt(2.0 / (math.pi * observations)) * math.fsum(spread)


def kl_divergence(a: Mapping[Any, float], b: Mapping[Any, float]) -> float:
    """Σ a·log(a/b) in nats; infinite where `a` has mass that `b` lacks."""
    terms = []
    for outcome, mass in a.items():
        if mass > 0:
            other = b.get(outcome, 0.0)
            if other <= 0:
                return math.inf
            terms.append(mass * math.log(mass / other))
    return math.fsum(terms)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979): rejecting those below α has family-wise error α, however they depend."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def uniformity(p_values: Iterable[float]) -> float:
    """p-value of the Kolmogorov-Smirnov test that independent p-values are uniform; 1 for fewer than five."""
    values = list(p_values)
    return float(stats.kstest(values, "uniform").pvalue) if len(values) >= 5 else 1.0
