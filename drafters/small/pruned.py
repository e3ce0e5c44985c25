"""Checkpoints of a pruned small model: its layers and final norm; the rest is the target's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters.checkpoint_files import expect_shape, read_checkpoint, take_token_map
from drafters.small.prune import Cut, MappedHead, carve
from specdec.errors import OptionError
from specdec.model import Model

OPTION = "drafter.path"
KIND = "specdec_pruned"  # `model_type` of config.json


def is_pruned(path: str) -> bool:
    """Whether a folder holds such a checkpoint."""
    config = Path(path).expanduser() / "config.json"
    try:
        return json.loads(config.read_text(encoding="utf-8")).get("model_type") == KIND
    except (OSError, ValueError):
        return False


def save_pruned(small: Model, shape: dict[str, Any], folder: Path, base_model: str, card: str = "") -> Path:
    """Write `config.json`, `model.safetensors` (bfloat16) and the card `README.md`.

    Arguments:
        small: from `carve`. shape: of its `Cut`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.to("cpu", torch.bfloat16).contiguous() for name, t in own_state(small).items()}
    head = small.hf.get_output_embeddings()
    if isinstance(head, MappedHead):
        tensors["token_map"] = head.token_map.to("cpu", torch.int32)
    config = {"model_type": KIND, "base_model_name_or_path": base_model, **shape}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if card:
        (folder / "README.md").write_text(card, encoding="utf-8")
    return folder


def load_pruned(path: str, target: Model) -> Model:
    """The small model of a checkpoint, in the target's dtype on its device.

    Raises:
        OptionError: names the tensor that is missing or of a wrong shape.
    """
    config, tensors = read_checkpoint(path, option=OPTION)
    token_map = take_token_map(path, tensors, target.vocab_size, OPTION)
    layers = config["layers"]
    whole = target.config
    for name, most in (
        ("layers", whole.num_hidden_layers),
        ("units", whole.intermediate_size),
        ("groups", getattr(whole, "num_key_value_heads", None) or whole.num_attention_heads),
    ):
        if (config.get(name) or 0) > most:
            raise OptionError(OPTION, path, f"keeps {config[name]} {name}, but this target has {most}.")
    cut = Cut(
        list(range(layers)),
        [list(range(config["units"]))] * layers if config.get("units") else [],
        [list(range(config["groups"]))] * layers if config.get("groups") else [],
    )
    small = carve(target, cut, token_map)
    wanted = own_state(small)
    if odd := sorted(wanted.keys() ^ tensors.keys()):
        which = "is missing" if odd[0] in wanted else "is not expected"
        raise OptionError(OPTION, path, f"{odd[0]} {which} in this checkpoint.")
    for name, own in wanted.items():
        own.copy_(expect_shape(path, name, tensors[name], tuple(own.shape), OPTION))
    small.name = f"{target.name}/small-{layers}"
    return small


def own_state(small: Model) -> dict[str, Tensor]:
    """What is the small model's own: layers and final norm."""
    decoder = small.hf.get_decoder()
    layers = {f"layers.{name}": t for name, t in decoder.layers.state_dict().items()}
    return layers | {f"norm.{name}": t for name, t in decoder.norm.state_dict().items()}
