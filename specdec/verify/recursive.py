"""Recursive rejection sampling: try the siblings one after another, each against what its elders left."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, Purpose
from specdec.verify.expectation import accepted_after_elders, accepted_if_drawn, chances
from specdec.verify.rule import Rule, Verdict, children, final_purpose, follow, law_at, offers, ratio


class RecursiveRule(Rule):
    """r₁ = p; accept sibling X_i with min(1, r_i/q_i), else r_{i+1} = norm(max(r_i − q_i, 0)); at last y ~ r.

    q_i = q with replacement; without, q with the elders zeroed. Deterministic siblings have one-hot laws: x
    is accepted with r(x)/Σr and else struck from r, which is to draw y ~ p and look whether it was drafted.
    Acceptance of k i.i.d. siblings: 1 − Π (1 − Σ min(r_i, q)); of deterministic ones: Σ p(children).
    """

    name = "recursive"
    paper = "SpecInfer, Miao et al. 2305.09781, Algorithm 2; without replacement: RSD, Jeon et al. 2402.14160"
    exact = True
    trees = True
    kinds = frozenset({Kind.DETERMINISTIC, Kind.WITH_REPLACEMENT, Kind.WITHOUT_REPLACEMENT})

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        if proposal.q is None:
            return follow(proposal, p, draws, lambda d, law, depth: d.categorical(law, Purpose.BONUS, depth))
        node = p.new_full((len(p),), -1, dtype=torch.int64)
        node, residual = self.walk(proposal, p, draws, node)
        y = draws.categorical(residual, final_purpose(~children(proposal, node).any(1)))
        return Verdict.at(proposal.tree, node, y)

    def walk(self, proposal: Proposal, p: Tensor, draws: Draws, node: Tensor) -> tuple[Tensor, Tensor]:
        """From `node` `[B]` down as far as drawn siblings are accepted.

        Returns:
            the last accepted node `[B]` and the residual there `[B, V]` (not normalised).
        """
        assert proposal.q is not None, "the siblings are drawn"
        r = law_at(p, node)
        mass = torch.ones_like(r[:, 0])  # of r
        spent = torch.zeros_like(mass, dtype=torch.float64)  # q of the refused siblings
        for n, rows in offers(proposal, node):
            x = proposal.tokens[rows, n]
            q_x, scale = self._law_of(proposal, proposal.q[rows, n], x, mass[rows], spent[rows])
            accept = draws.select(rows).bernoulli(ratio(r[rows, x], q_x * scale), Purpose.ACCEPT, n)
            down, stay = rows[accept], rows[~accept]
            node[down], r[down], mass[down], spent[down] = n, p[down, n + 1], 1.0, 0.0
            # a refused token has r = 0 from now on: it need not be zeroed in q, too
            r[stay] = (r[stay] - scale[~accept, None] * proposal.q[stay, n].to(r.dtype)).clamp_(min=0.0)
            spent[stay] += q_x[~accept].double()
            mass[stay] = r[stay].sum(-1)
        empty = (mass <= 0).nonzero()[:, 0]  # rounding only
        r[empty] = p[empty, node[empty] + 1]
        return node, r

    @staticmethod
    def _law_of(
        proposal: Proposal, q: Tensor, x: Tensor, mass: Tensor, spent: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`[A]` q(x) of the base law q `[A, V]`, and `[A]` what brings q to the mass of the residual."""
        q_x = q.gather(1, x[:, None])[:, 0].to(mass.dtype)
        if proposal.kind is not Kind.WITHOUT_REPLACEMENT:
            return q_x, mass
        left = q.sum(-1, dtype=torch.float64) - spent
        return q_x, mass / left.to(mass.dtype)

    def expected_accepted(self, proposal: Proposal, p: Tensor) -> Tensor:
        if proposal.q is None:
            return accepted_if_drawn(proposal, p)
        return accepted_after_elders(proposal, chances(self.walk, proposal, p))

    def acceptance(self, p: Tensor, q: Tensor, drafts: int = 1) -> Tensor:
        r, refused = p, torch.ones_like(p[..., 0])
        for _ in range(drafts):
            refused = refused * (1.0 - torch.minimum(r, q).sum(-1))
            r = (r - q).clamp(min=0.0)
            r = r / r.sum(-1, keepdim=True).clamp(min=torch.finfo(r.dtype).tiny)
        return 1.0 - refused
