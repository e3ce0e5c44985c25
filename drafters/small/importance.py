"""How much each part of a model matters on a calibration set: layers, units of the MLPs, groups of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.training.batches import Batch
from specdec.model import Model


@torch.no_grad()
def block_influence(target: Model, batch: Batch) -> Tensor:
    """`[L]`: 1 − mean cosine between what enters and leaves a layer (ShortGPT, Men et al. 2403.03853).

    Arguments:
        target: a model whose decoder has `layers`.
        batch: whole sequences; means are over the answers' tokens.
    """
    layers = target.hf.get_decoder().layers
    found = torch.zeros(len(layers))
    mask = batch.answer_mask

    def watch(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            out = output[0] if isinstance(output, tuple) else output
            cosine = F.cosine_similarity(args[0].float(), out.float(), dim=-1)
            found[index] = 1 - float(cosine[mask].mean())

        return hook

    with _hooks((layer.register_forward_hook(watch(i)) for i, layer in enumerate(layers))):
        final_states(target, batch)
    return found


@torch.no_grad()
def leave_one_out(target: Model, batch: Batch) -> Tensor:
    """`[L]`: how much the loss on the answers' tokens grows when that layer alone is left out."""
    layers = target.hf.get_decoder().layers
    whole = answer_loss(target, batch)

    def skip(module: nn.Module, args: tuple, output: Any) -> Any:
        return (args[0], *output[1:]) if isinstance(output, tuple) else args[0]

    found = torch.zeros(len(layers))
    for index, layer in enumerate(layers):
        with _hooks([layer.register_forward_hook(skip)]):
            found[index] = answer_loss(target, batch) - whole
    return found


@torch.no_grad()
def unit_importance(target: Model, batch: Batch) -> Tensor:
    """`[L, I]`: mean |activation| of every MLP unit times the norm of the weights that read it."""
    return torch.stack(
        [
            mean * layer.mlp.down_proj.weight.float().norm(dim=0)
            for layer, mean in _inputs(target, batch, lambda layer: layer.mlp.down_proj)
        ]
    )


@torch.no_grad()
def head_importance(target: Model, batch: Batch) -> Tensor:
    """`[L, H_kv]`: mean |output| of every group of heads (a key/value head and its queries), weighted."""
    groups = target.config.num_key_value_heads
    found = []
    for layer, mean in _inputs(target, batch, lambda layer: layer.self_attn.o_proj):
        weighted = mean * layer.self_attn.o_proj.weight.float().norm(dim=0)
        found.append(weighted.view(groups, -1).sum(1))
    return torch.stack(found)


def final_states(target: Model, batch: Batch) -> Tensor:
    """`[B, T, H]` after the final norm. Padding stands on the right, so causal attention never sees it."""
    return target.hf.get_decoder()(input_ids=batch.tokens, use_cache=False).last_hidden_state


def answer_loss(target: Model, batch: Batch) -> float:
    """Mean cross-entropy of the answers' tokens."""
    row, place = batch.answer_mask.nonzero(as_tuple=True)
    head = target.hf.get_output_embeddings()
    states = final_states(target, batch)[row, place - 1]
    losses = [
        F.cross_entropy(F.linear(s, head.weight).float(), t, reduction="sum")
        for s, t in zip(states.split(1024), batch.tokens[row, place].split(1024), strict=True)
    ]
    return float(torch.stack(losses).sum()) / len(row)


def _inputs(
    target: Model, batch: Batch, part: Callable[[nn.Module], nn.Module]
) -> Iterator[tuple[nn.Module, Tensor]]:
    """Each layer with the mean absolute input of one of its parts over the answers' tokens."""
    means: dict[int, Tensor] = {}
    mask = batch.answer_mask
    layers = list(target.hf.get_decoder().layers)

    def watch(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple) -> None:
            means[index] = args[0][mask].float().abs().mean(0)

        return hook

    with _hooks((part(layer).register_forward_pre_hook(watch(i)) for i, layer in enumerate(layers))):
        final_states(target, batch)
    return ((layer, means[i]) for i, layer in enumerate(layers))


@contextmanager
def _hooks(handles: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield
