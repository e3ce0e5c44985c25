"""The node budget of trees found best on this machine: `task=speed_model` writes it, drafters read it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from specdec.checkpoints import cache_directory

DEFAULT = 15  # nodes, where nothing was measured: with the root 16 rows, a tile of a matrix unit


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


def nodes(wanted: int | None, drafter: str, target: str) -> int:
    """The user's number, else the recommended one, else the default."""
    path = file(drafter, target)
    if wanted is not None or not path.exists():
        return wanted or DEFAULT
    return int(json.loads(path.read_text(encoding="utf-8"))["nodes"])
