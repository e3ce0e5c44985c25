"""Every number of the lecture, exact parameter counts against the library's models, and measuring this
machine.
"""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from experiments import machine
from specdec.checkpoints.random_weights import SHIPPED, shipped_architectures
from specdec.compat import no_init_weights
from specdec.errors import OptionError
from specdec.roofline import (
    ACCELERATORS,
    Accelerator,
    Architecture,
    accelerator,
    attention,
    decode_step,
    forward,
    free_width,
    matmul,
    mlp,
    variants,
)
from specdec.roofline.variants import with_kv_heads, with_latent, with_sharing, with_windows

S, D, F, N, K, H, L, V = 1024, 5120, 13824, 40, 40, 128, 40, 32000
LLAMA13B = Architecture("Llama-2-13B", V, D, F, L, N, K, H)
H100 = ACCELERATORS["h100"]


def shipped(name: str) -> Architecture:
    return Architecture.from_config(json.loads((SHIPPED / f"{name}.json").read_text()), name)


# ---------------------------------------------------------------- the lecture


def test_parameters_of_llama_2_13b():
    assert (
        LLAMA13B.num_params
        == 13_015_449_600
        == 2 * V * D + 3 * D * F * L + (2 * D * N * H + 2 * D * K * H) * L
    )
    assert LLAMA13B.parameters == LLAMA13B.num_params + (2 * L + 1) * D  # the norms


def test_memory_of_llama_2_13b():
    assert LLAMA13B.kv_bytes(S) == 838_860_800 == S * K * H * L * 2 * 2
    for batch in (1, 64, 256):
        step = decode_step(LLAMA13B, batch, S, H100.bandwidth)
        assert step.memory == 838_860_800 * batch + 26_030_899_200


@pytest.mark.parametrize(
    ("kv_heads", "batch", "gigabytes", "milliseconds", "tokens_per_second"),
    [
        (40, 1, 26.9, 8.0, 125),
        (40, 64, 79.7, 23.8, 2689),
        (40, 256, 240.8, 71.9, 3562),
        (8, 64, 33.4, 10.0, 6417),
        (8, 256, 65.6, 19.6, 13068),
    ],
)
def test_the_lectures_table(kv_heads, batch, gigabytes, milliseconds, tokens_per_second):
    """With K = 8 the lecture's parameters are fewer too; all numbers to the digits it prints."""
    step = decode_step(with_kv_heads(LLAMA13B, kv_heads), batch, S, 3.35e12)
    assert round(step.memory / 1e9, 1) == gigabytes
    assert round(1000 * step.latency, 1) == milliseconds
    assert round(step.throughput) == tokens_per_second


def test_ridges():
    assert round(H100.ridge()) == 295
    assert round(ACCELERATORS["rtx4080"].ridge()) == 136
    assert ACCELERATORS["rtx4080"].bandwidth == 716.8e9 and ACCELERATORS["rtx4080"].peak() == 97.5e12
    assert ACCELERATORS["h100"].bandwidth == 3.35e12 and ACCELERATORS["h100"].peak() == 989e12


@pytest.mark.parametrize("b", [1, 7, 512])
def test_matmul(b):
    w = matmul(b, D, F)
    assert w.flops == 2 * b * D * F and w.bytes == 2 * b * D + 2 * D * F + 2 * b * F
    assert w.intensity == pytest.approx(b, rel=0.15) and w.intensity < b
    assert matmul(1, 1e9, 1e9).intensity == pytest.approx(1, rel=1e-6)


def test_mlp_and_attention():
    b, t = 3, 5
    w = mlp(b * t, D, F)
    assert w.flops == 6 * b * t * D * F and w.bytes == 4 * b * t * D + 4 * b * t * F + 6 * D * F
    assert mlp(15, 1e9, 1e9).intensity == pytest.approx(15, rel=1e-6)
    for batch, s, t in [(1, 1024, 1), (64, 1024, 1), (1, 1024, 1024), (8, 100, 7)]:
        a = attention(batch, s, t, D)
        assert a.flops == 4 * batch * s * t * D and a.bytes == 4 * batch * s * D + 4 * batch * t * D
        assert a.intensity == pytest.approx(s * t / (s + t))  # whatever B
    assert attention(4, S, S, D).intensity == pytest.approx(S / 2)
    assert attention(256, S, 1, D).intensity < 1


def test_what_is_bound_by_what():
    """Generation is memory-bound, prefill compute-bound; reading γ + 1 tokens takes as long as reading
    one.
    """
    decode, prefill = forward(LLAMA13B, 1, S), forward(LLAMA13B, S, S)
    assert decode.bound(H100) == "memory" and prefill.bound(H100) == "compute"
    verify = forward(LLAMA13B, 5, S)
    assert verify.seconds(H100) < 1.01 * decode.seconds(H100)
    assert verify.flops == pytest.approx(5 * decode.flops)


