"""The EAGLE networks: one for generations 1 and 2, one for 3, out of the same parts.

An *entry* i joins the embedding of token i+1 with the state at i and predicts token i+2. States are the
target's hidden states where the target has been, and the network's own output where only the draft has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from specdec.model import Model
from specdec.products import frozen, thin_linear

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of layer i over what is to be seen: q `[B, H, T, D]`, k, v `[B, H_kv, T, D]` → `[B, T, H·D]`."""

FEW = 64  # rows
PARTS = {  # what a checkpoint may or may not have
    "fc_bias",
    "qkv_bias",
    "o_bias",
    "mlp_bias",
    "qk_norm",  # on queries and keys, as in Qwen3
    "entry_norm",  # generation 1: a norm before the first layer (others have it always)
    "embedding_norm",  # generation 1: a norm on the embeddings
    "feature_norm",  # generation 3: a norm on the target's features
    "norm",  # before the head
    "lm_head",  # instead of the target's
    "embed_tokens",  # instead of the target's
}


@dataclass(frozen=True)
class Architecture:
    """What the weights of a drafter look like.

    Arguments:
        generation: 1 (EAGLE and EAGLE-2) or 3.
        layer: sizes of a layer, its RoPE included.
        vocab_size: the target's V.
        draft_vocab_size: V_d, how many of the tokens can be drafted.
        feature_layers: target layers whose *outputs* are the features (`Model.FINAL`: after the final norm).
        feature_size: their width.
        parts: which of `PARTS` there are.
        norm_before_residual: generation 3: the residual stream starts behind `hidden_norm` (of speculators).
    """

    generation: int
    layer: LlamaConfig
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, ...]
    feature_size: int
    parts: frozenset[str] = frozenset()
    norm_before_residual: bool = False

    @property
    def layers(self) -> int:
        return self.layer.num_hidden_layers


class Linear(nn.Linear):
    """A linear layer for few rows."""

    def forward(self, x: Tensor) -> Tensor:
        return thin_linear(x, self.weight, self.bias, FEW)


class Attention(nn.Module):
    """Grouped queries with RoPE; what they see is the business of `attend`."""

    def __init__(self, config: LlamaConfig, index: int, input_size: int, parts: frozenset[str]):
        super().__init__()
        dim, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        bias = "qkv_bias" in parts
        self.index, self.head_dim = index, dim
        self.q_proj = Linear(input_size, heads * dim, bias)
        self.k_proj = Linear(input_size, kv_heads * dim, bias)
        self.v_proj = Linear(input_size, kv_heads * dim, bias)
        self.o_proj = Linear(heads * dim, config.hidden_size, "o_bias" in parts)
        self.q_norm = nn.RMSNorm(dim, config.rms_norm_eps) if "qk_norm" in parts else None
        self.k_norm = nn.RMSNorm(dim, config.rms_norm_eps) if "qk_norm" in parts else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = self.q_proj(x).view(shape), self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *rope)
        return self.o_proj(attend(self.index, q, k, v.transpose(1, 2)))


