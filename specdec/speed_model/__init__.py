"""A speed model fitted to measured steps: predicts speedups, recommends drafts, explains what was measured.

Reading order: `steps` (what was measured), `cost` (seconds of a step as a function of its shape),
`acceptance` (what a drafter's tokens are worth), `model` (both together: speedup, best γ), `explanation`
(from the textbook's formula to the measured number, cause by cause), `trees` (the best tree of N nodes).
"""

from specdec.speed_model.acceptance import Acceptance, block_efficiency_iid, textbook_speedup
from specdec.speed_model.cost import Cost, fit_draft, fit_overhead, fit_target
from specdec.speed_model.explanation import CAUSES, Explanation, explain
from specdec.speed_model.model import Prediction, SpeedModel, Workload
from specdec.speed_model.steps import Steps
from specdec.speed_model.trees import best_tree, expected_accepted

__all__ = [
    "CAUSES",
    "Acceptance",
    "Cost",
    "Explanation",
    "Prediction",
    "SpeedModel",
    "Steps",
    "Workload",
    "best_tree",
    "block_efficiency_iid",
    "expected_accepted",
    "explain",
    "fit_draft",
    "fit_overhead",
    "fit_target",
    "textbook_speedup",
]
