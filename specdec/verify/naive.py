"""Naive sampling: draw from the target, go on if the token happens to have been drafted."""

from __future__ import annotations

from torch import Tensor

from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, Purpose
from specdec.verify.expectation import accepted_if_drawn
from specdec.verify.rule import Rule, Verdict, follow


class NaiveRule(Rule):
    """y ~ p at each position; descend while y is a drafted child.

    Exact for any draft whatever, since what is emitted never looks at it. Acceptance of k i.i.d. siblings:
    Σ p·(1 − (1 − q)^k), at most that of recursive rejection; for deterministic siblings the two are equal.
    """

    name = "naive"
    paper = "SpecInfer, Miao et al. 2305.09781 (naive sampling)"
    exact = True
    trees = True
    kinds = frozenset(Kind)

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        return follow(proposal, p, draws, lambda d, law, depth: d.categorical(law, Purpose.BONUS, depth))

    def expected_accepted(self, proposal: Proposal, p: Tensor) -> Tensor:
        return accepted_if_drawn(proposal, p)

    def acceptance(self, p: Tensor, q: Tensor, drafts: int = 1) -> Tensor:
        return (p * (1.0 - (1.0 - q) ** drafts)).sum(-1)
