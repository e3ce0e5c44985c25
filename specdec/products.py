"""Matrix products of few rows on a CPU: from packed copies or written W·xᵀ, those of the same rows as one.

A decode step multiplies few rows with many matrices, so its time is that of reading them. A CPU with AMX
reads W up to twice as fast in W·xᵀ as in x·Wᵀ, one without it in a packed copy (`specdec.packed`), and one
product with [W₁; W₂] is faster than two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from specdec import packed
from specdec.heap import return_freed_memory
from specdec.packed import copy_of

FEW = 16  # rows of a large head's product; with more, turning the result costs what turning the product saves
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # they read the same rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b as W·xᵀ."""
    rows = x.flatten(0, -2)
    out = torch.mv(weight, rows[0])[None] if rows.shape[0] == 1 else (weight @ rows.mT).mT
    out = out.reshape(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def from_copy(x: Tensor, weight: Tensor, bias: Tensor | None = None, rows: int | None = None) -> Tensor:
    """x·Wᵀ + b in compiled code, from the packed copy of `weight` or of the `rows` rows it begins."""
    out: Tensor = torch.ops.specdec.linear(x, weight, rows or len(weight))
    return out if bias is None else out + bias


def thin_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, few: int = FEW) -> Tensor:
    """x·Wᵀ + b where a draft may be made: as `few_rows` but on GPUs, in training and in compiled code."""
    if x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    return few_rows(x, weight, bias, few)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None, few: int = FEW) -> Tensor:
    """x·Wᵀ + b outside of compiled code: from a packed copy, or as `linear` for up to `few` rows.

    In `linear` an only row is multiplied twice: a product of two rows takes half the time of one of one row.
    """
    rows = x.flatten(0, -2)  # of three dimensions and not contiguous, `F.linear` would copy W for each row
    if (copy := copy_of(weight, len(weight))) is not None and x.dtype == weight.dtype:
        out = packed.product(rows, copy, bias)
    elif len(rows) > few:
        out = F.linear(rows, weight, bias)
    else:
        pair = rows.expand(2, -1) if len(rows) == 1 else rows
        # row by row turning takes a quarter of what `contiguous` does
        out = torch.stack(linear(pair, weight, bias)[: len(rows)].unbind())
    return out.view(*x.shape[:-1], -1)


def frozen(weight: Tensor) -> Tensor:
    """`weight` for others to read: itself, packed copy and all, unless it is being trained."""
    return weight.detach() if weight.requires_grad else weight


def prepare(module: nn.Module, *others: Tensor) -> None:
    """Make the linear layers below `module`, and `others`, ready to be multiplied with few rows on a CPU."""
    lay_together(module)
    packed.pack([*_matrices(module), *((weight, len(weight)) for weight in others)])


def _matrices(module: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """Of each matrix that is multiplied as one: its first rows, and how many rows it has."""
    for parent in module.modules():
        linears = {name: child for name, child in parent.named_children() if isinstance(child, nn.Linear)}
        for names in TOGETHER:
            weights = [linears[name].weight for name in names if name in linears]
            if len(weights) == len(names) and _are_together(weights):
                yield weights[0], sum(map(len, weights))
                linears = {name: child for name, child in linears.items() if name not in names}
        for child in linears.values():
            yield child.weight, len(child.weight)


@torch.no_grad()
def lay_together(module: nn.Module) -> None:
    """Lay the matrices of `TOGETHER` below `module` one behind the other in memory; values do not change."""
    moved = False
    for parent in module.modules():
        for names in TOGETHER:
            children = [getattr(parent, name, None) for name in names]
            if not all(isinstance(child, nn.Linear) for child in children):
                continue
            weights = [child.weight for child in children]  # type: ignore[union-attr]
            if not _are_together(weights) and _could_be_together(weights):
                rows = torch.cat(weights).split([len(w) for w in weights])
                for weight, own in zip(weights, rows, strict=True):
                    weight.data = own
                moved = True
    if moved:
        return_freed_memory()


def turn_and_merge(graph: GraphModule, inputs: Sequence[Any]) -> None:
    """Write all linear layers of a graph as `linear` or, where weights have packed copies, as `from_copy`.

    Those of one x whose matrices lie together become one product. A single row is left alone: the compiler
    itself puts its products into the loops around them.

    Arguments:
        inputs: one value for each of the graph's placeholders.
    """
    nodes = graph.graph.nodes
    values = dict(zip((n for n in nodes if n.op == "placeholder"), inputs, strict=True))
    of_same_rows = defaultdict(list)
    for node in nodes:
        if node.target is F.linear:
            node.target = linear
            of_same_rows[node.args[0]].append(node)
    for x, same in of_same_rows.items():
        if all(size == 1 for size in x.meta["example_value"].shape[:-1]):
            continue
        weights = [w for w in (values.get(node.args[1]) for node in same) if isinstance(w, Tensor)]
        if 1 < len(weights) == len(same) and _are_together(weights):
            _merge(graph, same, weights)
            continue
        for node in same:
            weight = values.get(node.args[1])
            if isinstance(weight, Tensor) and copy_of(weight, len(weight)) is not None:
                node.target = from_copy
    graph.recompile()


def _merge(graph: GraphModule, products: list[Node], weights: list[Tensor]) -> None:
    x, weight = products[0].args[:2]
    sizes = [len(w) for w in weights]
    with graph.graph.inserting_before(products[0]):
        call = graph.graph.call_function
        if copy_of(weights[0], sum(sizes)) is not None:
            product = call(from_copy, (x, weight, None, sum(sizes)))
        else:
            size, stride = (sum(sizes), weights[0].shape[1]), weights[0].stride()
            product = call(linear, (x, call(torch.as_strided, (weight, size, stride, 0))))
        parts = call(torch.split, (product, sizes, -1))
    for i, node in enumerate(products):
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        with graph.graph.inserting_before(node):
            part = graph.graph.call_function(_part, (parts, i, bias))
        node.replace_all_uses_with(part)
        graph.graph.erase_node(node)


def _part(parts: tuple[Tensor, ...], i: int, bias: Tensor | None) -> Tensor:
    return parts[i] if bias is None else parts[i] + bias


def _could_be_together(weights: Sequence[Tensor]) -> bool:
    on_cpu = all(w.device.type == "cpu" for w in weights)
    return on_cpu and len({(w.dtype, w.shape[1]) for w in weights}) == 1


def _are_together(weights: Sequence[Tensor]) -> bool:
    """Whether these are all rows of one matrix that begins its storage, as in all layers of one graph."""
    first, at = weights[0], 0
    storage = first.untyped_storage().data_ptr()
    for w in weights:
        alike = w.dtype == first.dtype and w.is_contiguous() and w.shape[1] == first.shape[1]
        if not alike or w.untyped_storage().data_ptr() != storage or w.storage_offset() != at:
            return False
        at += w.numel()
    return True
