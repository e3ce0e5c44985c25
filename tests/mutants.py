"""Wrong variants of the shipping rules and of drafting, each a mistake seen in the field: negative controls.

`MUTANTS` lists them. A check of exactness that passes one of these proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, Purpose
from specdec.verify.block import BlockRule
from specdec.verify.kseq import KSeqRule
from specdec.verify.recursive import RecursiveRule
from specdec.verify.rule import Rule, Verdict, children, law_at, offers, ratio, step_down
from specdec.verify.token import TokenRule


@dataclass(frozen=True)
class Mutant:
    """A wrong variant and where it shows.

    Arguments:
        name: what is wrong, in words.
        rule: makes the (possibly wrong) rule.
        parents: a proposal shape it shows on.
        kind: what the drafter declares.
        draws: what happens to the drafter's random decisions, if that is what is wrong.
        proposal: what happens to the finished proposal, if that is what is wrong.
        vocab: smallest vocabulary it shows on.
        enumerable: false if it is wrong only in which random numbers it uses.
        reported: max error found on other toy laws, for the order of magnitude.
    """

    name: str
    rule: Callable[[], Rule]
    parents: tuple[int, ...]
    kind: Kind
    reported: float
    draws: Callable[[Draws], Draws] = lambda draws: draws
    proposal: Callable[[Proposal], Proposal] = lambda proposal: proposal
    vocab: int = 3
    enumerable: bool = True


class Tampered:
    """`Draws` that pass every request on; subclasses interfere."""

    def __init__(self, draws: Draws):
        self.draws = draws

    def bernoulli(self, probability: Tensor, purpose: int = Purpose.ACCEPT, index: int = 0) -> Tensor:
        return self.draws.bernoulli(probability, purpose, index)

    def categorical(self, probs: Tensor, purpose: int | Tensor, index: int = 0) -> Tensor:
        return self.draws.categorical(probs, purpose, index)

    def race(self, probs: Tensor, depth: int) -> Tensor:
        return self.draws.race(probs, depth)

    def select(self, rows: Tensor) -> Tampered:
        return type(self)(self.draws.select(rows))


# --- the drafter's side ---------------------------------------------------------------------------


class DrawsColder(Tampered):
    def categorical(self, probs: Tensor, purpose: int | Tensor, index: int = 0) -> Tensor:
        return super().categorical(probs**2, purpose, index)  # T = 1/2


class DrawsArgmax(Tampered):
    def categorical(self, probs: Tensor, purpose: int | Tensor, index: int = 0) -> Tensor:
        return probs.argmax(-1)


def without_worst_sibling(proposal: Proposal) -> Proposal:
    """Drops the least probable child of the root after it was drawn."""
    siblings = (proposal.tree.parents == -1) & proposal.mask
    score = proposal.q_of_tokens(torch.float64).masked_fill(~siblings, torch.inf)
    dropped = torch.nn.functional.one_hot(score.argmin(1), proposal.size).bool()
    below = (proposal.tree.ancestors[:, 1:, 1:] & dropped[:, None, :]).any(-1)
    return replace(proposal, valid=proposal.mask & ~below)


# --- the token rule -------------------------------------------------------------------------------


class ResidualIsP(TokenRule):
    def residual(self, proposal: Proposal, p: Tensor, n: Tensor) -> Tensor:
        return p


class ResidualNotRenormalised(TokenRule):
    """An inverse CDF over a residual that does not sum to one runs off its end, onto the last token."""

    def residual(self, proposal: Proposal, p: Tensor, n: Tensor) -> Tensor:
        owed = super().residual(proposal, p, n)
        owed[:, -1] += 1.0 - owed.sum(1)
        return owed


class ResidualLacksOnlyTheRejected(TokenRule):
    def residual(self, proposal: Proposal, p: Tensor, n: Tensor) -> Tensor:
        return p.scatter(1, proposal.tokens.gather(1, n[:, None]), 0.0)


class BonusFromQ(TokenRule):
    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        p = p.clone()
        p[:, -1] = proposal.q[:, -1]
        return super().__call__(proposal, p, draws)


class ResidualReusesTheDraftsNumber(TokenRule):
    class Reusing(Tampered):
        def categorical(self, probs: Tensor, purpose: int | Tensor, index: int = 0) -> Tensor:
            purpose = torch.where(purpose == int(Purpose.RESIDUAL), int(Purpose.DRAFT), purpose)
            return super().categorical(probs, purpose, index)

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        return super().__call__(proposal, p, self.Reusing(draws))


# --- block verification ---------------------------------------------------------------------------


class BlockStopsAtFirstReject(BlockRule):
    class Stopping(Tampered):
        def bernoulli(self, probability: Tensor, purpose: int = Purpose.ACCEPT, index: int = 0) -> Tensor:
            return super().bernoulli(probability, purpose, index).long().cumprod(1).bool()

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        return super().__call__(proposal, p, self.Stopping(draws))


class BlockChanceIsPi(BlockRule):
    def chance(self, proposal: Proposal, p: Tensor, keep: Tensor) -> Tensor:
        return keep[:, 1:] * proposal.mask


class BlockResidualWithoutPi(BlockRule):
    def residual(self, proposal: Proposal, p: Tensor, n: Tensor, pi: Tensor) -> Tensor:
        return super().residual(proposal, p, n, torch.ones_like(pi))


class BlockLastRatioUncapped(BlockRule):
    """The last token is judged by the plain product of ratios, as if none had been capped on the way."""

    def chance(self, proposal: Proposal, p: Tensor, keep: Tensor) -> Tensor:
        h = super().chance(proposal, p, keep)
        p_x = p[:, :-1].gather(2, proposal.tokens[..., None])[..., 0]
        h[:, -1] = (p_x / proposal.q_of_tokens(p.dtype)).prod(1).clamp(max=1.0)
        return h


# --- several drafts -------------------------------------------------------------------------------


class TextbookRecursive(RecursiveRule):
    """Recursive rejection without replacement with every law written out; `wrong` names the wrong step.

    With `wrong=None` it is an independent implementation of the shipping rule.
    """

    def __init__(self, wrong: str | None = None):
        self.wrong = wrong

    def walk(self, proposal: Proposal, p: Tensor, draws: Draws, node: Tensor) -> tuple[Tensor, Tensor]:
        base = p[torch.arange(len(p)), node + 1]
        r, drawn = base.clone(), torch.zeros_like(base, dtype=torch.bool)
        for n, rows in offers(proposal, node):
            x = proposal.tokens[rows, n, None]
            q = proposal.q[rows, n].masked_fill(drawn[rows], 0.0)
            q = _normalised(q)
            over = (base if self.wrong == "base p in ratio" else r)[rows].gather(1, x)[:, 0]
            under = (proposal.q[rows, n] if self.wrong == "base q in ratio" else q).gather(1, x)[:, 0]
            accept = draws.select(rows).bernoulli(ratio(over, under), Purpose.ACCEPT, n)
            rest = (r[rows] - q).clamp(min=0.0)
            if self.wrong != "residual not renormalised":
                rest = _normalised(rest)
            if self.wrong == "residual not updated":
                rest = r[rows]
            down, stay = rows[accept], rows[~accept]
            node[down], base[down], r[down], drawn[down] = n, p[down, n + 1], p[down, n + 1], False
            r[stay] = rest[~accept]
            drawn[stay] = drawn[stay].scatter(1, x[~accept], True)
        return node, r


class MissIsDrawnAnew(RecursiveRule):
    """Deterministic siblings: y ~ p was no child, so another token is drawn from p, which may be one."""

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        right = super().__call__(proposal, p, draws)
        path = torch.nn.functional.pad(right.path, (1, 0), value=-1)
        node = path.gather(1, right.accepted[:, None])[:, 0]
        anew = draws.categorical(law_at(p, node), Purpose.RESIDUAL)
        return replace(right, token=torch.where(children(proposal, node).any(1), anew, right.token))


class LookedUpAmongAllOfItsDepth(RecursiveRule):
    """Deterministic siblings: y ~ p is looked up among the nodes of its depth, whoever their parent is."""

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        node = p.new_full((len(p),), -1, dtype=torch.int64)
        token, going = torch.empty_like(node), torch.ones_like(node, dtype=torch.bool)
        for depth in range(proposal.tree.max_depth + 1):
            rows = going.nonzero()[:, 0]
            token[rows] = draws.select(rows).categorical(law_at(p, node)[rows], Purpose.BONUS, depth)
            nodes = (proposal.tree.depth[:, 1:] == depth + 1) & proposal.mask
            found = nodes & (proposal.tokens == token[:, None]) & going[:, None]
            node, going = step_down(node, found), found.any(1)
        return Verdict.at(proposal.tree, node, token)


def _normalised(mass: Tensor) -> Tensor:
    return mass / mass.sum(1, keepdim=True).where(mass.sum(1, keepdim=True) > 0, 1.0)


class KSeqWithLeviathansResidual(KSeqRule):
    def residual(self, p: Tensor, q: Tensor, rho: Tensor, k: Tensor) -> Tensor:
        rest = (p - q).clamp(min=0.0)
        return torch.where(rest.sum(1, keepdim=True) > 0, rest, p)


def _without_replacement(wrong: str, reported: float) -> Mutant:
    name = f"without replacement: {wrong}"
    return Mutant(name, lambda: TextbookRecursive(wrong), (-1, -1, -1), Kind.WITHOUT_REPLACEMENT, reported)


_IID, _ONE, _CHAIN = Kind.WITH_REPLACEMENT, (-1,), (-1, 0)

MUTANTS = [
    Mutant("residual = p", ResidualIsP, _ONE, _IID, 0.233),
    Mutant("residual not renormalised", ResidualNotRenormalised, _ONE, _IID, 0.246),
    Mutant("residual = p minus only the rejected token", ResidualLacksOnlyTheRejected, _ONE, _IID, 0.173),
    Mutant("bonus drawn from q", BonusFromQ, _ONE, _IID, 0.681),
    Mutant("draft drawn at T=0.5, q reported at T=1", TokenRule, _ONE, _IID, 0.116, draws=DrawsColder),
    Mutant("argmax draft with soft q", TokenRule, _ONE, _IID, 0.348, draws=DrawsArgmax),
    Mutant("block: stop at first reject", BlockStopsAtFirstReject, _CHAIN, _IID, 0.560),
    Mutant("block: h = π", BlockChanceIsPi, _CHAIN, _IID, 0.260),
    Mutant("block: residual with π = 1", BlockResidualWithoutPi, _CHAIN, _IID, 0.021),
    Mutant("block: last ratio uncapped", BlockLastRatioUncapped, _CHAIN, _IID, 0.102),
    _without_replacement("base q in ratio", 0.746),
    _without_replacement("base p in ratio", 0.319),
    _without_replacement("residual not updated", 0.376),
    _without_replacement("residual not renormalised", 0.299),
    Mutant("k-SEQ with Leviathan's residual", KSeqWithLeviathansResidual, (-1, -1), _IID, 0.151),
    Mutant(
        "deterministic siblings: a miss is drawn anew", MissIsDrawnAnew, (-1, -1), Kind.DETERMINISTIC, 0.25
    ),
    Mutant(
        "deterministic siblings: looked up among all nodes of the depth",
        LookedUpAmongAllOfItsDepth,
        (-1, -1, 0, 1),
        Kind.DETERMINISTIC,
        1.0,
    ),
    Mutant(
        "sampled siblings pruned by score afterwards",
        RecursiveRule,
        (-1, -1, -1),
        _IID,
        0.406,
        proposal=without_worst_sibling,
    ),
    Mutant(
        "draft and residual share one random number",
        ResidualReusesTheDraftsNumber,
        (-1,),
        _IID,
        float("nan"),
        vocab=4,
        enumerable=False,
    ),
]
