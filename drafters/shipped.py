"""Trained weights that come with this package: `drafters/pretrained/<target>/<drafter>/`."""

from __future__ import annotations

from pathlib import Path

from specdec.errors import OptionError
from specdec.model import Model

PRETRAINED = Path(__file__).parent / "pretrained"


def folder(drafter: str, target: str) -> Path:
    """Where shipped weights of this drafter for this target lie, if there are any."""
    return PRETRAINED / target / drafter


def checkpoint(drafter: str, target: Model) -> str:
    """The shipped checkpoint.

    Raises:
        OptionError: none is shipped for this target, or this target's weights are random; says what to do.
    """
    place = folder(drafter, target.name)
    is_random = target.provenance.get("weights") == "random"
    if place.is_dir() and not is_random:
        return str(place)
    weights = " target.weights=random" if is_random or not target.name.startswith("smollm2") else ""
    remedy = (
        f"no {drafter} weights are shipped for target={target.name}"
        f"{' with random weights' if is_random else ''}; "
        f"train them (python run.py task=train drafter={drafter} target={target.name}), "
        f"give drafter.checkpoint=<folder, file or hub id>, or, for timing only, "
        f"use drafter.weights=random{weights}."
    )
    raise OptionError("drafter.checkpoint", "null", remedy)
