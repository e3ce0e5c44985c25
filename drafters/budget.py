"""The node budget of trees found best on this machine: `task=speed_model` writes it, drafters read it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from specdec.checkpoints import cache_directory

TILE = 15  # nodes: with the root 16 rows, a tile of a matrix unit
FEW = 9  # on a CPU without one, where every row costs time (LOG.md)


def file(drafter: str, target: str) -> Path:
    return cache_directory() / "budgets" / f"{target}-{drafter}.json"


def remember(drafter: str, target: str, nodes: int, speedup: float) -> Path:
    """Store a recommendation and the speedup it was predicted to give."""
    path = file(drafter, target)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"nodes": nodes, "predicted_speedup": speedup}) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def default(device: torch.device) -> int:
    """How many nodes suit a device of which nothing more is known."""
    tiles = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    return TILE if device.type != "cpu" or tiles() else FEW


def nodes(wanted: int | None, drafter: str, target: str, device: torch.device) -> int:
    """The user's number, else the recommended one, else the default."""
    path = file(drafter, target)
    if wanted is not None or not path.exists():
        return wanted or default(device)
    return int(json.loads(path.read_text(encoding="utf-8"))["nodes"])
