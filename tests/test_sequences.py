"""Ragged token buffers against Python lists, and every node's prefix against a walk up the tree."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import path_to

from specdec.sequences import Sequences
from specdec.tree import Tree


@st.composite
def states(draw):
    batch = draw(st.integers(1, 4))
    prompts = [draw(st.lists(st.integers(0, 9), min_size=1, max_size=6)) for _ in range(batch)]
    room = [draw(st.integers(1, 12)) for _ in range(batch)]
    return prompts, room


def start(prompts, room) -> Sequences:
    return Sequences(prompts, torch.arange(len(prompts)) + 70, torch.tensor(room))


@given(states(), st.data())
@settings(max_examples=60, deadline=None)
def test_append_and_select(state, data):
    prompts, room = state
    sequences, texts, left = start(*state), [list(p) for p in prompts], list(room)
    ids = sequences.ids.tolist()
    for _ in range(4):
        batch = len(texts)
        width = data.draw(st.integers(1, 4))
        block = data.draw(
            st.lists(
                st.lists(st.integers(0, 9), min_size=width, max_size=width), min_size=batch, max_size=batch
            )
        )
        count = [data.draw(st.integers(0, min(width, left[b]))) for b in range(batch)]
        sequences.append(torch.tensor(block), torch.tensor(count))
        blocks = [block[b][: count[b]] for b in range(batch)]
        texts = [t + new for t, new in zip(texts, blocks, strict=True)]
        left = [n - c for n, c in zip(left, count, strict=True)]
        sequences.settle(blocks, max(map(len, texts)))
        keep = sorted(data.draw(st.sets(st.integers(0, batch - 1), min_size=1)))
        sequences.select(torch.tensor(keep))
        texts, left, ids = ([x[i] for i in keep] for x in (texts, left, ids))
        assert sequences.batch == len(texts) and sequences.ids.tolist() == ids
        assert sequences.room.tolist() == left and sequences.lengths.tolist() == [len(t) for t in texts]
        assert sequences.root.flatten().tolist() == [t[-1] for t in texts]
        for b, text in enumerate(texts):
            assert sequences.tokens[b, : len(text)].tolist() == text
            assert sequences.prompts[b] == text[: int(sequences.prompt_length[b])]
        sequences.longest = max(map(len, texts))


@given(states(), st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_prefix_of_every_node(state, shared, data):
    prompts, room = state
    sequences, batch = start(prompts, room), len(prompts)
    size = data.draw(st.integers(0, 6))
    shapes = [[data.draw(st.integers(-1, n - 1)) for n in range(size)] for _ in range(1 if shared else batch)]
    drafted = torch.tensor(
        [[data.draw(st.integers(0, 9)) for _ in range(size)] for _ in range(batch)], dtype=torch.int64
    ).view(batch, size)
    tree = Tree(torch.tensor(shapes[0] if shared else shapes, dtype=torch.int64))
    prefix = sequences.prefix(tree, drafted)
    for b, prompt in enumerate(prompts):
        shape = shapes[0] if shared else shapes[b]
        for node in range(-1, size):
            expected = prompt + [int(drafted[b, n]) for n in path_to(shape, node)]
            row = prefix.tokens[b, node + 1].tolist()
            assert row == [-1] * (len(row) - len(expected)) + expected
            assert int(prefix.length[b, node + 1]) == len(expected)
            assert int(prefix.generated[b, node + 1]) == len(expected) - len(prompt)
    last = prefix.last()
    assert torch.equal(last.tokens[:, 0], prefix.tokens[:, -1]) and last.length.shape == (batch, 1)


def test_the_buffer_holds_all_the_room_and_keeps_one_column_spare():
    """A row that ends early writes nothing where another row's tokens lie."""
    sequences = start([[1, 2, 3], [4]], [2, 4])
    for _ in range(2):
        sequences.append(torch.tensor([[5, 6], [7, 8]]), torch.tensor([1, 2]))
    assert sequences.tokens[0, :5].tolist() == [1, 2, 3, 5, 5]
    assert sequences.tokens[1, :5].tolist() == [4, 7, 8, 7, 8]
    assert sequences.room.tolist() == [0, 0]
