"""Traversal verification: block verification on trees, from the leaves up."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, Purpose
from specdec.verify.expectation import elders
from specdec.verify.rule import (
    Rule,
    Verdict,
    children,
    final_purpose,
    law_at,
    or_where_empty,
    p_of_tokens,
    ratio,
    step_down,
)


class TraversalRule(Rule):
    """Visit children before parents, elders first; accept the first node v to pass with its π_v; y ~ b_v.

    A node starts with b = p and π = min(π'·b'(x)/s(x), 1), where π', b' are its parent's. Each of its
    children that fails, drawn from s, turns π·b into max(π·b − s, 0)/(S + 1 − π) and π into S/(S + 1 − π),
    S = Σ max(π·b − s, 0). Only failures precede a visit, so all π are known before any decision is drawn.
    """

    name = "traversal"
    paper = "Weng et al. 2505.12398, Algorithm 1"
    exact = True
    trees = True
    kinds = frozenset({Kind.DETERMINISTIC, Kind.WITH_REPLACEMENT, Kind.WITHOUT_REPLACEMENT})

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        nodes = self.all_fail(proposal, p)
        passed = draws.bernoulli(nodes.final[:, 1:] * proposal.mask, Purpose.ACCEPT)
        below = (proposal.tree.ancestors[:, 1:, 1:] & passed[:, :, None]).any(1)  # [B, N] in n's subtree
        node = torch.full((len(p),), -1, device=p.device)
        for _ in range(proposal.tree.max_depth):
            node = step_down(node, children(proposal, node) & below)
        bonus = ~children(proposal, node).any(1)
        law = or_where_empty(nodes.leftover(node), law_at(p, node))
        return Verdict.at(proposal.tree, node, draws.categorical(law, final_purpose(bonus)))

    def all_fail(self, proposal: Proposal, p: Tensor) -> _Failures:
        """Every node's π, from a walk in which all fail, siblings together."""
        nodes = _Failures(proposal, p)
        for n in torch.atleast_2d(proposal.tree.parents).argsort(dim=1, stable=True).unbind(1):
            nodes.fail(n.expand(len(p)))
        return nodes

    def expected_accepted(self, proposal: Proposal, p: Tensor) -> Tensor:
        fails = 1.0 - self.all_fail(proposal, p).final[:, 1:] * proposal.mask
        on_path = proposal.tree.ancestors[:, 1:, 1:]  # [1 or B, N, N]: [n, m] says whether m is n or above it
        subtree_fails = torch.where(on_path.mT, fails[:, None, :], 1.0).prod(-1)
        elders_fail = torch.where(elders(proposal), subtree_fails[:, None, :], 1.0).prod(-1)
        reached = torch.where(on_path, elders_fail[:, None, :], 1.0).prod(-1)
        return (reached * (1.0 - subtree_fails)).sum(1)

    def acceptance(self, p: Tensor, q: Tensor, drafts: int = 1) -> Tensor | None:
        return torch.minimum(p, q).sum(-1) if drafts == 1 else None


class _Failures:
    """π of all nodes, and π·b of the one parent per row whose children are failing.

    Attributes:
        start, final: `[B, N+1]` π of the root and every node before its children, and after all have failed.
    """

    def __init__(self, proposal: Proposal, p: Tensor):
        self.proposal, self.p, self.mask = proposal, p, proposal.mask
        self.sampled = proposal.q is not None
        self.rows = torch.arange(len(p), device=p.device)
        self.parents = torch.atleast_2d(proposal.tree.parents).expand(len(p), proposal.size)
        self.start, self.final = p.new_ones(2, len(p), proposal.size + 1).unbind(0)
        self.p_x, self.q_x = p_of_tokens(proposal, p), proposal.q_of_tokens(p.dtype)
        self.parent = torch.full_like(self.rows, -2)  # none yet
        self.pi, self.scale = torch.empty_like(p[:, 0, 0]), torch.empty_like(p[:, 0, 0])
        self.spent = torch.empty(len(p), dtype=torch.float64, device=p.device)
        self.weights = torch.empty_like(p[:, 0] if self.sampled else p[:, 0, :0])
        self.stand_at(torch.full_like(self.rows, -1))

    def stand_at(self, parent: Tensor) -> None:
        """Begin with the children of `parent` `[B]` in the rows where it is a new one."""
        new = (parent != self.parent).nonzero()[:, 0]
        self.parent, at = parent, parent[new]
        self.pi[new] = self.start[new, at + 1]
        if not self.sampled:
            self.scale[new] = self.pi[new]  # π·b is `scale`·p less the tokens of the failed
        else:
            self.weights[new] = self.p[new, at + 1] * self.pi[new, None]  # π·b
            self.spent[new] = 0.0  # q of the failed

    def fail(self, n: Tensor) -> None:
        """The nodes n `[B]` fail; where n is −1 or invalid, nothing happens."""
        live = (n >= 0) & self.mask[self.rows, n]
        self.stand_at(torch.where(live, self.parents[self.rows, n], self.parent))
        if not self.sampled:
            own = self.scale * self.p_x[self.rows, n]
            owed = (self.pi - own).clamp(min=0.0)
        else:
            own, owed = self._subtract(n, live)
        rest = owed + (1.0 - self.pi)
        rest = torch.where(live & (rest > 0), rest, 1.0)
        if not self.sampled:
            self.scale = self.scale / rest
        else:
            self.weights.div_(rest[:, None])
        self.pi = torch.where(live & (self.pi < 1), owed / rest, self.pi)
        own = torch.where(live, own.clamp(max=1.0), self.start[self.rows, n + 1])
        self.start[self.rows, n + 1] = own
        self.final[self.rows, n + 1] = torch.where(live, own, self.final[self.rows, n + 1])
        self.final[self.rows, self.parent + 1] = self.pi

    def _subtract(self, n: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """Turn π·b into max(π·b − s, 0); `[B]` min(π·b(x)/s(x), 1) from before and `[B]` S from after."""
        q, q_x = self.proposal.law(n, self.p.shape[1], self.p.dtype), self.q_x[self.rows, n]
        scale = live.to(q.dtype)
        if self.proposal.kind is Kind.WITHOUT_REPLACEMENT:  # failed elders have π·b = 0 already
            left = q.sum(-1, dtype=torch.float64) - self.spent
            scale = torch.where(live, 1.0 / left, 0.0).to(q.dtype)
            self.spent += q_x * live
        own = ratio(self.weights.gather(1, self.proposal.tokens[self.rows, n, None])[:, 0], q_x * scale)
        self.weights.sub_(q.mul_(scale[:, None])).clamp_(min=0.0)
        return own, self.weights.sum(-1)

    def leftover(self, node: Tensor) -> Tensor:
        """`[B, V]`, to be normalised: π·b of `node` `[B]` after all its children failed."""
        young = children(self.proposal, node)
        if not self.sampled:
            gone = torch.where(young, 0.0, torch.inf).to(self.p.dtype)
            return law_at(self.p, node).scatter_reduce_(1, self.proposal.tokens, gone, "amin")
        self.parent = torch.full_like(node, -2)
        self.stand_at(node)
        width = int(young.sum(1).max()) if self.proposal.size else 0
        order = (~young).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        for n in torch.where(young.gather(1, order), order, -1).unbind(1):
            self.fail(n)
        return self.weights
