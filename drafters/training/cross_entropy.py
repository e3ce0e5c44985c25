"""The loss of every drafter, −Σ p log q, computed with its head a slice of rows at a time.

A row of logits is as long as the draft vocabulary. Whole, they would be written and read a dozen times per
step; a slice stays in the processor's cache, and only the gradient of the states is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SLICE = 64  # rows


def soft_cross_entropy(logits: Tensor, law: Tensor) -> Tensor:
    """`[P]`: −Σ p log q. Mass that p has outside the draft vocabulary costs nothing.

    Arguments:
        logits: `[P, Vd]`. law: `[P, Vd]`, at most 1 in sum.
    """
    logits = logits.float()
    return law.sum(-1) * logits.logsumexp(-1) - (law * logits).sum(-1)


def head_cross_entropy(
    states: Tensor, weight: Tensor, bias: Tensor | None, laws: Tensor, index: Tensor
) -> Tensor:
    """`[P]`: `soft_cross_entropy` of the head's logits to `laws[index]`, differentiable.

    Arguments:
        states: `[P, H]`. weight, bias: `[Vd, H]`, `[Vd]` the head.
        laws: `[A, Vd]`. index: `[P]` int64, each state's law.
    """
    return _HeadCrossEntropy.apply(states, weight, bias, laws, index)


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, laws: Tensor, index: Tensor
    ) -> Tensor:
        losses = states.new_empty(len(states), dtype=torch.float32)
        gradient = torch.empty_like(states)
        for rows in _slices(len(states)):
            logits, law = _logits(states[rows], weight, bias), laws[index[rows]]
            losses[rows] = soft_cross_entropy(logits, law)
            gradient[rows] = (_slope(logits, law).to(weight.dtype) @ weight).to(gradient.dtype)
        ctx.save_for_backward(states, weight, bias, laws, index, gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = upstream
        states, weight, bias, laws, index, gradient = ctx.saved_tensors
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        if of_weight is not None or of_bias is not None:  # a head of its own: its slopes once more
            for rows in _slices(len(states)):
                slope = _slope(_logits(states[rows], weight, bias), laws[index[rows]])
                slope = (slope * scale[rows, None]).to(weight.dtype)
                if of_weight is not None:
                    of_weight += slope.mT @ states[rows].to(weight.dtype)
                if of_bias is not None:
                    of_bias += slope.sum(0)
        return gradient * scale[:, None].to(gradient.dtype), of_weight, of_bias, None, None


def _slices(count: int) -> list[slice]:
    return [slice(start, start + SLICE) for start in range(0, count, SLICE)]


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(states.to(weight.dtype), weight, bias).float()


def _slope(logits: Tensor, law: Tensor) -> Tensor:
    """The loss's derivative by the logits: mass(p) · softmax − p."""
    return logits.softmax(-1).mul_(law.sum(-1, keepdim=True)).sub_(law)
