"""source=tiny: a random Llama, small enough to enumerate, whose law clearly depends on the context."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.compat import no_init_weights, quiet_transformers
from specdec.config import TargetConfig
from specdec.errors import OptionError
from specdec.tokenization import BYTE_VOCABULARY, byte_tokenizer

LOGIT_STD = 1.5  # entropy ≈ log V − LOGIT_STD²/2
QUERY_KEY_STD = 1.5  # attention scores of standard deviation ≈ 1.5²: clearly not uniform
CONTEXT = 2048


def tiny_config(config: TargetConfig) -> LlamaConfig:
    """Two heads on one key/value head; the byte tokenizer's special tokens if the vocabulary has room."""
    if config.device_map:
        raise OptionError("target.device_map", config.device_map, "is not for the tiny target; leave it out.")
    if config.vocab_size < 2:
        raise OptionError("target.vocab_size", config.vocab_size, "must be ≥ 2.")
    if config.layers < 1:
        raise OptionError("target.layers", config.layers, "must be ≥ 1.")
    if config.hidden_size < 4 or config.hidden_size % 4:
        raise OptionError("target.hidden_size", config.hidden_size, "must be a positive multiple of 4.")
    has_text = config.vocab_size >= BYTE_VOCABULARY
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=2 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=config.hidden_size // 2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=256 if has_text else None,
        eos_token_id=257 if has_text else None,
        pad_token_id=258 if has_text else None,
    )


def build_tiny(config: TargetConfig, device: torch.device, dtype: torch.dtype):
    """(model, tokenizer or None): weights drawn in float64 on the CPU from `target.seed`, then cast."""
    architecture = tiny_config(config)
    architecture._attn_implementation = config.attention
    with quiet_transformers(), no_init_weights():
        model = LlamaForCausalLM._from_config(architecture, dtype=dtype)
    generator = torch.Generator().manual_seed(config.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(noise * _std(name, parameter.shape[1]))
    tokenizer = byte_tokenizer() if config.vocab_size >= BYTE_VOCABULARY else None
    return model.to(device), tokenizer


def _std(name: str, fan_in: int) -> float:
    """Gains per square root of fan-in; embeddings have unit entries."""
    if "embed_tokens" in name:
        return 1.0
    gain = QUERY_KEY_STD if "q_proj" in name or "k_proj" in name else LOGIT_STD
    return gain / fan_in**0.5


def save_tiny(config: TargetConfig, folder: str | Path) -> Path:
    """Write the tiny model and its tokenizer as a checkpoint folder (for `target=hf target.path=FOLDER`)."""
    model, tokenizer = build_tiny(config, torch.device("cpu"), torch.float32)
    with quiet_transformers():
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    return Path(folder)
