"""CUDA graphs: a forward is recorded once per shape, then replayed without Python and launches in between."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specdec.errors import OptionError

Work = Callable[[], tuple[Tensor, ...]]
Record = Callable[[Work], tuple[Callable[[], object], tuple[Tensor, ...]]]
"""Records what some work does: how to do it again, and the tensors in which its results will lie."""

WIDEST = 128  # tokens per row; a longer forward takes long enough not to mind its launches
PAGE = 256  # slots: a graph looks at whole pages of the cache, so that the next page needs the next graph


@lru_cache
def on_cuda(device: torch.device) -> Record:
    """CUDA graphs on `device`; all that are ever recorded there share their scratch memory and a stream."""
    return _OnCuda(device)


class _OnCuda:
    def __init__(self, device: torch.device):
        self.device = device
        with torch.cuda.device(device):
            # a stream has a workspace of its own, and a pool dies with its last graph: so one of each, kept
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            self.anchor = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.anchor, pool=self.pool, stream=self.stream):
                self.held = torch.zeros(1, device=device)

    def __call__(self, work: Work) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
        with torch.cuda.device(self.device):
            main = torch.cuda.current_stream()
            self.stream.wait_stream(main)
            with torch.cuda.stream(self.stream):  # libraries set themselves up in a first call
                work()
            main.wait_stream(self.stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                    results = work()
            finally:
                torch.cuda.set_stream(main)  # where a recording breaks off, torch does not
        return graph.replay, results


class Graphs:
    """Recorded functions of tensors, by what else they depend on.

    Arguments:
        record: how work is recorded (`on_cuda`).
        most: the most rows there will be.
    """

    def __init__(self, record: Record, most: int):
        self.record, self.most = record, most
        self._known: dict[Hashable, tuple[Any, ...]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def forget(self) -> None:
        """Let go of all of them, and of what they read."""
        self._known.clear()

    def run(
        self, key: Hashable, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """`function(*inputs)`; the results hold until anything that the same `record` recorded is done again.

        Arguments:
            key: whatever the function's kernels depend on apart from `inputs` and from what lies in memory.
            function: given `inputs` with their rows filled up to a power of 2; the same rows of its results
                are cut off. It may not ask the device for a value. It is called twice at first, so it may
                only write what a second call writes again.
            inputs: `[B, …]` each.

        Raises:
            OptionError: it asks the device for a value, or does something else that no graph can hold.
        """
        batch = len(inputs[0])
        rows = min(1 << (batch - 1).bit_length(), self.most)
        key = (key, rows, *((x.shape[1:], x.dtype) for x in inputs))
        if key not in self._known:
            places = [x.new_zeros(rows, *x.shape[1:]) for x in inputs]
            for place, x in zip(places, inputs, strict=True):
                place[:batch] = x
            try:
                recorded = self.record(lambda: function(*places))
            except RuntimeError as error:
                why = str(error).partition("\n")[0]
                remedy = f"a forward cannot be recorded ({why}); use engine.compile=off."
                raise OptionError("engine.compile", "graphs or on", remedy) from error
            # the function is kept, since it holds tensors that the graph reads
            self._known[key] = (function, places, *recorded)
        _, places, replay, results = self._known[key]
        for place, x in zip(places, inputs, strict=True):
            place[:batch] = x
        replay()
        return tuple(result[:batch] for result in results)


def pages(slots: int) -> int:
    """`slots`, rounded up to whole pages."""
    return -(-slots // PAGE) * PAGE
