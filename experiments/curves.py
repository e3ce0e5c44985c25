"""The learning curves of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.plots import save


def learning_curves(
    loss: str, losses: list[list[float]], validations: list[dict[str, Any]], stem: Path
) -> list[Path]:
    """Training loss, and acceptance and agreement on held-out answers, by draft depth.

    Arguments:
        loss: what was minimised. losses: `[step, loss at depth 1, …]` per step.
        validations: see `drafters.training.loop.History`.
        stem: path without suffix.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for depth in range(1, len(losses[0]) if losses else 1):
        left.plot([row[0] for row in losses], [row[depth] for row in losses], lw=0.8, label=f"depth {depth}")
    left.set(xlabel="step", ylabel=loss, title="Training")
    steps = [v["step"] for v in validations]
    for depth in range(len(validations[0]["depths"]) if validations else 0):
        color = f"C{depth}"
        for name, style in (("alpha", "o-"), ("agreement", "s--")):
            values = [v["depths"][depth][name] for v in validations]
            right.plot(steps, values, style, ms=3, color=color, label=f"{name}, depth {depth + 1}")
    right.set(xlabel="step", ylim=(0, None), title="Held-out answers")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    return save(figure, stem)
