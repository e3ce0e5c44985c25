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
        attention_mask: `[B, 1, T, S]` additive float; without one (when `generate` runs the model) Hugging
            Face's own function takes over.

    Returns:
        `[B, T, H, D]` and no weights.
    """
    if attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **kwargs)
    batch, heads, count, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    packed = query.reshape(batch, kv_heads, groups * count, dim)
    if groups > 1 and count > 1:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(packed, key, value, attention_mask, scale=scaling)
    return out.reshape(batch, heads, count, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
