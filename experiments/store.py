"""A run's directory: `meta.json` (what ran), `samples.jsonl` (each sample as it finishes), `summary.json`.

A killed run loses at most the sample it was computing. The summary is written last: its presence means done.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specdec.config import Config
from specdec.errors import OptionError, SpecdecError

PACKAGES = ("specdec", "torch", "transformers", "accelerate", "numpy", "hydra-core", "omegaconf")


class Run:
    """The open directory of one run.

    Arguments:
        directory: created where missing.
        config: the checked configuration; `config.resume` allows to go on with what the directory holds.
        facts: further entries of `meta.json`, e.g. `device="cpu"`, `dtype="bfloat16"`.

    Raises:
        OptionError: another process is at work there, the directory holds another run's results, or
            `resume=true` with other options than then.
        SpecdecError: it cannot be written.
    """

    def __init__(self, directory: Path | str, config: Config, **facts: Any):
        self.directory = Path(directory)
        self._samples = self.directory / "samples.jsonl"
        self.records: list[dict[str, Any]] = []  # finished samples, in the order they finished
        with self._writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.directory / ".lock", timeout=0, is_singleton=True)  # until we end
            try:
                self._lock.acquire()
            except Timeout as error:
                remedy = "another process is at work there; wait for it, or choose another."
                raise OptionError("hydra.run.dir", self.directory, remedy) from error
        self._begin(config, facts)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run."""
        path = self.directory / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def keys(self, *fields: str) -> set[tuple[Any, ...]]:
        """What is finished, as tuples of these fields of the samples: what a resumed run skips."""
        return {tuple(record[field] for field in fields) for record in self.records}

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one finished sample; it is on disk when this returns.

        Raises:
            SpecdecError: it could not be written; the samples before it stay readable.
        """
        entry = plain(record)
        line = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with self._writing(self._samples), open(self._samples, "ab", buffering=0) as file:
            end = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError:
                os.truncate(self._samples, end)  # no half a line; needs no space
                raise
        self.records.append(entry)

    def finish(self, summary: Mapping[str, Any]) -> Path:
        """Write `summary.json`; the run is done."""
        return self.write("summary.json", summary)

    def close(self) -> None:
        """Let other processes in; the end of this one does the same."""
        self._lock.release()

    def write(self, name: str, content: Mapping[str, Any]) -> Path:
        """Write a JSON file of the run, whole or not at all."""
        path = self.directory / name
        partial = path.with_suffix(".partial")
        with self._writing(path):
            with open(partial, "w", encoding="utf-8") as file:
                json.dump(plain(content), file, ensure_ascii=False, allow_nan=False, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        return path

    def _begin(self, config: Config, facts: Mapping[str, Any]) -> None:
        path = self.directory / "meta.json"
        now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **git_state()}
        if not path.exists():
            meta = {"started": now, "config": config, **machine(), **facts, "resumed": []}
        elif not config.resume:
            remedy = "holds a run already; resume=true goes on with it, or choose another."
            raise OptionError("hydra.run.dir", self.directory, remedy)
        else:
            meta = json.loads(path.read_text(encoding="utf-8"))
            self._refuse_other_options(meta["config"], plain(config))
            nodes = facts.get("max_nodes")
            if (then := meta.get("max_nodes", nodes)) != nodes:
                remedy = f"was {then} nodes when {self.directory} began, now {nodes}; give them in a new run."
                raise OptionError("drafter.nodes", "null", remedy)
            meta["resumed"].append(now)
            self.records = self._repaired_samples()
        self.write("meta.json", meta)

    def _refuse_other_options(self, then: dict[str, Any], now: dict[str, Any]) -> None:
        then, now = _flat(then), _flat(now)
        for option in sorted(then.keys() | now.keys()):
            before, today = then.get(option), now.get(option)
            if option != "resume" and before != today:
                remedy = f"was {before} when {self.directory} began; resume=true needs the same options."
                raise OptionError(option, today, remedy)

    def _repaired_samples(self) -> list[dict[str, Any]]:
        """The samples on disk; a last line cut short by a crash is removed."""
        content = self._samples.read_bytes() if self._samples.exists() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with self._writing(self._samples):
                os.truncate(self._samples, whole)
        records = []
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                remedy = f"line {number} is no JSON ({error}); remove it, or start afresh."
                raise OptionError("resume", str(self._samples), remedy) from error
        return records

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"cannot write {path}: {error.strerror or error}"
            kept = f"finished samples are kept ({len(self.records)})"
            remedy = "make room or choose another hydra.run.dir; the same command with resume=true goes on"
            raise SpecdecError(f"{what}; {kept}; {remedy}.") from error


def plain(value: Any) -> Any:
    """`value` as JSON knows it: dataclasses, arrays, paths and sets resolved, NaN and infinity as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "tolist"):  # numpy and torch
        return plain(value.tolist())
    return str(value)


def machine() -> dict[str, Any]:
    """What the run ran on: versions, interpreter, platform, processor."""
    return {
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
    }


def cpu_model() -> str:
    """The processor's name, as far as the platform tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def git_state() -> dict[str, Any]:
    """The commit of this code and whether files differ from it; null where it is no checkout."""
    source = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return leaves
