"""The drafter's memory: true entries of what is committed, and behind them those of a draft as it grows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from drafters.eagle.model import EagleModel
from specdec.cache import SlotCache, emptied
from specdec.compiled import reading
from specdec.distribution import Prefix
from specdec.graphs import WIDEST, Record, pages
from specdec.sequences import Sequences
from specdec.tree import Tree

CHUNK = 512  # prompt entries per forward
Forward = Callable[[EagleModel, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def eager(
    model: EagleModel, tokens: Tensor, states: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
) -> Tensor:
    """The network's forward over what the cache of this forward holds (`specdec.compiled.reading`)."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.specdec.attend(q, k, v, mask, model.slot_layers[layer], None).flatten(2)

    return model(tokens, states, (cos, sin), attend).contiguous()


class Memory:
    """Keys and values of the entries of each row; entry i lies in slot i and at position i.

    Arguments:
        model: the attached network.
        batch: B.
        capacity: slots per row.
        run: the network's forward, as it is or compiled.
        record: how forwards are recorded, if they are to be. old: a memory that nobody needs.
    """

    def __init__(
        self,
        model: EagleModel,
        batch: int,
        capacity: int,
        device: torch.device,
        run: Forward = eager,
        record: Record | None = None,
        old: Memory | None = None,
    ):
        self.model, self.run = model, run
        entered = model.fc if model.architecture.generation == 1 else nn.Identity()
        self._bytes = sum(p.nbytes for part in (model.layers, entered) for p in part.parameters())
        again = emptied(old and old.cache, batch, capacity, record)
        if again is None:
            again = SlotCache(model.architecture.layers, batch, capacity, device, record=record)
        self.cache = again
        self.cos, self.sin = model.rope(capacity)
        self.slots = torch.arange(self.cache.capacity, device=device)

    @torch.inference_mode()
    def read(self, tokens: Tensor, features: Sequence[Tensor], count: Tensor, longest: int) -> Tensor:
        """Append true entries.

        Arguments:
            tokens: `[B, T]` int64. features: `[B, T, H_t]` each. count: `[B]`, how many of T each row has.
            longest: entries of the longest row afterwards.

        Returns:
            `[B, 1, H]`: each row's state after its last entry.
        """
        base, cache, last = self.cache.lengths, self.cache, count[:, None, None] - 1
        prompt = cache.longest == 0  # every length would be a recording of its own
        state = None
        for start in range(0, tokens.shape[1], CHUNK):
            piece = slice(start, start + CHUNK)
            states = self.model.states([f[:, piece] for f in features])
            positions = cache.lengths[:, None] + self.slots[: states.shape[1]]  # [B, T]
            used = cache.longest + states.shape[1]
            hidden = torch.zeros(*positions.shape, used, dtype=states.dtype, device=states.device)
            hidden.masked_fill_(self.slots[:used] > positions[..., None], torch.finfo(states.dtype).min)
            after = self.forward(tokens[:, piece], states, positions, hidden[:, None], replay=not prompt)
            at = (last - start).clamp(0, after.shape[1] - 1).expand(-1, 1, after.shape[2])
            found = after.gather(1, at)
            state = found if state is None else torch.where(last >= start, found, state)
        cache.lengths = base + count
        cache.settle(longest)
        assert state is not None
        return state

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, mask: Tensor, replay: bool = True
    ) -> Tensor:
        """Write entries `[B, T]` behind the last ones; `[B, T, H]` the states after them.

        Arguments:
            tokens, states: as in `EagleModel`. positions: `[B, T]`. mask: `[B, 1, T, S]` additive.
            replay: as a recorded forward, where forwards are recorded.
        """
        cache, count = self.cache, tokens.shape[1]
        self.model.bytes_read += self._bytes
        inputs = tokens, states, self.cos[positions], self.sin[positions], mask
        if replay and cache.graphs is not None and cache.blocks and count <= WIDEST:
            after = self._replayed(*inputs)
        else:
            after = self._forward(*inputs)
        cache.lengths = cache.lengths + count
        cache.longest += count
        return after

    def _forward(self, tokens: Tensor, *inputs: Tensor) -> Tensor:
        self.cache.begin(tokens.shape[1], inputs[-1].shape[-1])
        with reading(self.cache):
            return self.run(self.model, tokens, *inputs)

    def _replayed(self, *inputs: Tensor) -> Tensor:
        """`_forward`, recorded once for every shape; the mask is widened to whole pages."""
        *others, mask = inputs
        hidden = torch.finfo(mask.dtype).min
        mask = torch.nn.functional.pad(mask, (0, pages(mask.shape[-1]) - mask.shape[-1]), value=hidden)

        memory = weakref.proxy(self)  # its cache owns the graphs, so no circle

        def forward(lengths: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            with memory.cache.standing_at(lengths):
                return (memory._forward(*inputs),)

        assert self.cache.graphs is not None
        return self.cache.graphs.run(self.run, forward, self.cache.lengths, *others, mask)[0]


def try_out(model: EagleModel, run: Forward, batch: int) -> None:
    """Forwards of several tokens and of one, no two sizes alike, so that each compiles for all sizes."""
    weight, size = model.fc.weight, model.architecture.layer.hidden_size
    for count in (3, 1):
        memory = Memory(model, batch, 12, weight.device, run)
        memory.cache.lengths, memory.cache.longest = memory.cache.lengths + 4, 4
        states = torch.zeros(batch, count, size, dtype=weight.dtype, device=weight.device)
        tokens = torch.zeros(batch, count, dtype=torch.int64, device=weight.device)
        positions = memory.cache.lengths[:, None] + memory.slots[:count]
        mask = torch.zeros(batch, 1, count, 4 + count, dtype=weight.dtype, device=weight.device)
        memory.forward(tokens, states, positions, mask)


class Growth:
    """One draft, level by level; a level's nodes see the true entries, their ancestors and themselves.

    Arguments:
        memory: with true entries up to the root's.
        root: `[B, 1, H]` the state after the last of them.
        sequences: what the draft hangs off.
        width: drafted entries there may be.
    """

    def __init__(self, memory: Memory, root: Tensor, sequences: Sequences, width: int):
        self.memory, self.sequences, self.states = memory, sequences, root
        cache = memory.cache
        self.base, self.longest = cache.lengths, cache.longest
        self.depth = self.size = 0
        self.tokens = sequences.tokens[:, :0]  # [B, S] of the entries drafted so far
        self.trail: Tensor | None = None  # [B, P, depth] the drafted entries each node sees
        drafted = memory.slots[: self.longest + width] >= self.base[:, None]
        self.committed = torch.zeros(drafted.shape, dtype=root.dtype, device=root.device)
        self.committed = self.committed.masked_fill_(drafted, torch.finfo(root.dtype).min)[:, None]
        self._committed_tokens: Prefix | None = None

    @property
    def logits(self) -> Tensor:
        """`[B, P, V_d]` after each node of the last level (at first: after the root)."""
        return self.memory.model.logits(self.states)

    @torch.inference_mode()
    def grow(self, tokens: Tensor, parent: Tensor) -> None:
        """Read a level: `tokens` `[B, P]`, whose parents stand at `parent` `[B, P]` in the level before."""
        batch, count = tokens.shape
        index = parent[..., None]
        own = (self.memory.slots[:count] + self.size)[None, :, None].expand(batch, -1, 1)
        if self.trail is None:
            self.trail = own
        else:
            above = self.trail.gather(1, index.expand(-1, -1, self.depth))
            self.trail = torch.cat([above, own], 2)
        states = self.states.gather(1, index.expand(-1, -1, self.states.shape[2]))
        positions = (self.base + self.depth)[:, None].expand(-1, count)
        used = self.longest + self.size + count
        mask = self.committed[:, :, :used].repeat(1, count, 1)
        mask.scatter_(2, self.base[:, None, None] + self.trail, 0.0)
        self.states = self.memory.forward(tokens, states, positions, mask[:, None])
        self.tokens = torch.cat([self.tokens, tokens], 1)
        self.depth, self.size = self.depth + 1, self.size + count

    def prefix(self) -> Prefix:
        """What stands before the children of each node of the last level."""
        if self._committed_tokens is None:
            nothing = self.sequences.tokens[:, :0]
            self._committed_tokens = self.sequences.prefix(Tree.chain(0, nothing.device), nothing)
        root = self._committed_tokens
        if self.trail is None:
            return root
        batch, count, depth = self.trail.shape
        path = self.tokens.gather(1, self.trail.flatten(1)).view(batch, count, depth)
        tokens = torch.cat([root.tokens.expand(-1, count, -1), path], 2)
        return Prefix(tokens, root.length.expand(-1, count) + depth, root.prompt_length)

    def close(self) -> None:
        """Forget the drafted entries: the next forward overwrites them."""
        self.memory.cache.lengths = self.base
        self.memory.cache.settle(self.longest)
