"""The benchmark's numbers as tables, goals, notes, a picture and a line of JSON."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments import plots
from experiments.benchmark import race
from experiments.benchmark.contestants import AUTOREGRESSIVE, HUGGING_FACE, OURS
from experiments.benchmark.context import ATTENTION
from experiments.benchmark.goals import Goal, point
from experiments.benchmark.peers import PEERS

BASELINE = f"{OURS}: {AUTOREGRESSIVE}"
TWINS = {"ngram": "prompt_lookup", "small": "assistant_model"}  # what `generate` calls the same method
MEMORY_SLACK, GROWTH, PAYS = 1.10, 10.0, 1.0


def fastest(table: dict[str, Any], among: Container[str], side: str = OURS) -> str | None:
    """The method of the highest tokens per second of one side, `None` if none of it raced."""
    own = {
        x["method"]: x["tokens_per_second"]["value"]
        for x in table.values()
        if x["side"] == side and x["method"] in among
    }
    return max(own, key=own.__getitem__, default=None)


def goals(results: dict[str, Any], timed: race.Records) -> list[Goal]:
    """Every goal that this run can judge."""
    return [
        *_race_goals(results.get("race", {}), timed),
        *_memory_goals(results.get("memory", {})),
        *_context_goals(results.get("context", {})),
    ]


def _race_goals(table: dict[str, Any], timed: race.Records) -> list[Goal]:
    found = []

    def against(first: str, second: str, wanted: float, label: str = "") -> None:
        if first in table and second in table:
            measured = race.ratio(timed, first, second)
            found.append(Goal(label or f"{_short(first)} ÷ {_short(second)}", measured, wanted))

    against(BASELINE, f"{HUGGING_FACE}: {AUTOREGRESSIVE}", 1.5)
    drafting = {x["method"] for x in table.values() if x["side"] == OURS} - {AUTOREGRESSIVE}
    best = fastest(table, drafting)
    against(f"{OURS}: {best}", BASELINE, 2.0, f"best drafter ({best}) ÷ {_short(BASELINE)}")
    for method, twin in TWINS.items():
        against(f"{OURS}: {method}", f"{HUGGING_FACE}: {twin}", 1.3)
    for peer in PEERS:
        for method in (AUTOREGRESSIVE, *TWINS):
            against(f"{OURS}: {method}", f"{peer}: {method}", 1.0)
        theirs = {x["method"] for x in table.values() if x["side"] == peer}
        if best not in TWINS or fastest(table, theirs, peer) != best:
            against(f"{OURS}: {best}", f"{peer}: {fastest(table, theirs, peer)}", 1.0)
    return found


def _short(name: str) -> str:
    """Ours by its method alone."""
    return name.removeprefix(f"{OURS}: ").replace(": ", " ")


def _memory_goals(table: dict[str, Any]) -> list[Goal]:
    return [
        Goal(
            f"{method}: peak memory against weights + KV + drafter",
            point(r["peak"] / r["expected"]),
            MEMORY_SLACK,
            at_most=True,
        )
        for method, r in table.items()
        if r["peak"] is not None
    ]


def _context_goals(found: dict[str, Any]) -> list[Goal]:
    if not found:
        return []
    span = f"{found['contexts'][0]} → {found['contexts'][-1]}"
    goals_ = []
    for method, share in found["beyond"].items():
        what = "growth of a step beyond attention" if method == AUTOREGRESSIVE else "growth of host work"
        percent = {k: None if v is None else 100 * v for k, v in share.items()}
        goals_.append(Goal(f"{method}: {what}, {span} tokens", percent, GROWTH, at_most=True, unit=" %"))
    return goals_


def tables(results: dict[str, Any], found: list[Goal]) -> list[Table]:
    """One table per section, the goals last."""
    made = []
    if results.get("race"):
        made.append(_race_table(results["race"]))
    if results.get("batches"):
        made.append(_batch_table(results["batches"]))
    if results.get("memory"):
        made.append(_memory_table(results["memory"]))
    if results.get("context"):
        made.append(_context_table(results["context"]))
    if found:
        table = _table("goals", ("what", "measured [95 %]", "goal", "verdict"))
        for goal in found:
            table.add_row(*goal.cells)
        made.append(table)
    return made


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    return table


def _race_table(found: dict[str, Any]) -> Table:
    one = next(iter(found.values()))
    title = f"batch 1, {one['prompts']} prompts of {one['domains']} domains, {one['repeats']} repeats"
    table = _table(title, ("contestant", "tok/s [95 %]", "ms/step", "τ", "spread", "greedy ="))
    for name, x in found.items():
        speed, agreed = x["tokens_per_second"], x["agreement"]
        step, tau = x.get("seconds_per_step"), x.get("block_efficiency")
        table.add_row(
            name,
            _interval(speed),
            "–" if step is None else f"{1000 * step:.1f}",
            "–" if tau is None else f"{tau:.2f}",
            f"{x['spread']:.0%}",
            f"{agreed.get('equal', 0)}/{sum(agreed.values())}",
            style="bold" if x["side"] == OURS else None,
        )
    return table


def _batch_table(found: dict[str, Any]) -> Table:
    title = f"batch sizes, drafter {found['drafter']}"
    table = _table(title, ("batch", "AR tok/s", "spec tok/s", "speedup [95 %]", "predicted", "error"))
    for r in found["batches"]:
        speed = [f"{x:.1f}" for x in r["tokens_per_second"].values()]
        told = ("–", "–") if r["predicted"] is None else (f"{r['predicted']:.2f}", f"{r['error']:+.0%}")
        table.add_row(str(r["batch"]), *speed, _interval(r["speedup"], 2), *told)
    return table


def _memory_table(found: dict[str, Any]) -> Table:
    kind = next(iter(found.values()))["kind"]
    table = _table(
        f"memory, MiB (peak of the {kind})",
        ("method", "weights", "KV", "drafter", "expected", "loaded", "peak"),
    )
    for method, r in found.items():
        cells = (r[x] for x in ("weights", "kv", "drafter", "expected", "loaded", "peak"))
        table.add_row(method, *("–" if x is None else f"{x / 2**20:.1f}" for x in cells))
    return table


def _context_table(found: dict[str, Any]) -> Table:
    columns = ("ms per step", *(str(c) for c in found["contexts"]))
    table = _table("a step against tokens of text", columns)
    for method, seconds in found["seconds"].items():
        style = "dim" if method == ATTENTION else None
        table.add_row(method, *(f"{1000 * s:.2f}" for s in seconds), style=style)
    return table


def notes(results: dict[str, Any]) -> list[str]:
    """What the tables do not say."""
    lines = []
    if floor := limit(results):
        lines.append(
            f"autoregressive: {1000 * floor['seconds']:.2f} ms per step; {floor['bytes'] / 2**20:.0f} MiB"
            f" at the measured {floor['bandwidth'] / 1e9:.1f} GB/s are {1000 * floor['floor']:.2f} ms:"
            f" {floor['fraction']:.0%} of the bandwidth's limit."
        )
    for name, x in results.get("race", {}).items():
        if x["agreement"].get("logic bug"):
            lines.append(f"! {name}: {x['agreement']['logic bug']} outputs differ by more than rounding")
    if found := results.get("batches"):
        places = [found.get(k) for k in ("measured_crossing", "predicted_crossing")]
        largest = found["batches"][-1]["batch"]
        told = [f"at batch {p:.1f}" if p else f"at no batch size up to {largest}" for p in places]
        lines.append(f"speculation ({found['drafter']}) stops paying {told[0]}; predicted: {told[1]}.")
    for name, why in results.get("left_out", {}).items():
        lines.append(f"left out: {name} ({why})")
    lines.append("“?” after a verdict: the interval holds the goal. greedy =: same tokens as our baseline's.")
    return lines


def limit(results: dict[str, Any]) -> dict[str, float] | None:
    """Seconds of an autoregressive step beside what reading its bytes takes at least."""
    own = results.get("race", {}).get(BASELINE)
    if not own or "seconds_per_step" not in own or not results.get("bandwidth"):
        return None
    size = results["footprint"]["weights"] + own["context"] * results["footprint"]["kv"]
    floor = size / results["bandwidth"]
    return {
        "seconds": own["seconds_per_step"],
        "bytes": size,
        "bandwidth": results["bandwidth"],
        "floor": floor,
        "fraction": floor / own["seconds_per_step"],
    }


def line(results: dict[str, Any]) -> dict[str, Any]:
    """The most important numbers, for machines."""
    return {
        "goals": results["goals"],
        "tokens_per_second": {n: x["tokens_per_second"]["value"] for n, x in results.get("race", {}).items()},
        "bandwidth_limit": limit(results),
        "batches": [
            {k: r[k] for k in ("batch", "predicted")} | {"speedup": r["speedup"]["value"]}
            for r in results.get("batches", {}).get("batches", ())
        ],
    }


def plot(results: dict[str, Any], stem: Path) -> list[Path]:
    """Speedup over batch size, and a step over the length of the text, where they were measured."""
    sections = [s for s in ("batches", "context") if results.get(s)]
    if not sections:
        return []
    figure, axes = plt.subplots(
        1, len(sections), figsize=(5.5 * len(sections), 4.2), layout="constrained", squeeze=False
    )
    for ax, section in zip(axes[0], sections, strict=True):
        found = results[section]
        if section == "batches":
            sizes = [r["batch"] for r in found["batches"]]
            ax.plot(sizes, [r["speedup"]["value"] for r in found["batches"]], "o", label="measured")
            ax.plot(sizes, [r["predicted"] for r in found["batches"]], "x", label="predicted from the others")
            if "curve" in found:
                ax.plot(*found["curve"], color="gray", lw=1, label="speed model")
            ax.axhline(PAYS, color="gray", ls=":")
            ax.set(xlabel="batch size", ylabel="speedup", title=f"drafter {found['drafter']}")
            ax.set_xscale("log", base=2)
        else:
            for method, seconds in found["seconds"].items():
                style = {"color": "gray", "ls": "--"} if method == ATTENTION else {"marker": "o"}
                ax.plot(found["contexts"], [1000 * s for s in seconds], label=method, **style)
            ax.set(xlabel="tokens of text", ylabel="ms per step", title="a step against the text's length")
            ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    return plots.save(figure, stem)


def _interval(x: dict[str, Any], digits: int = 1) -> str:
    ends = f" [{x['low']:.{digits}f}, {x['high']:.{digits}f}]" if x["low"] is not None else ""
    return f"{x['value']:.{digits}f}{ends}"
