"""EAGLE, slowly: float64, position by position and head by head, from tensors under their published names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HEADS, KV_HEADS, DIM, EPS, THETA = 4, 2, 8, 1e-6, 10000.0
LAYER = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + EPS) * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def rotated(x: Tensor, position: int) -> Tensor:
    """RoPE of one head: component i and i + D/2 are turned by position·θ^(−2i/D)."""
    out, half = x.clone(), len(x) // 2
    for i in range(half):
        angle = position * THETA ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


class Slow:
    """A drafter as its paper and its published code describe it.

    Arguments:
        tensors: float64, by published name; layers are called `prefix.format(i)`.
        embeddings, head: `[V, H]` of the target.
        prefix: e.g. `layers.{}.` or `midlayer.`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        embeddings: Tensor,
        head: Tensor,
        prefix: str,
        layers: int = 1,
        norm_before_residual: bool = False,
    ):
        self.t = {name: x.double() for name, x in tensors.items() if x.is_floating_point()}
        self.embeddings, self.head, self.prefix, self.layers = embeddings, head, prefix, layers
        self.third = self.t[prefix.format(0) + "self_attn.q_proj.weight"].shape[1] == 2 * len(
            self.t["fc.weight"]
        )
        self.norm_before_residual = norm_before_residual

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = self.t[name + ".weight"] @ x
        return y + self.t[name + ".bias"] if name + ".bias" in self.t else y

    def layer(self, index: int, entries: list[Tensor], embeddings: list[Tensor]) -> list[Tensor]:
        """One decoder layer over all positions."""
        at = self.prefix.format(index)
        keys, values, out = [], [], []
        for position, (h, e) in enumerate(zip(entries, embeddings, strict=True)):
            if self.third and index == 0:
                normed = norm(h, self.t[at + "hidden_norm.weight"])
                x = torch.cat([norm(e, self.t[at + "input_layernorm.weight"]), normed])
                h = normed if self.norm_before_residual else h
            elif at + "input_layernorm.weight" in self.t:
                x = norm(h, self.t[at + "input_layernorm.weight"])
            else:
                x = h
            q = self.linear(at + "self_attn.q_proj", x).view(-1, DIM)
            k = self.linear(at + "self_attn.k_proj", x).view(-1, DIM)
            if at + "self_attn.q_norm.weight" in self.t:
                q = torch.stack([norm(head, self.t[at + "self_attn.q_norm.weight"]) for head in q])
                k = torch.stack([norm(head, self.t[at + "self_attn.k_norm.weight"]) for head in k])
            keys.append([rotated(head, position) for head in k])
            values.append(self.linear(at + "self_attn.v_proj", x).view(-1, DIM))
            read = []
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                turned = rotated(q[head], position)
                scores = torch.stack([turned @ keys[s][group] / math.sqrt(DIM) for s in range(position + 1)])
                weights = torch.exp(scores - scores.max())
                weights = weights / weights.sum()
                read.append(sum(w * values[s][group] for s, w in enumerate(weights)))
            h = h + self.linear(at + "self_attn.o_proj", torch.cat(read))
            x = norm(h, self.t[at + "post_attention_layernorm.weight"])
            up = silu(self.linear(at + "mlp.gate_proj", x)) * self.linear(at + "mlp.up_proj", x)
            out.append(h + self.linear(at + "mlp.down_proj", up))
        return out

    def logits(self, tokens: Sequence[int], committed: int, features: Tensor) -> Tensor:
        """`[V_d]` of what follows `tokens`, of which the first `committed` have been verified.

        Arguments:
            features: `[committed − 1, ·]` the target's, of all these tokens but the last.
        """
        states = [self.linear("fc", f) for f in features] if self.third else list(features)
        for _ in range(len(tokens) - committed + 1):  # one round per entry whose state is the drafter's own
            embeddings = [self.embeddings[tokens[i + 1]] for i in range(len(states))]
            hidden = list(states)
            if not self.third:
                hidden = [
                    self.linear("fc", torch.cat([e, h])) for e, h in zip(embeddings, hidden, strict=True)
                ]
            for index in range(self.layers):
                hidden = self.layer(index, hidden, embeddings)
            states = [*states, hidden[-1]]
        last = states[-1]
        if "norm.weight" in self.t:
            last = norm(last, self.t["norm.weight"])
        return self.t.get("lm_head.weight", self.head) @ last


def fill(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors whose effects are all visible."""
    g = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=g, dtype=torch.float64)
        made[name] = noise / math.sqrt(shape[-1]) if len(shape) > 1 else noise * 0.2 + ("norm" in name)
    return made


def layer_shapes(prefix: str, size: int, inner: int, wide: bool = False) -> dict[str, tuple[int, ...]]:
    """A Llama layer's tensors without its input norm."""
    read = 2 * size if wide else size
    return {
        f"{prefix}self_attn.q_proj.weight": (HEADS * DIM, read),
        f"{prefix}self_attn.k_proj.weight": (KV_HEADS * DIM, read),
        f"{prefix}self_attn.v_proj.weight": (KV_HEADS * DIM, read),
        f"{prefix}self_attn.o_proj.weight": (size, HEADS * DIM),
        f"{prefix}mlp.gate_proj.weight": (inner, size),
        f"{prefix}mlp.up_proj.weight": (inner, size),
        f"{prefix}mlp.down_proj.weight": (size, inner),
        f"{prefix}post_attention_layernorm.weight": (size,),
    }


def eagle_1(size: int, inner: int, vocab: int, bias: bool = True) -> dict[str, Tensor]:
    """EAGLE-1 and EAGLE-2."""
    shapes = {"embed_tokens.weight": (vocab, size), "fc.weight": (size, 2 * size)}
    shapes |= {"fc.bias": (size,)} if bias else {}
    return fill(shapes | layer_shapes("layers.0.", size, inner))


def eagle_3(
    size: int, inner: int, vocab: int, draft_vocab: int, prefix: str = "midlayer."
) -> dict[str, Tensor]:
    """EAGLE-3; with `draft_vocab` < `vocab` the map of every third token and some more."""
    shapes = {
        "fc.weight": (size, 3 * size),
        **layer_shapes(prefix, size, inner, wide=True),
        f"{prefix}hidden_norm.weight": (size,),
        f"{prefix}input_layernorm.weight": (size,),
        "norm.weight": (size,),
        "lm_head.weight": (draft_vocab, size),
    }
    tensors = fill(shapes)
    if draft_vocab < vocab:
        ids = torch.arange(draft_vocab) * vocab // draft_vocab
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def write(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping, file: str = "model.safetensors"
) -> Path:
    import json

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(dict(tensors), folder / file)
    else:
        torch.save(dict(tensors), folder / file)
    return folder
