"""Layers kept against acceptance, cost and predicted speedup: which small model to train in earnest."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from drafters.training.loop import History
from drafters.training.trainable import Trainable


def comparison(layers: int, trainable: Trainable, history: History) -> dict[str, Any]:
    """One row: what brief training made of so many layers."""
    first, last = history.validations[0]["depths"][0], history.validations[-1]["depths"][0]
    gamma, speedup = predicted_speedup(last["alpha"], trainable.relative_cost)
    return {
        "layers": layers,
        "kept": trainable.report.get("layers_kept"),
        "alpha_before": first["alpha"],
        "alpha": last["alpha"],
        "agreement": last["agreement"],
        "relative_cost": trainable.relative_cost,
        "best_gamma": gamma,
        "predicted_speedup": speedup,
    }


def predicted_speedup(alpha: float, cost: float, longest: int = 16) -> tuple[int, float]:
    """The best γ and its improvement (1 − α^(γ+1)) / ((1 − α)(γc + 1)) (Leviathan et al. 2211.17192).

    Arguments:
        alpha: acceptance rate. cost: c, a draft step over a target step.
    """
    gains = [sum(alpha**i for i in range(gamma + 1)) / (gamma * cost + 1) for gamma in range(longest + 1)]
    gamma = max(range(longest + 1), key=gains.__getitem__)
    return gamma, gains[gamma]


def comparison_table(rows: list[dict[str, Any]]) -> Table:
    """The rows for the terminal."""
    table = Table(title="layers kept, acceptance, cost and predicted speedup after brief training")
    for name in ("layers", "kept", "α untrained", "α", "cost c", "best γ", "predicted speedup"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = [f"{row[name]:.3f}" for name in ("alpha_before", "alpha", "relative_cost")]
        kept = " ".join(map(str, row["kept"] or ()))
        best = str(row["best_gamma"]), f"{row['predicted_speedup']:.2f}"
        table.add_row(str(row["layers"]), kept, *numbers, *best)
    return table
