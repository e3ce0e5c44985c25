"""What the report says, as plain data for its templates."""

from __future__ import annotations

import importlib.metadata
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import prompts
from experiments.report import charts, prediction, timeline
from experiments.report.stored import StoredRun, differing, flat
from specdec.speed_model import CAUSES

METHODS = ("autoregressive", "speculative")
DASH = "–"


@dataclass
class Table:
    """A table: `rows` are (cells, bold), as many cells as `columns`; the first one names the row."""

    caption: str
    columns: list[str]
    rows: list[tuple[list[str], bool]]
    note: str = ""


def content(runs: list[StoredRun], title: str | None = None, sample: str | None = None) -> dict[str, Any]:
    """Everything the templates show.

    Arguments:
        runs: labelled by `stored.find`. title: of the page. sample: prompt whose decode is shown.
    """
    best = max(runs, key=lambda r: (r.overall["speedup"] or {}).get("value") or 0.0)
    predicted = prediction.predict(runs)
    return {
        "title": title or _title(runs),
        "subtitle": _subtitle(runs),
        "flags": list(dict.fromkeys(_said(r, f, len(runs)) for r in runs for f in r.flags)),
        "cards": _cards(best, len(runs)),
        "runs": _runs_table(runs) if len(runs) > 1 else None,
        "domains": [_domain_table(r) for r in ([best] if len(runs) == 1 else runs)],
        "charts": charts.all_charts(runs, _curves(runs)),
        "prediction": _prediction_table(runs, predicted),
        "causes": _causes_table(runs, predicted),
        "conventions": _conventions_table(runs),
        "latency": _latency_table(runs),
        "bandwidth": _bandwidth_table(runs),
        "rules": _rules_table(runs),
        "timeline": timeline.timeline(best, sample),
        "meanings": timeline.MEANING,
        "provenance": _provenance(runs),
        "configs": [(r.label, flat(r.config)) for r in runs],
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "version": _version(),
    }


def _title(runs: list[StoredRun]) -> str:
    config = runs[0].config
    drafters = dict.fromkeys(r.config["drafter"]["name"] for r in runs)
    return f"{', '.join(drafters)} on {config['target']['name']}"


def _subtitle(runs: list[StoredRun]) -> str:
    config, meta = runs[0].config, runs[0].meta
    temperature = config["sampling"]["temperature"]
    sampling = f"T={temperature:g}" if temperature else "greedy"
    varying = set(runs[0].options)
    said = [
        f"target {meta['target'].get('name', '')} {meta['target'].get('dtype', '')}",
        "" if "verify.name" in varying else f"verify={config['verify']['name']}",
        "" if "sampling.temperature" in varying else sampling,
        "" if "engine.batch_size" in varying else f"batch {config['engine']['batch_size']}",
        f"{runs[0].overall['prompts']} prompts ({config['prompts']['name']})",
        f"up to {config['engine']['max_new_tokens']} new tokens",
        meta.get("accelerator") or meta.get("cpu", ""),
    ]
    return " · ".join(part.strip() for part in said if part.strip())


def _said(run: StoredRun, flag: str, count: int) -> str:
    everywhere = count == 1 or flag in (run.meta.get("flags") or ()) and "random" in flag
    return flag if everywhere else f"{run.label}: {flag}"


def _cards(run: StoredRun, count: int) -> list[dict[str, str]]:
    n, speed = run.overall, run.overall["tokens_per_second"]
    where = f" of {run.label}" if count > 1 else ""
    return [
        {
            "name": f"speedup{where}",
            "value": f"{_number(_value(n['speedup']))}×",
            "more": _range(n["speedup"]),
        },
        {
            "name": "block efficiency τ",
            "value": _number(n["block_efficiency"]["value"]),
            "more": "tokens per target forward, " + _range(n["block_efficiency"]),
        },
        {
            "name": "acceptance rate α",
            "value": _number(n["acceptance_rate"]["value"]),
            "more": _range(n["acceptance_rate"]) or "no drafts",
        },
        {
            "name": "tokens per second",
            "value": _number(speed.get("speculative"), 1),
            "more": f"autoregressive {_number(speed.get('autoregressive'), 1)}",
        },
    ]


def _runs_table(runs: list[StoredRun]) -> Table:
    rows = [([r.label, *_cells(r.overall)], False) for r in runs]
    return Table("All runs", ["run", *CELLS], rows)


def _domain_table(run: StoredRun) -> Table:
    rows = [([domain, *_cells(numbers)], False) for domain, numbers in run.summary["domains"].items()]
    return Table(run.label, ["domain", *CELLS], [*rows, (["all", *_cells(run.overall)], True)])


CELLS = ("n", "α", "τ", "AR tok/s", "spec tok/s", "speedup", "95 % interval", "greedy =")


def _cells(n: dict[str, Any]) -> list[str]:
    speed, agreement = n["tokens_per_second"], n["agreement"]
    return [
        str(n["prompts"]),
        _number(n["acceptance_rate"]["value"]),
        _number(n["block_efficiency"]["value"]),
        _number(speed.get("autoregressive"), 1),
        _number(speed.get("speculative"), 1),
        _number(_value(n["speedup"])),
        _range(n["speedup"], "") or DASH,
        f"{agreement.get('equal', 0)}/{sum(agreement.values())}" if agreement else DASH,
    ]


