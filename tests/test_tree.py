"""Trees against walks along parents."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import path_to

from specdec.tree import Tree


@st.composite
def parents(draw, max_size: int = 24) -> list[int]:
    size = draw(st.integers(0, max_size))
    return [draw(st.integers(-1, n - 1)) for n in range(size)]


def check(tree: Tree, row: int, shape: list[int]) -> None:
    paths = [[], *(path_to(shape, n) for n in range(len(shape)))]
    depth = [len(path) for path in paths]
    assert tree.depth[row].tolist() == depth
    width = tree.max_depth
    assert tree.paths[row].tolist() == [path + [-1] * (width - len(path)) for path in paths]
    for i, path in enumerate(paths):
        seen = {0, *(n + 1 for n in path)}
        assert tree.ancestors[row, i].nonzero()[:, 0].tolist() == sorted(seen)


@given(parents())
@settings(max_examples=60, deadline=None)
def test_one_shape_for_all_rows(shape):
    tree = Tree(torch.tensor(shape, dtype=torch.int64))
    assert tree.size == len(shape)
    assert tree.max_depth == max((len(path_to(shape, n)) for n in range(len(shape))), default=0)
    check(tree, 0, shape)
    assert tree.is_chain == (shape == list(range(-1, len(shape) - 1)))


@given(st.integers(1, 4), st.integers(1, 16), st.randoms())
@settings(max_examples=40, deadline=None)
def test_a_shape_per_row(batch, size, random):
    shapes = [[random.randint(-1, n - 1) for n in range(size)] for _ in range(batch)]
    tree = Tree(torch.tensor(shapes))
    for row, shape in enumerate(shapes):
        check(tree, row, shape)
    rows = torch.tensor([len(shapes) - 1, 0])
    check(tree.rows(rows), 1, shapes[0])


@pytest.mark.parametrize("length", [0, 1, 2, 7, 64])
def test_chain(length):
    tree = Tree.chain(length)
    assert tree.is_chain and tree.max_depth == length
    check(tree, 0, list(range(-1, length - 1)))


def test_rows_of_a_shared_shape_are_itself():
    tree = Tree.chain(3)
    assert tree.rows(torch.tensor([1, 0])) is tree


def test_medusa_paths():
    """Nodes ordered by depth, then rank; the order in which paths are given does not matter."""
    tree = Tree.from_paths([[0, 1], [0], [1], [0, 0], [0, 0, 2]])
    assert tree.parents.tolist() == [-1, -1, 0, 0, 2]


def test_from_paths_of_a_random_tree():
    """Ranks of children in order give the tree back."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        shape = [int(torch.randint(-1, n, (1,), generator=generator)) for n in range(12)]
        rank = [shape[:n].count(shape[n]) for n in range(12)]
        paths = [tuple(rank[m] for m in path_to(shape, n)) for n in range(12)]
        tree = Tree.from_paths(paths)
        order = sorted(range(12), key=lambda n: (len(paths[n]), paths[n]))
        assert tree.parents.tolist() == [order.index(shape[n]) if shape[n] >= 0 else -1 for n in order]


def test_a_path_without_its_parent_is_refused():
    with pytest.raises(ValueError, match=r"\[0, 1\] has no parent \[0\]"):
        Tree.from_paths([[1], [0, 1]])


def test_an_empty_path_is_refused():
    with pytest.raises(ValueError, match="empty"):
        Tree.from_paths([[], [0]])


def test_a_path_given_twice_is_refused():
    with pytest.raises(ValueError, match=r"\[0\] is given twice"):
        Tree.from_paths([[0], [0], [0, 1]])


def test_the_depths_of_a_chain_are_counted_not_multiplied():
    """A prompt read in pieces of thousands of tokens is a chain, and ancestors are a matrix of its square."""
    chain = Tree(torch.arange(-1, 4))
    assert chain.depth.tolist() == [[0, 1, 2, 3, 4, 5]] and "ancestors" not in vars(chain)
    assert Tree.chain(0).depth.tolist() == [[0]] and Tree.chain(5).max_depth == 5
