"""Finished runs on disk, read back: no model, no torch."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments import summary
from specdec.errors import OptionError

NO_CONDITION = ("resume", "runs", "logger", "experiment")  # options that do not bear on what is measured
IGNORED = (*NO_CONDITION, "seed", "engine.threads")  # labels of last resort


@dataclass
class StoredRun:
    """One run of `task=measure`.

    Arguments:
        directory: where it lies.
        meta: its `meta.json`. records: its samples. pieces: text by token id, where it was stored.
        stored: its `summary.json`; empty if the run did not finish.
        label: what sets it apart from the others of a report.
    """

    directory: Path
    meta: dict[str, Any]
    records: summary.Records
    pieces: dict[str, str]
    stored: dict[str, Any]
    label: str = ""
    options: dict[str, Any] = field(default_factory=dict)  # those that differ between the runs of a report

    @classmethod
    def read(cls, directory: Path) -> StoredRun:
        """Read a run's directory.

        Raises:
            OptionError: a file of it is damaged.
        """
        lines = (directory / "samples.jsonl").read_bytes().splitlines(keepends=True)  # at \n, not at U+2028
        records = []
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):  # what a crash cut short does not count
                try:
                    records.append(json.loads(line))
                except ValueError as error:
                    remedy = f"line {number} of samples.jsonl is no JSON ({error}); remove it or the run."
                    raise OptionError("runs", directory, remedy) from error
        files = ("meta.json", "pieces.json", "summary.json")
        meta, pieces, stored = (_json(directory, name) for name in files)
        return cls(directory, meta, records, pieces, stored)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """All numbers, computed from the samples afresh."""
        return summary.summarise(self.records)

    @property
    def overall(self) -> dict[str, Any]:
        return self.summary["overall"]

    @property
    def config(self) -> dict[str, Any]:
        return self.meta["config"]

    @property
    def finished(self) -> bool:
        return bool(self.stored)

    @property
    def flags(self) -> list[str]:
        """What a reader must know before believing the numbers."""
        flags = list(self.meta.get("flags", ()))
        if not self.finished:
            flags.append("unfinished run: not everything was measured")
        if self.overall["agreement"].get("logic bug"):
            flags.append("greedy outputs differ from the baseline by more than numeric ties: a bug")
        return flags

    @cached_property
    def conditions(self) -> dict[str, str]:
        """Every option that bears on what was measured, by its full name, as text."""
        return {n: repr(v) for n, v in flat(self.config).items() if n not in NO_CONDITION}

    def option(self, name: str) -> Any:
        """An option of the run by its full name, `None` where it has none."""
        return flat(self.config).get(name)


def differing(a: StoredRun, b: StoredRun) -> set[str]:
    """The options in which two runs differ, by their full names; one that a run has not is null there."""
    names = a.conditions.keys() | b.conditions.keys()
    return {n for n in names if a.conditions.get(n, "None") != b.conditions.get(n, "None")}


def find(places: str | int | Iterable[str | int]) -> list[StoredRun]:
    """All measured runs at or below `places` (folders or patterns), labelled by what sets them apart.

    Raises:
        OptionError: a place does not exist, or no run of `task=measure` with samples lies there.
    """
    places = [str(p) for p in ([places] if isinstance(places, str | int) else places)]
    directories: dict[Path, Path] = {}  # however a run is reached, it is there once
    for place in places:
        matches = [Path(p) for p in sorted(glob.glob(str(Path(place).expanduser())))]
        folders = [p for p in matches if p.is_dir()]  # a pattern may hit files beside them
        if not folders:
            raise OptionError("runs", place, "there is no such folder.")
        for match in folders:
            for meta in sorted(match.rglob("meta.json"), key=_natural):
                directories.setdefault(meta.parent.resolve(), meta.parent)
    runs = [StoredRun.read(d) for d in directories.values() if (d / "samples.jsonl").is_file()]
    runs = [r for r in runs if r.records and r.config["task"]["name"] == "measure"]
    if not runs:
        raise OptionError("runs", places, "no run of task=measure with samples lies there.")
    label(runs)
    return runs


def label(runs: list[StoredRun]) -> None:
    """Give each run its label: the options that differ between the runs, or its folder's name."""
    options = [flat(run.config) for run in runs]
    names = dict.fromkeys(name for of_run in options for name in of_run)
    varying = [n for n in names if len({repr(o.get(n)) for o in options}) > 1]
    varying = [n for n in varying if n not in IGNORED] or varying
    if "drafter.name" in varying:  # options that only some drafters have say nothing more than its name
        shared = set.intersection(*(set(o) for o in options))
        varying = [n for n in varying if n in shared]
    if "target.name" in varying:
        varying = [n for n in varying if not n.startswith("target.") or n == "target.name"]
    for run, of_run in zip(runs, options, strict=True):
        run.options = {name: of_run.get(name) for name in varying}
        run.label = ", ".join(f"{short(n)}={_value(v)}" for n, v in run.options.items())
    for shown in {run.label for run in runs}:  # what tells runs of one drafter apart
        alike = [i for i, run in enumerate(runs) if run.label == shown]
        own = [n for n in names if len({repr(options[i].get(n)) for i in alike}) > 1 and n not in IGNORED]
        for i in alike:
            parts = (runs[i].label, *(f"{short(n)}={_value(options[i].get(n))}" for n in own))
            runs[i].label = ", ".join(filter(None, parts))
    if len({run.label for run in runs}) < len(runs) or not runs[0].label:
        paths = [run.directory.resolve().parts for run in runs]
        depth = 1
        while len({path[-depth:] for path in paths}) < len(paths):
            depth += 1
        for run, path in zip(runs, paths, strict=True):
            run.label = ", ".join(filter(None, (run.label, "/".join(path[-depth:]))))


def short(option: str) -> str:
    """`drafter.gamma` as "γ", `drafter.name` as "drafter", others by their last part."""
    if option == "drafter.gamma":
        return "γ"
    group, _, name = option.rpartition(".")
    return group or name if name == "name" else name


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their full names."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return leaves


def _value(value: Any) -> str:
    """As it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """`2` before `10`, as a sweep numbers its folders."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in path.parts]


def _json(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise OptionError("runs", directory, f"{name} is no JSON ({error}).") from error
