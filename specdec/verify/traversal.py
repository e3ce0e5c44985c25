"""Traversal verification: block verification on trees, from the leaves up."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, Purpose
from specdec.verify.expectation import elders
from specdec.verify.rule import Rule, Verdict, children, final_purpose, law_at, or_where_empty, ratio, step_down


class TraversalRule(Rule):
    """Visit the nodes children first, elders first; accept the first node v that passes with its π_v, and y ~ b_v.

    A node starts with b = p and π = min(π'·b'(x)/s(x), 1), where π', b' are its parent's. Each of its children that
    fails, drawn from s, turns π·b into max(π·b − s, 0)/(S + 1 − π) and π into S/(S + 1 − π), S = Σ max(π·b − s, 0).
    Nothing but failures precedes a visit, so all π are known before any decision is drawn.
    """

    name = "traversal"
    paper = "Weng et al. 2505.12398, Algorithm 1"
    exact = True
    trees = True
    kinds = frozenset({Kind.DETERMINISTIC, Kind.WITH_REPLACEMENT, Kind.WITHOUT_REPLACEMENT})

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        batch = len(p)
        start, final = self.keep(proposal, p)
        passed = draws.bernoulli(final[:, 1:] * proposal.mask, Purpose.ACCEPT)
        below = (proposal.tree.ancestors[:, 1:, 1:] & passed[:, :, None]).any(1)  # [B, N] in n's subtree
        node = torch.full((batch,), -1, device=p.device)
        for _ in range(proposal.tree.max_depth):
            node = step_down(node, children(proposal, node) & below)

        young = children(proposal, node)
        width = int(young.sum(1).max()) if proposal.size else 0
        order = (~young).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        family = torch.where(young.gather(1, order), order, -1)
        law = or_where_empty(_fail_in_turn(proposal, p, family, node, start, final), law_at(p, node))
        return Verdict.at(proposal.tree, node, draws.categorical(law, final_purpose(~young.any(1))))

    def keep(self, proposal: Proposal, p: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, N+1]` twice: π of the root and every node before its children, and after all of them failed."""
        batch, size = proposal.tokens.shape
        start, final = p.new_ones(batch, size + 1), p.new_ones(batch, size + 1)
        families = torch.atleast_2d(proposal.tree.parents).argsort(dim=1, stable=True).expand(batch, size)
        _fail_in_turn(proposal, p, families, torch.full((batch,), -1, device=p.device), start, final)
        return start, final

    def expected_accepted(self, proposal: Proposal, p: Tensor) -> Tensor:
        fails = 1.0 - self.keep(proposal, p)[1][:, 1:] * proposal.mask
        subtree = proposal.tree.ancestors[:, 1:, 1:].mT  # [1 or B, N, N]: [n, m] says whether m is n or below it
        all_fail = torch.where(subtree, fails[:, None, :], 1.0).prod(-1)
        elders_fail = torch.where(elders(proposal), all_fail[:, None, :], 1.0).prod(-1)
        on_path = proposal.tree.ancestors[:, 1:, 1:]  # every elder of n and of its ancestors fails, n's subtree not
        return (torch.where(on_path, elders_fail[:, None, :], 1.0).prod(-1) * (1.0 - all_fail)).sum(1)

    def acceptance(self, p: Tensor, q: Tensor, drafts: int = 1) -> Tensor | None:
        return torch.minimum(p, q).sum(-1) if drafts == 1 else None


def _fail_in_turn(
    proposal: Proposal, p: Tensor, order: Tensor, stand: Tensor, start: Tensor, final: Tensor
) -> Tensor:
    """Let the nodes `order` `[B, T]` (siblings adjacent, −1: none) fail in turn; `start` and `final` are filled in.

    Returns:
        π·b `[B, V]` of the last parent met, `stand` `[B]` if there was none.
    """
    every = torch.arange(len(p), device=p.device)
    parents = torch.atleast_2d(proposal.tree.parents).expand(len(p), -1)
    stand = stand.clone()
    weights = p[every, stand + 1] * start[every, stand + 1, None]  # π·b
    keep = start[every, stand + 1]  # π
    spent = p.new_zeros(len(p), dtype=torch.float64)  # q of the elders
    for n in order.unbind(1):
        rows = ((n >= 0) & proposal.mask[every, n]).nonzero()[:, 0]
        node, parent = n[rows], parents[rows, n[rows]]
        fresh = parent != stand[rows]
        new, at = rows[fresh], parent[fresh]
        stand[new], keep[new], spent[new] = at, start[new, at + 1], 0.0
        weights[new] = p[new, at + 1] * start[new, at + 1, None]

        x, c, pi = proposal.tokens[rows, node], weights[rows], keep[rows]
        if proposal.q is None:
            start[rows, node + 1] = c.gather(1, x[:, None])[:, 0].clamp(max=1.0)
            c = c.scatter(1, x[:, None], 0.0)
        else:
            s = proposal.q[rows, node].to(p.dtype)
            s_x = s.gather(1, x[:, None])[:, 0]
            if proposal.kind is Kind.WITHOUT_REPLACEMENT:  # failed elders have π·b = 0 already: only rescale
                scale = (1.0 / (s.sum(-1, dtype=torch.float64) - spent[rows])).to(p.dtype)
                spent[rows] += s_x.double()
                s, s_x = s * scale[:, None], s_x * scale
            start[rows, node + 1] = ratio(c.gather(1, x[:, None])[:, 0], s_x)
            c = (c - s).clamp_(min=0.0)
        final[rows, node + 1] = start[rows, node + 1]
        owed = c.sum(-1)
        rest = owed + 1.0 - pi
        weights[rows] = c / torch.where(rest > 0, rest, 1.0)[:, None]
        keep[rows] = torch.where(pi < 1, owed / rest, 1.0)
        final[rows, parent + 1] = keep[rows]
    return weights
