"""From the textbook's speedup to the measured one, cause by cause: factors whose product is exactly their
ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.speed_model.acceptance import Acceptance, textbook_speedup
from specdec.speed_model.model import Prediction, SpeedModel, Workload

CAUSES = {
    "acceptance": "positions are not alike (non-i.i.d. acceptance), and not every step drafts γ tokens",
    "verify width": "a verify forward costs more than a decode forward",
    "overhead": "rule, commit and bookkeeping, in both methods",
    "prefill": "the share of time in which nothing is decoded",
    "prediction": "acceptance was predicted from other runs, not counted in this one",
    "timing": "what the fitted costs leave unexplained: interruptions, stragglers of a batch, drift",
}


@dataclass(frozen=True)
class Explanation:
    """Textbook × all factors = measured.

    Arguments:
        textbook: Leviathan's formula with the pooled α, the nominal γ and the fitted cost of a draft pass.
        predicted: what the speed model says.
        measured: what the clock said.
        factors: cause (see `CAUSES`) → factor.
    """

    textbook: float
    predicted: float
    measured: float
    factors: dict[str, float]

    @property
    def error(self) -> float:
        """predicted/measured − 1."""
        return self.predicted / self.measured - 1


def explain(
    model: SpeedModel,
    acceptance: Acceptance,
    workload: Workload,
    measured: float,
    drafts=None,
    gamma: int | None = None,
    forecast: Prediction | None = None,
) -> Explanation:
    """Split measured/textbook into causes.

    Arguments:
        acceptance: as counted in the measured run. drafts: as in `SpeedModel.predict`.
        gamma: the nominal draft length, by default the deepest draft.
        forecast: a prediction made without this run; by default the model's own for this acceptance.
    """
    gamma = acceptance.gamma if gamma is None else gamma
    own = model.predict(acceptance, workload, drafts)
    decode = float(model.target(batch=workload.batch, context=workload.context))
    full = {"batch": workload.batch, "context": workload.context, "nodes": gamma, "depth": gamma}
    textbook = textbook_speedup(
        acceptance.rate, gamma, float(model.draft(**full)) / decode / gamma if gamma else 0.0
    )
    tau = own.block_efficiency
    by_acceptance = tau / (1 + own.draft / decode)
    with_width = tau * decode / (own.target + own.draft)
    predicted = forecast.speedup if forecast else own.speedup
    factors = {
        "acceptance": by_acceptance / textbook,
        "verify width": with_width / by_acceptance,
        "overhead": own.decode_speedup / with_width,
        "prefill": own.speedup / own.decode_speedup,
        "timing": measured / own.speedup,
    }
    if forecast:  # the chain of factors ends at the forecast: what it missed is told apart from timing
        factors["prediction"] = own.speedup / predicted
        factors["acceptance"] /= factors["prediction"]
    return Explanation(textbook, predicted, measured, factors)
