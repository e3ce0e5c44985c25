"""A whole forward (prefill, decode, verify) as work, and the lecture's decode step: memory, latency,
throughput.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.roofline.accelerator import Accelerator
from specdec.roofline.architecture import Architecture
from specdec.roofline.work import Work, attention, matmul, mlp


@dataclass(frozen=True)
class DecodeStep:
    """One decode step of a batch, memory-bound.

    Arguments:
        memory: bytes of parameters and caches, all read once per step.
        latency: seconds. throughput: tokens per second of the whole batch.
    """

    memory: float
    latency: float
    throughput: float


def decode_step(
    arch: Architecture,
    batch: int,
    context: int,
    bandwidth: float,
    weight_size: float = 2.0,
    kv_size: float = 2.0,
    params: int | None = None,
) -> DecodeStep:
    """memory = B·KV + parameters, latency = memory / bandwidth, throughput = B / latency.

    Arguments:
        bandwidth: bytes per second.
        weight_size, kv_size: bytes per number of weights and of the cache.
        params: number of parameters; by default `arch.num_params`.
    """
    params = arch.num_params if params is None else params
    memory = batch * arch.kv_bytes(context, kv_size) + weight_size * params
    latency = memory / bandwidth
    return DecodeStep(memory, latency, batch / latency)


def forward(
    arch: Architecture,
    tokens: int,
    context: int,
    batch: int = 1,
    size: float = 2.0,
    weight_size: float | None = None,
    logits: int | None = None,
) -> Work:
    """All matrix products and attention of one forward; norms and rotations are left out.

    Arguments:
        tokens: T new tokens per sequence: 1 decodes, γ+1 verifies, the prompt's length prefills.
        context: S tokens attended to, the new ones included.
        size: bytes per number of activations and cache. weight_size: of weights, the same by default.
        logits: positions per sequence for which the head is computed; all by default.
    """
    weight_size = size if weight_size is None else weight_size
    rows = batch * tokens
    work = Work(bytes=weight_size * rows * arch.hidden)  # rows of the embedding
    for inner, columns in arch.projections():
        work += arch.layers * matmul(rows, inner, columns, size, weight_size)
    for layer in range(arch.layers):
        work += attention_layer(arch, tokens, arch.seen(layer, context), batch, size)
    experts = arch.experts
    dense = arch.layers - (experts.layers if experts else 0)
    work += dense * mlp(rows, arch.hidden, arch.ffn, size, weight_size)
    if experts:
        used = experts.touched(rows) + experts.shared  # matrices read
        each = rows * (experts.active + experts.shared) / used  # tokens per matrix
        work += experts.layers * used * mlp(each, arch.hidden, experts.ffn, size, weight_size)
        work += experts.layers * matmul(rows, arch.hidden, experts.count, size, weight_size)
    return work + matmul(
        batch * (tokens if logits is None else logits), arch.hidden, arch.vocab, size, weight_size
    )


def attention_layer(
    arch: Architecture, tokens: float, seen: float, batch: float = 1, size: float = 2.0
) -> Work:
    """Attention of one layer over `seen` tokens; latent attention reads its compressed cache without
    expanding it.
    """
    if arch.latent is None:
        width, kv_width = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        return attention(batch, seen, tokens, width, kv_width, size)
    c = arch.latent
    scores_and_values = arch.heads * (c.width + c.rank)
    moved = batch * seen * c.width + batch * tokens * arch.heads * (c.width + c.rank)
    return Work(2.0 * batch * seen * tokens * scores_and_values, size * moved)


def free_width(
    arch: Architecture,
    accelerator: Accelerator,
    context: int,
    batch: int = 1,
    slack: float = 0.1,
    dtype="bfloat16",
) -> int:
    """How many tokens a verify forward may hold before the roofline makes it more than `slack` slower
    than one.
    """
    one = forward(arch, 1, context, batch).seconds(accelerator, dtype)

    def costs_more(width: int) -> bool:
        return (
            forward(arch, width, context + width - 1, batch).seconds(accelerator, dtype) > (1 + slack) * one
        )

    low, high = 1, 2
    while not costs_more(high) and high < 65536:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if costs_more(middle) else (middle, high)
    return low
