"""Costs and acceptance together: the speed of speculative decoding, and the draft that makes it highest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specdec.speed_model.acceptance import Acceptance
from specdec.speed_model.cost import Cost, fit_draft, fit_overhead, fit_target
from specdec.speed_model.steps import Steps
from specdec.speed_model.trees import best_tree

Shapes = tuple[Sequence[float], Sequence[float], Sequence[float]]
"""(nodes, depth, share of steps) of drafts."""


@dataclass(frozen=True)
class Workload:
    """What is decoded.

    Arguments:
        tokens: new tokens per sequence, the first one (from the prefill) included.
        context: mean tokens of context during decoding. batch: sequences decoded together.
        prefill: seconds to read the prompts. drafter_prefill: what the drafter adds to it.
    """

    tokens: float
    context: float
    batch: float = 1.0
    prefill: float = 0.0
    drafter_prefill: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """Speculative decoding as predicted.

    Arguments:
        gamma: draft depth. nodes: mean drafted nodes per step.
        block_efficiency: τ. draft, target, overhead: seconds of a step.
        baseline: seconds of an autoregressive step. speedup: tokens per second over the baseline's,
            prefill included.
        decode_speedup: the same without prefill.
    """

    gamma: int
    nodes: float
    block_efficiency: float
    draft: float
    target: float
    overhead: float
    baseline: float
    decode_speedup: float
    speedup: float

    @property
    def step(self) -> float:
        """Seconds of a speculative step."""
        return self.draft + self.target + self.overhead


@dataclass(frozen=True)
class SpeedModel:
    """Seconds of drafting, of the target's forward, and of everything else, as functions of a step's
    shape.
    """

    target: Cost
    draft: Cost
    overhead: Cost

    @classmethod
    def fit(cls, steps: Steps) -> SpeedModel:
        """From measured steps, those of the baseline among them."""
        return cls(fit_target(steps), fit_draft(steps), fit_overhead(steps))

    def baseline(self, workload: Workload) -> float:
        """Seconds of an autoregressive step."""
        shape = {"batch": workload.batch, "context": workload.context, "drafting": 0.0}
        return float(self.target(**shape) + self.overhead(**shape))

    def parts(self, workload: Workload, nodes, depth, share) -> tuple[float, float, float]:
        """Mean seconds (draft, target, overhead) of steps whose drafts have `nodes` and `depth`, weighted
        by `share`.
        """
        shape = {"batch": workload.batch, "nodes": nodes, "depth": depth, "context": workload.context}
        costs = (self.draft, self.target, self.overhead)
        draft, target, overhead = (float(np.sum(share * cost(**shape)) / np.sum(share)) for cost in costs)
        return draft, target, overhead

    def predict(
        self,
        acceptance: Acceptance,
        workload: Workload,
        drafts: Shapes | None = None,
    ) -> Prediction:
        """The speedup of drafts accepted like this.

        Arguments:
            drafts: (nodes, depth, share of steps) of the drafts; by default chains as long as
                `acceptance` says.
        """
        lengths, share = acceptance.drafts()
        shapes = drafts or (lengths.tolist(), lengths.tolist(), share.tolist())
        return self.predict_tau(acceptance.block_efficiency, acceptance.gamma, workload, shapes)

    def predict_tau(
        self,
        tau: float,
        gamma: int,
        workload: Workload,
        drafts: Shapes,
    ) -> Prediction:
        """The speedup of drafts of block efficiency `tau` and depth `gamma`; `drafts` as in `predict`."""
        nodes, depth, share = (np.asarray(x, dtype=np.float64) for x in drafts)
        draft, target, overhead = self.parts(workload, nodes, depth, share)
        baseline = self.baseline(workload)
        step, rest = draft + target + overhead, workload.tokens - 1
        plain = workload.prefill + rest * baseline
        speculative = workload.prefill + workload.drafter_prefill + rest / tau * step
        return Prediction(
            gamma=gamma,
            nodes=float((nodes * share).sum() / share.sum()),
            block_efficiency=tau,
            draft=draft,
            target=target,
            overhead=overhead,
            baseline=baseline,
            decode_speedup=tau * baseline / step,
            speedup=plain / speculative,
        )

    def over_gamma(
        self, acceptance: Acceptance, workload: Workload, gammas: Iterable[int]
    ) -> list[Prediction]:
        """Predictions for several draft lengths."""
        return [self.predict(acceptance.at(gamma), workload) for gamma in gammas]

    def best_gamma(self, acceptance: Acceptance, workload: Workload, longest: int = 32) -> Prediction:
        """The fastest draft length; γ = 0 (with speedup 1 or less) means: do not speculate."""
        return max(self.over_gamma(acceptance, workload, range(longest + 1)), key=lambda p: p.speedup)

    def over_budgets(
        self, measured: Mapping[int, float], depth: int, workload: Workload
    ) -> dict[int, Prediction]:
        """Predictions by node budget for trees of `depth` levels whose shapes depend on the context.

        Arguments:
            measured: node budget → τ. Between two of them τ is interpolated over log(nodes).
        """
        known = sorted(measured)
        taus = [measured[n] for n in known]
        found = {}
        for n in range(known[0], known[-1] + 1):
            tau = float(np.interp(np.log(n), np.log(known), taus))
            found[n] = self.predict_tau(tau, depth, workload, ([n], [min(n, depth)], [1.0]))
        return found

    def best_budget(
        self, ranks: Sequence[Sequence[float]], workload: Workload, budgets: Iterable[int] = range(1, 65)
    ) -> tuple[Prediction, list[int]]:
        """The fastest tree, each budget taken with its best tree.

        Arguments:
            ranks: `ranks[d][r]`, probability that the drafter's choice of rank r at depth d + 1 is the one
                accepted, given that its parent is.

        Returns:
            the prediction, and the tree's parents.
        """
        found = []
        for budget in budgets:
            parents, depth, accepted = best_tree(ranks, budget)
            acceptance = Acceptance.given(np.divide(accepted, [1.0, *accepted[:-1]]).tolist())
            shape = ([len(parents)], [max(depth, default=0)], [1.0])
            found.append((self.predict(acceptance, workload, shape), parents))
        return max(found, key=lambda pair: pair[0].speedup)
