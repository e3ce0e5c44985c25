"""The same small model drafts a tree: several candidates per position, level by level."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.small.chain import SmallDrafter, only_where
from specdec.drafter import Draw
from specdec.model import Model, Output
from specdec.proposal import Kind, Proposal
from specdec.sampling import Sampling
from specdec.sequences import Sequences
from specdec.tree import Tree

SIBLINGS = {
    "with_replacement": Kind.WITH_REPLACEMENT,
    "without_replacement": Kind.WITHOUT_REPLACEMENT,
    "top_k": Kind.DETERMINISTIC,
}


class SmallTreeDrafter(SmallDrafter):
    """Every node at depth i gets `branching[i]` children, drawn from the model's law after it.

    Each level is one forward over the root and all nodes so far. The model keeps no drafted keys and values:
    what was accepted is read again with the next root, in the forward that is needed anyway.

    Arguments:
        model, vocab_size, eos_token_ids: as in `SmallDrafter`.
        branching: children per node, by depth.
        siblings: `with_replacement`, `without_replacement`, or `top_k` (the most probable tokens, nothing
            drawn).
    """

    def __init__(
        self,
        model: Model,
        vocab_size: int,
        branching: Sequence[int],
        siblings: str = "without_replacement",
        eos_token_ids: tuple[int, ...] = (),
    ):
        super().__init__(model, vocab_size, len(branching), eos_token_ids=eos_token_ids)
        self.kind, self.branching = SIBLINGS[siblings], [min(b, vocab_size) for b in branching]
        self.is_chain = max(self.branching) == 1
        self.levels = levels_of(self.branching)
        self.max_nodes = self.levels[-1][-1] + 1

    def begin(self, sequences: Sequences, output: Output, sampling: Sampling, capacity: int) -> None:
        ranked = self.kind is Kind.DETERMINISTIC
        super().begin(sequences, output, sampling.ranking if ranked else sampling, capacity)
        device = sequences.ids.device
        parents = parents_of(self.branching)
        self.trees = [
            Tree(torch.tensor(parents[: level[-1] + 1], dtype=torch.int64, device=device))
            for level in self.levels
        ]

    def propose(self, sequences: Sequences, draw: Draw, depth: int) -> Proposal:
        depth = min(depth, len(self.branching))
        if depth == 0:
            return Proposal.empty(sequences.batch, sequences.ids.device)
        kind = Kind.COUPLED if draw.coupled and self.kind is not Kind.DETERMINISTIC else self.kind
        tokens, valid = sequences.tokens[:, :0], sequences.tokens[:, :0].bool()  # [B, nodes so far]
        q = self._laws_after_root(sequences)  # [B, 1, V] after each node of the level above
        laws: list[Tensor] = []
        for level, nodes in enumerate(self.levels[:depth]):
            if level:
                q = self._laws(sequences, self.trees[level - 1], tokens)[:, self._slots(level - 1)]
            alive = (
                valid[:, self.levels[level - 1]]
                if level
                else torch.ones_like(sequences.root, dtype=torch.bool)
            )
            x, exists = self._children(q, alive, kind, draw, level, nodes[0])
            tokens, valid = torch.cat([tokens, x], 1), torch.cat([valid, exists], 1)
            laws.append(q.repeat_interleave(self.branching[level], 1))
        q = None if kind is Kind.DETERMINISTIC else torch.cat(laws, 1)
        return Proposal(tokens, self.trees[depth - 1], kind, q, valid)

    def commit(self, sequences: Sequences, path: Tensor, accepted: Tensor, output: Output) -> None:
        self.unread = [n + len(block) for n, block in zip(self.unread, sequences.last_block, strict=True)]

    def _children(
        self, q: Tensor, alive: Tensor, kind: Kind, draw: Draw, level: int, first: int
    ) -> tuple[Tensor, Tensor]:
        """The children of one level's nodes, whose laws are q `[B, P, V]`; `alive` `[B, P]` of them exist.

        Returns:
            tokens `[B, P·b]` and which of them exist `[B, P·b]`: distinct siblings run out with the support
            of q.
        """
        b = self.branching[level]
        if kind is Kind.DETERMINISTIC:
            top = q.topk(b, -1)
            return top.indices.flatten(1), ((top.values > 0) & alive[..., None]).flatten(1)
        tokens, exists = [], []
        for parent in range(q.shape[1]):
            law, going = q[:, parent], alive[:, parent]
            for sibling in range(b):
                x = draw(only_where(going, law), depth=level + 1, node=first + parent * b + sibling)
                tokens.append(x)
                exists.append(going)
                if kind is not Kind.WITH_REPLACEMENT and sibling + 1 < b:
                    law = law.scatter(1, x[:, None], 0.0)
                    mass = law.sum(1, keepdim=True)
                    going, law = going & (mass[:, 0] > 0), law / torch.where(mass > 0, mass, 1.0)
        return torch.stack(tokens, 1), torch.stack(exists, 1)

    def _laws_after_root(self, sequences: Sequences) -> Tensor:
        """q `[B, 1, V]` after the last committed token, which stays the root: the cache ends before it."""
        q = self._law(self._catch_up(sequences), sequences, sequences.tokens[:, :0])[:, None]
        self.cache.lengths = sequences.lengths - 1
        self.cache.settle(sequences.longest - 1)
        self.unread = [1] * sequences.batch
        return q

    def _laws(self, sequences: Sequences, tree: Tree, tokens: Tensor) -> Tensor:
        """q `[B, N+1, V]` after the root and every node so far."""
        read = self.vocabulary.to_drafter(torch.cat([sequences.root, tokens], 1))
        logits = self.vocabulary.to_target(self.model.forward(read, tree, self.cache).logits)
        prefix = sequences.prefix(tree, tokens) if self.sampling.needs_prefix else None
        return self._processed(logits, prefix)

    def _slots(self, level: int) -> slice:
        """Where a level's nodes stand in a forward, the root being first."""
        return slice(self.levels[level][0] + 1, self.levels[level][-1] + 2)


def levels_of(branching: Sequence[int]) -> list[range]:
    """The nodes of each depth, numbered breadth first."""
    levels, start, width = [], 0, 1
    for b in branching:
        width *= b
        levels.append(range(start, start + width))
        start += width
    return levels


def parents_of(branching: Sequence[int]) -> list[int]:
    """Each node's parent, −1 being the root; siblings stand next to each other."""
    parents: list[int] = []
    above: Sequence[int] = [-1]
    for b, level in zip(branching, levels_of(branching), strict=True):
        parents += [parent for parent in above for _ in range(b)]
        above = level
    return parents
