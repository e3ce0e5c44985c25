"""weights=random: a shipped architecture filled with random numbers, for timing without a hub."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from specdec.compat import no_init_weights, quiet_transformers
from specdec.config import TargetConfig
from specdec.errors import OptionError
from specdec.tokenization import BYTE_VOCABULARY, byte_tokenizer

SHIPPED = files("specdec") / "architectures"
STD = 0.02
BLOCK = 1_000_003  # random numbers shared by all weights; a prime, so that no two rows of a matrix coincide
SHIFT = 7919  # the block is turned by this much from one matrix to the next


def shipped_architectures() -> list[str]:
    names = (entry.name for entry in SHIPPED.iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def architecture(config: TargetConfig) -> PretrainedConfig:
    """The shipped architecture of that name, else the config.json in the folder `target.path`."""
    name = config.architecture
    if name in shipped_architectures():
        fields = json.loads((SHIPPED / f"{name}.json").read_text())
    elif name is None and config.path and (Path(config.path) / "config.json").is_file():
        fields = json.loads((Path(config.path) / "config.json").read_text())
    else:
        choices = ", ".join(shipped_architectures())
        remedy = f"target.weights=random needs one of {choices}, or target.path=FOLDER with a config.json."
        raise OptionError("target.architecture", name, remedy)
    return AutoConfig.for_model(**fields)


def build_random(config: TargetConfig, device: torch.device, dtype: torch.dtype):
    """(model, byte tokenizer): matrices are stretches of one random block, norms one, biases zero."""
    if config.device_map:
        remedy = "is for pretrained weights; use target.device."
        raise OptionError("target.device_map", config.device_map, remedy)
    model_config = architecture(config)
    tokenizer = byte_tokenizer() if model_config.vocab_size >= BYTE_VOCABULARY else None
    with quiet_transformers(), no_init_weights(), device:
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, attn_implementation=config.attention
        )
    model.tie_weights()
    if device.type != "meta":
        fill_(model, config.seed)
    return model, tokenizer


@torch.no_grad()
def fill_(model: torch.nn.Module, seed: int) -> None:
    """Set all parameters in place, at the speed of copying."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(BLOCK, generator=generator) * STD
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        block = block.to(parameter.device, parameter.dtype).roll(SHIFT)
        for piece in parameter.view(-1).split(BLOCK):
            piece.copy_(block[: len(piece)])
