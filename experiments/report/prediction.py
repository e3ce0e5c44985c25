"""The speed model fitted to stored runs: predicted against measured speedup, and where the rest went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.report.stored import StoredRun, differing
from experiments.summary import Records
from specdec.speed_model import Acceptance, Explanation, SpeedModel, Steps, Workload, explain

FIRST_STEPS = 1  # of every decode: they pay for caches that are made then


@dataclass(frozen=True)
class Predicted:
    """A run's speedup as predicted and as measured.

    Arguments:
        held_out: whether the prediction was made from the other runs alone.
        speedup: predicted. explanation: from the textbook's formula to the measured number.
        best_gamma, best_speedup: the draft length that the model would choose; `None` for trees.
    """

    held_out: bool
    speedup: float
    explanation: Explanation
    best_gamma: int | None
    best_speedup: float | None


def predict(runs: list[StoredRun]) -> dict[Path, Predicted]:
    """By the run's directory; runs that only differ in γ predict each other, the run itself left out."""
    found = {}
    for run in runs:
        others = [r for r in runs if differing(r, run) == {"drafter.gamma"}]
        predicted = _predicted(run, others)
        if predicted is not None:
            found[run.directory] = predicted
    return found


def curve(runs: list[StoredRun], gammas: Iterable[int]) -> list[tuple[int, float]]:
    """(γ, predicted speedup) of the speed model fitted to all these runs of one drafter."""
    model = SpeedModel.fit(Steps.concatenate(steps(r) for r in runs))
    pooled = Acceptance.pool([acceptance(r) for r in runs])
    load = workload(max(runs, key=lambda r: len(r.records)))
    return [(p.gamma, p.speedup) for p in model.over_gamma(pooled, load, gammas)]


def steps(run: StoredRun) -> Steps:
    """The measured steps of both methods; what a unit's prompts share is taken once."""
    parts = []
    for method in ("autoregressive", "speculative"):
        for group in _once(run.records, method):
            rows = group[0]["step_seconds"][FIRST_STEPS:]
            depth = None if is_chain(run) else _depths(group, FIRST_STEPS + len(rows))[FIRST_STEPS:]
            if rows:
                parts.append(Steps.from_rows(rows, depth, method == "speculative"))
    return Steps.concatenate(parts)


def acceptance(run: StoredRun) -> Acceptance:
    """Counted over all speculative steps."""
    columns: dict[str, list[int]] = {name: [] for name in ("depth", "accepted", "emitted", "nodes")}
    for record in run.records:
        if record["method"] == "speculative":
            for name, column in columns.items():
                column.extend(record["steps"][name])
    if not is_chain(run):
        columns["nodes"] = columns["depth"]
    return Acceptance.counted(**columns)


def workload(run: StoredRun) -> Workload:
    """What was decoded, in means over the baseline's batches."""
    groups = _once(run.records, "autoregressive")
    plain = [g[0]["phase_seconds"]["prefill"] for g in groups]
    drafted = [g[0]["phase_seconds"]["prefill"] for g in _once(run.records, "speculative")]
    context = [step[2] for g in groups for step in g[0]["step_seconds"]]
    prefill = float(np.mean(plain))
    return Workload(
        tokens=float(np.mean([len(r["tokens"]) for g in groups for r in g])),
        context=float(np.mean(context)) if context else 1.0,
        batch=float(np.mean([len(g) for g in groups])),
        prefill=prefill,
        drafter_prefill=max(float(np.mean(drafted)) - prefill, 0.0) if drafted else 0.0,
    )


def is_chain(run: StoredRun) -> bool:
    """Whether no draft of the run was a tree."""
    return all(parents is None for r in run.records for _, parents, _ in r.get("drafts", ()))


def _predicted(run: StoredRun, others: list[StoredRun]) -> Predicted | None:
    measured = run.overall["speedup"]
    own = acceptance(run)
    if measured is None or own.gamma == 0 or not np.isfinite(measured["value"]):
        return None
    if not run.overall["phase_seconds"].get("autoregressive"):
        return None
    load, chain, taken = workload(run), is_chain(run), steps(run)
    if not len(taken):
        return None  # all decodes ended with their first steps
    model = SpeedModel.fit(taken)
    forecast = None
    if others and chain:
        elsewhere = SpeedModel.fit(Steps.concatenate(steps(r) for r in others))
        pooled = Acceptance.pool([acceptance(r) for r in others])
        forecast = elsewhere.predict(pooled.at(own.gamma), load)
    explanation = explain(model, own, load, measured["value"], _shapes(run), forecast=forecast)
    best = model.best_gamma(own, load) if chain else None
    return Predicted(
        held_out=forecast is not None,
        speedup=explanation.predicted,
        explanation=explanation,
        best_gamma=best.gamma if best else None,
        best_speedup=best.speedup if best else None,
    )


def _shapes(run: StoredRun) -> tuple[list[float], list[float], list[float]] | None:
    """(nodes, depth, share) of the drafts of trees; `None` for chains, whose lengths say it all."""
    if is_chain(run):
        return None
    columns = [
        (n, d)
        for r in run.records
        if r["method"] == "speculative"
        for n, d in zip(r["steps"]["nodes"], r["steps"]["depth"], strict=True)
    ]
    shapes, count = np.unique(np.array(columns), axis=0, return_counts=True)
    return shapes[:, 0].tolist(), shapes[:, 1].tolist(), (count / count.sum()).tolist()


def _depths(group: Records, count: int) -> list[int]:
    """How deep the drafts of `count` steps of a batch were: as deep as its deepest row's."""
    rows = [r["steps"]["depth"] for r in group]  # a row that has ended has no more steps
    return [max((row[i] for row in rows if i < len(row)), default=0) for i in range(count)]


def _once(records: Records, method: str) -> list[Records]:
    """The samples of a method by what was decoded together."""
    groups: dict[tuple[int, int], Records] = {}
    for r in records:
        if r["method"] == method:
            groups.setdefault((r["unit"], r["repeat"]), []).append(r)
    return list(groups.values())
