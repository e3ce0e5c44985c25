"""What CUDA graphs do, on any device: the operations of some work are written down and done again blindly.

As in a graph, the second time no Python of the work runs: sizes, slots and branches are those of the first,
and tensors that are not inputs are the ones of the first. Asking the device for a value is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from specdec import compiled

ATTEND = torch.ops.specdec.attend.default
SYNCHRONIZE = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.equal.default",
    "aten.masked_select.default",
    "aten._unique2.default",
}


class Tape(TorchDispatchMode):
    """Operations in their order, with the tensors that went in and came out."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple] = []
        self.inside_attend = False  # reads a layer's number, which lies on the host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is ATTEND:  # written in Python: what it does is written down
            self.inside_attend = True
            with self:
                out = compiled._attend(*args, **kwargs)
            self.inside_attend = False
            return out
        by_mask = str(func).startswith("aten.index") and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_flatten(args[1:2])[0]
        )
        if (str(func) in SYNCHRONIZE or by_mask) and not self.inside_attend:
            raise RuntimeError(f"{func} waits for the device")
        out = func(*args, **kwargs)
        if str(func) not in SYNCHRONIZE:
            self.done.append((func, args, kwargs, out))
        return out

    def play(self) -> dict[int, Tensor]:
        """Do everything again; what came out in place of each former tensor."""
        now: dict[int, Tensor] = {}

        def current(x):
            return now.get(id(x), x) if isinstance(x, Tensor) else x

        for func, args, kwargs, out in self.done:
            new = func(*tree_map(current, args), **tree_map(current, kwargs))
            for was, is_ in zip(tree_flatten(out)[0], tree_flatten(new)[0], strict=True):
                if isinstance(was, Tensor):
                    now[id(was)] = is_
        return now


class _Results:
    def __init__(self, tensors: tuple[Tensor, ...]):
        self.tensors = tensors


_recorded: weakref.WeakSet[_Results] = weakref.WeakSet()


def on_tape(work: Callable[[], tuple[Tensor, ...]]):
    """A `specdec.graphs.Record`."""
    work()
    tape = Tape()
    with tape:
        found = work()
    results = tuple(torch.full_like(x, 99) for x in found)  # nothing is computed while a graph is recorded
    _recorded.add(holder := _Results(results))

    def replay() -> None:
        for other in _recorded:  # scratch memory is shared, so another's results may be overwritten
            for result in other.tensors if other is not holder else ():
                result.fill_(99)
        now = tape.play()
        for result, was in zip(results, found, strict=True):
            result.copy_(now.get(id(was), was))

    return replay, results