def _conventions_table(runs: list[StoredRun]) -> Table:
    columns = [
        "run", "α (tried)", "α (drafted)", "τ, with bonus", "accepted, no bonus",
        "accepted when drafting", "accepted per node", "steps", "behind a stop",
    ]  # fmt: skip
    rows = []
    for r in runs:
        n = r.overall
        rows.append(([
            r.label,
            _with_range(n["acceptance_rate"]),
            _number(n["draft_acceptance_rate"]),
            _with_range(n["block_efficiency"]),
            _number(n["mean_accepted"]),
            _number(n["mean_accepted_when_drafting"]),
            _number(n["node_efficiency"]),
            str(n["steps"]),
            str(n["discarded"]),
        ], False))  # fmt: skip
    note = (
        "One ledger, every convention: α (tried) counts a position only if all before it were accepted;"
        " α (drafted) counts all drafted positions; tokens behind a stop are discarded, never counted."
    )
    return Table("The same counts in every convention in use", columns, rows, note)


def _latency_table(runs: list[StoredRun]) -> Table:
    columns = [
        "run", "TTFT ms, AR", "TTFT ms, spec", "ms/token, AR", "ms/token, spec",
        "tok/s, AR", "tok/s, spec", "peak memory", "accelerator peak",
    ]  # fmt: skip
    rows = []
    for r in runs:
        n = r.overall
        times = [
            _number(1000 * n[name][m] if n[name].get(m) is not None else None, 1)
            for name in ("seconds_to_first_token", "seconds_per_token")
            for m in METHODS
        ]
        rates = [_number(n["tokens_per_second"].get(m), 1) for m in METHODS]
        rows.append(([r.label, *times, *rates, _peak(r, "process"), _peak(r, "cuda")], False))
    note = (
        "TTFT: median time to the first token. ms/token: from the first token on, as a reader sees it."
        " tok/s: all new tokens over all seconds, prefill included; with a batch, of all its rows together."
    )
    return Table("Latency, throughput, memory", columns, rows, note)


def _bandwidth_table(runs: list[StoredRun]) -> Table | None:
    rows = []
    for r in runs:
        if not (footprint := r.meta.get("footprint")):
            continue
        for method in METHODS:
            moved = bytes_moved(r, method)
            if moved is None:
                continue
            label = f"{r.label}, {method}" if method == "speculative" or len(runs) == 1 else None
            if label or r is runs[0]:
                rows.append(([
                    label or method,
                    _bytes(footprint["weights"]),
                    _bytes(moved["kv"]),
                    _bytes(moved["draft"]),
                    _bytes(moved["step"]),
                    _bytes(moved["target_rate"]) + "/s",
                    _bytes(moved["rate"]) + "/s",
                ], False))  # fmt: skip
    columns = [
        "run", "weights", "KV read", "drafter", "all per step", "target's forward", "whole step",
    ]  # fmt: skip
    note = (
        "Bytes moved by one step over the seconds of that step: weights once per forward, keys and values of"
        " every row's context, the drafter's weights for each of its own forwards. Never bytes × tokens/s:"
        " the tokens of a block share one reading of the weights."
    )
    return Table("Memory bandwidth", columns, rows, note) if rows else None


def bytes_moved(run: StoredRun, method: str) -> dict[str, float] | None:
    """Mean bytes per decode step, and bytes per second of the target's forward and of the whole step."""
    footprint = run.meta["footprint"]
    once = {(r["unit"], r["repeat"]): r for r in run.records if r["method"] == method and "draft_bytes" in r}
    steps = [step for r in once.values() for step in r["step_seconds"]]
    if not steps:
        return None
    weights = footprint["weights"] * len(steps)
    kv = footprint["kv"] * sum(batch * (context + nodes) for batch, nodes, context, *_ in steps)
    draft = sum(r["draft_bytes"] for r in once.values()) if method == "speculative" else 0
    target_seconds, seconds = sum(s[4] for s in steps), sum(sum(s[3:]) for s in steps)
    return {
        "kv": kv / len(steps),
        "draft": draft / len(steps),
        "step": (weights + kv + draft) / len(steps),
        "target_rate": (weights + kv) / target_seconds,
        "rate": (weights + kv + draft) / seconds,
    }


def _rules_table(runs: list[StoredRun]) -> Table:
    columns = ["run", "prompts", "perplexity, target", "perplexity, drafter", "greedy: equal", "ties", "bugs"]
    rows = []
    for r in runs:
        found, agreement = r.stored.get("perplexity", {}), r.overall["agreement"]
        rows.append(([
            r.label,
            str(r.overall["prompts"]),
            *(_number(found.get(m, {}).get("perplexity")) for m in ("target", "drafter")),
            *(str(agreement.get(v, 0)) if agreement else DASH for v in ("equal", "numeric tie", "logic bug")),
        ], False))  # fmt: skip
    note = (
        "Perplexity at temperature 1 on the baseline's outputs, over the whole vocabulary. Greedy outputs"
        " must equal the baseline's; a numeric tie is a difference within rounding, anything else a bug."
    )
    return Table("Rules of the game", columns, rows, note)


