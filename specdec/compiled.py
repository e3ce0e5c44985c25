"""Decoder layers through `torch.compile`: one compiled function serves all layers of a model.

A model's layers differ in their weights only, and weights are inputs of the compiled function, so that a few
seconds of compiling do for all of them. The cache stays outside: writing keys and values and attending to
them is one operator (`specdec::attend`) which the compiler does not look into. On a CPU the products are
those of `specdec.products`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import is_
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from specdec.attention import grouped_attention
from specdec.cache import SlotCache
from specdec.errors import compiling
from specdec.products import few_rows, turn_and_merge

T = TypeVar("T")
LARGE = 50_000_000  # parameters; below, compiling takes longer than most runs save
NO_COMPILER = "torch.compile finds no C++ compiler (g++ or clang++) on this machine"
TOGETHER = 4  # layers of one compiled call at most; more take longer to compile and bring little
VARIANTS = 32  # of one function: batch 1 or more, tokens 1 or more, each with and without gradients
_read: list[SlotCache] = []  # the cache of the forward that is running, last

_library = torch.library.Library("specdec", "DEF")
_library.define("attend(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor layer, float? scaling) -> Tensor")


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, layer: Tensor, scaling: float | None) -> Tensor:
    """Append keys and values to the running forward's cache, attend to all of it: `[B, T, H, D]`."""
    k, v = _read[-1].slot_layers[int(layer)].update(k, v)
    return grouped_attention(q, k, v, mask, scaling)


_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake(
    "specdec::attend",
    lambda q, k, v, mask, layer, scaling: q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]),
    lib=_library,
)


@contextmanager
def reading(cache: SlotCache) -> Iterator[None]:
    """The forwards in this block read and write `cache`."""
    _read.append(cache)
    try:
        yield
    finally:
        _read.pop()


def try_sizes(run: Callable[[int], None], batch: int, tried: set[int]) -> None:
    """Let `run(rows)` compile what batches of up to `batch` rows need: for one row, and for several.

    Arguments:
        tried: the numbers of rows that have been compiled for, which grow.

    Raises:
        OptionError: compiling failed.
    """
    for rows in sorted({1, min(batch, 2)} - tried):
        with compiling():
            run(rows)
        tried.add(rows)


def compiled(function: Callable[..., T]) -> Callable[..., T]:
    """`function` through `torch.compile`, with no check of the modules it reads at every call.

    Those modules, in its first argument, may be others at every call if they differ in their weights only.
    """

    def run(*args: Any, **kwargs: Any) -> T:
        return function(*args, **kwargs)

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    # compiled variants are remembered by code object: this one is nobody else's
    own = FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)
    options: dict[str, Any] = {"guard_filter_fn": _shapes_only}
    return torch.compile(own, backend=_inductor, dynamic=True, fullgraph=True, options=options)


def _shapes_only(guards: list[Any]) -> list[bool]:
    """Of the conditions for a compiled variant, those on global modes and on tensors given as arguments."""
    return [
        not g.name or (g.guard_type == "TENSOR_MATCH" and "args[0]" not in g.name and "._" not in g.name)
        for g in guards
    ]


def _inductor(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
    on_cpu = any(isinstance(x, Tensor) and x.device.type == "cpu" and x.dim() > 1 for x in inputs)
    if on_cpu:
        turn_and_merge(graph, inputs)
    return torch._inductor.compile(graph, inputs, options={"size_asserts": False})  # type: ignore[return-value]


class CompiledLayers:
    """The decoder layers of a model, and their compiled stand-ins.

    Arguments:
        layers: alike but for their weights.
        head: the language-model head behind them.
        cache_argument: the name under which they are given the cache.
    """

    def __init__(self, layers: nn.ModuleList, head: nn.Module, cache_argument: str):
        forward, elsewhere = type(layers[0]).forward, {cache_argument: _WrittenElsewhere()}

        def in_turn(group: list[nn.Module], x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            after = []
            for layer in group:
                x = forward(layer, x, *args, **(kwargs | elsewhere)).contiguous()
                after.append(x)
            return tuple(after)

        function, size = compiled(in_turn), together(len(layers))
        starts = range(0, len(layers), size)
        self._groups = [_Group(function, list(layers[first : first + size])) for first in starts]
        self._instead: list[tuple[nn.Module, Callable[..., Any]]] = []
        for group in self._groups:
            self._instead += [(layer, partial(group, i)) for i, layer in enumerate(group.layers)]
        if type(head) is nn.Linear and head.weight.device.type == "cpu":
            self._instead.append((head, lambda x: few_rows(x, head.weight, head.bias)))
        for index, layer in enumerate(layers):
            attention: Any = layer.self_attn
            attention.slot_layer = torch.tensor(index, device="cpu")

    @contextmanager
    def running(self, cache: SlotCache) -> Iterator[None]:
        """Forwards in this block run compiled, and read and write `cache`."""
        for module, forward in self._instead:
            module.forward = forward  # type: ignore[method-assign]
        try:
            with reading(cache):
                yield
        finally:
            for module, _ in self._instead:
                del module.forward
            for group in self._groups:
                group.after = group.given = ()


class _WrittenElsewhere:
    """Stands in for the cache while a layer computes its keys and values: `specdec::attend` writes them."""

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key, value


class _Group:
    """Layers of one compiled call: the first one's turn runs all of them, the others find theirs ready.

    Raises:
        ValueError: they are not called one on the other's result with the same further arguments.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], layers: list[nn.Module]):
        self.function, self.layers = function, layers
        self.after: tuple[Tensor, ...] = ()
        self.given: tuple[Any, ...] = ()

    def __call__(self, index: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = (*args, *kwargs.values())
        if index == 0:
            self.given, self.after = given, self.function(self.layers, x, *args, **kwargs)
        elif x is not self.after[index - 1] or not all(map(is_, given, self.given)):
            raise ValueError("the layers of this model take different arguments")
        return self.after[index]


def together(layers: int) -> int:
    """How many layers one compiled call runs: at most `TOGETHER`, in every call as many."""
    return max(n for n in range(1, TOGETHER + 1) if layers % n == 0)


def alike(layers: nn.ModuleList) -> bool:
    """Whether layers differ in their weights only, so that one compiled function serves them all."""
    return len({repr(_signature(layer)) for layer in layers}) == 1 and hasattr(layers[0], "self_attn")


def _signature(layer: nn.Module) -> list[Any]:
    plain = (bool, int, float, str, type(None))
    found: list[Any] = [(name, tuple(p.shape)) for name, p in layer.named_parameters()]
    for name, module in layer.named_modules():
        values = {k: v for k, v in vars(module).items() if isinstance(v, plain) and k != "layer_idx"}
        found.append((name, type(module), sorted(values.items())))
    return found


def spread(layers: nn.ModuleList) -> bool:
    """Whether something brings the layers' inputs to their devices."""
    return any("forward" in vars(layer) for layer in layers)


def obstacle(layers: nn.ModuleList, own_attention: bool) -> str | None:
    """Why these layers cannot be compiled, if they cannot."""
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        return NO_COMPILER
    if not own_attention:
        return "only target.attention=sdpa can be compiled"
    if spread(layers):
        return "the target's layers are spread over devices"
    if not alike(layers):
        return "the target's layers differ in more than their weights"
    return None
