"""Losses of a drafter's law q to the target's law p, computed with its head a slice of rows at a time.

A row of logits is as long as the draft vocabulary. Whole, they would be written and read a dozen times per
step; a slice stays in the processor's cache, and only the gradient of the states is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SLICE, SLICE_ON_CUDA = 64, 4096  # rows; on CUDA launches cost more than memory
ADAPTIVITY = 3.0  # of `hybrid`, as in its paper

# logits and laws, both `[P, Vd]` → the losses `[P]` and their derivatives by the logits `[P, Vd]`
Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def soft_cross_entropy(logits: Tensor, law: Tensor) -> Tensor:
    """`[P]`: −Σ p log q. Mass that p has outside the draft vocabulary costs nothing.

    Arguments:
        logits: `[P, Vd]`. law: `[P, Vd]`, at most 1 in sum.
    """
    logits = logits.float()
    return law.sum(-1) * logits.logsumexp(-1) - (law * logits).sum(-1)


def cross_entropy(logits: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
    """−Σ p log q: KL divergence up to a constant, the usual loss of distillation."""
    slope = logits.softmax(-1).mul_(law.sum(-1, keepdim=True)).sub_(law)
    return soft_cross_entropy(logits, law), slope


def log_acceptance(logits: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
    """−log Σ min(p, q), the acceptance rate itself (Samarin et al. 2602.23881, the loss LK^α)."""
    alpha, slope = _acceptance(logits, law)
    return -alpha.log(), slope.div_(-alpha[:, None])


def hybrid(logits: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
    """λ × cross-entropy + (1 − λ) × (1 − Σ min(p, q)), λ = exp(−3 α) held fixed (same paper, LK^λ).

    Where little is accepted the acceptance rate has hardly a gradient, and cross-entropy leads. The paper
    takes λ from the mean of a batch; here each position has its own.
    """
    alpha, rise = _acceptance(logits, law)
    entropy, slope = cross_entropy(logits, law)
    share = torch.exp(-ADAPTIVITY * alpha)
    slope = slope.mul_(share[:, None]).sub_(rise.mul_(1 - share[:, None]))
    return share * entropy + (1 - share) * (1 - alpha), slope


LOSSES: dict[str, Loss] = {f.__name__: f for f in (cross_entropy, log_acceptance, hybrid)}


def _acceptance(logits: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
    """α = Σ min(p, q) `[P]` and its derivative by the logits: q · (1[q < p] − Σ q 1[q < p])."""
    q = logits.softmax(-1)
    alpha = torch.minimum(q, law).sum(-1).clamp(min=torch.finfo(q.dtype).tiny)
    rising = q * (q < law)
    return alpha, rising.sub_(q.mul_(rising.sum(-1, keepdim=True)))


def head_loss(
    loss: Loss, states: Tensor, weight: Tensor, bias: Tensor | None, laws: Tensor, index: Tensor
) -> Tensor:
    """`[P]`: the loss of the head's logits to `laws[index]`, differentiable.

    Arguments:
        loss: one of `LOSSES`.
        states: `[P, H]`. weight, bias: `[Vd, H]`, `[Vd]` the head.
        laws: `[A, Vd]`. index: `[P]` int64, each state's law.
    """
    return _HeadLoss.apply(loss, states, weight, bias, laws, index)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: Loss, states: Tensor, weight: Tensor, bias: Tensor | None, laws: Tensor, index: Tensor
    ) -> Tensor:
        losses = states.new_empty(len(states), dtype=torch.float32)
        gradient = torch.empty_like(states)
        for rows in _slices(states):
            losses[rows], slope = loss(_logits(states[rows], weight, bias), laws[index[rows]])
            gradient[rows] = (slope.to(weight.dtype) @ weight).to(gradient.dtype)
        ctx.loss = loss
        ctx.save_for_backward(states, weight, bias, laws, index, gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = upstream
        states, weight, bias, laws, index, gradient = ctx.saved_tensors
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[2] else None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        if of_weight is not None or of_bias is not None:  # a head of its own: its slopes once more
            for rows in _slices(states):
                _, slope = ctx.loss(_logits(states[rows], weight, bias), laws[index[rows]])
                slope = (slope * scale[rows, None]).to(weight.dtype)
                if of_weight is not None:
                    of_weight += slope.mT @ states[rows].to(weight.dtype)
                if of_bias is not None:
                    of_bias += slope.sum(0)
        return None, gradient * scale[:, None].to(gradient.dtype), of_weight, of_bias, None, None


def _slices(states: Tensor) -> list[slice]:
    rows = SLICE_ON_CUDA if states.is_cuda else SLICE
    return [slice(start, start + rows) for start in range(0, len(states), rows)]


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(states.to(weight.dtype), weight, bias).float()
