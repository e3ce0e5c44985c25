"""Copies of weights in oneDNN's own order, where a CPU multiplies few rows much faster with them.

Without AMX a bfloat16 product puts its matrix in order anew at every call, which takes longer than all the
rest. Whether copies pay is measured; each costs the memory of its matrix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil
import torch
from torch import Tensor

ROWS = 16  # oneDNN chooses its order for products of so many; it serves all
GAIN = 0.75  # a product with a copy must take less than this fraction of one without …
TRIED = 64 * 2**20  # … over so many bytes of matrices, more than caches hold
ROUNDS = 5
SHARE = 0.25  # of the free memory is what copies may take
_pays: dict[torch.dtype, bool] = {}  # on this machine

_library = torch.library.Library("specdec", "FRAGMENT")
_library.define("linear(Tensor x, Tensor weight, SymInt rows) -> Tensor")


def _linear(x: Tensor, weight: Tensor, rows: int) -> Tensor:
    """x·Wᵀ, W being the `rows` rows in memory that begin with those of `weight`."""
    copy = copy_of(weight, rows)
    if copy is None:
        return torch.nn.functional.linear(x, whole(weight, rows))
    return product(x, copy)


_library.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake(
    "specdec::linear", lambda x, weight, rows: x.new_empty(*x.shape[:-1], rows), lib=_library
)


@dataclass(frozen=True)
class Copy:
    """What a weight carries as `packed`; it stays behind when the weight is copied or saved.

    Arguments:
        matrix: opaque, in oneDNN's order. state: the weight's, when it was made.
    """

    matrix: Tensor | None = None
    state: tuple[int, int] | None = None

    def __reduce__(self) -> tuple[type[Copy], tuple[()]]:
        return Copy, ()


def whole(weight: Tensor, rows: int) -> Tensor:
    """The matrix of `rows` rows that begins with those of `weight`."""
    return weight.detach().as_strided((rows, weight.shape[1]), weight.stride())


def copy_of(weight: Tensor, rows: int) -> Tensor | None:
    """The copy of the `rows` rows that begin with those of `weight`, if there is one of what they are now."""
    copy: Copy | None = getattr(weight, "packed", None)
    if copy is None or copy.matrix is None or len(copy.matrix) != rows or copy.state != _state(weight):
        return None
    return copy.matrix


def _state(weight: Tensor) -> tuple[int, int]:
    """Another one after the weight has moved or been written to."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def product(x: Tensor, copy: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b, from the copy of W."""
    return _operator()(x, copy, bias, "none", [], "")  # type: ignore[no-any-return]


@cache
def _operator() -> Callable[..., Any]:
    """Looked up once: it is called a hundred times per forward."""
    return torch.ops.mkldnn._linear_pointwise.default  # type: ignore[no-any-return]


def pack(weights: Sequence[tuple[Tensor, int]]) -> None:
    """Copy matrices if that pays here; copies there were are made anew.

    Arguments:
        weights: of each matrix its first rows, and how many rows it has (see `whole`).
    """
    matrices = [whole(weight, rows) for weight, rows in weights]
    if matrices and _fit(matrices) and pays(matrices):
        for (weight, _), matrix in zip(weights, matrices, strict=True):
            weight.packed = Copy(_reordered(matrix), _state(weight))  # type: ignore[attr-defined]


def pays(matrices: Sequence[Tensor]) -> bool:
    """Whether products with copies of such matrices are much faster: measured once per process and dtype.

    With the first matrices that are not too few to be measured; what a drafter does goes by its target's.
    """
    dtype = matrices[0].dtype
    if dtype not in _pays:
        if dtype != torch.bfloat16 or sum(matrix.nbytes for matrix in matrices) < TRIED:
            return False
        _pays[dtype] = _measured(matrices) < GAIN
    return _pays[dtype]


def _measured(matrices: Sequence[Tensor]) -> float:
    """Seconds of products of few rows with copies over those without, the best of some rounds in turns."""
    some, size = [], 0
    for matrix in matrices:
        if size < TRIED:
            some.append(matrix)
            size += matrix.nbytes
    inputs = [matrix.new_ones(ROWS, matrix.shape[1]) for matrix in some]
    try:
        copies = [_reordered(matrix) for matrix in some]

        def with_copies() -> None:
            for x, copy in zip(inputs, copies, strict=True):
                product(x, copy)

        def without() -> None:
            for x, matrix in zip(inputs, some, strict=True):
                matrix @ x.mT

        times = [(_seconds(with_copies), _seconds(without)) for _ in range(ROUNDS)]
    except (AttributeError, RuntimeError):  # a build without oneDNN
        return float("inf")
    fast, slow = map(min, zip(*times, strict=True))
    return fast / slow


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _fit(matrices: Sequence[Tensor]) -> bool:
    if any(matrix.device.type != "cpu" for matrix in matrices):
        return False
    return sum(matrix.nbytes for matrix in matrices) < SHARE * psutil.virtual_memory().available


@torch.no_grad()
def _reordered(matrix: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(matrix, ROWS)  # type: ignore[no-any-return]
