"""From a `TargetConfig` to a loaded Hugging Face model and its tokenizer.

    embedded   a small real model that comes from the Python package index (embedded.py)
    hf         a checkpoint folder or a hub id (pretrained.py)
    tiny       a random Llama for tests (tiny.py)
    weights=random   any shipped architecture with random weights, for timing (random_weights.py)
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.checkpoints.devices import resolve_device, resolve_dtype
from specdec.checkpoints.embedded import REQUIREMENT, EmbeddedTarget, cache_directory
from specdec.checkpoints.pretrained import checkpoint_folder, load_pretrained
from specdec.checkpoints.random_weights import build_random
from specdec.checkpoints.tiny import build_tiny, save_tiny
from specdec.config import TargetConfig
from specdec.errors import OptionError
from specdec.progress import Progress, status
from specdec.tokenization import has_chat_template

__all__ = [
    "Loaded",
    "cache_directory",
    "context_length",
    "eos_token_ids",
    "load",
    "resolve_device",
    "resolve_dtype",
    "save_tiny",
]

SOURCES = ("embedded", "hf", "tiny")
WEIGHTS = ("pretrained", "random")


@dataclass(frozen=True)
class Loaded:
    """A model ready for inference (eval mode, no gradients) and what is known about it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    device: torch.device  # of the embedding, where token ids go
    dtype: torch.dtype
    chat: bool  # prompts are wrapped in the tokenizer's chat template
    provenance: dict[str, Any] = field(default_factory=dict)  # for meta.json: source, weights, dtype, parameters, ...


def load(config: TargetConfig, progress: Progress | None = None) -> Loaded:
    """Load the target that `config` describes; slow steps are announced to `progress` (default: standard error).

    Raises OptionError, before anything slow where it can be known, for a value that cannot work or a model that
    cannot be had.
    """
    if progress is None:
        with status() as progress:
            return load(config, progress)
    _check_choice("target.source", config.source, SOURCES)
    _check_choice("target.weights", config.weights, WEIGHTS)
    device = resolve_device(config.device)
    dtype = torch.float32 if config.source == "tiny" and config.dtype == "auto" else resolve_dtype(config.dtype, device)
    start = time.perf_counter()
    model, tokenizer, origin = _SOURCES[_kind(config)](config, device, dtype, progress)
    model.eval().requires_grad_(False)
    provenance = {
        "name": config.name,
        **origin,
        "dtype": str(dtype).removeprefix("torch."),
        "device": config.device_map or str(device),
        "attention": config.attention,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "load_seconds": round(time.perf_counter() - start, 3),
    }
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        device=model.get_input_embeddings().weight.device,
        dtype=dtype,
        chat=config.chat and has_chat_template(tokenizer),
        provenance=provenance,
    )


def _kind(config: TargetConfig) -> str:
    return "random" if config.weights == "random" and config.source != "tiny" else config.source


def _embedded(config, device, dtype, progress):
    folder = EmbeddedTarget(cache_directory()).prepare(progress)
    progress(f"Loading {config.name}")
    origin = {"source": REQUIREMENT, "weights": "pretrained"}
    return *load_pretrained(config, folder, device, dtype), origin


def _hf(config, device, dtype, progress):
    folder = checkpoint_folder(config, progress)
    progress(f"Loading {config.path}")
    origin = {"source": config.path, "weights": "pretrained", "revision": config.revision}
    if folder.parent.name == "snapshots":
        origin["commit"] = folder.name
    return *load_pretrained(config, folder, device, dtype), origin


def _tiny(config, device, dtype, progress):
    return *build_tiny(config, device, dtype), {"source": "tiny", "weights": "random", "seed": config.seed}


def _random(config, device, dtype, progress):
    progress(f"Building {config.architecture or config.path} with random weights")
    origin = {"source": config.architecture or config.path, "weights": "random", "seed": config.seed}
    return *build_random(config, device, dtype), origin


_SOURCES = {"embedded": _embedded, "hf": _hf, "tiny": _tiny, "random": _random}


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(option, value, f"choose one of {', '.join(choices)}.")


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> frozenset[int]:
    """The ids that end a sequence: the generation config's (as `generate` has it), else the model's or tokenizer's."""
    for owner in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True), tokenizer):
        eos = getattr(owner, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


def context_length(model: PreTrainedModel) -> int:
    """Positions the model was built for, prompt and output together; `sys.maxsize` where its config sets no limit."""
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return positions or sys.maxsize
