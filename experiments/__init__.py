"""What a user runs. A task `x` is a file `experiments/x.py` and a `conf/task/x.yaml` with the same options.

The file holds

- `Options`: a dataclass of the task's options, `name: str = "x"` first, checks in `__post_init__`;
- `run(config, run_dir) -> None`: does the work and leaves its results in `run_dir` (see `experiments.store`).

`config` is a `specdec.config.Config`, checked throughout: `config.task` is the task's `Options`,
`config.drafter` the drafter's own dataclass. Errors the user can act on are `SpecdecError`s; a check that ran
and failed is `CheckFailed`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from experiments import trackers
from specdec.config import Config, from_mapping
from specdec.errors import OptionError

READERS = ("report", "speed_model")  # tasks that read stored runs


def run(config: Config, run_dir: Path) -> None:
    """Run the task that `config.task` names, its results in `run_dir`; when resumed, only if unfinished."""
    if config.resume and (run_dir / "summary.json").exists():
        print(f"{run_dir} is finished already", file=sys.stderr)
        return
    name = config.task["name"]
    if config.runs is not None and name not in READERS:
        raise OptionError("runs", config.runs, f"is not read by task={name}, but by {', '.join(READERS)}.")
    task = importlib.import_module(f"experiments.{name}")
    config.task = from_mapping(task.Options, config.task, "task")
    trackers.check(config.logger)
    task.run(config, run_dir)
    trackers.log(config.logger, run_dir)
