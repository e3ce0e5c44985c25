"""Which tree to draft: paths of ranks, chosen greedily for the most accepted tokens (section 2.3.3)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

Path = tuple[int, ...]

# Rates where none were measured: the top guess of head d is right with .5·.7^d, that of rank r is
# (r+1)^-1.5 times as likely to be.
TYPICAL = [[0.5 * 0.7**d * (r + 1) ** -1.5 for r in range(10)] for d in range(4)]


def greedy_choices(rates: Sequence[Sequence[float]], nodes: int) -> list[Path]:
    """The tree of `nodes` nodes with the largest expected accepted length, best nodes first.

    A node is worth the product of the rates along its path, so no child is worth more than its parent, and
    taking the best next one is optimal.

    Arguments:
        rates: `rates[d][r]` how likely the guess of rank r of head d is right if those above it are.
        nodes: how many.
    """
    heap = [(-rate, (r,)) for r, rate in enumerate(rates[0])]
    heapq.heapify(heap)
    chosen: list[Path] = []
    while heap and len(chosen) < nodes:
        worth, path = heapq.heappop(heap)
        chosen.append(path)
        if len(path) < len(rates):
            for r, rate in enumerate(rates[len(path)]):
                heapq.heappush(heap, (worth * rate, (*path, r)))
    return chosen


def expected_accepted(rates: Sequence[Sequence[float]], choices: Sequence[Path]) -> float:
    """Mean accepted length of a tree: the sum of its nodes' worths."""
    total = 0.0
    for path in choices:
        worth = 1.0
        for d, r in enumerate(path):
            worth *= rates[d][r]
        total += worth
    return total


def rank_rates(ranks: Tensor, count: int) -> list[list[float]]:
    """Measured rates, as `greedy_choices` wants them.

    Arguments:
        ranks: `[P, D]` the rank that head d gave to the token which came, at P positions.
        count: ranks below this are looked at.

    Returns:
        D lists of `count` shares, of head d among the positions where all heads before ranked below `count`.
    """
    rates, alive = [], torch.ones(len(ranks), dtype=torch.bool)
    for d in range(ranks.shape[1]):
        hits = torch.bincount(ranks[alive, d].clamp(max=count), minlength=count + 1)[:count]
        rates.append((hits / alive.sum().clamp(min=1)).tolist())
        alive = alive & (ranks[:, d] < count)
    return rates


def accepted_by_tree(ranks: Tensor, choices: Sequence[Path]) -> Tensor:
    """`[P]` int64: how deep the tree would have been accepted at each position.

    Arguments:
        ranks: `[P, D]` as in `rank_rates`.
        choices: closed under parents.
    """
    accepted = torch.zeros(len(ranks), dtype=torch.int64)
    for path in choices:
        if len(path) <= ranks.shape[1]:
            hit = (ranks[:, : len(path)] == torch.tensor(path)).all(1)
            accepted = torch.where(hit & (accepted < len(path)), len(path), accepted)
    return accepted
