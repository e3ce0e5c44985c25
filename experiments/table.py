"""The numbers of a run as a table for the terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

COLUMNS = ("domain", "n", "α", "τ", "AR tok/s", "spec tok/s", "speedup [95 %]", "TTFT ms", "greedy =")


def results(summary: dict[str, Any]) -> Table:
    """One line per domain and one for everything."""
    title = "autoregressive (AR) against speculative decoding"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "domain" else "right", no_wrap=True)
    for domain, numbers in summary["domains"].items():
        table.add_row(domain, *_cells(numbers))
    table.add_section()
    table.add_row("all", *_cells(summary["overall"]), style="bold")
    return table


def runs(numbers: list[tuple[str, dict[str, Any]]]) -> Table:
    """One line per run of a sweep.

    Arguments:
        numbers: (label, overall numbers) of each run.
    """
    table = Table(title="all runs of the sweep", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("run", *COLUMNS[1:]):
        table.add_column(name, justify="left" if name == "run" else "right", no_wrap=name != "run")
    for label, of_run in numbers:
        table.add_row(label, *_cells(of_run))
    return table


def notes(summary: dict[str, Any]) -> list[str]:
    """What the table means, and what a reader must know before believing it."""
    lines = [
        "α: accepted share of tried draft tokens; τ: tokens per target forward; speedup: ratio of tokens/s"
        " over all prompts, interval from resampling prompts; TTFT: median time to the first token, AR/spec."
    ]
    found = summary["overall"]["agreement"]
    if found:
        lines.append(
            "greedy agreement with the baseline: " + ", ".join(f"{n} {v}" for v, n in found.items()) + "."
        )
    if found.get("logic bug"):
        lines.append(
            "A difference that is no numeric tie is a bug: please report samples.jsonl and meta.json."
        )
    return [*lines, *(f"! {flag}" for flag in summary["flags"])]


def _cells(n: dict[str, Any]) -> list[str]:
    speed, first = n["tokens_per_second"], n["seconds_to_first_token"]
    agreement = n["agreement"]
    return [
        str(n["prompts"]),
        _number(n["acceptance_rate"]["value"]),
        _number(n["block_efficiency"]["value"]),
        _number(speed.get("autoregressive"), 1),
        _number(speed.get("speculative"), 1),
        _with_interval(n["speedup"]),
        "/".join(_number(1000 * first[m], 0) for m in ("autoregressive", "speculative") if m in first),
        f"{agreement.get('equal', 0)}/{sum(agreement.values())}" if agreement else "–",
    ]


def _with_interval(x: dict[str, float | None] | None) -> str:
    if x is None:
        return "–"
    interval = f" [{x['low']:.2f}, {x['high']:.2f}]" if x["low"] is not None else ""
    return f"{_number(x['value'])}{interval}"


def _number(x: float | None, digits: int = 2) -> str:
    return "–" if x is None or x != x else f"{x:.{digits}f}"
