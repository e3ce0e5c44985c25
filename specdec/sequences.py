"""The sequences being decoded: their tokens, lengths and identities, ragged from the first line."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.distribution import Prefix
from specdec.tree import Tree


class Sequences:
    """B active sequences.

    Arguments:
        prompts: token ids of each prompt.
        ids: `[B]` int64, each sequence's identity in the random source.
        room: `[B]` int64, how many new tokens each may still get.
        margin: slots beyond the last token that the buffer keeps free.
    """

    def __init__(self, prompts: list[list[int]], ids: Tensor, room: Tensor, margin: int = 1):
        device = ids.device
        lengths = [len(p) for p in prompts]
        self.ids, self.room, self.prompts = ids, room, prompts
        self.lengths = torch.tensor(lengths, device=device)  # [B] committed tokens
        self.prompt_length = self.lengths.clone()
        self.longest = max(lengths)
        width = self.longest + int(room.max()) + margin
        padded = torch.tensor([p + [0] * (self.longest - len(p)) for p in prompts], device=device)
        self.tokens = torch.nn.functional.pad(padded, (0, width - self.longest))  # [B, capacity]
        self.last_block: list[list[int]] = []  # what was committed last, on the host

    @property
    def batch(self) -> int:
        return len(self.ids)

    @property
    def root(self) -> Tensor:
        """`[B, 1]`: the last committed token, which the model has not read yet."""
        return self.tokens.gather(1, self.lengths[:, None] - 1)

    def append(self, block: Tensor, count: Tensor) -> None:
        """Commit the first `count[b]` of `block` `[B, D]`."""
        steps = torch.arange(block.shape[1], device=block.device)
        at = self.lengths[:, None] + steps
        kept = steps < count[:, None]
        at = torch.where(kept, at, self.tokens.shape[1] - 1)  # the last column is spare
        self.tokens.scatter_(1, at, torch.where(kept, block, 0))
        self.lengths = self.lengths + count
        self.room = self.room - count

    def settle(self, blocks: list[list[int]], longest: int) -> None:
        """Tell the host what was committed last and how long the longest row is."""
        self.last_block, self.longest = blocks, longest

    def select(self, rows: Tensor) -> None:
        """Keep only some rows (int64 indices)."""
        self.ids, self.room, self.lengths, self.prompt_length, self.tokens = (
            x[rows] for x in (self.ids, self.room, self.lengths, self.prompt_length, self.tokens)
        )
        keep = rows.tolist()
        self.prompts = [self.prompts[i] for i in keep]
        self.last_block = [self.last_block[i] for i in keep]

    def prefix(self, tree: Tree, drafted: Tensor) -> Prefix:
        """The prefix of the root and of every node, right-aligned.

        Arguments:
            tree: N nodes.
            drafted: `[B, N]` their tokens.
        """
        length = self.lengths[:, None] + tree.depth  # [B, N+1]
        width = self.longest + tree.max_depth
        at = (
            torch.arange(width, device=length.device) - (width - length)[..., None]
        )  # [B, N+1, W] absolute position
        committed = (
            self.tokens[:, None]
            .expand(-1, length.shape[1], -1)
            .gather(2, at.clamp(0, self.tokens.shape[1] - 1))
        )
        tokens = torch.where(at >= 0, committed, -1)
        if tree.size:
            level = at - self.lengths[:, None, None]  # 0 for depth 1
            paths = tree.paths.expand(self.batch, -1, -1)
            node = paths.gather(2, level.clamp(0, tree.max_depth - 1))  # [B, N+1, W]
            above = drafted[:, None].expand(-1, length.shape[1], -1).gather(2, node.clamp(min=0))
            tokens = torch.where(level >= 0, above, tokens)
        return Prefix(tokens, length, self.prompt_length)
