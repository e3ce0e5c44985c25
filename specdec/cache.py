"""A key/value cache with slots: every row has its own length, and rolling back is moving a number."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdec.graphs import Graphs, Record, pages
from specdec.tree import Tree


class SlotCache(Cache):
    """Per layer two buffers `[B, H_kv, capacity, D]`; row b's committed tokens lie in slots 0 … lengths[b]−1.

    A forward of T tokens writes row b's keys and values at slots lengths[b] … lengths[b]+T−1 and leaves
    the length alone. `advance` then keeps a path; whatever is not kept is overwritten by the next forward.

    Arguments:
        layers: number of layers.
        batch: B.
        capacity: slots per row.
        alike: whether all layers' keys and values have one shape and device; then they are moved together.
        record: how forwards over these buffers are recorded, if they are to be.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        device: torch.device,
        alike: bool = True,
        record: Record | None = None,
    ):
        self.slot_layers = [_SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.slot_layers))
        self.graphs = Graphs(record, batch) if record else None
        self.capacity, self.alike = pages(capacity) if record else capacity, alike
        self.blocks: list[_Block] = []
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.longest = 0  # max(lengths), known on the host
        self.aligned = True  # all lengths equal, so that a slice can be written instead of a scatter
        self.slots: Tensor | slice = slice(0, 0)  # where the forward that has begun writes
        self.used = 0  # and how many slots it looks at
        self.rows = torch.arange(batch, device=device)[:, None]

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def serves(self, batch: int, capacity: int, record: Record | None) -> bool:
        """Whether it can take another batch, recorded forwards and all."""
        graphs = self.graphs
        return (
            graphs is not None
            and graphs.record is record
            and batch <= graphs.most
            and capacity <= self.capacity
        )

    def restart(self, batch: int) -> None:
        """Empty it for `batch` rows; the buffers stay where they are."""
        for block in self.blocks:
            block.restart(batch)
        self.rows = torch.arange(batch, device=self.lengths.device)[:, None]
        self.lengths, self.longest, self.aligned = torch.zeros_like(self.rows[:, 0]), 0, True

    @contextmanager
    def standing_at(self, lengths: Tensor) -> Iterator[None]:
        """For recording: forwards in this block find `lengths` `[R]`, of R rows of the buffers."""
        was = self.lengths, self.rows, self.aligned
        self.rows = torch.arange(len(lengths), device=lengths.device)[:, None]
        self.lengths, self.aligned = lengths, False
        for block in self.blocks:
            block.show(len(lengths))
        try:
            yield
        finally:
            self.lengths, self.rows, self.aligned = was
            for block in self.blocks:
                block.show(self.batch)

    def begin(self, count: int, used: int | None = None) -> None:
        """Prepare a forward of `count` tokens per row over the first `used` slots (else the fewest)."""
        if self.longest + count > self.capacity:
            raise RuntimeError(f"{count} tokens after {self.longest} do not fit into {self.capacity} slots")
        self.used = used or self.longest + count
        if self.aligned:
            self.slots = slice(self.longest, self.longest + count)
        else:
            self.slots = self.lengths[:, None] + torch.arange(count, device=self.lengths.device)

    @torch.inference_mode()
    def advance(self, tree: Tree, path: Tensor, accepted: Tensor) -> None:
        """Keep the root and the accepted `path` `[B, D]` of the last forward; `settle` must follow.

        Arguments:
            tree: the shape that was forwarded (the root at the first slot, node n at slot n+1).
            path: accepted nodes from depth 1 downwards, −1 padded.
            accepted: `[B]` how many.
        """
        if not tree.is_chain and path.shape[1]:
            first = self.lengths[:, None] + 1
            goal = first + torch.arange(path.shape[1], device=path.device)  # [B, D]
            source = torch.where(path >= 0, first + path, goal)  # what is not accepted stays where it is
            # on a GPU moving nothing is cheaper than waiting to hear that there is nothing to move
            if source.device.type != "cpu" or not torch.equal(source, goal):
                for block in self.blocks:
                    block.move(self.rows, source, goal)
        self.lengths = self.lengths + 1 + accepted

    def settle(self, longest: int) -> None:
        """Tell the cache, once the host knows it, how long its longest row is."""
        self.longest, self.aligned = longest, self.batch == 1

    @torch.inference_mode()
    def select(self, rows: Tensor) -> None:
        """Keep only some rows (int64 indices); those that stay where they are, are not copied."""
        goal = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        for block in self.blocks:
            block.select(len(rows), rows[goal], goal)
        self.lengths, self.rows = self.lengths[rows], self.rows[: len(rows)]

    def make_room(self, layer: _SlotLayer, keys: Tensor, values: Tensor) -> None:
        """Buffers for a layer, whose first keys and values these are: its own, or those of all layers."""
        layers = self.slot_layers if self.alike else [layer]
        self.blocks.append(_Block(layers, keys, values, self.capacity))


def emptied(old: SlotCache | None, batch: int, capacity: int, record: Record | None) -> SlotCache | None:
    """`old`, which nobody needs, emptied for another batch, if its recorded forwards can serve on."""
    if old is None or old.graphs is None:
        return None
    if not old.serves(batch, capacity, record):
        old.graphs.forget()
        return None
    old.restart(batch)
    return old


class _Block:
    """Keys and values of some layers, each `[L, B, H_kv, capacity, D]`."""

    def __init__(self, layers: list[_SlotLayer], keys: Tensor, values: Tensor, capacity: int):
        self.layers = layers
        self.whole = [x.new_zeros(len(layers), *x.shape[:2], capacity, x.shape[3]) for x in (keys, values)]
        self.show(len(keys))

    def show(self, rows: int) -> None:
        """Hand the first `rows` rows to the layers."""
        self.buffers = [buffer[:, :rows] for buffer in self.whole]
        for layer, keys, values in zip(self.layers, *self.buffers, strict=True):
            layer.keys, layer.values, layer.is_initialized = keys, values, True

    def restart(self, rows: int) -> None:
        """`rows` empty rows."""
        for buffer in self.whole:
            buffer.zero_()
        self.show(rows)

    def move(self, rows: Tensor, source: Tensor, goal: Tensor) -> None:
        """Copy slots `source` to `goal`, both `[B, D]`."""
        for buffer in self.buffers:
            at, here, there = (x.to(buffer.device) for x in (rows, source, goal))
            buffer[:, at, :, there] = buffer[:, at, :, here]

    def select(self, count: int, source: Tensor, goal: Tensor) -> None:
        """Copy rows `source` to `goal`, then keep the first `count`."""
        for buffer in self.buffers:
            buffer[:, goal.to(buffer.device)] = buffer[:, source.to(buffer.device)]
        self.show(count)


class _SlotLayer(CacheLayerMixin):
    """One layer's buffers, allocated at the first write, when their shape and dtype are known."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: SlotCache):
        super().__init__()
        self._cache = weakref.proxy(cache)  # no circle: buffers are freed as soon as the cache is dropped

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._cache.make_room(self, key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write `[B, H_kv, T, D]` at each row's next slots; return the slots in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots, used = self._cache.slots, self._cache.used
        if isinstance(slots, slice):
            self.keys[:, :, slots] = key_states
            self.values[:, :, slots] = value_states
        else:
            rows, slots = self._cache.rows.to(self.keys.device), slots.to(self.keys.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :used], self.values[:, :, :used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.used, 0

    def get_seq_length(self) -> int:
        return self._cache.longest

    def get_max_length(self) -> int:
        return self._cache.capacity
