"""k-SEQ: judge k i.i.d. siblings by one common, best threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, Purpose
from specdec.verify.expectation import accepted_after_elders, chances
from specdec.verify.rule import Rule, Verdict, children, final_purpose, law_at, p_of_tokens, ratio, step_down


class KSeqRule(Rule):
    """Accept each of k siblings with min(1, p/(ρq)) until one passes; else y ∝ p − min(q, p/ρ)·A/β.

    β = Σ min(q, p/ρ) is a sibling's acceptance and A = 1 − (1 − β)^k that of the position. Exact for every ρ
    with A ≤ ρβ; A is largest at the smallest of them, the root ρ* ∈ [1, k] of A = ρβ.
    """

    name = "kseq"
    paper = "SpecTr, Sun et al. 2310.15141 (k-SEQ)"
    exact = True
    trees = True
    kinds = frozenset({Kind.WITH_REPLACEMENT})

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        node = p.new_full((len(p),), -1, dtype=torch.int64)
        node, law, bonus = self.walk(proposal, p, draws, node)
        return Verdict.at(proposal.tree, node, draws.categorical(law, final_purpose(bonus)))

    def walk(
        self, proposal: Proposal, p: Tensor, draws: Draws, node: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From `node` `[B]` down as far as siblings are accepted.

        Returns:
            the last accepted node `[B]`, what to emit there `[B, V]` (not normalised), `[B]` if it is a leaf.
        """
        rho = torch.ones_like(p[:, 0, 0])
        q_x, p_x = proposal.q_of_tokens(p.dtype), p_of_tokens(proposal, p)
        rows = torch.arange(len(p), device=p.device)
        for _ in range(proposal.tree.max_depth):
            young = children(proposal, node)
            k = young.sum(1)
            rows = rows[k[rows] > 0]
            if not len(rows):
                break
            law = p[rows, node[rows] + 1]
            rho[rows] = best_threshold(law, self._q(proposal, young, rows, law.dtype), k[rows])
            chance = ratio(p_x[rows], rho[rows, None] * q_x[rows]) * young[rows]
            accept = draws.select(rows).bernoulli(chance, Purpose.ACCEPT)
            node[rows] = step_down(node[rows], accept)
            rows = rows[accept.any(1)]
        young = children(proposal, node)
        k, law = young.sum(1), law_at(p, node)
        rows = (k > 0).nonzero()[:, 0]
        if len(rows):
            q = self._q(proposal, young, rows, law.dtype)
            law[rows] = self.residual(law[rows], q, rho[rows], k[rows])
        return node, law, k == 0

    @staticmethod
    def _q(proposal: Proposal, young: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """`[A, V]`: the law the children `young` `[B, N]` of some rows were drawn from."""
        assert proposal.q is not None
        return proposal.q[rows, young[rows].to(torch.uint8).argmax(1)].to(dtype)

    def residual(self, p: Tensor, q: Tensor, rho: Tensor, k: Tensor) -> Tensor:
        """`[A, V]`: what is left of p when all k siblings failed, p itself if that is only rounding."""
        hit = torch.minimum(q, p / rho[:, None])
        beta = hit.sum(-1)
        share = torch.where(beta > 0, position_acceptance(beta, k) / beta, 0.0)
        rest = (p - hit * share[:, None]).clamp_(min=0.0)
        return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)

    def expected_accepted(self, proposal: Proposal, p: Tensor) -> Tensor:
        return accepted_after_elders(proposal, chances(self.walk, proposal, p))

    def acceptance(self, p: Tensor, q: Tensor, drafts: int = 1) -> Tensor:
        k = torch.full_like(p[..., 0], drafts)
        rho = best_threshold(p, q, k)
        return position_acceptance(torch.minimum(q, p / rho[..., None]).sum(-1), k)


def position_acceptance(beta: Tensor, k: Tensor) -> Tensor:
    """A = 1 − (1 − β)^k, accurate for small β."""
    return -torch.expm1(k * torch.log1p(-beta.clamp(max=1.0)))


def best_threshold(p: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """ρ* `[A]` for laws `[A, V]` and k `[A]` siblings, from above: what is returned has A ≤ ρβ to rounding.

    Newton's method on ρβ(ρ) − A(ρ), falling back to the geometric middle of the bracket that it keeps. Since
    ρβ grows with ρ, the acceptance at the returned ρ falls short of the best by at most ρβ − A ≤ 1e-6.
    """
    low, high = torch.ones_like(p[..., 0]), k.to(p.dtype)  # ρβ − A is ≤ 0 and ≥ 0 there
    rho, done = high, torch.zeros_like(low, dtype=torch.bool)
    for _ in range(40):
        scaled = rho[..., None] * q
        beta = torch.minimum(scaled, p).sum(-1) / rho
        value = rho * beta - position_acceptance(beta, k)
        low = torch.where(~done & (value < 0), rho, low)
        high = torch.where(done | (value < 0), high, rho)
        done |= (value >= 0) & (value <= 1e-6)  # a row that is done stays as it is, whoever shares its batch
        if bool(done.all()):
            break
        up = (q * (scaled <= p)).sum(-1)  # derivative of ρβ
        slope = up - k * (1.0 - beta).clamp(min=0.0) ** (k - 1) * (up - beta) / rho
        newton = rho - value / slope
        rho = torch.where((newton > low) & (newton < high), newton, (low * high).sqrt())
    return high
