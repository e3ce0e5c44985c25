"""The shape of a decoder, read from any Llama-like Hugging Face configuration: parameters and cache size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.errors import OptionError

# model_type → what its configuration does not say: biases of q/k/v and of o (None: `attention_bias` says),
# norms per layer, whether queries and keys are normalised, whether head and embedding are one by default.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"qkv_bias": False, "o_bias": False},
    "mixtral": {"qkv_bias": False, "o_bias": False},
    "phi3": {"qkv_bias": False, "o_bias": False},
    "qwen2": {"qkv_bias": True, "o_bias": False},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "gemma": {"tied": True},
    "gemma2": {"norms": 4, "tied": True, "window_pattern": 2},
    "gemma3_text": {"norms": 4, "qk_norm": True, "tied": True, "window_pattern": 6},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "minicpm3": {},
    "smollm3": {},
}


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2405.04434 §2.1): what is cached is C = `rank` + `rope`
    numbers.
    """

    rank: int
    rope: int
    nope: int
    value: int
    query_rank: int | None = None

    @property
    def width(self) -> int:
        """Numbers cached per token and layer."""
        return self.rank + self.rope


@dataclass(frozen=True)
class Experts:
    """Mixture-of-experts feed-forward layers: `count` experts of width `ffn`, `active` of them per token."""

    count: int
    active: int
    ffn: int
    shared: int = 0  # experts that every token uses
    layers: int = 0  # how many layers are of this kind

    def touched(self, tokens: float) -> float:
        """Expected number of routed experts that `tokens` tokens use, routed uniformly: what must be read."""
        return self.count * (1 - (1 - self.active / self.count) ** tokens)


