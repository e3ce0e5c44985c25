"""The node budget of trees found best on this machine: `task=speed_model` writes it, drafters read it.

It holds for one sequence at a time, for the weights, dtype and device it was found with, and for drafters of
the same weights and mode.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specdec.checkpoints import cache_directory
from specdec.model import Model

TILE = 15  # nodes: with the root 16 rows, a tile of a matrix unit
FEW = 9  # on a CPU without one, where every row costs time (LOG.md)
OF_DRAFTER = ("name", "checkpoint", "revision", "weights", "mode", "siblings")  # what a budget holds for
OF_TARGET = ("name", "source", "commit", "weights", "seed", "dtype", "device")


def file(drafter: Mapping[str, Any], target: Mapping[str, Any]) -> Path:
    """Where the budget of a drafter of these options for a target of this provenance is kept."""
    facts = [str(drafter.get(name)) for name in OF_DRAFTER] + [str(target.get(name)) for name in OF_TARGET]
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=6).hexdigest()
    return cache_directory() / "budgets" / f"{target.get('name')}-{drafter['name']}-{digest}.json"


def remember(path: Path, nodes: int, speedup: float) -> Path:
    """Store a recommendation and the speedup it was predicted to give."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"nodes": nodes, "predicted_speedup": speedup}) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def default(device: torch.device) -> int:
    """How many nodes suit a device of which nothing more is known."""
    tiles = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    return TILE if device.type != "cpu" or tiles() else FEW


def nodes(drafter: Any, target: Model) -> int:
    """The number in the drafter's options, else the recommended one, else the default."""
    path = file(vars(drafter), target.provenance)
    if drafter.nodes is not None or not path.exists():
        return drafter.nodes or default(target.device)
    return int(json.loads(path.read_text(encoding="utf-8"))["nodes"])
