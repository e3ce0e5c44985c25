"""Counter-based random numbers: every draw is a pure function of (seed, sequence, position, purpose, index).

A sequence's randomness therefore depends neither on who shares its batch nor on the device, and the streams of
different purposes never overlap. The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC'11), written with 64-bit integer tensor operations, so that it runs wherever torch runs.

Rules and drafters never see uniforms: they ask a `Draws` for *decisions* (`bernoulli`, `categorical`, `race`).
That is what lets `specdec.exactness.enumeration` replace chance by a walk over every branch of the shipping code.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Purpose(IntEnum):
    """What a random number decides. Part of the counter, so purposes never share a number."""

    DRAFT = 0  # the drafter draws a proposed token
    ACCEPT = 1  # the rule accepts or rejects it
    RESIDUAL = 2  # the correction after a rejection
    BONUS = 3  # the extra token after full acceptance
    RACE = 4  # exponential noise of the Gumbel coupling, keyed by absolute position


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox-4x32-10.

    Arguments:
        counter: four int64 tensors of one shape, each holding a 32-bit word.
        key: two 32-bit words.

    Returns:
        Four int64 tensors holding 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # wraps modulo 2^64: all 64 bits are right
        c0, c1, c2, c3 = (
            ((right >> 32) & _MASK32) ^ c1 ^ k0,
            right & _MASK32,
            ((left >> 32) & _MASK32) ^ c3 ^ k1,
            left & _MASK32,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def _to_unit(high: Tensor, low: Tensor) -> Tensor:
    """Two 32-bit words → float64 in [0, 1) on the grid of 2^-53."""
    return ((high >> 5).double() * 67108864.0 + (low >> 6).double()) * (1.0 / 9007199254740992.0)


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """First token whose cumulative probability exceeds `u`, never one of zero probability.

    Arguments:
        probs: `[..., V]` non-negative weights (they need not sum to one exactly).
        u: `[...]` float64 in [0, 1).

    Returns:
        `[...]` int64.
    """
    positive = probs > 0
    cdf = probs.double().cumsum(-1)
    hit = (cdf > (u * cdf[..., -1])[..., None]) & positive
    first = hit.int().argmax(-1)
    # u·total can round up to the total: then the last possible token is meant.
    last = probs.shape[-1] - 1 - positive.flip(-1).int().argmax(-1)
    return torch.where(hit.any(-1), first, last)


class Draws(Protocol):
    """The random decisions of one step for B rows."""

    def bernoulli(self, probability: Tensor, purpose: int = Purpose.ACCEPT, index: int = 0) -> Tensor:
        """Bool tensor of `probability`'s shape, `[B]` or `[B, K]` (K consecutive indices from `index`)."""
        ...

    def categorical(self, probs: Tensor, purpose: int | Tensor, index: int = 0) -> Tensor:
        """Token `[B]` drawn from `probs` `[B, V]`; `purpose` may differ per row (`[B]` int64)."""
        ...

    def race(self, probs: Tensor, depth: int) -> Tensor:
        """Exponential race argmin E/p `[B]` at absolute position + `depth`, the noise shared by all who ask."""
        ...

    def select(self, rows: Tensor) -> Draws:
        """The same draws restricted to some rows (int64 indices)."""
        ...


class RandomSource(Protocol):
    """Gives each step its `Draws`."""

    def at(self, sequence: Tensor, position: Tensor) -> Draws: ...


class PhiloxSource:
    """The shipping random source.

    Arguments:
        seed: any non-negative integer below 2^64.
    """

    def __init__(self, seed: int):
        self.key = (seed & _MASK32, (seed >> 32) & _MASK32)

    def at(self, sequence: Tensor, position: Tensor) -> PhiloxDraws:
        """Draws for rows `sequence` `[B]` whose block starts at absolute `position` `[B]`.

        A step emits at least one token, so (sequence, position) never repeats and no number is used twice.
        """
        return PhiloxDraws(self.key, sequence, position)


class PhiloxDraws:
    """`Draws` by Philox: one uniform per decision."""

    def __init__(self, key: tuple[int, int], sequence: Tensor, position: Tensor):
        self.key, self.sequence, self.position = key, sequence, position

    def uniform(self, purpose: int | Tensor, index: int = 0, count: int = 1) -> Tensor:
        """`[B, count]` float64 in [0, 1)."""
        lane = torch.arange(index, index + count, device=self.sequence.device).expand(len(self.sequence), count)
        column = lambda x: x[:, None].expand_as(lane) if isinstance(x, Tensor) else torch.full_like(lane, int(x))  # noqa: E731
        words = philox((lane, column(self.position), column(self.sequence), column(purpose)), self.key)
        return _to_unit(words[0], words[1])

    def bernoulli(self, probability: Tensor, purpose: int = Purpose.ACCEPT, index: int = 0) -> Tensor:
        count = 1 if probability.dim() == 1 else probability.shape[1]
        u = self.uniform(purpose, index, count)
        return u.view_as(probability) < probability  # strict: probability 0 never, 1 always

    def categorical(self, probs: Tensor, purpose: int | Tensor, index: int = 0) -> Tensor:
        return inverse_cdf(probs, self.uniform(purpose, index)[:, 0])

    def race(self, probs: Tensor, depth: int) -> Tensor:
        vocab = probs.shape[-1]
        pairs = (vocab + 1) // 2  # one Philox block gives two 53-bit uniforms
        lane = torch.arange(pairs, device=probs.device).expand(len(probs), pairs)
        column = lambda x: x[:, None].expand_as(lane)  # noqa: E731
        words = philox(
            (lane, column(self.position + depth), column(self.sequence), torch.full_like(lane, int(Purpose.RACE))),
            self.key,
        )
        u = torch.stack((_to_unit(words[0], words[1]), _to_unit(words[2], words[3])), -1).flatten(1)[:, :vocab]
        noise = -torch.log1p(-u)  # Exp(1); u < 1, so it is finite
        return torch.where(probs > 0, noise / probs.double(), torch.inf).argmin(-1)

    def select(self, rows: Tensor) -> PhiloxDraws:
        return PhiloxDraws(self.key, self.sequence[rows], self.position[rows])
