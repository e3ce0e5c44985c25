"""Token-level rejection sampling, the rule of the two founding papers."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, Purpose
from specdec.verify.rule import Rule, Verdict, final_purpose, or_where_empty, p_of_tokens, ratio


class TokenRule(Rule):
    """Accept each drafted token with min(1, p/q); at the first rejection emit from norm(max(p − q, 0)).

    A position's acceptance is α = Σ min(p, q) = 1 − TV(p, q).
    """

    name = "token"
    paper = "Leviathan et al. 2211.17192, Algorithm 1; Chen et al. 2302.01318, Algorithm 2"
    exact = True
    trees = False
    kinds = frozenset({Kind.DETERMINISTIC, Kind.WITH_REPLACEMENT, Kind.WITHOUT_REPLACEMENT})

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        gamma = proposal.size
        accept = draws.bernoulli(self.chance(proposal, p), Purpose.ACCEPT)  # [B, γ]
        n = accept.long().cumprod(1).sum(1)  # [B] accepted length
        law = p[torch.arange(len(p), device=p.device), n]  # p at the first position not accepted
        bonus = n == proposal.mask.sum(1)
        if gamma:
            owed = self.residual(proposal, law, n.clamp(max=gamma - 1))
            law = torch.where(bonus[:, None], law, or_where_empty(owed, law))
        y = draws.categorical(law, final_purpose(bonus))
        return Verdict.at(proposal.tree, n - 1, y)

    def chance(self, proposal: Proposal, p: Tensor) -> Tensor:
        """`[B, γ]`: min(1, p/q) of each drafted token."""
        return ratio(p_of_tokens(proposal, p), proposal.q_of_tokens(p.dtype)) * proposal.mask

    def residual(self, proposal: Proposal, p: Tensor, n: Tensor) -> Tensor:
        """`[B, V]`: max(p − q, 0), which the position of the rejected node n `[B]` still owes p."""
        return (p - proposal.law(n, p.shape[-1], p.dtype)).clamp_(min=0.0)

    def expected_accepted(self, proposal: Proposal, p: Tensor) -> Tensor:
        return self.chance(proposal, p).cumprod(1).sum(1)

    def acceptance(self, p: Tensor, q: Tensor, drafts: int = 1) -> Tensor | None:
        return torch.minimum(p, q).sum(-1) if drafts == 1 else None
