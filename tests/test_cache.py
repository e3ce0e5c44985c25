"""Slots against Python lists: whatever is written, kept, moved and selected."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import path_to
from tape import on_tape

import drafters
from specdec import verify
from specdec.cache import SlotCache
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.tree import Tree

CAPACITY, LAYERS = 40, 2


def write(cache: SlotCache, values: torch.Tensor) -> list[torch.Tensor]:
    """Forward `[B, T]` distinguishable tokens; what layer l then sees as keys `[B, S]`."""
    cache.begin(values.shape[1])
    seen = []
    for index, layer in enumerate(cache.layers):
        state = (values + 1000 * index)[:, None, :, None].double()  # [B, 1, T, 1]
        keys, vals = layer.update(state, -state)
        assert torch.equal(keys, -vals)
        seen.append(keys[:, 0, :, 0])
    return seen


@st.composite
def runs(draw):
    """(batch, steps): each step a tree per row, the accepted node per row and perhaps the rows that go on."""
    batch = draw(st.integers(1, 4))
    steps, active = [], batch
    for _ in range(draw(st.integers(1, 6))):
        size = draw(st.integers(0, 5))
        shared = draw(st.booleans())
        shapes = [[draw(st.integers(-1, n - 1)) for n in range(size)] for _ in range(1 if shared else active)]
        nodes = [draw(st.integers(-1, size - 1)) for _ in range(active)]
        keep = sorted(draw(st.sets(st.integers(0, active - 1), min_size=1))) if draw(st.booleans()) else None
        steps.append((shapes, shared, nodes, keep))
        active = len(keep) if keep else active
    return batch, steps


@given(runs(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_any_run_keeps_exactly_the_accepted_paths(run, alike):
    batch, steps = run
    cache = SlotCache(LAYERS, batch, CAPACITY, torch.device("cpu"), alike)
    kept: list[list[int]] = [[] for _ in range(batch)]
    fresh = iter(range(10_000))
    for shapes, shared, nodes, keep in steps:
        size, rows = len(shapes[0]), len(kept)
        tokens = torch.tensor([[next(fresh) for _ in range(size + 1)] for _ in range(rows)])
        seen = write(cache, tokens)
        for b in range(rows):
            expected = torch.tensor(kept[b] + tokens[b].tolist(), dtype=torch.float64)
            for index in range(LAYERS):
                assert torch.equal(seen[index][b, : len(expected)], expected + 1000 * index)
        tree = Tree(torch.tensor(shapes[0] if shared else shapes, dtype=torch.int64))
        row = torch.zeros(rows, dtype=torch.int64) if shared else torch.arange(rows)
        index = torch.tensor(nodes) + 1
        cache.advance(tree, tree.paths[row, index], tree.depth[row, index])
        for b, node in enumerate(nodes):
            path = path_to(shapes[0] if shared else shapes[b], node)
            kept[b] += [int(tokens[b, n + 1]) for n in [-1, *path]]
        if keep:
            cache.select(torch.tensor(keep))
            kept = [kept[b] for b in keep]
        cache.settle(max(map(len, kept)))
        assert cache.batch == len(kept) and cache.lengths.tolist() == [len(row) for row in kept]
    for layer in cache.layers:
        for b, row in enumerate(kept):
            found = layer.keys[b, 0, : len(row), 0] % 1000
            assert found.tolist() == [x % 1000 for x in row]


def test_a_full_cache_says_so():
    cache = SlotCache(1, 1, 3, torch.device("cpu"))
    cache.begin(3)
    with pytest.raises(RuntimeError, match="4 tokens after 0 do not fit into 3 slots"):
        cache.begin(4)


def test_a_forward_sees_no_more_slots_than_are_in_use():
    cache = SlotCache(1, 2, 100, torch.device("cpu"))
    assert write(cache, torch.tensor([[1, 2], [3, 4]]))[0].shape == (2, 2)
    cache.advance(Tree.chain(1), torch.tensor([[0], [-1]]), torch.tensor([1, 0]))
    cache.settle(2)
    assert write(cache, torch.tensor([[5], [6]]))[0].shape == (2, 3)
    cache.begin(1, used=50)
    assert cache.layers[0].get_mask_sizes(1) == (50, 0)


def test_rolling_back_is_moving_a_number():
    """Nothing is cropped: rejected slots are overwritten by the next forward."""
    cache = SlotCache(1, 1, 8, torch.device("cpu"))
    write(cache, torch.tensor([[1, 2, 3]]))
    cache.advance(Tree.chain(2), torch.tensor([[-1, -1]]), torch.tensor([0]))
    cache.settle(1)
    assert write(cache, torch.tensor([[9]]))[0].tolist() == [[1.0, 9.0]]


@pytest.mark.parametrize("record", [None, on_tape])
def test_a_dropped_cache_is_freed_at_once(tiny64, record):
    """Keys and values are large: they may not wait for the collector of circular references."""
    gc.collect()
    gc.disable()
    try:
        cache = tiny64.new_cache(2, 16, record)
        tiny64.prefill(torch.ones(2, 3, dtype=torch.int64), torch.tensor([3, 3]), cache)
        tiny64.forward(torch.ones(2, 2, dtype=torch.int64), Tree.chain(1), cache)
        buffers = [weakref.ref(buffer) for block in cache.blocks for buffer in block.whole]
        assert all(ref() is not None for ref in buffers)
        del cache
        assert all(ref() is None for ref in buffers)
    finally:
        gc.enable()


@pytest.mark.parametrize("drafter", ["none", "small", "eagle"])
def test_a_finished_batch_leaves_no_cache_behind(tiny64, drafter, monkeypatch):
    """Nor does anything of the loop hold one: only a drafter's own lives until its next batch."""
    caches, init = [], SlotCache.__init__

    def watched(self, *args, **kwargs):
        init(self, *args, **kwargs)
        caches.append(weakref.ref(self))

    monkeypatch.setattr(SlotCache, "__init__", watched)
    options = {"none": {}, "small": {"layers": 1}, "eagle": {"weights": "random"}}[drafter]
    built = drafters.build({"name": drafter, **options}, tiny64)
    rule = verify.build({"name": "token" if built.is_chain else "recursive"})
    engine = Engine(tiny64, built, rule, config=EngineConfig(max_new_tokens=6, ignore_eos=True))
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            engine.generate([[1, 2, 3], [4, 5]])
        assert len(caches) == 4 * (1 + (drafter != "none"))
        assert sum(ref() is not None for ref in caches) == (drafter != "none")
    finally:
        gc.enable()
