"""Token-level rejection sampling, the rule of the two founding papers."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, Purpose
from specdec.verify.rule import Rule, Verdict, normalise


class TokenRule(Rule):
    """Accept each drafted token with min(1, p/q); at the first rejection emit from norm(max(p − q, 0)).

    With α = Σ min(p, q) per position, E[accepted] = α₁ + α₁α₂ + … along the chain.
    """

    name = "token"
    paper = "Leviathan et al. 2211.17192, Algorithm 1; Chen et al. 2302.01318, Algorithm 2"
    exact = True
    trees = False
    kinds = frozenset({Kind.DETERMINISTIC, Kind.WITH_REPLACEMENT, Kind.WITHOUT_REPLACEMENT})

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        x, gamma = proposal.tokens, proposal.size
        rows = torch.arange(len(x), device=x.device)
        p_x = p[:, :gamma].gather(-1, x[..., None])[..., 0]  # [B, γ]
        q_x = proposal.q_of_tokens(p.dtype)

        accept = draws.bernoulli((p_x / q_x).clamp(max=1.0) * proposal.mask, Purpose.ACCEPT)  # u < p/q
        n = accept.long().cumprod(1).sum(1)  # [B] accepted length
        p_n = p[rows, n]  # the law at the first position not accepted
        bonus = n == proposal.mask.sum(1)
        if gamma:
            q_n = proposal.law(n.clamp(max=gamma - 1), p.shape[-1], p.dtype)
            residual = normalise((p_n - q_n).clamp(min=0.0), fallback=p_n)
            p_n = torch.where(bonus[:, None], p_n, residual)
        y = draws.categorical(p_n, torch.where(bonus, int(Purpose.BONUS), int(Purpose.RESIDUAL)))

        steps = torch.arange(gamma, device=x.device)
        return Verdict(torch.where(steps < n[:, None], steps, -1), n, y)

    def expected_accepted(self, proposal: Proposal, p: Tensor) -> Tensor:
        """α₁ + α₁α₂ + … with the laws along this chain (exact when they do not depend on the drawn tokens)."""
        q = torch.stack([proposal.law(torch.full_like(proposal.tokens[:, 0], i), p.shape[-1], p.dtype) for i in range(proposal.size)], 1)
        alpha = torch.minimum(p[:, :-1], q).sum(-1) * proposal.mask
        return alpha.cumprod(1).sum(1)