def _curves(runs: list[StoredRun]) -> dict[str, list[tuple[int, float]]]:
    """Predicted speedup by γ, if γ is all that the runs differ in."""
    if len(runs) < 2 or any(differing(runs[0], r) != {"drafter.gamma"} for r in runs[1:]):
        return {}
    if any(not prediction.is_chain(r) for r in runs):
        return {}
    if any(r.overall["speedup"] is None or not r.overall["positions"]["offered"] for r in runs):
        return {}
    longest = max(r.option("drafter.gamma") for r in runs)
    return {"": prediction.curve(runs, range(1, longest + 1))}


def _prediction_table(runs: list[StoredRun], predicted: dict[Path, prediction.Predicted]) -> Table | None:
    rows = []
    for r in runs:
        if (p := predicted.get(r.directory)) is None:
            continue
        e = p.explanation
        rows.append(([
            r.label,
            _number(e.textbook),
            _number(e.predicted) + (" (held out)" if p.held_out else ""),
            _number(e.measured),
            f"{100 * e.error:+.0f} %",
            str(p.best_gamma) if p.best_gamma is not None else DASH,
            _number(p.best_speedup),
        ], False))  # fmt: skip
    columns = ["run", "textbook", "predicted", "measured", "error", "best γ", "its speedup"]
    note = (
        "Textbook: (1−α^(γ+1))/((1−α)(γc+1)). Predicted: the speed model fitted to measured steps, from the"
        " counted acceptance of every position; held out: from the other runs alone."
    )
    return Table("Predicted and measured speedup", columns, rows, note) if rows else None


def _causes_table(runs: list[StoredRun], predicted: dict[Path, prediction.Predicted]) -> Table | None:
    rows = []
    for r in runs:
        if (p := predicted.get(r.directory)) is not None:
            factors = [f"×{p.explanation.factors.get(cause, 1.0):.2f}" for cause in CAUSES]
            rows.append(
                ([r.label, _number(p.explanation.textbook), *factors, _number(p.explanation.measured)], False)
            )
    note = "; ".join(f"{cause}: {meaning}" for cause, meaning in CAUSES.items()) + "."
    columns = ["run", "textbook", *CAUSES, "measured"]
    return Table("From the textbook to the clock, cause by cause", columns, rows, note) if rows else None


def _provenance(runs: list[StoredRun]) -> list[tuple[str, str]]:
    meta = runs[0].meta
    started, target = meta["started"], meta["target"]
    commits = dict.fromkeys(
        f"{(r.meta['started'].get('commit') or 'unknown')[:12]}"
        + (" with uncommitted changes" if r.meta["started"].get("dirty") else "")
        for r in runs
    )
    facts = {
        "machine": f"{meta.get('cpu')}, {meta.get('cpus')} logical CPUs, {meta.get('threads')} threads",
        "accelerator": _accelerator(meta),
        "platform": meta.get("platform", ""),
        "target": ", ".join(f"{k} {v}" for k, v in target.items() if k != "load_seconds"),
        "versions": ", ".join(f"{k} {v}" for k, v in meta["versions"].items() if v)
        + f", Python {meta.get('python', '')}",
        "commit": ", ".join(commits),
        "begun": started.get("time", ""),
        "runs": ", ".join(str(r.directory) for r in runs),
        "prompts": _prompts_said(runs[0]),
    }
    return [(name, said) for name, said in facts.items() if said]


def _prompts_said(run: StoredRun) -> str:
    asked = run.config["prompts"]
    domains = ", ".join(run.summary["domains"])
    own = f"; the shipped {prompts.BUILTIN.name}" if asked["name"] == "builtin" else f"; {asked['path']}"
    return f"{run.overall['prompts']} in {domains}{own}"


def _accelerator(meta: dict[str, Any]) -> str:
    if not meta.get("accelerator"):
        return ""
    return f"{meta['accelerator']}, {_bytes(meta['accelerator_memory'])}"


def _peak(run: StoredRun, kind: str) -> str:
    found = [r["memory"].get(kind, 0) for r in run.records if "memory" in r]
    return _bytes(max(found)) if found and max(found) else DASH


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _with_range(x: dict[str, float | None]) -> str:
    found = _range(x, "")
    return _number(x["value"]) + (f" [{found}]" if found else "")


def _range(x: dict[str, float | None] | None, prefix: str = "95 %: ") -> str:
    if not x or x["low"] is None:
        return ""
    return f"{prefix}{x['low']:.2f} to {x['high']:.2f}"


def _value(x: dict[str, float | None] | None) -> float | None:
    return x["value"] if x else None


def _number(x: float | None, digits: int = 2) -> str:
    return DASH if x is None or x != x else f"{x:.{digits}f}"


def _version() -> str:
    try:
        return importlib.metadata.version("specdec")
    except importlib.metadata.PackageNotFoundError:
        return ""
