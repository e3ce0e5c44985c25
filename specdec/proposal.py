"""What a drafter hands to a verification rule: a token tree and how its tokens were drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from specdec.tree import Tree


class Kind(StrEnum):
    """How the tokens of a proposal came about; a rule decides from this declaration whether it is exact."""

    DETERMINISTIC = "deterministic"  # a function of the context alone, siblings distinct
    WITH_REPLACEMENT = "with_replacement"  # siblings i.i.d. from the declared q
    WITHOUT_REPLACEMENT = (
        "without_replacement"  # siblings drawn in order from q, each with its predecessors zeroed
    )
    COUPLED = "coupled"  # drawn with the target's own noise (Gumbel coupling)


@dataclass(frozen=True)
class Proposal:
    """A batch of drafted token trees; a chain is a tree of width one.

    Arguments:
        tokens: `[B, N]` int64, parents before children, siblings in the order they were drawn.
        tree: who hangs off whom, shared by all rows or per row.
        kind: how the tokens were drawn.
        q: `[B, N, V]` the law (after all processing) from which node n was drawn, given its parent; siblings
            share it (sampling without replacement zeroes predecessors of this same q). `None` if
            deterministic.
        valid: `[B, N]` bool, false where a row has fewer nodes than N; `None` means all valid. The valid
            nodes of a row are closed under parents. An invalid node is never accepted and is not counted as
            drafted.
    """

    tokens: Tensor
    tree: Tree
    kind: Kind = Kind.DETERMINISTIC
    q: Tensor | None = None
    valid: Tensor | None = None

    @classmethod
    def empty(cls, batch: int, device: torch.device | str = "cpu") -> Proposal:
        """No draft at all: what autoregressive decoding proposes."""
        return cls.chain(torch.empty(batch, 0, dtype=torch.int64, device=device))

    @classmethod
    def chain(
        cls, tokens: Tensor, q: Tensor | None = None, kind: Kind | None = None, lengths: Tensor | None = None
    ) -> Proposal:
        """A chain of γ tokens `[B, γ]`, of which row b has the first `lengths[b]`."""
        kind = kind or (Kind.DETERMINISTIC if q is None else Kind.WITH_REPLACEMENT)
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        valid = None if lengths is None else steps < lengths[:, None]
        return cls(tokens, Tree.chain(tokens.shape[1], tokens.device), kind, q, valid)

    def trimmed(self, depth: Tensor) -> Proposal:
        """Without the nodes deeper than `depth` `[B]`, row by row."""
        return replace(self, valid=self.mask & (self.tree.depth[:, 1:] <= depth[:, None]))

    @property
    def size(self) -> int:
        """N, the number of nodes (the root is not one)."""
        return self.tokens.shape[1]

    @property
    def mask(self) -> Tensor:
        """`[B, N]` bool: which nodes exist."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.valid is None else self.valid

    def q_of_tokens(self, dtype: torch.dtype) -> Tensor:
        """`[B, N]`: the declared probability of each drafted token (1 if deterministic)."""
        if self.q is None:
            return torch.ones_like(self.tokens, dtype=dtype)
        return self.q.gather(-1, self.tokens[..., None])[..., 0].to(dtype)

    def law(self, node: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
        """`[B, V]`: the law that node `node[b]` of row b was drawn from (one-hot if deterministic)."""
        rows = torch.arange(len(node), device=node.device)
        if self.q is not None:
            return self.q[rows, node].to(dtype)
        one_hot = torch.zeros(len(node), vocab, dtype=dtype, device=node.device)
        return one_hot.scatter_(1, self.tokens[rows, node][:, None], 1.0)
