"""Trained weights that come with this package: `drafters/pretrained/<target>/<drafter>/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.config import TargetConfig
from specdec.errors import OptionError

PRETRAINED = Path(__file__).parent / "pretrained"
GIVEN = {  # what may stand there, and what else there is
    "drafter.path": "<model folder or hub id with the target's tokenizer>, or drafter.layers=N",
    "drafter.checkpoint": "<folder, file or hub id>, or, for timing only, drafter.weights=random "
    "target.weights=random",
}


def folder(drafter: str, target: str) -> Path:
    """Where shipped weights of this drafter for this target lie, if there are any."""
    return PRETRAINED / target / drafter


def check(config: Any, target: TargetConfig) -> None:
    """Refuse, before the target is loaded, options of a drafter that ask for weights which are not shipped.

    Raises:
        OptionError: as `checkpoint`.
    """
    if getattr(config, "wants_shipped", False):
        random = target.weights == "random" or target.source == "tiny"
        checkpoint(config.name, target.name, random)


def checkpoint(drafter: str, target: str, random: bool) -> str:
    """The shipped checkpoint of a drafter for a target; `random`: whether that has random weights.

    Raises:
        OptionError: none is shipped for this target, or for its weights; says what to do.
    """
    place = folder(drafter, target)
    if place.is_dir() and not random:
        return str(place)
    option = "drafter.path" if drafter == "small" else "drafter.checkpoint"
    kind = " with random weights" if random else ""
    command = f"python run.py task=train drafter={drafter} target={target}"
    none = f"no {drafter} weights are shipped for target={target}{kind}"
    raise OptionError(option, "null", f"{none}; give {option}={GIVEN[option]}; or train one: {command}")
