"""Linear layers of a CPU in bfloat16, their weights laid out once as oneDNN multiplies them best."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.checkpoints.devices import cpu_multiplies_bfloat16

ROWS = 32  # for which the layout is chosen; it serves one row as well
FEW = 64  # rows; larger products are as fast in the plain layout


class PackedLinear(nn.Linear):
    """A linear layer with a second, packed copy of its weight; the plain one stays for whoever reads it."""

    def pack(self) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), ROWS)
        self._of = self.weight.data_ptr()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        changed = self.weight.data_ptr() != self._of
        if changed or rows > FEW or x.dtype != self.weight.dtype or torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """A plain layer: whoever copies it may train it."""
        plain = nn.Linear.__new__(nn.Linear)
        memo[id(self)] = plain
        state = {name: value for name, value in vars(self).items() if name not in ("_packed", "_of")}
        plain.__dict__.update(copy.deepcopy(state, memo))
        return plain


def can_pack(module: nn.Module) -> bool:
    """Whether this machine and torch can, and the weights are in bfloat16 on the CPU."""
    first = next(module.parameters())
    known = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and torch.backends.mkldnn.is_available()
    here = first.device.type == "cpu" and first.dtype == torch.bfloat16
    return here and known and cpu_multiplies_bfloat16()


@torch.no_grad()
def pack(module: nn.Module) -> int:
    """Pack all linear layers in place; how many there are now. What is packed already stays so."""
    layers = [m for m in module.modules() if type(m) is nn.Linear and m.weight.dtype == torch.bfloat16]
    for layer in layers:
        layer.__class__ = PackedLinear
        layer.pack()
    return sum(isinstance(m, PackedLinear) for m in module.modules())
