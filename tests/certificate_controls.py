"""The wrong variants of `tests.mutants` as pairings that run through the real engine, for the certificate.

`task=certify` in a checkout runs them and lists them as what it would have caught.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafters.small.certify import stranger
from drafters.small.tree import SIBLINGS, SmallTreeDrafter
from specdec.drafter import Draw
from specdec.exactness.pairing import Pairing
from specdec.model import Model
from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, Pairs, Purpose, RandomSource, inverse_cdf
from specdec.sequences import Sequences
from specdec.verify import Rule, Verdict
from specdec.verify.naive import NaiveRule
from tests.mutants import MUTANTS, Mutant

GRID = 512
BRANCHING = {(-1,): (1,), (-1, 0): (1, 1), (-1, -1): (2,), (-1, -1, -1): (3,), (-1, -1, 0, 1): (2, 1)}


@dataclass(frozen=True)
class Control:
    """A wrong pairing.

    Arguments:
        wrap: what makes its law enumerable.
    """

    name: str
    pairing: Pairing
    wrap: Callable[[RandomSource], RandomSource]


def controls() -> dict[str, Control]:
    """All mutants by name."""
    return {mutant.name: _control(mutant) for mutant in MUTANTS}


def _control(mutant: Mutant) -> Control:
    pairing = Pairing(
        f"mutant: {mutant.name}", WithDraftOnly(mutant.rule()), lambda target: Tampering(target, mutant)
    )
    return Control(mutant.name, pairing, (lambda s: s) if mutant.enumerable else SharedNumber)


class WithDraftOnly(Rule):
    """A wrong rule, asked only where something was drafted."""

    exact, trees, kinds = True, True, frozenset(Kind)

    def __init__(self, rule: Rule):
        self.rule = rule
        self.name = rule.name  # type: ignore[misc]

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        verdict = (self.rule if proposal.size else NaiveRule())(proposal, p, draws)
        return replace(
            verdict, token=verdict.token.clamp(max=p.shape[-1] - 1)
        )  # weights that are all zero run over


class Tampering(SmallTreeDrafter):
    """The small drafter with the mutant's interference."""

    def __init__(self, target: Model, mutant: Mutant):
        siblings = next(name for name, kind in SIBLINGS.items() if kind is mutant.kind)
        branching = BRANCHING[mutant.parents]
        super().__init__(stranger(target), target.vocab_size, branching, siblings, target.eos_token_ids)
        self.mutant = mutant

    def propose(self, sequences: Sequences, draw: Draw, depth: int) -> Proposal:
        proposal = super().propose(sequences, _Interfered(draw, self.mutant), depth)
        return self.mutant.proposal(proposal) if proposal.size else proposal


class _Interfered(Draw):
    """Draws the token through the mutant's `Draws`, but from what the given `draw` would draw from."""

    def __init__(self, draw: Draw, mutant: Mutant):
        super().__init__(draw.draws, draw.coupled)
        self.draw, self.mutant = draw, mutant

    def __call__(self, q: Tensor, depth: int, node: int) -> Tensor:
        return self.mutant.draws(_OneDraw(self.draw, depth, node)).categorical(q, Purpose.DRAFT, node)


class _OneDraw:
    """`Draws` for one node, passed on to the engine's `Draw`."""

    def __init__(self, draw: Draw, depth: int, node: int):
        self.draw, self.depth, self.node = draw, depth, node

    def categorical(self, probs: Tensor, purpose: int | Tensor, index: int = 0) -> Tensor:
        return self.draw(probs, self.depth, self.node)


class SharedNumber:
    """Makes enumerable what uses one number twice: the number itself is enumerated, on a grid."""

    def __init__(self, source: RandomSource):
        self.source = source

    def at(self, sequence: Tensor, position: Tensor, pairs: Pairs | None = None) -> Draws:
        return _SharedDraws(self.source.at(sequence, position, pairs))


class _SharedDraws:
    def __init__(self, draws: Draws):
        self.draws = draws
        self.numbers: dict[int, Tensor] = {}  # by node

    def bernoulli(self, probability: Tensor, purpose: int = Purpose.ACCEPT, index: int = 0) -> Tensor:
        return self.draws.bernoulli(probability, purpose, index)

    def categorical(self, probs: Tensor, purpose: int | Tensor, index: int = 0) -> Tensor:
        shared = torch.as_tensor(purpose).expand(len(probs)) == int(Purpose.DRAFT)
        first = torch.nn.functional.one_hot(probs.argmax(-1), probs.shape[-1]).to(probs.dtype)
        if index not in self.numbers:  # the draft's own draw; rows where it is settled decide nothing
            settled = (probs.gather(1, probs.argmax(-1, keepdim=True)) == probs.sum(-1, keepdim=True))[:, 0]
            grid = torch.ones(len(probs), GRID, dtype=torch.float64)
            grid[settled | ~shared, 1:] = 0.0
            cell = self.draws.categorical(grid, purpose, index)
            self.numbers[index] = (cell + 0.5) / GRID
        reused = inverse_cdf(probs, self.numbers[index])
        fresh = self.draws.categorical(torch.where(shared[:, None], first, probs), purpose, index)
        return torch.where(shared, reused, fresh)

    def race(self, probs: Tensor, depth: int) -> Tensor:
        return self.draws.race(probs, depth)

    def select(self, rows: Tensor) -> Draws:
        picked = _SharedDraws(self.draws.select(rows))
        picked.numbers = {node: u[rows] for node, u in self.numbers.items()}
        return picked
