"""The shape of a token tree: parents, depths, ancestors. Node −1 is the root, the last committed token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tree:
    """Parents `[N]` (one shape for all rows) or `[B, N]` (one per row), each parent before its children."""

    parents: Tensor

    @staticmethod
    @lru_cache(maxsize=256)
    def chain(length: int, device: torch.device | str = "cpu") -> Tree:
        """The tree of width one."""
        return Tree(torch.arange(-1, length - 1, device=device))

    @staticmethod
    def from_paths(
        paths: list[tuple[int, ...]] | list[list[int]], device: torch.device | str = "cpu"
    ) -> Tree:
        """Medusa's notation: each node is the path of ranks that leads to it; every prefix must be present.

        Raises:
            ValueError: a path is empty, given twice, or lacks its parent.
        """
        ordered = sorted((tuple(p) for p in paths), key=lambda p: (len(p), p))
        index = {path: i for i, path in enumerate(ordered)}
        if () in index:
            raise ValueError("an empty path is the root, which is no node of the tree")
        if len(index) < len(ordered):
            twice = next(p for p in ordered if ordered.count(p) > 1)
            raise ValueError(f"path {list(twice)} is given twice")
        missing = [p for p in ordered if len(p) > 1 and p[:-1] not in index]
        if missing:
            raise ValueError(f"path {list(missing[0])} has no parent {list(missing[0][:-1])} in the tree")
        return Tree(torch.tensor([index.get(p[:-1], -1) for p in ordered], dtype=torch.int64, device=device))

    @property
    def size(self) -> int:
        """N."""
        return self.parents.shape[-1]

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node hangs off its predecessor."""
        return self.parents.dim() == 1 and self.parents.tolist() == list(range(-1, self.size - 1))

    @cached_property
    def ancestors(self) -> Tensor:
        """`[1 or B, N+1, N+1]` bool: whether j is i or an ancestor of i, at [i, j]; index 0 is the root."""
        parents = torch.atleast_2d(self.parents) + 1
        batch, n = parents.shape
        sees = torch.eye(n + 1, device=parents.device).repeat(batch, 1, 1)
        sees[:, 1:].scatter_(2, parents[..., None], 1.0)  # each node sees itself and its parent …
        for _ in range(max(n, 1).bit_length()):  # … and by squaring, everyone above
            sees = (sees @ sees).clamp(max=1.0)
        return sees.bool()

    @cached_property
    def depth(self) -> Tensor:
        """`[1 or B, N+1]` int64: 0 for the root, 1 for its children, …"""
        if self.is_chain:
            return torch.arange(self.size + 1, device=self.parents.device)[None]
        return self.ancestors.sum(-1) - 1

    @cached_property
    def max_depth(self) -> int:
        return int(self.depth.max())

    @cached_property
    def paths(self) -> Tensor:
        """`[1 or B, N+1, D]` int64: the nodes from depth 1 down to each node, without the root; −1 padded."""
        batch, count = self.depth.shape
        spill = self.max_depth  # the root and the unseen are written to one extra column
        column = torch.where(self.ancestors, self.depth[:, None, :] - 1, spill)
        column[:, :, 0] = spill
        out = torch.full((batch, count, spill + 1), -1, dtype=torch.int64, device=self.parents.device)
        out.scatter_(2, column, torch.arange(-1, count - 1, device=out.device).expand_as(column))
        return out[..., :spill]

    def rows(self, index: Tensor) -> Tree:
        """The trees of some rows."""
        return self if self.parents.dim() == 1 else Tree(self.parents[index])