class Feedforward(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, config: LlamaConfig, bias: bool):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer; the first one of generation 3 reads the embedding beside the state."""

    def __init__(self, architecture: Architecture, index: int):
        super().__init__()
        config, parts = architecture.layer, architecture.parts
        size, eps = config.hidden_size, config.rms_norm_eps
        wide = architecture.generation == 3 and index == 0
        normed = architecture.generation == 3 or index > 0 or "entry_norm" in parts
        self.norm_before_residual = architecture.norm_before_residual
        self.self_attn = Attention(config, index, 2 * size if wide else size, parts)
        self.mlp = Feedforward(config, "mlp_bias" in parts)
        self.hidden_norm = nn.RMSNorm(size, eps) if wide else None
        self.input_layernorm = nn.RMSNorm(size, eps) if normed else nn.Identity()
        self.post_attention_layernorm = nn.RMSNorm(size, eps)

    def forward(
        self, hidden: Tensor, embedding: Tensor, rope: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        if self.hidden_norm is None:
            x = self.input_layernorm(hidden)
        else:
            normed = self.hidden_norm(hidden)
            x = torch.cat([self.input_layernorm(embedding), normed], -1)
            hidden = normed if self.norm_before_residual else hidden
        hidden = hidden + self.self_attn(x, rope, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleModel(nn.Module):
    """The network; `attach` lends it the target's embeddings and head.

    Arguments:
        architecture: its sizes and parts.
    """

    d2t: Tensor

    def __init__(self, architecture: Architecture):
        super().__init__()
        a, parts = architecture, architecture.parts
        size, eps = a.layer.hidden_size, a.layer.rms_norm_eps
        self.architecture = a
        sources = len(a.feature_layers) * a.feature_size if a.generation == 3 else 2 * size
        self.feature_norm = nn.RMSNorm(sources, eps) if "feature_norm" in parts else nn.Identity()
        self.embedding_norm = nn.RMSNorm(size, eps) if "embedding_norm" in parts else nn.Identity()
        self.fc = Linear(sources, size, "fc_bias" in parts)
        self.layers = nn.ModuleList(Layer(a, i) for i in range(a.layers))
        self.norm = nn.RMSNorm(size, eps) if "norm" in parts else nn.Identity()
        self.lm_head = Linear(size, a.draft_vocab_size, False) if "lm_head" in parts else None
        self.embed_tokens = nn.Embedding(a.vocab_size, size) if "embed_tokens" in parts else None
        if a.draft_vocab_size < a.vocab_size:  # token id = i + d2t[i]
            self.register_buffer("d2t", torch.zeros(a.draft_vocab_size, dtype=torch.int64))
        self.draft_ids: Tensor | None = (
            None  # [V_d] the target's ids of the draft vocabulary; None = all of them
        )
        self._lent: dict[str, Any] = {}  # the target's, no parameters of ours
        self._rope: tuple[Tensor, Tensor] | None = None
        self.bytes_read = 0  # of weights, so far, by drafting; compiled forwards are not seen by hooks
        self.slot_layers = [torch.tensor(i, device="cpu") for i in range(a.layers)]  # for `specdec::attend`

    @property
    def is_reduced(self) -> bool:
        return self.architecture.draft_vocab_size < self.architecture.vocab_size

    def attach(self, target: Model) -> EagleModel:
        """Share the target's embeddings and the rows of its head that can be drafted; move to its device."""
        self.to(target.device, target.dtype)
        head = target.hf.get_output_embeddings()
        if self.is_reduced:
            self.draft_ids = torch.arange(len(self.d2t), device=target.device) + self.d2t
        weight, bias = frozen(head.weight), getattr(head, "bias", None)
        if self.draft_ids is not None and self.lm_head is None:
            ids = self.draft_ids.to(weight.device)
            weight, bias = weight[ids], None if bias is None else bias[ids]
        if self.lm_head is None:
            self._lent["head"] = (weight.to(target.device), None if bias is None else bias.to(target.device))
        self._lent["embed"] = target.hf.get_input_embeddings()
        return self

    def states(self, features: Iterable[Tensor]) -> Tensor:
        """The target's features `[B, T, H_t]` each → states `[B, T, H]` of the same positions."""
        joined = torch.cat([f.to(self.fc.weight.device, self.fc.weight.dtype) for f in features], -1)
        if self.architecture.generation == 1:
            return joined
        self.bytes_read += self.fc.weight.nbytes
        return self.fc(self.feature_norm(joined))

    def forward(self, tokens: Tensor, states: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """The states after some entries.

        Arguments:
            tokens: `[B, T]` int64, each entry's token.
            states: `[B, T, H]` the state *before* that token.
            rope: cosine and sine `[B, T, D]` of the entries' positions.
            attend: attention over the entries that each one is to see.

        Returns:
            `[B, T, H]` the state after each token.
        """
        embed = self.embed_tokens or self._lent["embed"]
        embedding = self.embedding_norm(embed(tokens).to(states.dtype))
        hidden = states
        if self.architecture.generation == 1:
            hidden = self.fc(torch.cat([embedding, states], -1))
        for layer in self.layers:
            hidden = layer(hidden, embedding, rope, attend)
        return hidden

    def logits(self, states: Tensor) -> Tensor:
        """`[B, T, V_d]`: of the token after each state, over the draft vocabulary."""
        weight, bias = self.head
        self.bytes_read += weight.nbytes
        return thin_linear(self.norm(states).to(weight.dtype), weight, bias, FEW)

    @property
    def head(self) -> tuple[Tensor, Tensor | None]:
        """Matrix `[V_d, H]` and bias, if any: its own, or the target's rows of the draft vocabulary."""
        return (self.lm_head.weight, None) if self.lm_head is not None else self._lent["head"]

    def rope(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine `[positions, D]`, in float32 precision whatever the weights' dtype."""
        weight, known = self.fc.weight, self._rope
        if (
            known is None
            or len(known[0]) < positions
            or (known[0].device, known[0].dtype) != (weight.device, weight.dtype)
        ):
            rotary = LlamaRotaryEmbedding(self.architecture.layer).to(weight.device)
            cos, sin = rotary(weight, torch.arange(positions, device=weight.device)[None])
            self._rope = cos[0], sin[0]
        return self._rope


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """EAGLE-3's low, middle and high features as *outputs*: the inputs of layers 2, L//2 and L−3.

    Where these are not three, the first, the middle and the last layer.
    """
    low, middle, high = 1, layers // 2 - 1, layers - 4
    if low < middle < high:
        return low, middle, high
    return 0, (layers - 1) // 2, layers - 1


def layer_config(target: Model, layers: int) -> LlamaConfig:
    """A layer of the target's own sizes."""
    config = target.config
    heads = config.num_attention_heads
    rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    rope = rope.get("full_attention", rope)
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        hidden_act=getattr(config, "hidden_act", None) or config.hidden_activation,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
    )


def new_architecture(target: Model, generation: int, layers: int, draft_vocab: int | None) -> Architecture:
    """What we train and fill with random numbers: the target's own sizes, head and embeddings."""
    final = generation == 1
    return Architecture(
        generation=generation,
        layer=layer_config(target, layers),
        vocab_size=target.vocab_size,
        draft_vocab_size=min(draft_vocab or target.vocab_size, target.vocab_size),
        feature_layers=(Model.FINAL,) if final else default_feature_layers(target.config.num_hidden_layers),
        feature_size=target.config.hidden_size,
        parts=frozenset() if final else frozenset({"norm"}),
    )
