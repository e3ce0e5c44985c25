"""Counter-based random numbers: every draw is a pure function of (seed, sequence, position, purpose, index).

A sequence's randomness therefore depends neither on who shares its batch nor on the device, and the streams
of different purposes never overlap. The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", SC'11), written once for Python integers (few rows: no overhead) and tensors (many).

Rules and drafters see no uniforms: they ask a `Draws` for *decisions* (`bernoulli`, `categorical`, `race`).
So `specdec.exactness.enumeration` can replace chance by a walk over every branch of the shipping code.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import cache, lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.errors import compiling

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_FEW = 48  # up to this many numbers, Python integers beat tensor operations
_FEW_ROWS = 16  # up to this many rows' noise for the race is made one by one and kept for later steps …
_KEPT = 64  # … so much of it


class Purpose(IntEnum):
    """What a random number decides. Part of the counter, so purposes never share a number."""

    DRAFT = 0  # the drafter draws a proposed token
    ACCEPT = 1  # the rule accepts or rejects it
    RESIDUAL = 2  # the correction after a rejection
    BONUS = 3  # the extra token after full acceptance
    RACE = 4  # exponential noise of the Gumbel coupling, keyed by absolute position


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
    """Philox-4x32-10.

    Arguments:
        counter: four 32-bit words, each a Python integer, an int64 tensor or a uint64 array, that broadcast.
        key: two 32-bit words, likewise.

    Returns:
        Four 32-bit words of the same type.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # int64 wraps: all 64 bits are right
        c0, c1, c2, c3 = (
            ((right >> 32) & _MASK32) ^ c1 ^ k0,
            right & _MASK32,
            ((left >> 32) & _MASK32) ^ c3 ^ k1,
            left & _MASK32,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def _to_unit(high: Any, low: Any) -> Any:
    """Two 32-bit words → a number in [0, 1) on the grid of 2^-53 (of a tensor, float64)."""
    whole = ((high >> 5) << 26) | (low >> 6)
    return (whole.double() if isinstance(whole, Tensor) else whole) * 2.0**-53


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """First token whose cumulative probability exceeds `u`, never one of zero probability.

    Arguments:
        probs: `[..., V]` non-negative weights (they need not sum to one).
        u: `[...]` float64 in [0, 1).

    Returns:
        `[...]` int64.
    """
    cdf = probs.cumsum(-1, dtype=torch.float64)
    if probs.device.type == "cpu":  # summed in order: never falls, and stays flat at impossible tokens
        threshold = u[..., None] * cdf[..., -1:]  # below the total for every double u < 1
        token = torch.searchsorted(cdf, threshold, right=True)[..., 0]
        return token.clamp_(max=probs.shape[-1] - 1)  # of NaN; that the law is none is seen to elsewhere
    return _first_possible(cdf, probs, u)


def _first_possible(cdf: Tensor, probs: Tensor, u: Tensor) -> Tensor:
    """The same for sums taken in parallel, which may differ in the last bit between neighbours."""
    cdf = cdf.masked_fill(probs <= 0, 0.0)
    hit = cdf > (u * cdf.amax(-1))[..., None]
    return hit.view(torch.uint8).argmax(-1)


Pairs = Callable[[], list[tuple[int, int]]]
"""Gives (position, sequence) of each row, as the host knows them."""


class Draws(Protocol):
    """The random decisions of one step for B rows."""

    def bernoulli(self, probability: Tensor, purpose: int = Purpose.ACCEPT, index: int = 0) -> Tensor:
        """Bool tensor of `probability`'s shape, `[B]` or `[B, K]` (K consecutive indices from `index`)."""
        ...

    def categorical(self, probs: Tensor, purpose: int | Tensor, index: int = 0) -> Tensor:
        """Token `[B]` drawn from weights `probs` `[B, V]`; `purpose` may differ per row (`[B]` int64).

        From `[B, K, V]`, tokens `[B, K]`: K decisions with consecutive indices from `index`.
        """
        ...

    def race(self, probs: Tensor, depth: int) -> Tensor:
        """Exponential race argmin E/p `[B]` at absolute position + `depth`, on noise all callers share."""
        ...

    def select(self, rows: Tensor) -> Draws:
        """The same draws restricted to some rows (int64 indices)."""
        ...


class RandomSource(Protocol):
    """Gives each step its `Draws`."""

    def at(self, sequence: Tensor, position: Tensor, pairs: Pairs | None = None) -> Draws: ...


class PhiloxSource:
    """The shipping random source.

    Arguments:
        seed: any non-negative integer below 2^64.
    """

    name = "noise of verify=gumbel"

    def __init__(self, seed: int):
        self.key = (seed & _MASK32, (seed >> 32) & _MASK32)
        # several steps look at one position
        self._row_noise = lru_cache(_KEPT)(partial(_row_noise, self.key))

    def compile(self, vocab: int) -> None:
        """Make the noise of single rows in compiled code, much faster, if it is the same bit by bit.

        Raises:
            OptionError: it cannot be compiled.
        """
        compiled = partial(_compiled_row_noise, self.key)
        with compiling():
            same = torch.equal(compiled(1, 2, vocab), _row_noise(self.key, 1, 2, vocab))
        if same:
            self._row_noise = lru_cache(_KEPT)(compiled)

    def at(self, sequence: Tensor, position: Tensor, pairs: Pairs | None = None) -> PhiloxDraws:
        """Draws for rows `sequence` `[B]` whose block starts at absolute `position` `[B]` (both below 2^32).

        A step emits at least one token, so (sequence, position) never repeats and no number is used twice.
        `pairs` are the same numbers on the host; if it has them, it need not wait for the device.
        """
        return PhiloxDraws(self.key, sequence, position, self._row_noise, pairs)


class PhiloxDraws:
    """`Draws` by Philox: one uniform per decision."""

    def __init__(
        self,
        key: tuple[int, int],
        sequence: Tensor,
        position: Tensor,
        row_noise: Callable[[int, int, int], Tensor] | None = None,
        pairs: Pairs | None = None,
    ):
        self.key, self.sequence, self.position = key, sequence, position
        self._row_noise = row_noise or partial(_row_noise, key)
        self._pairs = cache(pairs or partial(_ask, sequence, position))
        self._noise: dict[tuple[int, int], Tensor] = {}  # of `race`, which drafter and rule both ask for

    def uniform(self, purpose: int | Tensor, index: int = 0, count: int = 1) -> Tensor:
        """`[B, count]` float64 in [0, 1), on the device of `sequence`."""
        batch, device = len(self.sequence), self.sequence.device
        if batch * count <= _FEW:
            if isinstance(purpose, Tensor) and device.type != "cpu":  # all, rather than wait to hear which
                every = torch.stack([self.uniform(p, index, count) for p in Purpose], 1)
                return every[torch.arange(batch, device=device), purpose]
            lanes = range(index, index + count)
            purposes = purpose.tolist() if isinstance(purpose, Tensor) else [int(purpose)] * batch
            rows = zip(self._pairs(), purposes, strict=True)
            counters = ((lane, at, who, why) for (at, who), why in rows for lane in lanes)
            unit = [_to_unit(*philox(counter, self.key)[:2]) for counter in counters]
            found = torch.tensor(unit, dtype=torch.float64).view(batch, count)
            return found.to(device, non_blocking=True)
        lane = torch.arange(index, index + count, device=device)[None]
        why = purpose if isinstance(purpose, Tensor) else torch.full_like(self.sequence, int(purpose))
        words = philox((lane, self.position[:, None], self.sequence[:, None], why[:, None]), self.key)
        return _to_unit(words[0], words[1])

    def bernoulli(self, probability: Tensor, purpose: int = Purpose.ACCEPT, index: int = 0) -> Tensor:
        count = 1 if probability.dim() == 1 else probability.shape[1]
        u = self.uniform(purpose, index, count).to(probability.device)
        return u.view_as(probability) < probability  # strict: probability 0 never, 1 always

    def categorical(self, probs: Tensor, purpose: int | Tensor, index: int = 0) -> Tensor:
        count = 1 if probs.dim() == 2 else probs.shape[1]
        u = self.uniform(purpose, index, count).to(probs.device)
        return inverse_cdf(probs, u.view(probs.shape[:-1]))

    def race(self, probs: Tensor, depth: int) -> Tensor:
        noise = self.noise(probs.shape[-1], depth, probs.device)
        noise = noise if probs.dim() == 2 else noise[:, None]
        return (noise / probs.double()).masked_fill_(probs <= 0, torch.inf).argmin(-1)

    def noise(self, vocab: int, depth: int, device: torch.device) -> Tensor:
        """E `[B, V]` ~ Exp(1), float64: what is raced on at absolute position + `depth`."""
        if (depth, vocab) not in self._noise:
            if len(self.sequence) <= _FEW_ROWS and device.type == "cpu":
                rows = [self._row_noise(who, at + depth, vocab) for at, who in self._pairs()]
                self._noise[depth, vocab] = torch.stack(rows)
            else:
                position, sequence = (x[:, None].to(device) for x in (self.position + depth, self.sequence))
                lane = torch.arange((vocab + 1) // 2, device=device)
                why = torch.full_like(sequence, int(Purpose.RACE))
                self._noise[depth, vocab] = _exponential((lane, position, sequence, why), self.key, vocab)
        return self._noise[depth, vocab]

    def select(self, rows: Tensor) -> PhiloxDraws:
        rows = rows.to(self.sequence.device)
        if len(rows) == len(self.sequence) and torch.equal(rows, torch.arange(len(rows), device=rows.device)):
            return self
        return PhiloxDraws(self.key, self.sequence[rows], self.position[rows], self._row_noise)


def _ask(sequence: Tensor, position: Tensor) -> list[tuple[int, int]]:
    return list(zip(position.tolist(), sequence.tolist(), strict=True))


def _row_noise(key: tuple[int, int], sequence: int, position: int, vocab: int) -> Tensor:
    """`[V]`: the race's noise of one row; NumPy's integers are faster than torch's on a CPU."""
    lane = np.arange((vocab + 1) // 2, dtype=np.uint64)
    return _exponential((lane, position, sequence, int(Purpose.RACE)), key, vocab)


@torch.inference_mode()
def _compiled_row_noise(key: tuple[int, int], sequence: int, position: int, vocab: int) -> Tensor:
    lane = torch.arange((vocab + 1) // 2)
    words = torch.tensor([position, sequence, int(Purpose.RACE), *key])
    return _to_exponential(_compiled_unit_pairs()(lane, *words), vocab)


@cache
def _compiled_unit_pairs() -> Callable[..., Tensor]:
    def run(lane: Tensor, position: Tensor, sequence: Tensor, purpose: Tensor, *key: Tensor) -> Tensor:
        return _unit_pairs((lane, position, sequence, purpose), key)

    return torch.compile(run, fullgraph=True)


def _exponential(counter: tuple[Any, Any, Any, Any], key: tuple[int, int], vocab: int) -> Tensor:
    """`[..., V]` float64 ~ Exp(1); a Philox block gives two of them."""
    return _to_exponential(_unit_pairs(counter, key), vocab)


def _unit_pairs(counter: tuple[Any, Any, Any, Any], key: tuple[Any, ...]) -> Tensor:
    """`[..., 2L]` float64 in [0, 1), two of each of L blocks."""
    words = philox(counter, key)
    pairs = [torch.as_tensor(_to_unit(words[i], words[i + 1])) for i in (0, 2)]
    return torch.stack(pairs, -1).flatten(-2)


def _to_exponential(u: Tensor, vocab: int) -> Tensor:
    return u[..., :vocab].neg().log1p_().neg_()  # u < 1, so it is finite
