"""From a `TargetConfig` to a loaded Hugging Face model and its tokenizer. One file per origin:

- embedded.py: a small real model that comes from the Python package index
- pretrained.py: a checkpoint folder or a hub id
- tiny.py: a random Llama for tests
- random_weights.py: a shipped architecture with random weights, for timing
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.checkpoints.devices import resolve_device, resolve_dtype
from specdec.checkpoints.embedded import REQUIREMENT, EmbeddedTarget, cache_directory
from specdec.checkpoints.pretrained import checkpoint_folder, load_pretrained
from specdec.checkpoints.random_weights import build_random
from specdec.checkpoints.tiny import build_tiny, save_tiny
from specdec.compat import attention_names
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


@dataclass(frozen=True)
class Loaded:
    """A model ready for inference (eval mode, no gradients) and what is known about it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    device: torch.device  # where token ids go
    dtype: torch.dtype
    chat: bool  # prompts are wrapped in the tokenizer's chat template
    provenance: dict[str, Any]  # for meta.json: source, weights (pretrained or random), dtype, ...


def load(config: TargetConfig, progress: Progress | None = None) -> Loaded:
    """Load the target that `config` describes.

    Arguments:
        progress: is told of each slow step; by default they are shown on standard error.

    Raises:
        OptionError: a value that cannot work, or a model that cannot be had.
    """
    if progress is None:
        with status() as progress:
            return load(config, progress)
    device = resolve_device(config.device)
    tiny_auto = config.source == "tiny" and config.dtype == "auto"
    dtype = torch.float32 if tiny_auto else resolve_dtype(config.dtype, device)
    if config.attention not in attention_names():
        choices = ", ".join(attention_names())
        raise OptionError("target.attention", config.attention, f"no such attention; choices: {choices}.")
    start = time.perf_counter()
    try:
        model, tokenizer, origin = _from_origin(config, device, dtype, progress)
    except torch.OutOfMemoryError as error:
        remedy = "the model does not fit into its memory; use target.device_map=auto or target.device=cpu."
        raise OptionError("target.device", device, remedy) from error
    model.eval().requires_grad_(False)
    provenance = {
        "name": config.name,
        **origin,
        "dtype": str(dtype).removeprefix("torch."),
        "device": config.device_map or str(device),
        "attention": config.attention,
        "parameters": model.num_parameters(),
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


def _from_origin(config: TargetConfig, device: torch.device, dtype: torch.dtype, progress: Progress):
    """(model, tokenizer, where they come from)."""
    random: dict[str, Any] = {"weights": "random", "seed": config.seed}
    if config.source == "tiny":
        return *build_tiny(config, device, dtype), {"source": "tiny"} | random
    if config.weights == "random":
        source = config.architecture or config.path
        progress(f"Building {source} with random weights")
        return *build_random(config, device, dtype), {"source": source} | random
    origin: dict[str, Any] = {"weights": "pretrained"}
    if config.source == "embedded":
        folder = EmbeddedTarget(cache_directory()).prepare(progress)
        origin["source"] = REQUIREMENT
    else:
        folder = checkpoint_folder(config, progress)
        origin["source"] = config.path
        origin["commit"] = folder.name if folder.parent.name == "snapshots" else None
    progress(f"Loading {config.name}")
    return *load_pretrained(config, folder, device, dtype), origin


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> frozenset[int]:
    """The ids that end a sequence, as in `generate`: the generation config's, else the model's, else the
    tokenizer's, else none.
    """
    for owner in (model.generation_config, model.config.get_text_config(decoder=True), tokenizer):
        eos = getattr(owner, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


def context_length(model: PreTrainedModel) -> int:
    """Positions the model was built for, prompt and output together; `sys.maxsize` if there is no limit."""
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return positions or sys.maxsize
