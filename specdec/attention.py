"""Attention for token trees: scaled dot products with an explicit mask and grouped queries.

Hugging Face's `sdpa` repeats keys and values for every query head as soon as a mask is given. Here the query
heads that share a key/value head are laid side by side instead, so that the cache is read once and never
copied.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "specdec_tree"


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Masked grouped-query attention.

    Arguments:
        query: `[B, H, T, D]`; key, value: `[B, H_kv, S, D]`.
        attention_mask: `[B, 1, T, S]` additive float, or `[B, 1, G·T, S]`, repeated for the G query heads of
            a key/value head; without one (when `generate` runs the model) Hugging Face's own function
            takes over.

    Returns:
        `[B, T, H, D]` and no weights.
    """
    if attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **kwargs)
    if torch.compiler.is_compiling() and hasattr(module, "slot_layer"):  # see specdec.compiled
        # products turned round leave rows that attention would not take on its fast path
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        attend = torch.ops.specdec.attend
        return attend(query, key, value, attention_mask, module.slot_layer, scaling), None
    return grouped_attention(query, key, value, attention_mask, scaling), None


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None = None
) -> Tensor:
    """Masked attention with the queries of a key/value head side by side; shapes as in `tree_attention`."""
    batch, heads, count, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    packed = query.reshape(batch, kv_heads, groups * count, dim)
    if mask.shape[2] not in (1, groups * count):
        mask = mask.repeat(1, 1, groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(packed, key, value, mask, scale=scaling)
    return out.reshape(batch, heads, count, value.shape[-1]).transpose(1, 2).contiguous()


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
