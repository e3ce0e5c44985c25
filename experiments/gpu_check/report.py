"""The check's numbers as one Markdown document: goals first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.benchmark.goals import Goal, point
from experiments.gpu_check.forwards import EAGER, GRAPH, ROOFLINE, relative

WANTED_FRACTION, WANTED_WIDTH, WANTED_COST, WANTED_ERROR, WANTED_MINUTES = 75.0, 16, 1.1, 10.0, 8.0


def rows(results: dict[str, Any], *parts: str) -> list[dict[str, Any]]:
    """The rows of some parts, none of one that did not run."""
    return [row for part in parts if isinstance(results.get(part), list) for row in results[part]]


def goals(results: dict[str, Any]) -> list[Goal]:
    """Every goal that this run can judge."""
    found = []
    for r in rows(results, "autoregressive"):
        if r.get("batch") == 1 and "error" not in r:
            label = f"autoregressive{' ' + r['mode'] if r['mode'] else ''}: share of the memory bandwidth"
            found.append(Goal(label, point(100 * r["fraction"]), WANTED_FRACTION, unit=" %"))
    costs = relative(rows(results, "forwards", "compiled"))
    mode = GRAPH if any(key[0] == GRAPH for key in costs) else EAGER
    for (kind, batch, context, width), cost in costs.items():
        if (kind, width) == (mode, WANTED_WIDTH):
            label = f"verify({WANTED_WIDTH}) against one token, {mode}, batch {batch}, context {context}"
            if least := costs.get((ROOFLINE, batch, context, width)):
                label += f" (roofline {least:.2f})"
            found.append(Goal(label, point(cost), WANTED_COST, at_most=True))
    for r in rows(results, "synthetic"):
        label = f"speedup at acceptance {r['rate']}: error of the prediction"
        found.append(Goal(label, point(100 * abs(r["error"])), WANTED_ERROR, at_most=True, unit=" %"))
    found.append(Goal("the whole check", point(results["seconds"] / 60), WANTED_MINUTES, True, " min"))
    return found


def markdown(results: dict[str, Any], found: Sequence[Goal]) -> str:
    """The whole document."""
    target, bandwidth = results["target"], results["bandwidth"]
    sheet = f", data sheet {bandwidth['sheet'] / 1e12:.2f} TB/s" if bandwidth["sheet"] else ""
    parts = [
        "# GPU check",
        f"{results.get('accelerator', results['device'])}; {target['name']}, {target['dtype']}, "
        f"weights {target['weights']}; reads {bandwidth['measured'] / 1e12:.3f} TB/s measured{sheet}.",
        *_checks(results),
        table(("goal", "measured", "wanted", "verdict"), [g.cells for g in found]),
        *_autoregressive(results),
        *_forwards(results),
        *_modes(results),
        *_drafters(results),
        *_synthetic(results),
        *(f"**{part} failed**: {r['error']}" for part, r in results.items() if broke(r)),
    ]
    return "\n\n".join(parts) + "\n"


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    made = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in made)


def broke(result: Any) -> bool:
    """Whether a part ended with an error instead of results."""
    return isinstance(result, dict) and isinstance(result.get("error"), str)


def _checks(results: dict[str, Any]) -> list[str]:
    said = []
    tests, proof = results.get("tests"), results.get("certificate")
    if tests and not broke(tests):
        said.append(f"Tests: {'passed' if tests['ok'] else 'FAILED'} ({tests['told']}).")
    if proof and not broke(proof):
        words = f"{len(proof['pairings'])} pairings at N = {proof['sequences']:,}"
        left = f"; not reached in time: {', '.join(proof['not_reached'])}" if proof["not_reached"] else ""
        why = f": {'; '.join(proof['failures'])}" if proof["failures"] else ""
        said.append(f"Certificate: {'passed' if proof['ok'] else 'FAILED'} ({words}{left}){why}.")
    return said


def _autoregressive(results: dict[str, Any]) -> list[str]:
    lines = [
        (
            r["mode"] or "–",
            str(r["batch"]),
            f"{1000 * r['seconds_per_step']:.2f}",
            f"{r['tokens_per_second']:.1f}",
            f"{r['bytes_per_second'] / 1e12:.3f}",
            f"{r['fraction']:.0%}",
        )
        for r in rows(results, "autoregressive")
        if "error" not in r
    ]
    columns = ("autoregressive", "batch", "ms/step", "tok/s", "TB/s", "of the bandwidth")
    broken = [f"{r['mode']}: {r['error']}" for r in rows(results, "autoregressive") if "error" in r]
    return [*([table(columns, lines)] if lines else []), *broken]


def _forwards(results: dict[str, Any]) -> list[str]:
    measured = rows(results, "forwards", "compiled")
    costs, known = relative(measured), {_key(r): r["seconds"] for r in measured}
    widths = sorted({r["width"] for r in measured})
    lines = []
    for place in dict.fromkeys(_key(r)[:3] for r in measured):
        if (*place, 1) not in costs:
            continue
        cells = [f"{costs[*place, w]:.2f}" if (*place, w) in costs else "–" for w in widths]
        lines.append((place[0], *(str(x) for x in place[1:]), f"{1000 * known[*place, 1]:.2f}", *cells))
    columns = ("forward", "batch", "context", "ms, 1 token", *(f"×, {w}" for w in widths))
    errors = [f"{' '.join(map(str, _key(r)))}: {r['error']}" for r in measured if "error" in r]
    return ([table(columns, lines)] if lines else []) + errors[:8]


def _key(r: dict[str, Any]) -> tuple[str, int, int, int]:
    return r["mode"], r["batch"], r["context"], r["width"]


def _modes(results: dict[str, Any]) -> list[str]:
    """Eager against the others, on the shapes that all of them ran."""
    known = {_key(r): r for r in rows(results, "forwards", "compiled")}
    lines = []
    for key, r in known.items():
        base = known.get((EAGER, *key[1:]))
        if key[0] in (EAGER, ROOFLINE) or not base or not base["seconds"] or not r["seconds"]:
            continue
        made = f"{r['compile_seconds']:.0f}" if "compile_seconds" in r else "–"
        cells = (f"{1000 * base['seconds']:.2f}", f"{1000 * r['seconds']:.2f}")
        lines.append(
            (key[0], *(str(x) for x in key[1:]), *cells, f"{base['seconds'] / r['seconds']:.2f}", made)
        )
    columns = ("against eager", "batch", "context", "width", "eager ms", "ms", "×", "compile s")
    return [table(columns, lines)] if lines else []


def _drafters(results: dict[str, Any]) -> list[str]:
    lines = [
        (
            r["drafter"],
            r["mode"],
            str(r["batch"]),
            str(r["nodes"]),
            f"{1000 * r['draft']:.2f}",
            f"{1000 * r['target']:.2f}",
            f"{1000 * r['overhead']:.2f}",
            f"{r['draft'] / r['target']:.2f}",
        )
        for r in rows(results, "drafters")
        if "error" not in r
    ]
    columns = ("drafter", "mode", "batch", "nodes", "draft ms", "target ms", "rest ms", "draft/target")
    broken = [f"{r['drafter']}, {r['mode']}: {r['error']}" for r in rows(results, "drafters") if "error" in r]
    return [*([table(columns, lines)] if lines else []), *broken]


def _synthetic(results: dict[str, Any]) -> list[str]:
    lines = [
        (
            f"{r['rate']:g}",
            r["drafter"],
            str(r["gamma"]),
            f"{r['block_efficiency']:.2f}",
            f"{r['measured']:.2f}",
            f"{r['predicted']:.2f}",
            f"{r['error']:+.0%}",
        )
        for r in rows(results, "synthetic")
    ]
    columns = ("acceptance", "drafter", "γ", "τ", "speedup", "predicted", "error")
    return [table(columns, lines)] if lines else []
