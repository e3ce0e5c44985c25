"""The optimizers: AdamW, or Muon (Jordan 2024) for the matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Parameter

NAMES = ("muon", "adamw")


class Optimizer:
    """Several of torch's optimizers as one, with one learning rate.

    Arguments:
        name: one of `NAMES`.
        parameters: what is trained.
        rate: the learning rate, at AdamW's scale in both.
        decay: decoupled weight decay.
    """

    def __init__(self, name: str, parameters: Iterable[Parameter], rate: float, decay: float = 0.0):
        parameters = list(parameters)
        matrices = [p for p in parameters if name == "muon" and p.ndim == 2]
        others = [p for p in parameters if name != "muon" or p.ndim != 2]
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(
                torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            )
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=decay))

    def step(self, rate: float) -> None:
        """Update at this learning rate and forget the gradients."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
