"""Block verification: judge all prefixes of the draft jointly and keep the longest that passes."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, Purpose
from specdec.verify.rule import Rule, Verdict, final_purpose, or_where_empty, p_of_tokens, ratio


class BlockRule(Rule):
    """Accept the longest prefix x₁…x_i with u_i < h_i; every u_i is drawn, no failure stops the search.

    π_i = min(π_{i−1}·p(x_i)/q(x_i), 1) is the probability with which x₁…x_i may at most be kept, and is kept:
    E[accepted] = Σ E[π_i], at least that of the token rule.
    """

    name = "block"
    paper = "Sun et al. 2403.10444, Algorithm 2"
    exact = True
    trees = False
    kinds = frozenset({Kind.DETERMINISTIC, Kind.WITH_REPLACEMENT, Kind.WITHOUT_REPLACEMENT})

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        gamma = proposal.size
        keep = self.keep(proposal, p)  # [B, γ+1]
        passed = draws.bernoulli(self.chance(proposal, p, keep), Purpose.ACCEPT)  # [B, γ]
        steps = torch.arange(1, gamma + 1, device=p.device)
        n = torch.cat((torch.zeros_like(p[:, :1, 0]).long(), passed * steps), 1).amax(
            1
        )  # [B] accepted length
        rows = torch.arange(len(p), device=p.device)
        law = p[rows, n]
        bonus = n == proposal.mask.sum(1)
        if gamma:
            owed = self.residual(proposal, law, n.clamp(max=gamma - 1), keep[rows, n])
            law = torch.where(bonus[:, None], law, or_where_empty(owed, law))
        y = draws.categorical(law, final_purpose(bonus))
        return Verdict.at(proposal.tree, n - 1, y)

    def keep(self, proposal: Proposal, p: Tensor) -> Tensor:
        """`[B, γ+1]`: π₀ = 1, π₁, …, π_γ."""
        p_x, q_x = p_of_tokens(proposal, p), proposal.q_of_tokens(p.dtype)
        pi = [torch.ones_like(p[:, 0, 0])]
        for i in range(proposal.size):
            pi.append(ratio(pi[-1] * p_x[:, i], q_x[:, i]))
        return torch.stack(pi, 1)

    def chance(self, proposal: Proposal, p: Tensor, keep: Tensor) -> Tensor:
        """`[B, γ]`: h_i = S_i/(S_i + 1 − π_i), S_i = Σ max(π_i·p − q, 0); π_i for the last drafted token."""
        mask, p_x = proposal.mask, p_of_tokens(proposal, p)
        h = keep[:, 1:].clone()
        for i in range(1, proposal.size):
            pi = keep[:, i]
            if proposal.q is None:  # q is the one-hot of the next token
                owed = pi * (1.0 - p_x[:, i])
            else:
                owed = (pi[:, None] * p[:, i] - proposal.q[:, i].to(p.dtype)).clamp_(min=0.0).sum(-1)
            passes = torch.where(pi < 1, owed / (owed + (1.0 - pi)), 1.0)
            h[:, i - 1] = torch.where(mask[:, i], passes, pi)
        return h * mask

    def residual(self, proposal: Proposal, p: Tensor, n: Tensor, pi: Tensor) -> Tensor:
        """`[B, V]`: max(π·p − q, 0), which the position of node n `[B]` still owes the target's p."""
        return (pi[:, None] * p - proposal.law(n, p.shape[-1], p.dtype)).clamp_(min=0.0)

    def expected_accepted(self, proposal: Proposal, p: Tensor) -> Tensor:
        return (self.keep(proposal, p)[:, 1:] * proposal.mask).sum(1)

    def acceptance(self, p: Tensor, q: Tensor, drafts: int = 1) -> Tensor | None:
        return torch.minimum(p, q).sum(-1) if drafts == 1 else None