@dataclass(frozen=True)
class Architecture:
    """A decoder's shape: V vocab, D hidden, F ffn, L layers, N heads, K kv_heads, H head_dim.

    Arguments:
        windows: per layer, how many tokens it looks back at; `None` is all.
        owns_cache: per layer, whether it keeps keys and values of its own (cross-layer sharing otherwise).
        tied: embedding and language-model head are one matrix.
        latent, experts: where it has them.
        qkv_bias, o_bias, mlp_bias, norms, qk_norm: the small parameters.
        known: whether `parameters` knows this family's small parameters.
    """

    name: str
    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = ()
    owns_cache: tuple[bool, ...] = ()
    tied: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norms: int = 2
    qk_norm: bool = False
    known: bool = True

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.layers)
        if not self.owns_cache:
            object.__setattr__(self, "owns_cache", (True,) * self.layers)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | Any, name: str = "") -> Architecture:
        """From the contents of a `config.json`, or a `PretrainedConfig`.

        Raises:
            OptionError: it is no decoder of gated feed-forward layers and attention.
        """
        c = dict(config if isinstance(config, Mapping) else config.to_dict())
        c = {**c, **c["text_config"]} if isinstance(c.get("text_config"), Mapping) else c
        name = name or c.get("model_type") or "model"
        missing = [
            k
            for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
            if not c.get(k)
        ]
        if missing:
            remedy = (
                f"its configuration has no {', '.join(missing)}; only Llama-like decoders are understood."
            )
            raise OptionError("target", name, remedy)
        family = FAMILIES.get(c.get("model_type") or "llama")
        heads, layers = c["num_attention_heads"], c["num_hidden_layers"]
        facts = family or {}
        bias = bool(c.get("attention_bias", False))
        return cls(
            name=name,
            vocab=c["vocab_size"],
            hidden=c["hidden_size"],
            ffn=c.get("intermediate_size") or 0,
            layers=layers,
            heads=heads,
            kv_heads=c.get("num_key_value_heads") or heads,
            head_dim=c.get("head_dim") or c["hidden_size"] // heads,
            windows=_windows(c, layers, facts.get("window_pattern"), name),
            owns_cache=_owners(c, layers),
            tied=bool(c.get("tie_word_embeddings", facts.get("tied", False))),
            latent=_latent(c),
            experts=_experts(c, layers, name),
            qkv_bias=facts.get("qkv_bias", bias),
            o_bias=facts.get("o_bias", bias),
            mlp_bias=bool(c.get("mlp_bias", False)),
            norms=facts.get("norms", 2),
            qk_norm=facts.get("qk_norm", False),
            known=family is not None,
        )

    @property
    def num_params(self) -> int:
        """The lecture's count: 2VD + 3DFL + (2DNH + 2DKH)L."""
        per_layer = 3 * self.hidden * self.ffn + 2 * self.hidden * self.head_dim * (
            self.heads + self.kv_heads
        )
        return 2 * self.vocab * self.hidden + per_layer * self.layers

    @property
    def parameters(self) -> int:
        """The exact count: biases, norms, tied embeddings, latent projections and experts included.

        Raises:
            OptionError: the small parameters of this family are not known.
        """
        if not self.known:
            remedy = f"its exact parameter count is not known; the families that are: {', '.join(FAMILIES)}."
            raise OptionError("target", self.name, remedy)
        dense = self.layers - (self.experts.layers if self.experts else 0)
        total = self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden
        total += self.layers * (self._attention_parameters() + self.norms * self.hidden)
        total += dense * (3 * self.hidden * self.ffn + self.mlp_bias * (2 * self.ffn + self.hidden))
        if self.experts:
            e = self.experts
            total += e.layers * self.hidden * (e.count + 3 * e.ffn * (e.count + e.shared))
        return total

    def _attention_parameters(self) -> int:
        return sum(a * b for a, b in self.projections()) + self._attention_extras()

    def projections(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of each matrix of one attention layer."""
        d, n = self.hidden, self.heads
        if self.latent is None:
            q, kv = n * self.head_dim, self.kv_heads * self.head_dim
            return [(d, q), (d, kv), (d, kv), (q, d)]
        c = self.latent
        q_out = n * (c.nope + c.rope)
        query = [(d, c.query_rank), (c.query_rank, q_out)] if c.query_rank else [(d, q_out)]
        return [*query, (d, c.width), (c.rank, n * (c.nope + c.value)), (n * c.value, d)]

    def _attention_extras(self) -> int:
        """Biases and norms of one attention layer."""
        if self.latent is not None:
            down = [self.latent.query_rank] if self.latent.query_rank else []
            biases = self.qkv_bias * (sum(down) + self.latent.width) + self.o_bias * self.hidden
            return sum(down) + self.latent.rank + biases
        biases = self.qkv_bias * self.head_dim * (self.heads + 2 * self.kv_heads) + self.o_bias * self.hidden
        return biases + self.qk_norm * 2 * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers that one layer caches per token."""
        return self.latent.width if self.latent else 2 * self.kv_heads * self.head_dim

    def kv_bytes(self, context: int, size: float = 2.0) -> float:
        """Bytes of keys and values kept for one sequence of `context` tokens."""
        return (
            size
            * self.kv_width
            * sum(self.seen(layer, context) for layer in range(self.layers) if self.owns_cache[layer])
        )

    def seen(self, layer: int, context: float) -> float:
        """How many of `context` tokens a layer looks at."""
        window = self.windows[layer]
        return context if window is None else min(context, window)


def _windows(c: Mapping[str, Any], layers: int, pattern: int | None, name: str) -> tuple[int | None, ...]:
    """Window of each layer."""
    window = c.get("sliding_window")
    kinds = c.get("layer_types")
    if kinds:
        strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if strange:
            raise OptionError(
                "target", name, f"layers of kind {', '.join(strange)} keep no plain key/value cache."
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if not window or c.get("use_sliding_window") is False:
        return (None,) * layers
    if c.get("use_sliding_window"):  # Qwen2: the layers from max_window_layers on
        return tuple(window if i >= c.get("max_window_layers", 0) else None for i in range(layers))
    pattern = c.get("sliding_window_pattern") or pattern
    return tuple(None if pattern and (i + 1) % pattern == 0 else window for i in range(layers))


def _owners(c: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Cross-layer sharing: the last layers reuse an earlier one's cache, or every k-th layer keeps one."""
    if c.get("num_kv_shared_layers"):
        return tuple(i < layers - c["num_kv_shared_layers"] for i in range(layers))
    factor = c.get("cla_share_factor") if c.get("use_cla") else None
    return tuple(i % (factor or 1) == 0 for i in range(layers))


def _latent(c: Mapping[str, Any]) -> Latent | None:
    if not c.get("kv_lora_rank"):
        return None
    return Latent(
        rank=c["kv_lora_rank"],
        rope=c["qk_rope_head_dim"],
        nope=c["qk_nope_head_dim"],
        value=c["v_head_dim"],
        query_rank=c.get("q_lora_rank"),
    )


def _experts(c: Mapping[str, Any], layers: int, name: str) -> Experts | None:
    count = c.get("n_routed_experts") or c.get("num_experts") or c.get("num_local_experts")
    if not count:
        return None
    if c.get("shared_expert_intermediate_size"):
        raise OptionError("target", name, "shared experts of a width of their own are not understood.")
    if not c.get("num_experts_per_tok"):
        raise OptionError("target", name, "its configuration has experts, but no num_experts_per_tok.")
    first, step = (
        c.get("first_k_dense_replace") or 0,
        c.get("decoder_sparse_step") or c.get("moe_layer_freq") or 1,
    )
    dense = set(c.get("mlp_only_layers") or ())
    offset = 1 if c.get("decoder_sparse_step") else 0
    sparse = [i for i in range(layers) if i >= first and i not in dense and (i + offset) % step == 0]
    return Experts(
        count=count,
        active=c["num_experts_per_tok"],
        ffn=c.get("moe_intermediate_size") or c["intermediate_size"],
        shared=c.get("n_shared_experts") or 0,
        layers=len(sparse),
    )
