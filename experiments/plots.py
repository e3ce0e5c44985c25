"""Figures of a run, each as PNG and SVG."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
logging.getLogger("matplotlib").setLevel(logging.WARNING)

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

WILSON_Z = 1.96


def acceptance(summary: dict[str, Any], stem: Path) -> list[Path]:
    """Acceptance by draft position, and speedup by domain.

    Arguments:
        summary: of `experiments.summary.summarise`.
        stem: path without suffix.

    Returns:
        The paths written.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _positions(left, summary)
    _speedups(right, summary)
    if summary["flags"]:
        figure.suptitle("; ".join(summary["flags"]), color="firebrick", fontsize=10)
    return save(figure, stem)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG and close it."""
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    plt.close(figure)
    return paths


def _positions(axes: plt.Axes, summary: dict[str, Any]) -> None:
    counts = {k: np.array(v, dtype=float) for k, v in summary["overall"]["positions"].items()}
    position = np.arange(1, len(counts["offered"]) + 1)
    for name, base, style in (("given the ones before", "tried", "o-"), ("unconditional", "offered", "s--")):
        share, low, high = wilson(counts["accepted"], counts[base])
        bars = np.maximum([share - low, high - share], 0)
        axes.errorbar(position, share, yerr=bars, fmt=style, capsize=3, label=name)
    axes.set(
        xlabel="draft position", ylabel="accepted share", ylim=(0, 1.02), title="Acceptance by draft position"
    )
    axes.set_xticks(position)
    axes.grid(alpha=0.3)
    axes.legend(title="α per position, 95 % interval")


def _speedups(axes: plt.Axes, summary: dict[str, Any]) -> None:
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


def wilson(successes: np.ndarray, trials: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Share and 95 % Wilson interval (Wilson 1927), NaN where nothing was tried."""
    with np.errstate(invalid="ignore", divide="ignore"):
        share = successes / trials
        center = (successes + WILSON_Z**2 / 2) / (trials + WILSON_Z**2)
        half = WILSON_Z / (trials + WILSON_Z**2) * np.sqrt(successes * (1 - share) + WILSON_Z**2 / 4)
    nothing = trials == 0
    return share, np.where(nothing, np.nan, center - half), np.where(nothing, np.nan, center + half)
