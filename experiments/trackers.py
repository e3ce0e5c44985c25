"""Experiment trackers behind one function: a finished run's options and numbers go to whichever was chosen.

`logger=wandb|mlflow|trackio|tensorboard`; nothing is imported unless chosen, the files are always written.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specdec.config import suggest
from specdec.errors import OptionError

PROJECT = "specdec"
Values = dict[str, Any]


def check(logger: str | None) -> None:
    """Refuse, before anything slow, a tracker that cannot work.

    Raises:
        OptionError: no such tracker, or its package is not installed.
    """
    if logger is None:
        return
    if logger not in TRACKERS:
        raise OptionError("logger", logger, f"no such tracker; {suggest(logger, [None, *TRACKERS])}")
    package = TRACKERS[logger][0]
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        remedy = f"its package is not installed: pip install {PIP.get(logger, package)}; null goes without."
        raise OptionError("logger", logger, remedy)


def log(logger: str | None, run_dir: Path) -> None:
    """Hand a finished run to a tracker: its options as parameters, the numbers of its summary as metrics.

    Arguments:
        logger: a key of `TRACKERS`; `None` does nothing. run_dir: where `meta.json` and `summary.json` lie.
    """
    summary = run_dir / "summary.json"
    if logger is None or not summary.exists():
        return
    meta = json.loads((run_dir / "meta.json").read_text(encoding="utf-8"))
    options = flat(meta.get("config", {}), ".")
    values = flat(json.loads(summary.read_text(encoding="utf-8")), "/")
    TRACKERS[logger][1](run_dir, options, {name: v for name, v in values.items() if _is_number(v)})


def flat(tree: Mapping[str, Any], separator: str, prefix: str = "") -> Values:
    """Nested values by their joined names; lists are left out of numbers by the caller."""
    leaves: Values = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, separator, f"{prefix}{key}{separator}")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _wandb(run_dir: Path, options: Values, numbers: Values) -> None:
    import wandb

    run = wandb.init(project=PROJECT, name=run_dir.name, config=options, dir=str(run_dir))
    run.log(numbers)
    run.finish()


def _trackio(run_dir: Path, options: Values, numbers: Values) -> None:
    import trackio

    trackio.init(project=PROJECT, name=run_dir.name, config=options)
    trackio.log(numbers)
    trackio.finish()


def _mlflow(run_dir: Path, options: Values, numbers: Values) -> None:
    import mlflow

    mlflow.set_experiment(PROJECT)
    with mlflow.start_run(run_name=run_dir.name):
        mlflow.log_params({name: str(value)[:500] for name, value in options.items()})
        mlflow.log_metrics(numbers)
        for file in ("meta.json", "summary.json"):
            mlflow.log_artifact(str(run_dir / file))


def _tensorboard(run_dir: Path, options: Values, numbers: Values) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(log_dir=str(run_dir / "tensorboard")) as writer:
        writer.add_text("options", "\n".join(f"    {name}: {value}" for name, value in options.items()))
        for name, value in numbers.items():
            writer.add_scalar(name, value, 0)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


TRACKERS: dict[str, tuple[str, Callable[[Path, Values, Values], None]]] = {
    "wandb": ("wandb", _wandb),
    "mlflow": ("mlflow", _mlflow),
    "trackio": ("trackio", _trackio),
    "tensorboard": ("tensorboard", _tensorboard),
}
PIP = {"mlflow": "mlflow-skinny"}
