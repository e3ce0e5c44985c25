"""The certificate as files: certificate.json for machines, .md in words, .png and .svg as a picture."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from experiments import plots
from experiments.store import Run
from specdec.exactness.verdict import tests_of

Record = dict[str, Any]
BAND = 0.999  # pointwise intervals of the picture


def write(store: Run, result: Record) -> list[Path]:
    """All files of the certificate; returns their paths."""
    records = store.records
    pairings = [{k: v for k, v in r.items() if k != "law"} for r in records if "control" not in r]
    controls = [r for r in records if "control" in r]
    laws = [{"drafter": r["drafter"], "rule": r["rule"], **r["law"]} for r in records if r.get("law")]
    content = {
        "verdict": verdict_in_words(result),
        **result,
        "pairings": pairings,
        "controls": controls,
        "laws": laws,
    }
    text = store.directory / "certificate.md"
    text.write_text(markdown(records, result), encoding="utf-8")
    return [
        store.write("certificate.json", content),
        text,
        *picture(records, result, store.directory / "certificate"),
    ]


def verdict_in_words(result: Record) -> str:
    """The verdict, two or three sentences."""
    if not result["passed"]:
        return "NOT EXACT. " + " ".join(f"{failure}." for failure in result["failures"])
    said = []
    if result["proved"]:
        said.append(
            "Proved by enumeration through the engine to 1e-12 "
            f"(V = 3, 4 tokens, {_count(result['proved'])}, largest error {result['proof_error']:.0e})."
        )
    if main := next(iter(result["detectable"].values()), None):
        said.append(
            f"At N = {main['n']:,} no deviation above TV = {main['tv']:.4f} detected "
            f"(power {result['power']:g}, joint law of 4 tokens, level {result['alpha']:g} for all "
            f"{result['family']} tests together)."
        )
    if result["not_confirmed"]:
        said.append(f"{len(result['not_confirmed'])} deviations were not confirmed when run again.")
    return " ".join(said)


def _count(pairings: int) -> str:
    return "1 pairing" if pairings == 1 else f"{pairings} pairings"


def line(name: str, record: Record) -> str:
    """What is said when a job is finished."""
    seconds = f"{record['seconds']:.0f} s" if "seconds" in record else "run again"
    if "control" in record:
        mark = "rejected" if record["rejected"] else "missed"
        return f"{mark:>9}  mutant: {name}, N = {record['n']:,}, power {record['power']:.6f}, {seconds}"
    if "tv" in record:
        return f"{'LOSSY':>9}  {name}: TV = {record['tv']:.3f}, {seconds}"
    broken = [c["what"] for c in record.get("checks", ()) if c["passed"] is False]
    smallest = min((t["p"] for t in record["tests"]), default=float("nan"))
    mark = "FAILED" if broken else "done"
    said = "; ".join(broken) or f"{len(record['tests'])} tests, smallest p {smallest:.2g}"
    return f"{mark:>9}  {name}: {said}, {seconds}"


def markdown(records: list[Record], result: Record) -> str:
    """The whole report."""
    parts = ["# Certificate of exactness", verdict_in_words(result)]
    parts += [_seen(result), _checks(records), _table(records)]
    chance = result["not_confirmed"]
    if chance:
        parts.append("Failed once and not again with ten times the sequences:\n\n" + _list(chance))
    lossy = [r for r in records if "tv" in r and "control" not in r]
    if lossy:
        parts += ["## Lossy rules", _lossy(lossy)]
    parts += ["## Would have caught", _controls(records, result)]
    if result["refused"]:
        parts += ["## Refused at configuration time", _refused(result["refused"])]
    parts += ["## What was done", _method(result)]
    return "\n\n".join(parts) + "\n"


def _seen(result: Record) -> str:
    rows = [
        [name, f"{d['n']:,}", str(d["df"]), f"{d['tv']:.4f}", f"{result['detectable_alone'][name]['tv']:.4f}"]
        for name, d in result["detectable"].items()
    ]
    head = ["scenario", "N at least", "df", "detectable TV, whole family", "detectable TV, one test"]
    return f"Detectable with power {result['power']:g}, whatever the direction:\n\n" + _grid(head, rows)


def _table(records: list[Record]) -> str:
    head = [
        "drafter",
        "rule",
        "scenario",
        "N",
        "cells",
        "χ²",
        "df",
        "p",
        "G-test p",
        "smallest p of its parts",
    ]
    rows = []
    for r in records:
        if not r.get("exact") or r.get("rerun"):
            continue
        for test in r["tests"]:
            if test["what"] != "joint":
                continue
            parts = [t["p"] for t in r["tests"] if t["scenario"] == test["scenario"] and t is not test]
            rows.append(
                [
                    r["drafter"],
                    r["rule"],
                    test["scenario"],
                    f"{test['n']:,}",
                    str(test["cells"]),
                    f"{test['chi2']:.1f}",
                    str(test["df"]),
                    f"{test['p']:.3g}",
                    f"{test['g_p']:.3g}",
                    f"{min(parts):.3g}" if parts else "–",
                ]
            )
    return _grid(head, rows)


def _checks(records: list[Record]) -> str:
    """What holds with certainty or not at all, and for how many pairings it was looked at."""
    found: dict[str, Counter] = {}
    for check in (check for r in records for check in r.get("checks", ())):
        found.setdefault(check["what"], Counter())[check["passed"]] += 1
    rows = [[what, str(n[True]), str(n[False]), str(n[None])] for what, n in found.items()]
    said = _grid(["what must hold exactly", "holds", "fails", "not applicable"], rows)
    details = {c["detail"] for r in records for c in r.get("checks", ()) if c["passed"] is None}
    return said + "".join(f"\n\nNot applicable: {detail}." for detail in sorted(details))


def _lossy(records: list[Record]) -> str:
    head = ["drafter", "rule", "N", "measured TV", "TV of an exact sample of this size", "measured KL (nats)"]
    rows = [
        [
            r["drafter"],
            f"{r['rule']} (LOSSY)",
            f"{r['n']:,}",
            f"{r['tv']:.4f}",
            f"{r['tv_of_noise']:.4f}",
            _nats(r["kl"]),
        ]
        for r in records
    ]
    said = "These do not keep the target's law and get no certificate; this is how far they were from it.\n\n"
    return said + _grid(head, rows)


def _nats(kl: float | None) -> str:
    return "∞" if kl is None else f"{kl:.4f}"


def _controls(records: list[Record], result: Record) -> str:
    if result["controls_missing"]:
        return f"Not shown: {result['controls_missing']}."
    rows = [
        [
            r["control"],
            f"{r['tv']:.4f}",
            f"{r['n']:,}",
            f"{r['power']:.6f}",
            f"{r['p']:.1e}",
            "yes" if r["rejected"] else "no",
        ]
        for r in records
        if "control" in r
    ]
    if not rows:
        return "Not run; `python run.py task=certify` runs them (or `task.controls=true`)."
    head = ["wrong variant", "its TV", "N", "computed power", "p", "rejected at 1e-6"]
    return "Wrong variants of the shipping code, run through the same engine and test:\n\n" + _grid(
        head, rows
    )


def _refused(refused: list[dict[str, str]]) -> str:
    drafters: dict[tuple[str, str], list[str]] = {}
    for entry in refused:
        drafters.setdefault((entry["rule"], entry["reason"]), []).append(entry["drafter"])
    return _list([f"{rule} × ({'; '.join(names)}): {reason}" for (rule, reason), names in drafters.items()])


def _method(result: Record) -> str:
    return _list(
        [
            "Proof: a random source that walks every branch of the shipping engine (prefill, draft, tree "
            "forward, rule, commit, roll-back, stop) and multiplies probabilities, against plain forwards "
            "without a cache.",
            "Test: support first; then Pearson's χ² on the joint law of all new tokens, cells that expect "
            "fewer than 5 pooled, none dropped; the same after each first token; the accepted length of the "
            "first block.",
            f"Family: {result['family']} tests, Holm at {result['alpha']:g}, smallest adjusted p "
            f"{result['smallest_adjusted_p']:.3g}. Kolmogorov-Smirnov test of the "
            f"{result['uniformity_tests']} independent p-values: p = {result['uniformity_p']:.3g}. "
            f"{result['sequences']:,} sequences, seed {result['seed']}.",
            "A test that fails is run again with ten times the sequences (at most a million) and other "
            "random numbers; both results are printed, and the second one counts.",
            "Not covered: deviations among outcomes so rare that they share a bin, larger vocabularies, "
            "rounding in low precision.",
        ]
    )


def _grid(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


def _list(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def picture(records: list[Record], result: Record, stem: Path) -> list[Path]:
    """Observed against expected frequencies of every outcome, and the p-values against their law."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    _frequencies(left, records)
    _quantiles(right, records)
    verdict = "no deviation detected" if result["passed"] else "NOT EXACT"
    figure.suptitle(
        f"Certificate of exactness: {verdict}", color="black" if result["passed"] else "firebrick"
    )
    return plots.save(figure, stem)


