"""The tree of N nodes that is accepted longest, given how often each rank is accepted at each depth."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def best_tree(ranks: Sequence[Sequence[float]], nodes: int) -> tuple[list[int], list[int], list[float]]:
    """Grow the tree by its most probable path, again and again (Medusa, 2401.10774 §2.3.3).

    A path's probability is the product of its ranks' rates, so it never exceeds its parent's, and ranks are
    sorted within a depth, so the greedy choice is the optimum.

    Arguments:
        ranks: `ranks[d][r]`, falling in r: probability that rank r is accepted at depth d + 1, its parent
            being accepted.
        nodes: N, at most.

    Returns:
        parents (−1: the root; parents come first), depth of each node, and the probability of accepting at
        least 1, 2, … tokens.
    """
    parents: list[int] = []
    depths: list[int] = []
    reached: list[float] = [0.0] * len(ranks)
    waiting: list[tuple[float, int, int, int, float]] = []  # −probability, parent, depth, rank, parent's own

    def offer(parent: int, depth: int, rank: int, above: float) -> None:
        if depth < len(ranks) and rank < len(ranks[depth]) and ranks[depth][rank] > 0:
            heapq.heappush(waiting, (-above * ranks[depth][rank], parent, depth, rank, above))

    offer(-1, 0, 0, 1.0)
    while waiting and len(parents) < nodes:
        negative, parent, depth, rank, above = heapq.heappop(waiting)
        parents.append(parent)
        depths.append(depth + 1)
        reached[depth] -= negative
        offer(len(parents) - 1, depth + 1, 0, -negative)
        offer(parent, depth, rank + 1, above)
    return parents, depths, reached[: max(depths, default=0)]


def expected_accepted(parents: Sequence[int], ranks: Sequence[Sequence[float]]) -> float:
    """E[accepted] of a tree whose siblings come in the order of their ranks: the sum of all paths'
    probabilities.
    """
    probability: list[float] = []
    depth: list[int] = []
    children: dict[int, int] = {}
    for parent in parents:
        level = 0 if parent < 0 else depth[parent] + 1
        rank = children.get(parent, 0)
        children[parent] = rank + 1
        probability.append((1.0 if parent < 0 else probability[parent]) * ranks[level][rank])
        depth.append(level)
    return sum(probability)
