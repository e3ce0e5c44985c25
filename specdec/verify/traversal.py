"""Traversal verification: block verification on trees, from the leaves up."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, Purpose
from specdec.verify.rule import Rule, Verdict, children, final_purpose, or_where_empty, ratio, step_down


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
        batch, size = len(p), proposal.size
        start = p.new_ones(batch, size + 1)  # π of the root and of every node before its children …
        final = start.clone()  # … and after them
        families = torch.atleast_2d(proposal.tree.parents).argsort(dim=1, stable=True).expand(batch, size)
        root = torch.full((batch,), -1, device=p.device)
        _raise_children(proposal, p, families, root, start, final)

        passed = draws.bernoulli(final[:, 1:], Purpose.ACCEPT) & proposal.mask
        below = (proposal.tree.ancestors[:, 1:, 1:] & passed[:, :, None]).any(1)  # [B, N] in n's subtree
        node = root
        for _ in range(proposal.tree.max_depth):
            node = step_down(node, children(proposal, node) & below)

        young = children(proposal, node)
        width = int(young.sum(1).max()) if size else 0
        order = (~young).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        family = torch.where(young.gather(1, order), order, -1)
        weights = _raise_children(proposal, p, family, node, start, final)
        law = or_where_empty(weights, p[torch.arange(batch, device=p.device), node + 1])
        return Verdict.at(proposal.tree, node, draws.categorical(law, final_purpose(~young.any(1))))

    def acceptance(self, p: Tensor, q: Tensor, drafts: int = 1) -> Tensor | None:
        return torch.minimum(p, q).sum(-1) if drafts == 1 else None


def _raise_children(
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
            start[rows, node + 1] = c.gather(1, x[:, None])[:, 0]
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
        scale = torch.where(rest > 0, 1.0 / rest, 1.0)
        weights[rows] = c * scale[:, None]
        keep[rows] = torch.where(pi < 1, owed * scale, 1.0)
        final[rows, parent + 1] = keep[rows]
    return weights
