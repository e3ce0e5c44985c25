"""Goodness of fit: statistics by hand and by scipy, nothing dropped, power by formula and by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specdec.exactness import goodness
from specdec.exactness.goodness import Fit, bins, detectable_tv, fit, power_against


def draw(law: dict, count: int, rng: np.random.Generator) -> dict:
    outcomes = list(law)
    return dict(zip(outcomes, rng.multinomial(count, [law[o] for o in outcomes]).tolist(), strict=True))


# ---------------------------------------------------------------- the statistics


def test_by_hand():
    found = fit({"a": 30, "b": 70}, {"a": 0.5, "b": 0.5})
    assert found.chi2 == pytest.approx((20**2 + 20**2) / 50) and found.df == 1
    assert found.g == pytest.approx(2 * (30 * math.log(0.6) + 70 * math.log(1.4)))
    assert found.p == pytest.approx(math.erfc(math.sqrt(16 / 2)))  # χ²₁ is a squared normal
    assert (found.observations, found.cells, found.pooled, found.impossible) == (100, 2, 0, {})


def test_as_scipy():
    rng = np.random.default_rng(0)
    law = dict(enumerate(rng.dirichlet(np.ones(12)) * 0.5 + 0.5 / 12))
    counts = draw(law, 3000, rng)
    observed, expected = list(counts.values()), [3000 * p for p in law.values()]
    found = fit(counts, law)
    for ours, theirs in (
        ((found.chi2, found.p), stats.chisquare(observed, expected)),
        ((found.g, found.g_p), stats.power_divergence(observed, expected, lambda_="log-likelihood")),
    ):
        assert ours == pytest.approx((theirs.statistic, theirs.pvalue))


def test_a_certainty_has_nothing_to_test():
    found = fit({"a": 10}, {"a": 1.0})
    assert (found.df, found.chi2, found.p, found.g_p) == (0, 0.0, 1.0, 1.0)


def test_an_impossible_outcome_fails_before_any_pooling():
    """One impossible observation among a million that fit: a pooled test would never see it."""
    found = fit({"a": 500_000, "b": 500_000, "c": 1}, {"a": 0.5, "b": 0.5, "c": 0.0})
    assert found.p == found.g_p == 0.0 and found.impossible == {"c": 1}
    assert fit({"a": 1, "never heard of": 2}, {"a": 1.0}).impossible == {"never heard of": 2}
    assert fit({"a": 5, "b": 5, "c": 0}, {"a": 0.5, "b": 0.5}).impossible == {}  # not observed at all


@pytest.mark.parametrize(
    ("expected", "bin_of"),
    [
        ([10, 20, 30], [0, 1, 2]),
        ([10, 4, 20, 3], [0, 2, 1, 2]),  # 4 + 3 ≥ 5: a bin of their own
        ([10, 2, 8, 2], [0, 1, 1, 1]),  # 2 + 2 < 5: into the smallest kept cell
        ([4.9, 20], [0, 0]),
        ([1, 2], [0, 0]),  # nothing is kept: one bin, no degrees of freedom
    ],
)
def test_pooling(expected, bin_of):
    assert bins(np.array(expected, dtype=float)).tolist() == bin_of


@given(st.lists(st.floats(0.01, 50), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_pooling_drops_nothing_and_leaves_no_small_bin(expected):
    expected = np.array(expected)
    mass = np.bincount(bins(expected), expected)
    assert mass.sum() == pytest.approx(expected.sum())
    assert len(mass) == 1 or (mass >= goodness.LEAST_EXPECTED).all()


def test_pooled_cells_count():
    """A leak that only shows in cells of expectation below five is seen: they are one bin, not none."""
    law = {"a": 0.98, **{i: 0.0002 for i in range(100)}}
    found = fit({"a": 980, **dict.fromkeys(range(100), 1)}, law)
    assert (
        found.pooled == 100 and found.df == 1 and found.chi2 == pytest.approx((100 - 20) ** 2 / 20, rel=0.1)
    )


def test_strata_add_up():
    parts = [
        fit({"a": 30, "b": 70}, {"a": 0.5, "b": 0.5}),
        fit({0: 10, 1: 20, 2: 30}, {0: 0.2, 1: 0.3, 2: 0.5}),
    ]
    whole = Fit.sum(parts)
    assert (
        whole.df == 3
        and whole.chi2 == pytest.approx(sum(f.chi2 for f in parts))
        and whole.observations == 160
    )
    assert whole.p == pytest.approx(stats.chi2.sf(whole.chi2, 3))
    assert Fit.sum([*parts, fit({"x": 1}, {"y": 1.0})]).impossible == {(2, "x"): 1}


def test_false_alarms_come_as_often_as_stated():
    """2,000 exact samples tested at .01; the count leaves its binomial interval with probability 1e-6."""
    rng = np.random.default_rng(1)
    law = dict(enumerate(rng.dirichlet(np.ones(40))))
    alarms = sum(fit(draw(law, 2000, rng), law).p < 0.01 for _ in range(2000))
    low, high = stats.binom.interval(1 - 1e-6, 2000, 0.01)
    assert low <= alarms <= high


# ---------------------------------------------------------------- power


@pytest.mark.parametrize(
    ("cells", "tv"), [(5, 0.010), (25, 0.0126), (50, 0.0141), (125, 0.0167), (1000, 0.0260)]
)
def test_the_known_table(cells, tv):
    """N = 100,000, level 1e-3, power .99."""
    assert detectable_tv(100_000, cells - 1, 1e-3, 0.99) == pytest.approx(tv, rel=0.006)


def test_detectable_in_its_least_visible_direction():
    """Half of the mass scaled up by 1 + 2·TV and half down: exactly λ = 4·N·TV²."""
    law = {i: 0.1 for i in range(10)}
    tv = detectable_tv(20_000, 9, 1e-4, 0.9)
    worst = {i: 0.1 * (1 + 2 * tv * (-1) ** i) for i in law}
    assert goodness.total_variation(worst, law) == pytest.approx(tv)
    assert power_against(worst, law, 20_000, 1e-4) == pytest.approx(0.9, abs=1e-6)
    visible = dict(law) | {0: 0.1 + tv, 1: 0.1 - tv}
    assert power_against(visible, law, 20_000, 1e-4) > 0.999


def test_nothing_is_detectable_without_data_or_freedom():
    assert detectable_tv(0, 5, 1e-3) == detectable_tv(100, 0, 1e-3) == math.inf


def test_power_against_a_leak():
    """An impossible outcome of probability 1/N is seen with 1 − (1 − 1/N)^N, whatever the level."""
    found = power_against({"a": 0.999, "b": 0.001}, {"a": 1.0}, 1000, 1e-9)
    assert found == pytest.approx(1 - 0.999**1000)
    assert power_against({"b": 1.0}, {"a": 1.0}, 1, 1e-9) == 1.0


def test_power_as_simulated():
    """2,000 samples of a wrong law: the share rejected, within 5 standard deviations (false alarm 6e-7)
    and 2 % for the chi-square approximation."""
    rng = np.random.default_rng(2)
    law = {0: 0.2, 1: 0.3, 2: 0.5}
    wrong = {0: 0.24, 1: 0.29, 2: 0.47}
    computed = power_against(wrong, law, 1500, 1e-2)
    share = np.mean([fit(draw(wrong, 1500, rng), law).p < 1e-2 for _ in range(2000)])
    assert 0.3 < computed < 0.95
    assert share == pytest.approx(computed, abs=5 * math.sqrt(computed * (1 - computed) / 2000) + 0.02)


def test_power_against_the_truth_is_the_level():
    law = {0: 0.25, 1: 0.75}
    assert power_against(law, law, 1000, 1e-3) == pytest.approx(1e-3)


# ---------------------------------------------------------------- distances and families


def test_distances_by_hand():
    a, b = {0: 0.5, 1: 0.5}, {0: 0.25, 1: 0.25, 2: 0.5}
    assert goodness.total_variation(a, b) == pytest.approx(0.5)
    assert goodness.kl_divergence(a, b) == pytest.approx(math.log(2))
    assert goodness.kl_divergence(b, a) == math.inf
    assert goodness.kl_divergence(a, a) == 0.0


def test_the_distance_of_noise_as_simulated():
    """Mean of 300 samples, within 5 % (its standard error is below 1 %)."""
    rng = np.random.default_rng(3)
    law = dict(enumerate(rng.dirichlet(np.ones(50))))
    seen = [
        goodness.total_variation({o: n / 4000 for o, n in draw(law, 4000, rng).items()}, law)
        for _ in range(300)
    ]
    assert np.mean(seen) == pytest.approx(goodness.tv_of_noise(law, 4000), rel=0.05)


def test_holm_by_hand():
    assert goodness.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert goodness.holm([0.9, 0.8]) == [1.0, 1.0]
    assert goodness.holm([]) == []


def test_holm_keeps_the_family_wise_error():
    """Of 2,000 families of 20 uniform p-values, 5 % have a rejection; interval of probability 1 − 1e-6."""
    rng = np.random.default_rng(4)
    alarms = sum(min(goodness.holm(rng.random(20).tolist())) < 0.05 for _ in range(2000))
    low, high = stats.binom.interval(1 - 1e-6, 2000, 1 - (1 - 0.05 / 20) ** 20)
    assert low <= alarms <= high


def test_uniformity():
    even = [(i + 0.5) / 100 for i in range(100)]
    assert goodness.uniformity(even) > 0.99
    assert goodness.uniformity([p**2 for p in even]) < 1e-4  # too small
    assert goodness.uniformity([0.4 + 0.2 * p for p in even]) < 1e-4  # too good
    assert goodness.uniformity([1e-9]) == 1.0  # too few to say
