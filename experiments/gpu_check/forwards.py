"""Seconds of a verify forward by width, context and batch: eager, compiled, replayed from a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from experiments.bandwidth import footprint
from experiments.machine import dtype_bytes, synchronize
from specdec.errors import OptionError
from specdec.model import Model
from specdec.roofline import Accelerator, Architecture, forward
from specdec.tree import Tree

EAGER, COMPILED, GRAPH, ROOFLINE = "eager", "compiled", "graph", "roofline"
ROUNDS, WARM_UP = 5, 3

Work = Callable[[], object]


def prepared(target: Model, batch: int, context: int, width: int) -> Work:
    """A forward of `width` tokens per row after `context` tokens that the cache already holds."""
    device = target.device
    cache, tree = target.new_cache(batch, context + width), Tree.chain(width - 1, device)
    tokens = torch.arange(batch * width, device=device).reshape(batch, width) % target.vocab_size
    cache.lengths = torch.full_like(cache.lengths, context)
    cache.settle(context)
    return lambda: target.forward(tokens, tree, cache)


def graphed(work: Work) -> Work:
    """The same work as one CUDA graph: no Python and no launches between its kernels."""
    work()  # the cache's buffers are made here, on the stream that frees them
    stream = _side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay(work: Work = work) -> None:  # which holds the tensors that the graph reads
        graph.replay()

    return replay


@lru_cache(maxsize=1)
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@contextmanager
def compiled(target: Model, batch: int) -> Iterator[None]:
    """The target's forwards as `engine.compile=on` runs them."""
    target.compile(batch)
    was, target.compiled = target.compiled, True
    try:
        yield
    finally:
        target.compiled = was


def seconds_of(work: Work, device: torch.device, seconds: float) -> float:
    """Median over rounds of the mean of calls queued one after the other, about `seconds` in all."""
    for _ in range(WARM_UP):
        work()
    once = _timed(work, device, 1)
    calls = max(1, int(seconds / ROUNDS / max(once, 1e-9)))
    return float(np.median([_timed(work, device, calls) for _ in range(ROUNDS)]))


def _timed(work: Work, device: torch.device, calls: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def modes(device: torch.device) -> list[str]:
    """How a whole grid of shapes can be run here."""
    return [EAGER, GRAPH] if device.type == "cuda" else [EAGER]


def release(device: torch.device) -> None:
    """Give back what a graph kept: the next shape may need the room."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(target: Model, mode: str, batch: int, context: int, width: int, seconds: float) -> dict[str, Any]:
    """One shape in one mode; an error is told instead of its time."""
    place = {"mode": mode, "batch": batch, "context": context, "width": width}
    try:
        if mode == COMPILED:
            with compiled(target, batch):
                work = prepared(target, batch, context, width)
                place["compile_seconds"] = target.compile_seconds
                return place | {"seconds": seconds_of(work, target.device, seconds)}
        work = prepared(target, batch, context, width)
        work = graphed(work) if mode == GRAPH else work
        return place | {"seconds": seconds_of(work, target.device, seconds)}
    except Exception as error:  # a mode that does not work here must not end the check
        return place | {"seconds": None, "error": told(error)}


def told(error: Exception) -> str:
    """An error in one line."""
    return (
        error.remedy if isinstance(error, OptionError) else f"{type(error).__name__}: {error}".split("\n")[0]
    )


def roofline(target: Model, accelerator: Accelerator, batch: int, context: int, width: int) -> dict[str, Any]:
    """The least time that the shape can take on this accelerator."""
    arch = Architecture.from_config(target.config, target.name)
    work = forward(arch, width, context + width, batch, dtype_bytes(target.dtype))
    seconds = work.seconds(accelerator, str(target.dtype).removeprefix("torch."))
    return {"mode": ROOFLINE, "batch": batch, "context": context, "width": width, "seconds": seconds}


def step_bytes(target: Model, batch: int, context: float) -> float:
    """Bytes that a step reads at least: weights, keys and values."""
    size = footprint(target)
    return size["weights"] + batch * context * size["kv"]


def relative(rows: list[dict[str, Any]]) -> dict[tuple[str, int, int, int], float]:
    """(mode, batch, context, width) → seconds over those of one token in the same mode, batch and context."""
    known = {(r["mode"], r["batch"], r["context"], r["width"]): r["seconds"] for r in rows if r["seconds"]}
    return {key: s / known[(*key[:3], 1)] for key, s in known.items() if (*key[:3], 1) in known}
