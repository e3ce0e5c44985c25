"""Trained weights that come with this package: `drafters/pretrained/<target>/<drafter>/`."""

from __future__ import annotations

from pathlib import Path

from specdec.errors import OptionError
from specdec.model import Model

PRETRAINED = Path(__file__).parent / "pretrained"


def folder(drafter: str, target: str) -> Path:
    """Where shipped weights of this drafter for this target lie, if there are any."""
    return PRETRAINED / target / drafter


def checkpoint(drafter: str, target: Model, option: str = "drafter.checkpoint", otherwise: str = "") -> str:
    """The shipped checkpoint.

    Arguments:
        option: the user's option that would name a checkpoint.
        otherwise: what else the user can do.

    Raises:
        OptionError: none is shipped for this target, or this target's weights are random; says what to do.
    """
    place = folder(drafter, target.name)
    random = target.provenance.get("weights") == "random"
    if place.is_dir() and not random:
        return str(place)
    otherwise = otherwise or (
        f"give {option}=<folder, file or hub id>, or, for timing only, "
        f"drafter.weights=random target.weights=random;"
    )
    kind = " with random weights" if random else ""
    command = f"python run.py task=train drafter={drafter} target={target.name}"
    none = f"no {drafter} weights are shipped for target={target.name}{kind}"
    raise OptionError(option, "null", f"{none}; {otherwise} or train one: {command}")
