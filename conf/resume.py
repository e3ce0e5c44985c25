"""`resume=true`: find the directory in which the interrupted run lies."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from omegaconf import OmegaConf


def resumed(arguments: list[str]) -> list[str]:
    """The command line of a run that goes on: with `resume=true` it gets the interrupted run's directory.

    That is the newest one below `outputs/` or `multirun/` whose options are the same and that is not finished
    (has `meta.json`, no `summary.json`). A sweep goes on as a whole; its finished runs are skipped.
    """
    overrides = {a for a in arguments if "=" in a and not a.startswith("-")}
    wanted = any(re.fullmatch(r"resume=(true|1|yes|on)", a, re.IGNORECASE) for a in overrides)
    if not wanted or any(re.match(r"hydra\.(run|sweep)\.dir=", a) for a in overrides):
        return arguments
    found = _unfinished(_same(overrides), sweep=bool({"-m", "--multirun"} & set(arguments)))
    if found is None:
        print("resume: no unfinished run with these options here; starting afresh", file=sys.stderr)
        return arguments
    print(f"resume: going on in {found}", file=sys.stderr)
    mode = "sweep" if found.parts[0] == "multirun" else "run"
    return [*arguments, f"hydra.{mode}.dir={found.as_posix()!r}"]


def _same(overrides: set[str]) -> set[str]:
    """What makes two runs the same: their options, without how they were started."""
    return {o for o in overrides if not re.match(r"\+*(hydra\.|hydra/|resume=)", o)}


def _unfinished(overrides: set[str], sweep: bool) -> Path | None:
    candidates: list[Path] = []
    if sweep or any(o.startswith("experiment=") for o in overrides):  # an experiment may be a sweep by itself
        for record in Path("multirun").glob("*/*/multirun.yaml"):
            if _same(set(OmegaConf.load(record).hydra.overrides.task)) == overrides:
                candidates.append(record.parent)
    if not sweep:
        for record in Path("outputs").glob("*/*/.hydra/overrides.yaml"):
            run = record.parent.parent
            started, finished = (run / "meta.json").exists(), (run / "summary.json").exists()
            if started and not finished and _same(set(OmegaConf.load(record))) == overrides:
                candidates.append(run)
    return max(candidates, key=lambda path: path.parts[1:], default=None)