def _frequencies(axes: plt.Axes, records: list[Record]) -> None:
    laws = [r for r in records if r.get("law") and sum(r["law"]["observed"])]
    total = 0
    for r in laws:
        p, seen = np.array(r["law"]["probability"]), np.array(r["law"]["observed"], dtype=float)
        total = int(seen.sum())
        axes.plot(p, seen / (p * total), ".", ms=2, alpha=0.5, color="tab:blue", rasterized=True)
    if laws:
        p = np.sort(np.array(laws[0]["law"]["probability"]))
        low, high = (stats.binom.ppf(x, total, p) / (p * total) for x in ((1 - BAND) / 2, (1 + BAND) / 2))
        axes.fill_between(
            p, low, high, color="gray", alpha=0.25, step="mid", label=f"{BAND:.1%} of exact samples"
        )
        axes.legend(loc="upper right")
    axes.axhline(1.0, color="black", lw=0.8)
    axes.set(
        xscale="log", ylim=(0, 2.5), xlabel="exact probability of an outcome", ylabel="observed / expected"
    )
    axes.set_xlim(left=1 / max(total, 1))  # rarer ones are observed once in a while
    axes.set_title(f"Every outcome of {len(laws)} pairings, N = {total:,} each")


def _quantiles(axes: plt.Axes, records: list[Record]) -> None:
    tests = [t for t in tests_of([r for r in records if not r.get("rerun")]) if t["df"]]
    for what, style in (("joint", "o"), ("after", "."), ("accepted", "x")):
        p = np.sort([max(t["p"], 1e-300) for t in tests if t["what"].startswith(what)])
        if len(p):
            rank = np.arange(1, len(p) + 1)
            axes.plot(rank / (len(p) + 1), p, style, ms=4, label=f"{what} ({len(p)})")
    grid = np.arange(1, max(len(tests), 2))
    x = grid / len(grid)
    low, high = (stats.beta.ppf(q, grid, len(grid) + 1 - grid) for q in ((1 - BAND) / 2, (1 + BAND) / 2))
    axes.fill_between(x, low, high, color="gray", alpha=0.25, label=f"{BAND:.1%} if uniform")
    axes.plot([x[0], 1], [x[0], 1], color="black", lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="expected p", ylabel="observed p", title="p-values")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
