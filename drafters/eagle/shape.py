"""Shapes of static trees, in Medusa's notation: a node is the path of ranks that leads to it (no torch)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

STAY = 0.6  # built-in shape: rank r is the right one with chance STAY·(1 − STAY)^r


@dataclass(frozen=True)
class Level:
    """The nodes of one depth, elder siblings of all parents before younger ones.

    Arguments:
        first: number of its first node; nodes are numbered level by level.
        parent: for each node, its parent's place among the expanded nodes of the level above.
        rank: for each node, its rank among its siblings, rising.
        expanded: places, within this level, of the nodes that have children.
        parents: for each node, its parent's number (−1 for the root).
    """

    first: int
    parent: tuple[int, ...]
    rank: tuple[int, ...]
    expanded: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.rank)


def chain_paths(depth: int) -> list[tuple[int, ...]]:
    """The best token of every depth."""
    return [(0,) * d for d in range(1, depth + 1)]


def built_in_paths(depth: int, top_k: int, nodes: int) -> list[tuple[int, ...]]:
    """The `nodes` likeliest paths if ranks were geometric, at most `depth` deep with ranks below `top_k`."""
    paths: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(-STAY, (0,))]
    while heap and len(paths) < nodes:
        minus, path = heapq.heappop(heap)
        paths.append(path)
        if path[-1] + 1 < top_k:
            heapq.heappush(heap, (minus * (1 - STAY), (*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            heapq.heappush(heap, (minus * STAY, (*path, 0)))
    return paths


def levels_of(paths: Sequence[Sequence[int]]) -> list[Level]:
    """The levels of a tree; every prefix of a path must be a path."""
    levels: list[Level] = []
    nodes = {tuple(p) for p in paths}
    have_children = {p[:-1] for p in nodes}
    above: list[tuple[int, ...]] = [()]  # expanded nodes of the level above
    number = {(): -1}
    first = 0
    for depth in range(1, max(map(len, nodes)) + 1):
        here = sorted((p for p in nodes if len(p) == depth), key=lambda p: (p[-1], above.index(p[:-1])))
        number |= {p: first + i for i, p in enumerate(here)}
        levels.append(
            Level(
                first,
                tuple(above.index(p[:-1]) for p in here),
                tuple(p[-1] for p in here),
                tuple(i for i, p in enumerate(here) if p in have_children),
                tuple(number[p[:-1]] for p in here),
            )
        )
        above, first = [p for p in here if p in have_children], first + len(here)
    return levels


def check_paths(paths: Sequence[Sequence[int]], drawn: bool) -> str | None:
    """What is wrong with a tree, in words, or `None`."""
    nodes = {tuple(p) for p in paths}
    if len(nodes) < len(paths):
        return "a path is given twice."
    for path in sorted(nodes):
        if not path or min(path) < 0:
            return f"{list(path)} is no path: it is a list of one or more ranks ≥ 0."
        if len(path) > 1 and path[:-1] not in nodes:
            return f"path {list(path)} has no parent {list(path[:-1])} in the tree."
        if drawn and path[-1] and (*path[:-1], path[-1] - 1) not in nodes:
            return f"path {list(path)} has no elder sibling {path[-1] - 1}, but siblings are drawn in turn."
    return None
