"""The answers as padded batches, in an order that is a function of (seed, epoch)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from drafters.training.shards import Answer

T = TypeVar("T")
BUCKET = 16  # batches sorted by length together, so that little is padding


@dataclass(frozen=True)
class Batch:
    """Some answers, right-padded.

    Arguments:
        tokens: `[B, T]` int64; what precedes them was cut off where a drafter does not look at prompts.
        lengths: `[B]` int64.
        starts: `[B]` int64, the place of each answer's first token, at least 1.
        features: layer → `[B, T, H]`, the target's hidden states (see `Teacher`).
    """

    tokens: Tensor
    lengths: Tensor
    starts: Tensor
    features: dict[int, Tensor] = field(default_factory=dict)

    @property
    def answer_mask(self) -> Tensor:
        """`[B, T]` bool: which tokens the target said."""
        place = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (place >= self.starts[:, None]) & (place < self.lengths[:, None])

    def to(self, device: torch.device | str) -> Batch:
        return replace(
            self,
            tokens=self.tokens.to(device),
            lengths=self.lengths.to(device),
            starts=self.starts.to(device),
            features={layer: f.to(device) for layer, f in self.features.items()},
        )


def pad(answers: Sequence[Answer]) -> Batch:
    """Whole sequences, prompts included."""
    lengths = [len(a.tokens) for a in answers]
    longest = max(lengths)
    return Batch(
        torch.tensor([a.tokens + [0] * (longest - n) for a, n in zip(answers, lengths, strict=True)]),
        torch.tensor(lengths),
        torch.tensor([a.prompt_length for a in answers]),
    )


def groups(lengths: Sequence[int], positions: int, seed: int, epoch: int) -> list[list[int]]:
    """All sequences in random groups of like length, each with at most `positions` places, padding included.

    Arguments:
        lengths: of every sequence.
        positions: a sequence longer than that is a group by itself.
        seed, epoch: decide the order.

    Returns:
        Indices into `lengths`; every index once.
    """
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    mean = max(1, sum(lengths) // max(1, len(lengths)))
    stretch = max(1, BUCKET * positions // mean)
    found: list[list[int]] = []
    for start in range(0, len(order), stretch):
        found += _cut(
            sorted(order[start : start + stretch], key=lambda i: (lengths[i], i)), lengths, positions
        )
    rng.shuffle(found)
    return found


def _cut(order: list[int], lengths: Sequence[int], positions: int) -> Iterator[list[int]]:
    group: list[int] = []
    for i in order:  # lengths rise, so the newcomer is the longest
        if group and lengths[i] * (len(group) + 1) > positions:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def read_ahead(plan: Iterable[T], read: Callable[[T], Batch]) -> Iterator[tuple[T, Batch]]:
    """Each of `plan` with its batch; while one is used, a thread reads the next."""
    with ThreadPoolExecutor(1) as reader:
        waiting: tuple[T, Future[Batch]] | None = None
        for planned in plan:
            following = planned, reader.submit(read, planned)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = following
        if waiting is not None:
            yield waiting[0], waiting[1].result()
