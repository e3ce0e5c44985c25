"""Many runs as one table: a row per run, the options that differ first, then the numbers."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

from experiments.report import stored
from experiments.report.stored import StoredRun

COLUMNS = {
    "prompts": ("prompts",),
    "acceptance_rate": ("acceptance_rate", "value"),
    "acceptance_rate_low": ("acceptance_rate", "low"),
    "acceptance_rate_high": ("acceptance_rate", "high"),
    "draft_acceptance_rate": ("draft_acceptance_rate",),
    "block_efficiency": ("block_efficiency", "value"),
    "block_efficiency_low": ("block_efficiency", "low"),
    "block_efficiency_high": ("block_efficiency", "high"),
    "mean_accepted": ("mean_accepted",),
    "speedup": ("speedup", "value"),
    "speedup_low": ("speedup", "low"),
    "speedup_high": ("speedup", "high"),
    "tokens_per_second_autoregressive": ("tokens_per_second", "autoregressive"),
    "tokens_per_second_speculative": ("tokens_per_second", "speculative"),
    "seconds_to_first_token_autoregressive": ("seconds_to_first_token", "autoregressive"),
    "seconds_to_first_token_speculative": ("seconds_to_first_token", "speculative"),
    "seconds_per_token_autoregressive": ("seconds_per_token", "autoregressive"),
    "seconds_per_token_speculative": ("seconds_per_token", "speculative"),
}


def rows(runs: list[StoredRun], domains: bool = False) -> list[dict[str, Any]]:
    """One row per run, or with `domains` per run and domain ("all", the total, first)."""
    table = []
    for run in runs:
        parts = run.summary["domains"] if domains else {}
        groups = {"all": run.overall} | {d: n for d, n in parts.items() if d != "all"}
        for domain, numbers in groups.items():
            row = {**run.options, "run": str(run.directory), "finished": run.finished, "domain": domain}
            row |= {name: _at(numbers, path) for name, path in COLUMNS.items()}
            table.append(row | {"flags": "; ".join(run.flags)})
    return table


def conclude(directory: Path) -> None:
    """The end of a sweep: a table on the terminal, `runs.csv`/`.parquet` and the report in its folder.

    Raises:
        OptionError: no measured run lies there.
    """
    from rich.console import Console

    from experiments import report, table

    runs = stored.find(str(directory))
    console = Console() if sys.stdout.isatty() else Console(width=100)
    console.print(table.runs([(run.label, run.overall) for run in runs]))
    for flag in dict.fromkeys(flag for run in runs for flag in run.flags):
        console.print(f"! {flag}", highlight=False, soft_wrap=True)
    for path in report.write(runs, directory):
        if path.suffix != ".png":
            console.print(str(path), highlight=False, soft_wrap=True)


def write(table: list[dict[str, Any]], stem: Path) -> list[Path]:
    """Write a table as CSV, and as Parquet where pandas and pyarrow are there; the paths written."""
    paths = [stem.with_suffix(".csv")]
    with open(paths[0], "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in table for name in row)))
        writer.writeheader()
        writer.writerows(table)
    try:
        import pandas

        frame = pandas.DataFrame(table)
        for name in frame.columns:  # one column, one type: lists and mixtures as text
            if frame[name].map(type).nunique() > 1 and not all(map(_is_number, frame[name])):
                frame[name] = frame[name].map(lambda x: None if x is None else str(x))
        frame.to_parquet(stem.with_suffix(".parquet"))
        paths.append(stem.with_suffix(".parquet"))
    except ImportError:
        pass  # the CSV says the same
    return paths


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _at(numbers: dict[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = numbers
    for name in path:
        found = (found or {}).get(name)
    return found