def test_forward_flops_are_two_per_parameter_and_token():
    for name in ("llama3-8b", "qwen2.5-7b", "vicuna-7b"):
        arch = shipped(name)
        weights = arch.num_params - arch.vocab * arch.hidden  # the embedding is only looked up
        assert forward(arch, 64, 64).flops == pytest.approx(2 * 64 * weights, rel=0.01)
    assert forward(LLAMA13B, S, S).flops == pytest.approx(2 * S * LLAMA13B.num_params, rel=0.03)


def test_a_decode_forward_moves_what_the_lecture_says_and_little_more():
    """Weights without the embedding table, the cache, and activations that hardly count."""
    for batch in (1, 64):
        least = 2 * (LLAMA13B.num_params - V * D) + batch * LLAMA13B.kv_bytes(S)
        assert least < forward(LLAMA13B, 1, S, batch).bytes < 1.01 * least


def test_exercise_qwen():
    """Qwen2.5-7B at context 4096 on 716.8 GB/s, worked out by hand from its configuration."""
    arch = shipped("qwen2.5-7b")
    assert (arch.hidden, arch.ffn, arch.layers, arch.heads, arch.kv_heads, arch.head_dim) == (
        3584, 18944, 28, 28, 4, 128,
    )  # fmt: skip
    assert arch.kv_bytes(4096) == 234_881_024 == 4096 * 4 * 128 * 28 * 2 * 2
    assert arch.num_params == 7_615_283_200 and arch.parameters == 7_615_616_512
    one, many = (decode_step(arch, b, 4096, 716.8e9) for b in (1, 32))
    assert one.memory == 15_465_447_424 and many.memory == 22_746_759_168
    assert (round(1e3 * one.latency, 2), round(one.throughput, 1)) == (21.58, 46.3)
    assert (round(1e3 * many.latency, 2), round(many.throughput)) == (31.73, 1008)


# ---------------------------------------------------------------- caches


def test_cache_variants():
    assert with_kv_heads(LLAMA13B, 8).kv_bytes(S) == 838_860_800 / 5
    assert with_kv_heads(LLAMA13B, 1).kv_bytes(S) == 838_860_800 / 40
    assert with_sharing(LLAMA13B, 2).kv_bytes(S) == 838_860_800 / 2
    local = with_windows(replace(LLAMA13B, layers=12, windows=(), owns_cache=()), window=128, global_every=6)
    assert local.kv_bytes(S) == 4 * K * H * (10 * 128 + 2 * S)  # 1 global layer in 6
    assert local.kv_bytes(64) == 4 * K * H * 12 * 64  # shorter than the window
    assert LLAMA13B.kv_bytes(S, size=1) == 838_860_800 / 2
    assert all(v.kv_bytes(S) > 0 for v in variants(LLAMA13B).values())


def test_latent_attention_of_deepseek_v2():
    """C = 512 + 64 numbers per token and layer instead of N·H = 16384 each for keys and values."""
    with_defaults = AutoConfig.for_model(
        "deepseek_v2", num_attention_heads=128, num_key_value_heads=128, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, hidden_size=5120,
        num_hidden_layers=60, num_experts_per_tok=6,
    )  # fmt: skip
    arch = Architecture.from_config(with_defaults)
    assert arch.kv_width == 576 and arch.kv_bytes(1000) == 1000 * 576 * 60 * 2
    assert with_latent(LLAMA13B).kv_width == 576
    latent = forward(arch, 1, 8192).bytes
    assert latent < forward(replace(arch, latent=None, head_dim=128), 1, 8192).bytes


def test_windows_and_shared_caches_of_real_configurations():
    gemma3 = Architecture.from_config(
        AutoConfig.for_model("gemma3_text", num_hidden_layers=12, sliding_window=512)
    )
    assert [w for w in gemma3.windows] == ([512] * 5 + [None]) * 2
    raw = {"model_type": "gemma3_text", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 12}
    raw |= {"num_attention_heads": 2, "sliding_window": 512, "sliding_window_pattern": 6}
    assert Architecture.from_config(raw).windows == gemma3.windows and Architecture.from_config(raw).tied
    assert (
        Architecture.from_config(AutoConfig.for_model("mistral", sliding_window=4096)).windows == (4096,) * 32
    )
    assert shipped("qwen2.5-7b").windows == (None,) * 28
    half = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2, "num_hidden_layers": 4}
    assert Architecture.from_config({**raw, "model_type": "qwen2", **half}).windows == (None, None, 64, 64)
    shared = {**raw, "model_type": "llama", "sliding_window": None, "num_kv_shared_layers": 4}
    assert Architecture.from_config(shared).owns_cache == (True,) * 8 + (False,) * 4
    crossed = {**raw, "model_type": "llama", "sliding_window": None, "use_cla": True, "cla_share_factor": 2}
    assert Architecture.from_config(crossed).owns_cache == (True, False) * 6


@pytest.mark.parametrize("size", [4, 2, 1, 0.5])
def test_quantised_weights(size):
    assert decode_step(LLAMA13B, 0, S, 1.0, weight_size=size).memory == size * 13_015_449_600
    whole, halved = forward(LLAMA13B, 1, S, weight_size=2 * size), forward(LLAMA13B, 1, S, weight_size=size)
    assert whole.bytes - halved.bytes == pytest.approx(size * (LLAMA13B.num_params - V * D), rel=0.001)


