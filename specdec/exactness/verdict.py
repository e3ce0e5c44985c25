"""From the records of all pairings to one verdict: Holm over all tests, uniformity, re-runs, checks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from specdec.exactness import goodness
from specdec.exactness.certificate import CONTROL_POWER

Record = dict[str, Any]
MOST_RERUNS = 3
RERUN_FACTOR, MOST_SEQUENCES = 10, 1_000_000


def tests_of(records: Iterable[Record]) -> list[Record]:
    """Every test of the family, with the pairing it belongs to."""
    exact = (r for r in records if r.get("exact"))
    return [{"drafter": r["drafter"], "rule": r["rule"], **test} for r in exact for test in r["tests"]]


def rejected(tests: Sequence[Record], alpha: float, also: Sequence[float] = ()) -> list[Record]:
    """The tests that fail at family-wise error `alpha`, `also` being further p-values of the family."""
    adjusted = goodness.holm([*(t["p"] for t in tests), *also])
    return [test for test, p in zip(tests, adjusted, strict=False) if p < alpha]


def to_rerun(records: Sequence[Record], alpha: float) -> list[tuple[str, str, str]]:
    """(drafter, rule, scenario) of what failed by chance or by a bug: to be run again, the first few."""
    tests = tests_of(records)
    failed = rejected(tests, alpha, [_uniformity(tests)])
    wanted = dict.fromkeys((t["drafter"], t["rule"], t["scenario"]) for t in failed if not t["impossible"])
    done = {(r["drafter"], r["rule"], r["scenario"]) for r in records if r.get("rerun")}
    return [key for key in wanted if key not in done][: max(0, MOST_RERUNS - len(done))]


def verdict(records: Sequence[Record], alpha: float, power: float) -> Record:
    """The verdict over everything that ran.

    Arguments:
        records: of `certificate.certify`, `certificate.control` and re-runs (`rerun: true`, with `tests`).
        alpha: family-wise error. power: of the stated detectable deviation.

    Returns:
        `passed`, `failures` (sentences), the family and what it could see.
    """
    pairings = [r for r in records if r.get("exact") and not r.get("rerun")]
    tests = tests_of(pairings)
    uniformity = _uniformity(tests)
    family = len(tests) + 1
    adjusted = goodness.holm([*(t["p"] for t in tests), uniformity])
    failures = [
        f"{r['drafter']} × {r['rule']}: {c['what']}: {c['detail']}"
        for r in pairings
        for c in r["checks"]
        if c["passed"] is False
    ]
    again = _reruns(records, alpha)
    chance: list[str] = []
    for test, p in zip(tests, adjusted, strict=False):
        if p < alpha:
            name = f"{test['drafter']} × {test['rule']}, {test['scenario']}: {test['what']}"
            said = _said(test)
            rerun = again.get((test["drafter"], test["rule"], test["scenario"], test["what"]))
            if rerun is not None and not test["impossible"]:
                said += f"; again with other seeds: {_said(rerun)}"
            confirmed = test["impossible"] or rerun is None or rerun["confirmed"]
            (failures if confirmed else chance).append(f"{name}: {said}")
    if adjusted[-1] < alpha:
        failures.append(f"the p-values are not uniform (Kolmogorov-Smirnov p = {uniformity:.1e})")
    controls = [r for r in records if "control" in r]
    failures += [
        f"negative control not rejected: {c['control']} (power {c['power']:.4f})"
        for c in controls
        if not c["rejected"] and c["power"] >= CONTROL_POWER
    ]
    joint = [t for t in tests if t["what"] == "joint" and t["df"]]
    proofs = [c for r in pairings for c in r["checks"] if "error" in c]
    return {
        "passed": not failures,
        "failures": failures,
        "not_confirmed": chance,
        "alpha": alpha,
        "power": power,
        "family": family,
        "smallest_adjusted_p": min(adjusted),
        "uniformity_p": uniformity,
        "uniformity_tests": len(_independent(tests)),
        "proved": len(proofs),
        "proof_error": max((c["error"] for c in proofs), default=None),
        "detectable": _detectable(joint, alpha / family, power),
        "detectable_alone": _detectable(joint, alpha, power),
        "sequences": sum(t["n"] for t in joint),
    }


def _detectable(joint: Sequence[Record], alpha: float, power: float) -> dict[str, Record]:
    """By scenario: the smallest N and the largest deviation that may have gone unseen at that level."""
    seen: dict[str, Record] = {}
    for test in joint:
        tv = goodness.detectable_tv(test["n"], test["df"], alpha, power)
        if tv > seen.get(test["scenario"], {"tv": -math.inf})["tv"]:
            seen[test["scenario"]] = {"n": test["n"], "df": test["df"], "tv": tv}
    return seen


def _independent(tests: Sequence[Record]) -> list[Record]:
    """Tests that share no information: the laws after each first token."""
    return [t for t in tests if t["what"].startswith("after") and t["df"] and not t["impossible"]]


def _uniformity(tests: Sequence[Record]) -> float:
    return goodness.uniformity(t["p"] for t in _independent(tests))


def _reruns(records: Sequence[Record], alpha: float) -> dict[tuple[str, str, str, str], Record]:
    reruns = [r for r in records if r.get("rerun")]
    tests = [{"drafter": r["drafter"], "rule": r["rule"], **t} for r in reruns for t in r["tests"]]
    adjusted = goodness.holm([t["p"] for t in tests])
    return {
        (t["drafter"], t["rule"], t["scenario"], t["what"]): t | {"confirmed": p < alpha}
        for t, p in zip(tests, adjusted, strict=True)
    }


def _said(test: Record) -> str:
    if test["impossible"]:
        outcome, count = test["impossible"][0]
        return f"impossible outcome {list(outcome)} observed {count} times (N = {test['n']:,})"
    return f"χ² = {test['chi2']:.1f}, df = {test['df']}, p = {test['p']:.1e} (N = {test['n']:,})"
