"""The speed model fitted to stored runs: costs of a step, predicted against measured, best draft length.

Runs that differ only in the draft length predict each other, the predicted run left out. From runs of trees
that differ only in the node budget the best one is found, and remembered for `drafter.nodes=null`. Needs no
model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import drafters
from drafters import budget
from experiments import plots
from experiments.report import prediction, stored
from experiments.report.stored import StoredRun
from experiments.store import Run
from specdec.config import Config, at_least
from specdec.errors import OptionError
from specdec.speed_model import CAUSES, Acceptance, Cost, SpeedModel, Steps, Workload

SIZES = ("drafter.gamma", "drafter.nodes")


@dataclass
class Options:
    """Options of `task=speed_model`."""

    name: str = "speed_model"
    runs: list[str] = field(default_factory=list)  # folders or patterns, e.g. a sweep's; [] = the option runs
    longest: int = 16  # draft lengths tried, 0 … longest

    def __post_init__(self) -> None:
        at_least("task", self, longest=1)


def run(config: Config, run_dir: Path) -> None:
    """Tables, `summary.json`, speed_model.png/.svg in `run_dir`."""
    task: Options = config.task
    wanted = task.runs or config.runs
    if not wanted:
        raise OptionError("runs", "null", "must name finished runs, e.g. runs=multirun/DATE/TIME-NAME.")
    found = stored.find(wanted)
    results = analyse(found, task.longest)
    for g in results["groups"]:
        if g["kept_in"]:
            best = g["best_nodes"]
            budget.remember(Path(g["kept_in"]), best, g["budgets"][best]["speedup"])
    store = Run(run_dir, config)
    console = Console() if Console().is_terminal else Console(width=120)
    for table in _tables(results):
        console.print(table)
    for line in _notes(results):
        console.print(line, highlight=False, soft_wrap=True)
    paths = [*plot(results, run_dir / "speed_model"), store.finish(results)]
    for path in paths:
        console.print(str(path), highlight=False, soft_wrap=True)


def analyse(runs: list[StoredRun], longest: int) -> dict[str, Any]:
    """Everything the task says, as plain numbers: per group of runs that differ only in size of the draft."""
    predicted = prediction.predict(runs)
    groups = []
    for group in _groups(runs):
        steps = Steps.concatenate(prediction.steps(r) for r in group)
        if not len(steps):
            where = group[0].directory
            raise OptionError("runs", where, "no decode has a second step; raise engine.max_new_tokens.")
        model = SpeedModel.fit(steps)
        acceptance = Acceptance.pool([prediction.acceptance(r) for r in group])
        load = prediction.workload(max(group, key=lambda r: len(r.records)))
        told = [_run(r, predicted[r.directory]) for r in group if r.directory in predicted]
        budgets = _budgets(model, group, load)
        errors = [abs(r["error"]) for r in told if r["held_out"]]
        groups.append(
            {
                "name": _name(group),
                "costs": {part: _cost(getattr(model, part)) for part in ("target", "draft", "overhead")},
                "widths": _widths(steps, model),
                "workload": load,
                "acceptance": acceptance.conditional,
                "chains": all(prediction.is_chain(r) for r in group),
                "curve": _curve(model, acceptance, load, longest),
                "runs": told,
                "drafter": group[0].config["drafter"]["name"],
                "target": group[0].config["target"]["name"],
                "budgets": budgets,
                "best_nodes": max(budgets, key=lambda n: budgets[n]["speedup"]) if budgets else None,
                "median_error": float(np.median(errors)) if errors else None,
                "kept_in": _place(group[0]) if budgets else None,
            }
        )
    places = [g["kept_in"] for g in groups]
    for g in groups:
        if places.count(g["kept_in"]) > 1:  # nobody knows which of them the next run will be like
            g["kept_in"] = None
    return {"groups": groups}


def _groups(runs: list[StoredRun]) -> list[list[StoredRun]]:
    """Runs that differ in nothing but γ or the node budget, together."""
    groups: dict[str, list[StoredRun]] = {}
    for r in runs:
        key = repr(sorted(item for item in r.conditions.items() if item[0] not in SIZES))
        groups.setdefault(key, []).append(r)
    return list(groups.values())


def _name(group: list[StoredRun]) -> str:
    shared = {n: v for n, v in group[0].options.items() if n not in SIZES}
    return ", ".join(f"{stored.short(n)}={v}" for n, v in shared.items()) or str(
        group[0].option("drafter.name")
    )


def _cost(cost: Cost) -> dict[str, Any]:
    return {"seconds": cost.coefficients, "hinge": cost.hinge, "knot": cost.knot, "noise": cost.noise}


def _widths(steps: Steps, model: SpeedModel) -> list[dict[str, float]]:
    """Measured (median) and fitted seconds of the target's forward by tokens per row and batch."""
    found = []
    for batch, nodes in np.unique(np.stack([steps.batch, steps.nodes], 1), axis=0):
        here = steps.where((steps.batch == batch) & (steps.nodes == nodes))
        fitted = model.target(batch=here.batch, nodes=here.nodes, depth=here.depth, context=here.context)
        found.append(
            {"batch": batch, "tokens": nodes + 1, "steps": len(here)}
            | {"measured": float(np.median(here.target)), "fitted": float(np.median(fitted))}
        )
    return found


