"""Bytes moved per forward: weights, keys and values, the drafter's own forwards.

The rate is bytes of a forward over its seconds. Bytes times tokens per second would be wrong: the tokens of a
block share one reading of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from specdec.drafter import Drafter
from specdec.model import Model


def footprint(model: Model) -> dict[str, int]:
    """What one forward must read: `weights` once, `kv` for every token of context of every row (bytes)."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = torch.empty(0, dtype=model.dtype).element_size()
    return {
        "weights": weight_bytes(model.hf),
        "kv": 2 * config.num_hidden_layers * heads * size * element,
    }


def weight_bytes(module: nn.Module) -> int:
    """Bytes of the weights that a forward reads whole; of an embedding table it reads only some rows.

    A table that serves as the output projection too is read whole, once; so are the target's weights that a
    part of a drafter has `lent`.
    """
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    tables -= {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)}
    own = [p for p in module.parameters() if id(p) not in tables]
    for part in module.modules():
        own += getattr(part, "lent", ())
    return sum(x.nbytes for x in own)


class DraftMeter:
    """Counts bytes of weights that a drafter reads: as it says itself, or its modules' once a call.

    Whatever module the drafter holds is found by itself. The target itself is not counted; a part of the
    target that the drafter reads (rows of its head) is.
    """

    def __init__(self, drafter: Drafter, target: Model):
        self.drafter, self.bytes, self.before = drafter, 0, drafter.bytes_read or 0
        self._hooks = [m.register_forward_hook(self._counter(m)) for m in drafter_modules(drafter, target)]

    def take(self) -> int:
        """The bytes since the last call."""
        if (total := self.drafter.bytes_read) is not None:
            taken, self.before = total - self.before, total
            return taken
        taken, self.bytes = self.bytes, 0
        return taken

    def _counter(self, module: nn.Module):
        size = weight_bytes(module)

        def count(*_: Any) -> None:
            self.bytes += size

        return count


def drafter_modules(drafter: Drafter, target: Model) -> list[nn.Module]:
    """The outermost modules of a drafter, not the target itself."""
    found = {id(m): m for m in _modules(drafter, depth=3) if m is not target.hf}
    inner = {id(child) for m in found.values() for child in m.modules() if child is not m}
    return [m for key, m in found.items() if key not in inner]


def _modules(value: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(value, nn.ModuleList | nn.ModuleDict):  # never called themselves
        for child in value.children():
            yield from _modules(child, depth)
    elif isinstance(value, nn.Module):
        yield value
    elif isinstance(value, Model):
        yield value.hf
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _modules(item, depth - 1) if depth else ()
    elif depth and type(value).__module__.startswith("drafters"):
        for item in vars(value).values():
            yield from _modules(item, depth - 1)
