"""Proof by enumeration: a random source that walks every branch of the shipping code.

Each row of a batch is one branch. A row carries a script, the decisions it is to take; past its end it takes
the first possible option and reports the others, which become the scripts of a later run. So every branch
runs exactly once, with its probability, nothing is sampled, and rules, drafters and engine cannot tell this
source from the shipping one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.rng import Pairs, Purpose


class EnumerationError(SpecdecError):
    """The code under enumeration did something that cannot be enumerated."""


class EnumerationSource:
    """A `RandomSource` that prescribes the decisions of the sequences 0 … R−1.

    Arguments:
        scripts: `[R, L]` int64, the options to take, −1 padded.
    """

    def __init__(self, scripts: Tensor):
        self.script_length = (scripts >= 0).sum(1)
        self.taken = scripts  # grows to the right
        self.cursor = torch.zeros(len(scripts), dtype=torch.int64)
        self.weight = torch.ones(len(scripts), dtype=torch.float64)
        self.unexplored: list[Tensor] = []  # scripts of branches met but not taken

    def at(self, sequence: Tensor, position: Tensor, pairs: Pairs | None = None) -> EnumerationDraws:
        return EnumerationDraws(self, sequence.cpu())

    def decide(self, sequence: Tensor, options: Tensor) -> Tensor:
        """`[A]`: the option each sequence takes, with positive probability in `options` `[A, K]`."""
        if not bool(torch.isfinite(options).all()) or bool((options < 0).any()):
            raise EnumerationError(
                "a decision was asked for with negative, infinite or undefined probabilities"
            )
        options = options / options.sum(1, keepdim=True)
        choice = options.gt(0).to(torch.uint8).argmax(1)
        open_ = options.gt(0).sum(1) > 1  # certainties are no decisions
        rows, seq = open_.nonzero()[:, 0], sequence[open_]
        if not len(seq):
            return choice
        at = self.cursor[seq]
        if int(at.max()) >= self.taken.shape[1]:
            self.taken = torch.nn.functional.pad(
                self.taken, (0, int(at.max()) + 1 - self.taken.shape[1]), value=-1
            )
        scripted = at < self.script_length[seq]
        choice[rows[scripted]] = self.taken[seq[scripted], at[scripted]]
        probability = options[rows, choice[rows]]
        if bool((probability <= 0).any()):
            raise EnumerationError(
                "a replayed branch met other probabilities than before: the code keeps hidden state"
            )
        self._note_alternatives(seq[~scripted], options[rows[~scripted]], choice[rows[~scripted]])
        self.taken[seq, at] = choice[rows]
        self.weight[seq] *= probability
        self.cursor[seq] += 1
        return choice

    def _note_alternatives(self, seq: Tensor, options: Tensor, choice: Tensor) -> None:
        row, option = options.gt(0).nonzero(as_tuple=True)
        other = option != choice[row]
        row, option = row[other], option[other]
        scripts = self.taken[seq[row]].clone()
        scripts[torch.arange(len(row)), self.cursor[seq[row]]] = option
        self.unexplored.append(scripts)


class EnumerationDraws:
    """`Draws` that take prescribed decisions."""

    def __init__(self, source: EnumerationSource, sequence: Tensor):
        self.source, self.sequence = source, sequence

    def bernoulli(self, probability: Tensor, purpose: int = Purpose.ACCEPT, index: int = 0) -> Tensor:
        chance = probability.detach().double().cpu().reshape(len(self.sequence), -1)
        columns = [
            self.source.decide(self.sequence, torch.stack((1.0 - c, c), 1)).bool() for c in chance.unbind(1)
        ]
        taken = torch.stack(columns, 1) if columns else torch.zeros(chance.shape, dtype=torch.bool)
        return taken.view(probability.shape).to(probability.device)

    def categorical(self, probs: Tensor, purpose: int | Tensor, index: int = 0) -> Tensor:
        laws = probs.detach().double().cpu()
        if probs.dim() == 2:
            return self.source.decide(self.sequence, laws).to(probs.device)
        tokens = [self.source.decide(self.sequence, law) for law in laws.unbind(1)]
        return torch.stack(tokens, 1).to(probs.device)

    def race(self, probs: Tensor, depth: int) -> Tensor:
        raise EnumerationError(
            "Gumbel noise is continuous and cannot be enumerated; it is tested by bit-identity"
        )

    def select(self, rows: Tensor) -> EnumerationDraws:
        return EnumerationDraws(self.source, self.sequence[rows.cpu()])


def enumerate_law(
    run: Callable[[EnumerationSource, Tensor], Tensor | Sequence[tuple[int, ...]]], rows: int = 1 << 15
) -> dict[tuple[int, ...], float]:
    """The exact law of what a randomised procedure returns.

    Arguments:
        run: given a random source and sequence ids `[R]`, runs R independent copies of the procedure and
            returns their R outcomes, in the order of the ids: tuples of integers or a tensor `[R, L]`.
        rows: at most this many copies at once.

    Returns:
        probability by outcome, summing to one.

    Raises:
        EnumerationError: the procedure draws continuous noise, keeps state between runs or asks for non-laws.
    """
    branches: dict[tuple[int, ...], list[float]] = defaultdict(list)
    pending = [torch.empty(1, 0, dtype=torch.int64)]
    while pending:
        scripts = pending.pop()
        if len(scripts) > rows:
            pending.append(scripts[rows:])
            scripts = scripts[:rows]
        source = EnumerationSource(scripts.clone())
        outcomes = run(source, torch.arange(len(scripts)))
        if isinstance(outcomes, Tensor):
            outcomes = outcomes.tolist()
        for outcome, weight in zip(outcomes, source.weight.tolist(), strict=True):
            branches[tuple(outcome)].append(weight)
        pending += _joined(source.unexplored)
    law = {outcome: math.fsum(weights) for outcome, weights in branches.items()}
    if abs(math.fsum(law.values()) - 1.0) > 1e-9:
        raise EnumerationError(
            f"branches sum to {math.fsum(law.values())!r}: the code keeps state between runs"
        )
    return law


def _joined(scripts: list[Tensor]) -> list[Tensor]:
    """One tensor of all scripts, −1 padded to the right."""
    width = max((s.shape[1] for s in scripts), default=0)
    padded = [torch.nn.functional.pad(s, (0, width - s.shape[1]), value=-1) for s in scripts if len(s)]
    return [torch.cat(padded)] if padded else []
