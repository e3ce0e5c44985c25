"""Exact laws of the whole engine by enumeration: of everything it emits, or of its first drafted block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.drafter import Drafter, Draw
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.exactness.enumeration import EnumerationSource, enumerate_law
from specdec.model import Output
from specdec.proposal import Proposal
from specdec.rng import Draws, Pairs, Purpose, RandomSource
from specdec.sampling import Sampling
from specdec.sequences import Sequences

Outcome = tuple[int, ...]
MakeEngine = Callable[[RandomSource, int], Engine]  # (random source, max_new_tokens) → engine
WrapSource = Callable[[RandomSource], RandomSource]
ROUNDING = 1e-13
MOST_BRANCHES = 100_000


class TooManyBranches(SpecdecError):
    """The draft is too wide to be enumerated."""


class _Budget:
    def __init__(self, branches: int):
        self.left = branches

    def spend(self, branches: int) -> None:
        self.left -= branches
        if self.left < 0:
            raise TooManyBranches("the draft has too many branches to enumerate")


def output_law(make_engine: MakeEngine, prompt: list[int], tokens: int) -> dict[Outcome, float]:
    """The law of everything the engine emits, all of its steps enumerated (few tokens, small vocabulary).

    Raises:
        TooManyBranches: more than `MOST_BRANCHES`.
    """
    budget = _Budget(MOST_BRANCHES)

    def run(source: EnumerationSource, ids: Tensor) -> list[Outcome]:
        budget.spend(len(ids))
        engine = _alone(make_engine(_Settling(source), tokens))
        return [tuple(g.tokens) for g in engine.generate([prompt] * len(ids), ids.tolist())]

    return enumerate_law(run)


def first_block(
    make_engine: MakeEngine, prompt: list[int], tokens: int, wrap: WrapSource = lambda source: source
) -> dict[Outcome, float]:
    """The law of the first step after the prefill.

    Arguments:
        tokens: the engine's max_new_tokens.
        wrap: what stands between the engine and the enumeration.

    Returns:
        probability by (accepted, first token, the block's tokens…); accepted is −1 if there was no block.

    Raises:
        TooManyBranches: more than `MOST_BRANCHES`.
    """
    budget = _Budget(MOST_BRANCHES)

    def run(source: EnumerationSource, ids: Tensor) -> list[Outcome]:
        budget.spend(len(ids))
        engine = _alone(make_engine(_FirstBlock(wrap(_Settling(source))), tokens))
        outputs = engine.generate([prompt] * len(ids), ids.tolist())
        first = first_rows(engine)
        return [
            (accepted, *g.tokens[: 1 + emitted])
            for g in outputs
            for accepted, emitted in [first.get(g.sequence, (-1, 0))]
        ]

    return enumerate_law(run)


def first_rows(engine: Engine) -> dict[int, tuple[int, int]]:
    """(accepted, emitted) of every sequence's first step after the prefill, from the engine's ledger."""
    first: dict[int, tuple[int, int]] = {}
    for row in engine.ledger.rows:
        if not row.prefill and row.sequence not in first:
            first[row.sequence] = (row.accepted, row.emitted)
    return first


def accepted_law(block: dict[Outcome, float]) -> dict[int, float]:
    """The law of the accepted length, from the law of the first block."""
    law: dict[int, float] = defaultdict(float)
    for (accepted, *_), weight in block.items():
        law[accepted] += weight
    return dict(law)


def composed_law(
    make_engine: MakeEngine,
    prompt: list[int],
    tokens: int,
    eos_token_ids: Sequence[int] = (),
    wrap: WrapSource = lambda source: source,
) -> dict[Outcome, float]:
    """The law of all that is emitted, each block enumerated afresh after the tokens before it.

    Far cheaper than `output_law`, and the same as long as a step depends on the committed tokens alone.
    """
    ended: dict[Outcome, float] = defaultdict(float)
    growing: dict[Outcome, float] = {}
    blocks: dict[Outcome, dict[Outcome, float]] = {}  # first block after prompt + prefix

    def after(prefix: Outcome) -> dict[Outcome, float]:
        if prefix not in blocks:
            blocks[prefix] = first_block(make_engine, [*prompt, *prefix], tokens - len(prefix), wrap)
        return blocks[prefix]

    def grow(outcome: Outcome, weight: float) -> None:
        done = len(outcome) == tokens or outcome[-1] in eos_token_ids
        place = ended if done else growing
        place[outcome] = place.get(outcome, 0.0) + weight

    for (_, *emitted), weight in after(()).items():
        grow(tuple(emitted), weight)
    while growing:
        prefix = min(growing, key=len)
        weight = growing.pop(prefix)
        *head, last = prefix
        branches = [(x, w) for x, w in after(tuple(head)).items() if x[1] == last]
        total = sum(w for _, w in branches)
        for (_, _, *emitted), share in branches:
            grow((*prefix, *emitted), weight * share / total)
    return dict(ended)


def _alone(engine: Engine) -> Engine:
    """The engine, its drafter deciding nothing about nodes that only other rows have room for."""
    engine.drafter = _WithinRoom(engine.drafter)
    return engine


class _WithinRoom(Drafter):
    """A drafter whose draws beyond a row's room, which the engine trims away, are certainties."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.name, self.kind, self.is_chain = drafter.name, drafter.kind, drafter.is_chain
        self.max_nodes, self.features = drafter.max_nodes, drafter.features

    def begin(self, sequences: Sequences, output: Output, sampling: Sampling, capacity: int) -> None:
        self.drafter.begin(sequences, output, sampling, capacity)

    def propose(self, sequences: Sequences, draw: Draw, depth: int) -> Proposal:
        return self.drafter.propose(sequences, _DrawWithinRoom(draw, sequences.room), depth)

    def commit(self, sequences: Sequences, path: Tensor, accepted: Tensor, output: Output) -> None:
        self.drafter.commit(sequences, path, accepted, output)

    def select(self, rows: Tensor) -> None:
        self.drafter.select(rows)


class _DrawWithinRoom(Draw):
    def __init__(self, draw: Draw, room: Tensor):
        super().__init__(draw.draws, draw.coupled)
        self.room = room

    def __call__(self, q: Tensor, depth: int, node: int) -> Tensor:
        first = torch.nn.functional.one_hot(q.argmax(-1), q.shape[-1]).to(q.dtype)
        has_room = (depth < self.room).view(-1, *[1] * (q.dim() - 1))
        return super().__call__(torch.where(has_room, q, first), depth, node)


class _Settling:
    """Makes decisions certain that are so up to rounding: forwards of other batch sizes round otherwise."""

    def __init__(self, source: RandomSource):
        self.source = source

    def at(self, sequence: Tensor, position: Tensor, pairs: Pairs | None = None) -> Draws:
        return _SettlingDraws(self.source.at(sequence, position, pairs))


class _SettlingDraws:
    def __init__(self, draws: Draws):
        self.draws = draws

    def bernoulli(self, probability: Tensor, purpose: int = Purpose.ACCEPT, index: int = 0) -> Tensor:
        certain = torch.where(
            probability < ROUNDING, 0.0, torch.where(probability > 1 - ROUNDING, 1.0, probability)
        )
        return self.draws.bernoulli(certain, purpose, index)

    def categorical(self, probs: Tensor, purpose: int | Tensor, index: int = 0) -> Tensor:
        least = ROUNDING * probs.sum(-1, keepdim=True)
        return self.draws.categorical(torch.where(probs < least, 0.0, probs), purpose, index)

    def race(self, probs: Tensor, depth: int) -> Tensor:
        return self.draws.race(probs, depth)

    def select(self, rows: Tensor) -> Draws:
        return _SettlingDraws(self.draws.select(rows))


class _FirstBlock:
    """A random source for the prefill's token and one step; what follows is settled without chance."""

    def __init__(self, source: RandomSource):
        self.source, self.steps = source, 0

    def at(self, sequence: Tensor, position: Tensor, pairs: Pairs | None = None) -> Draws:
        self.steps += 1
        return self.source.at(sequence, position, pairs) if self.steps <= 2 else _Settled()


class _Settled:
    """`Draws` without chance: nothing is accepted, and the most probable token is drawn."""

    def bernoulli(self, probability: Tensor, purpose: int = 0, index: int = 0) -> Tensor:
        return torch.zeros_like(probability, dtype=torch.bool)

    def categorical(self, probs: Tensor, purpose: int | Tensor, index: int = 0) -> Tensor:
        return probs.argmax(-1)

    def race(self, probs: Tensor, depth: int) -> Tensor:
        return probs.argmax(-1)

    def select(self, rows: Tensor) -> _Settled:
        return self
