"""Gumbel coupling: target and drafter race on the same noise; the output does not depend on the drafter."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.proposal import Kind, Proposal
from specdec.rng import Draws
from specdec.verify.expectation import accepted_if_drawn
from specdec.verify.rule import Rule, Verdict, follow


class GumbelRule(Rule):
    """Y = argmin E/p with noise E keyed by absolute position; emit Y, go on while it is a drafted child.

    The same seed gives bit-identical output for every drafter, none included. One that draws X = argmin E/q
    agrees with probability Σ_x 1/Σ_z max(p_z/p_x, q_z/q_x) ≥ (1 − TV)/(1 + TV).
    """

    name = "gumbel"
    paper = "Daliri, Musco and Suresh 2408.07978 (Gumbel coupling, drafter-invariant decoding)"
    exact = True
    trees = True
    kinds = frozenset(Kind)
    coupled = True

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        return follow(proposal, p, draws, lambda d, law, depth: d.race(law, depth))

    def expected_accepted(self, proposal: Proposal, p: Tensor) -> Tensor | None:
        return None if proposal.kind is Kind.COUPLED else accepted_if_drawn(proposal, p)

    def acceptance(self, p: Tensor, q: Tensor, drafts: int = 1) -> Tensor | None:
        if drafts != 1:
            return None
        worst = torch.maximum(p[..., None, :] / p[..., None], q[..., None, :] / q[..., None]).sum(-1)
        return torch.where((p > 0) & (q > 0), 1.0 / worst, 0.0).sum(-1)