def _curve(model: SpeedModel, acceptance: Acceptance, load: Workload, longest: int) -> list[dict[str, Any]]:
    return [
        vars(p) | {"gamma": g} for g, p in enumerate(model.over_gamma(acceptance, load, range(longest + 1)))
    ]


def _budgets(model: SpeedModel, group: list[StoredRun], load: Workload) -> dict[int, dict[str, Any]]:
    """Predictions by node budget, where trees of several budgets were measured."""
    measured = {r.config["drafter"]["nodes"]: r for r in group if "drafter.nodes" in r.options}
    if len(measured) < 2 or None in measured or any(prediction.is_chain(r) for r in group):
        return {}
    accepted = {n: prediction.acceptance(r) for n, r in measured.items()}
    depth = max(a.gamma for a in accepted.values())
    over = model.over_budgets({n: a.block_efficiency for n, a in accepted.items()}, depth, load)
    return {n: vars(p) for n, p in over.items()}


def _run(run: StoredRun, p: prediction.Predicted) -> dict[str, Any]:
    gamma = prediction.acceptance(run).gamma
    nodes = run.config["drafter"].get("nodes") or gamma
    facts = {"label": run.label, "gamma": gamma, "nodes": nodes, "held_out": p.held_out}
    return facts | {"error": p.explanation.error} | vars(p.explanation)


def _tables(results: dict[str, Any]) -> list[Table]:
    found = []
    for g in results["groups"]:
        causes = [c for c in CAUSES if any(c in r["factors"] for r in g["runs"])]
        table = Table(
            title=f"{g['name']}: textbook × causes = measured", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for column in ("run", "textbook", *causes, "measured", "predicted", "error"):
            table.add_column(column, justify="left" if column == "run" else "right")
        for r in g["runs"]:
            factors = [f"×{r['factors'][c]:.3f}" if c in r["factors"] else "–" for c in causes]
            mark = "" if r["held_out"] else " (own)"
            numbers = (f"{r['measured']:.3f}", f"{r['predicted']:.3f}{mark}", f"{r['error']:+.1%}")
            table.add_row(r["label"], f"{r['textbook']:.3f}", *factors, *numbers)
        widths = Table(title=f"{g['name']}: the target's forward", box=SIMPLE_HEAD)
        for column in ("batch", "tokens per row", "steps", "measured ms", "fitted ms"):
            widths.add_column(column, justify="right")
        for w in g["widths"]:
            shape = (f"{w['batch']:.0f}", f"{w['tokens']:.0f}", str(w["steps"]))
            widths.add_row(*shape, f"{1000 * w['measured']:.2f}", f"{1000 * w['fitted']:.2f}")
        found += [table, widths]
    return found


def _place(run: StoredRun) -> str | None:
    """Where the best budget is kept for `drafter.nodes=null`, if that is to be measured, at batch size 1."""
    options = run.config["drafter"]
    if getattr(drafters.config_class(options["name"])(), "nodes", 0) is not None:
        return None
    return str(budget.file(options, run.meta["target"])) if run.config["engine"]["batch_size"] == 1 else None


def _notes(results: dict[str, Any]) -> list[str]:
    lines = [f"{cause}: {meaning}." for cause, meaning in CAUSES.items()]
    for g in results["groups"]:
        if g["chains"] and len(g["acceptance"]):
            best = max(g["curve"], key=lambda p: p["speedup"])
            advice = f"draft {best['gamma']}" if best["gamma"] else "do not speculate"
            lines.append(f"{g['name']}: on this machine {advice}; predicted speedup {best['speedup']:.2f} ×.")
        if g["budgets"]:
            n = g["best_nodes"]
            gain = f"predicted speedup {g['budgets'][n]['speedup']:.2f} ×"
            use = f"drafter.nodes=null now means {n}" if g["kept_in"] else f"use drafter.nodes={n}"
            lines.append(f"{g['name']}: the best tree has {n} nodes, {gain}; {use}.")
        if g["median_error"] is not None:
            lines.append(f"{g['name']}: median error of held-out draft lengths {g['median_error']:.1%}.")
    return lines


def plot(results: dict[str, Any], stem: Path) -> list[Path]:
    """Speedup over γ or nodes, predicted and measured; the forward's cost over its width."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for i, g in enumerate(results["groups"]):
        color = f"C{i}"
        size = "gamma" if g["chains"] else "nodes"
        curve = g["curve"] if g["chains"] else list(g["budgets"].values())
        points = [p[size] for p in curve], [p["speedup"] for p in curve]
        left.plot(*points, color=color, label=f"{g['name']}, predicted")
        for r in g["runs"]:
            left.plot(r[size], r["measured"], "o", color=color)
            left.plot(r[size], r["predicted"], "x", color=color)
        width = [w["batch"] * w["tokens"] for w in g["widths"]]
        right.plot(width, [1000 * w["measured"] for w in g["widths"]], "o", color=color, label=f"{g['name']}")
        right.plot(width, [1000 * w["fitted"] for w in g["widths"]], "x", color=color)
    left.axhline(1.0, color="gray", ls=":")
    title = "Speedup: measured ●, predicted without that run ×"
    left.set(xlabel="γ; nodes of trees", ylabel="speedup", title=title)
    right.set(xlabel="tokens in the forward", ylabel="ms", title="The target's forward: measured ●, fitted ×")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return plots.save(figure, stem)
