"""Figures of a run, each as PNG and SVG."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.intervals import Interval

logging.getLogger("matplotlib").setLevel(logging.WARNING)


def acceptance(summary: dict[str, Any], stem: Path) -> list[Path]:
    """Acceptance by draft position, and speedup by domain.

    Arguments:
        summary: of `experiments.summary.summarise`.
        stem: path without suffix.

    Returns:
        The paths written.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _positions(left, summary)
    _speedups(right, summary)
    if summary["flags"]:
        figure.suptitle("; ".join(summary["flags"]), color="firebrick", fontsize=10)
    return save(figure, stem)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG."""
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


def _positions(axes: Axes, summary: dict[str, Any]) -> None:
    positions = summary["overall"]["positions"]
    position = np.arange(1, len(positions["offered"]) + 1)
    for label, name, style in (
        ("given the ones before", "alpha_conditional", "o-"),
        ("unconditional", "alpha_unconditional", "s--"),
    ):
        error_bars(axes, position, positions[name], fmt=style, label=label)
    axes.set(
        xlabel="draft position", ylabel="accepted share", ylim=(0, 1.02), title="Acceptance by draft position"
    )
    axes.set_xticks(position)
    axes.grid(alpha=0.3)
    if len(position):
        axes.legend(title="α per position, 95 % interval")


def _speedups(axes: Axes, summary: dict[str, Any]) -> None:
    entries = [*summary["domains"].items(), ("all", summary["overall"])]
    entries = [(name, n["speedup"]) for name, n in entries if n["speedup"]]
    for row, (name, speedup) in enumerate(entries):
        color = "black" if name == "all" else "tab:blue"
        if speedup["low"] is not None:
            axes.plot([speedup["low"], speedup["high"]], [row, row], color=color, lw=2)
        axes.plot(speedup["value"], row, "o", color=color)
    axes.axvline(1.0, color="gray", ls=":")
    axes.set_yticks(range(len(entries)), [name for name, _ in entries])
    axes.invert_yaxis()
    axes.set(xlabel="speedup over autoregressive decoding (95 % interval)", title="Speedup by domain")
    axes.grid(axis="x", alpha=0.3)


def error_bars(axes: Axes, x: np.ndarray | list, points: list[Interval], **style) -> None:
    """Points with their intervals; those without a value are left out."""
    kept = [
        (at, p["value"], p["low"], p["high"])
        for at, p in zip(x, points, strict=True)
        if p["value"] is not None and np.isfinite(p["value"])
    ]
    if not kept:
        return
    at, value, low, high = (np.array(column, dtype=float) for column in zip(*kept, strict=True))
    bars = np.nan_to_num(np.maximum([value - low, high - value], 0))
    axes.errorbar([k[0] for k in kept], value, yerr=bars, **{"capsize": 3, **style})