# ---------------------------------------------------------------- exact parameters

SMALL = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
MODELS = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 8}),
    ("mistral", {}),
    ("phi3", {"pad_token_id": 0}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gemma", {}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("smollm3", {"pad_token_id": 0}),
    ("mixtral", {"num_local_experts": 4}),
    (
        "qwen3_moe",
        {"num_experts": 8, "moe_intermediate_size": 32, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    (
        "deepseek_v2",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": 24, "moe_intermediate_size": 32},
    ),
    (
        "deepseek_v2",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": None, "first_k_dense_replace": 2},
    ),
    ("deepseek_v3", {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32}),
    ("minicpm3", {"num_attention_heads": 4, "num_key_value_heads": 4}),
]


def count(config) -> int:
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("family", "options"), MODELS)
def test_exact_parameters_of_every_family(family, options):
    try:
        config = AutoConfig.for_model(family, **SMALL, **options)
    except ValueError:
        pytest.skip(f"this transformers has no {family}")
    assert Architecture.from_config(config).parameters == count(config)


@pytest.mark.parametrize("name", shipped_architectures())
def test_exact_parameters_of_the_shipped_architectures(name):
    fields = json.loads((SHIPPED / f"{name}.json").read_text())
    assert shipped(name).parameters == count(AutoConfig.for_model(**fields))


def test_experts_make_wide_forwards_read_more():
    """Mixtral decodes with 2 of 8 experts; a verify forward of many tokens must read nearly all of them."""
    config = AutoConfig.for_model("mixtral")
    arch = Architecture.from_config(config)
    assert arch.experts.touched(1) == pytest.approx(2)
    assert arch.experts.touched(2) == pytest.approx(3.5)  # 8·(1 − (3/4)²)
    assert forward(arch, 16, 100).bytes > 3 * forward(arch, 1, 100).bytes
    dense = (
        forward(replace(arch, experts=None), 16, 100).bytes
        / forward(replace(arch, experts=None), 1, 100).bytes
    )
    assert dense < 1.01


def test_what_is_not_understood_is_refused():
    with pytest.raises(OptionError, match="no hidden_size"):
        Architecture.from_config({"model_type": "gpt2", "vocab_size": 8, "num_hidden_layers": 1, "n_embd": 4})
    raw = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    with pytest.raises(OptionError, match="linear_attention"):
        Architecture.from_config({**raw, "layer_types": ["linear_attention", "full_attention"]})
    unknown = Architecture.from_config({**raw, "intermediate_size": 8, "model_type": "newcomer"})
    assert unknown.num_params and unknown.kv_bytes(8)
    with pytest.raises(OptionError, match="exact parameter count is not known"):
        _ = unknown.parameters
    with pytest.raises(OptionError, match="num_experts_per_tok"):
        Architecture.from_config({**raw, "n_routed_experts": 8, "moe_intermediate_size": 8})
    with pytest.raises(OptionError, match="choices: h100"):
        accelerator("tpu")


# ---------------------------------------------------------------- accelerators and machines


def test_free_width_is_about_the_ridge():
    """Weights dominate: a verify forward is free until its tokens per weight byte reach the ridge."""
    arch = shipped("llama3-8b")
    for name in ("h100", "a100", "rtx3090"):
        ridge = ACCELERATORS[name].ridge()
        assert free_width(arch, ACCELERATORS[name], 512) == pytest.approx(1.1 * ridge, rel=0.12)
    assert free_width(arch, ACCELERATORS["a100"], 512, batch=32) < 8


def test_a_type_without_a_unit_runs_at_the_next_wider_ones_rate():
    a = Accelerator("x", 1.0, {"float32": 2.0, "bfloat16": 8.0})
    assert (a.peak("int4"), a.peak("fp8"), a.peak("float16"), a.peak("float32")) == (8.0, 8.0, 8.0, 2.0)
    with pytest.raises(KeyError):
        Accelerator("x", 1.0, {"bfloat16": 1.0}).peak("float32")


def test_this_machine_is_measured():
    """Only what must hold on any machine: positive rates, and a matrix product beats one number per byte
    read.
    """
    cpu = torch.device("cpu")
    bandwidth = machine.read_bandwidth(cpu, 0.05, size=2**24)
    rate = machine.matmul_rate(cpu, torch.float32, 0.05)
    assert 1e8 < bandwidth < 1e13 and 1e8 < rate < 1e15
    assert machine.buffer_bytes(cpu) >= 2**24 and machine.cache_bytes(cpu) >= 0
    assert machine.dtype_bytes(torch.bfloat16) == 2.0


def test_the_clock_takes_the_shortest_round(monkeypatch):
    ticks = iter([0.0, 0.0, 5.0, 5.0, 7.0, 7.0, 16.0, 100.0])  # start; rounds of 5, 2 and 9 s; the end
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(ticks))
    assert machine.best(lambda: None, torch.device("cpu"), 1.0) == 2.0
