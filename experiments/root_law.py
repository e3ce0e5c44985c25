"""The first position of a step: the best acceptance of any exact rule, and what a lossy rule emits there."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from specdec.proposal import Kind, Proposal
from specdec.rng import Purpose
from specdec.tree import Tree
from specdec.verify import Rule

MOST_CANDIDATES = 64  # of a sampled first token, the most probable ones are gone through
MOST_SIBLINGS = 6


def transport_bound_at_root(proposal: Proposal, p: Tensor) -> list[float | None]:
    """Maximal probability that the target's token is among the candidates of depth 1, of each row.

    Exact for deterministic candidates and for candidates drawn with replacement; `None` for more than one
    drawn without replacement, whose bound has no closed form.
    """
    found: list[float | None] = []
    for row, siblings in enumerate(_root_children(proposal)):
        root = p[row, 0].double()
        if not siblings:
            found.append(0.0)
        elif proposal.q is None:
            tokens = proposal.tokens[row, siblings].unique()
            found.append(float(root[tokens].sum()))
        elif proposal.kind is Kind.WITH_REPLACEMENT or len(siblings) == 1:
            found.append(threshold_bound(root, proposal.q[row, siblings[0]].double(), len(siblings)))
        else:
            found.append(None)
    return found


def threshold_bound(p: Tensor, q: Tensor, drafts: int) -> float:
    """min over H ⊆ V of 1 + p(H) − q(H)^k for k i.i.d. candidates from q (SpecTr, Sun et al. 2310.15141).

    For a given q(H) the least p(H) takes the tokens with the smallest p/q first, and between two such sets
    the expression is concave in q(H): so the minimum is at one of the V + 1 sets {p/q ≤ t}. For k = 1 that
    is Σ min(p, q).
    """
    order = torch.where(q > 0, p / q, torch.inf).argsort()
    below_p, below_q = p[order].cumsum(0), q[order].cumsum(0).clamp(max=1.0)
    return min(1.0, float((1.0 + below_p - below_q**drafts).min()))


def distance(rule: Rule, proposal: Proposal, p: Tensor) -> list[float]:
    """Total variation between p and the law of the first token that `rule` emits, where it can be told.

    Every decision of the rule is followed both ways, and a sampled first token is summed over the
    `MOST_CANDIDATES` most probable ones, so nothing is drawn at random.
    """
    found = []
    for row, siblings in enumerate(_root_children(proposal)):
        sampled = proposal.q is not None
        if not siblings or len(siblings) > (1 if sampled else MOST_SIBLINGS):
            continue
        root = p[row, 0]
        if sampled:
            weight, tokens = proposal.q[row, siblings[0]].topk(min(MOST_CANDIDATES, p.shape[-1]))
            tokens, weight = tokens[weight > 0][:, None], weight[weight > 0].double()
        else:
            tokens, weight = proposal.tokens[row, siblings][None], p.new_ones(1, dtype=torch.float64)
        law = first_token_law(rule, proposal, tokens, root, row)
        if law is None:
            continue
        emitted = (weight / weight.sum()) @ law
        found.append(0.5 * float((emitted - root.double()).abs().sum()))
    return found


def first_token_law(rule: Rule, proposal: Proposal, tokens: Tensor, root: Tensor, row: int) -> Tensor | None:
    """`[C, V]`: law of the first emitted token for each draft of depth 1, `tokens` `[C, K]`, K siblings.

    `None` for a rule that draws its token first and decides by it: there is no decision to follow.
    """
    count, width = tokens.shape
    tree = Tree(torch.full((width,), -1, device=tokens.device))
    q = None if proposal.q is None else proposal.q[row, :1].expand(count, width, -1)
    draft = replace(proposal, tokens=tokens, tree=tree, q=q, valid=None)
    p = root.expand(count, width + 1, -1)
    law = torch.zeros(count, len(root), dtype=torch.float64, device=root.device)
    for decisions in product((True, False), repeat=width):
        draws = _Followed(decisions, count, root.device)
        verdict = rule(draft, p, draws)
        others = [root.expand(count, -1).argmin(-1), *tokens.unbind(1)]  # what else might be drawn
        for wish in others:
            if not torch.equal(
                rule(draft, p, _Followed(decisions, count, root.device, wish)).path, verdict.path
            ):
                return None
        kept = verdict.accepted > 0
        first = tokens.gather(1, verdict.path[:, :1].clamp(min=0))[:, 0]
        one_hot = torch.zeros_like(law).scatter_(1, first[:, None], 1.0)
        law += draws.weight[:, None] * torch.where(kept[:, None], one_hot, draws.last)
    return law


class _Followed:
    """`Draws` that take given decisions by node number, weigh them, and keep the law of the last token drawn.

    A decision that is not asked for weighs ½ both ways, so that the weights of all decisions sum to one.

    Arguments:
        decisions: by node. count: rows. wish: `[C]` token drawn where it is possible, instead of the most
            probable one.
    """

    def __init__(
        self, decisions: tuple[bool, ...], count: int, device: torch.device, wish: Tensor | None = None
    ):
        self.wish = wish
        self.decisions = torch.tensor(decisions, device=device)
        self.chance = torch.full((count, len(decisions)), 0.5, dtype=torch.float64, device=device)
        self.last: Tensor = torch.zeros((), dtype=torch.float64, device=device)
        self.rows = torch.arange(count, device=device)

    @property
    def weight(self) -> Tensor:
        """`[C]`."""
        return torch.where(self.decisions, self.chance, 1.0 - self.chance).prod(1)

    def bernoulli(self, probability: Tensor, purpose: int = Purpose.ACCEPT, index: int = 0) -> Tensor:
        columns = probability.reshape(len(self.rows), -1)
        nodes = torch.arange(index, index + columns.shape[1], device=columns.device)
        self.chance[self.rows[:, None], nodes] = columns.double()
        return self.decisions[nodes].expand_as(columns).reshape(probability.shape)

    def categorical(self, probs: Tensor, purpose: int | Tensor, index: int = 0) -> Tensor:
        law = probs.double() / probs.double().sum(-1, keepdim=True)
        self.last = torch.zeros(len(self.chance), probs.shape[-1], dtype=torch.float64, device=probs.device)
        self.last[self.rows] = law
        best = law.argmax(-1)
        if self.wish is None:
            return best
        wish = self.wish[self.rows]
        return torch.where(law.gather(-1, wish[:, None])[:, 0] > 0, wish, best)

    def race(self, probs: Tensor, depth: int) -> Tensor:
        return self.categorical(probs, Purpose.RACE)

    def select(self, rows: Tensor) -> _Followed:
        part = object.__new__(_Followed)
        part.decisions, part.chance, part.wish = self.decisions, self.chance, self.wish
        part.last, part.rows = self.last, self.rows[rows]
        return part


def _root_children(proposal: Proposal) -> list[list[int]]:
    """The valid nodes of depth 1, row by row."""
    first = (torch.atleast_2d(proposal.tree.parents) == -1) & proposal.mask
    return [[n for n, is_first in enumerate(row) if is_first] for row in first.tolist()]
