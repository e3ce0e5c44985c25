"""Checkpoints of Medusa heads: three published layouts and ours, told apart by their keys.

- original: `{h}.{l}.linear.{weight,bias}`, and head matrices `{h}.{L}.weight` after L residual blocks;
- TGI ("v2"): the same without the matrices, the target's being used; ours adds `root.weight`, `token_map`;
- vLLM: `blocks.{h}.layers.{l}.{weight,bias}`, `lm_heads.{h}.weight` or one `lm_head.weight`, `token_map`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters.checkpoint_files import expect_shape, read_checkpoint, take_token_map
from drafters.medusa.heads import HeadsSpec, MedusaHeads
from specdec.errors import OptionError
from specdec.model import Model

PREFIX = re.compile(r"^medusa_heads?\.")
RENAMED = (  # published name → ours: blocks.{h}.{l}.linear.{weight,bias}, heads.{h}.weight
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), r"blocks.\1.\2.linear.\3"),
    (re.compile(r"(\d+)\.\d+\.weight"), r"heads.\1.weight"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), r"blocks.\1.\2.linear.\3"),
    (re.compile(r"lm_heads\.(\d+)\.weight"), r"heads.\1.weight"),
    (re.compile(r"(lm_head|root)\.weight|token_map"), r"\g<0>"),
)


def load_heads(path: str, target: Model, revision: str | None = None) -> MedusaHeads:
    """Heads from a folder, a file or a hub id, in the target's dtype on its device.

    Raises:
        OptionError: names the tensor that is missing, unknown or of a wrong shape.
    """
    config, published = read_checkpoint(path, revision)
    tensors = {our_name(path, name): tensor for name, tensor in published.items()}
    spec = read_spec(path, config, tensors)
    token_map = take_token_map(path, tensors, target.vocab_size)
    shared = tensors.pop("lm_head.weight", None)
    if shared is not None:
        tensors |= {f"heads.{h}.weight": shared for h in range(spec.heads)}
    bias = "blocks.0.0.linear.bias" in tensors
    heads = MedusaHeads(spec, target, token_map, bias)
    wanted = {name: tuple(tensor.shape) for name, tensor in heads.state_dict().items() if name != "token_map"}
    if odd := sorted(wanted.keys() ^ tensors.keys()):
        which = "is missing" if odd[0] in wanted else "is not expected"
        raise OptionError(
            "drafter.checkpoint", path, f"{odd[0]} {which}; it holds no whole set of Medusa heads."
        )
    for name, shape in wanted.items():
        expect_shape(path, name, tensors[name], shape)
    heads.load_state_dict(tensors | ({} if token_map is None else {"token_map": token_map}))
    return heads.to(target.device, target.dtype).eval().requires_grad_(False)


def our_name(path: str, published: str) -> str:
    """The name that we give to a published tensor.

    Raises:
        OptionError: no layout has it.
    """
    bare = PREFIX.sub("", published)
    for pattern, name in RENAMED:
        if match := pattern.fullmatch(bare):
            return match.expand(name)
    raise OptionError("drafter.checkpoint", path, f"{published} is no tensor of Medusa heads.")


def read_spec(path: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> HeadsSpec:
    """The heads' shape, counted from the tensors (published configurations have been wrong about it)."""
    places = [m for name in tensors if (m := re.fullmatch(r"blocks\.(\d+)\.(\d+)\.linear\.weight", name))]
    if not places:
        raise OptionError("drafter.checkpoint", path, "holds no residual blocks of Medusa heads.")
    token_map = tensors.get("token_map")
    choices = config.get("medusa_choices") or []
    return HeadsSpec(
        heads=1 + max(int(m[1]) for m in places),
        resblocks=1 + max(int(m[2]) for m in places),
        own_head=any(name.startswith(("heads.", "lm_head.")) for name in tensors),
        sees_root="root.weight" in tensors,
        draft_vocab=None if token_map is None else len(token_map),
        choices=[[int(r) for r in p] for p in choices],
    )


def save_heads(heads: MedusaHeads, folder: Path | str, base_model: str, card: str = "") -> Path:
    """Write `config.json`, `medusa_lm_head.safetensors` (bfloat16, TGI's layout) and the card `README.md`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    spec = heads.spec
    tensors = {}
    for name, tensor in heads.state_dict().items():
        match = re.fullmatch(r"(blocks|heads)\.(.+)", name)
        if match and match[1] == "blocks":
            name = match[2]
        elif match:
            name = match[2].replace(".weight", f".{spec.resblocks}.weight")
        kind = torch.int32 if name == "token_map" else torch.bfloat16
        tensors[name] = tensor.detach().to("cpu", kind).contiguous().clone()
    config = {
        "architectures": ["MedusaHeads"],
        "version": None if spec.own_head else "2",
        "base_model_name_or_path": base_model,
        "medusa_num_heads": spec.heads,
        "medusa_num_layers": spec.resblocks,
        "hidden_size": heads._shared[0].shape[1],
        "truncated_vocab_size": spec.draft_vocab,
        "medusa_choices": spec.choices,
        "sees_root": spec.sees_root,
    }
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if card:
        (folder / "README.md").write_text(card, encoding="utf-8")
    return folder


def describe(spec: HeadsSpec) -> dict[str, Any]:
    """The shape as plain values, without the tree."""
    return {k: v for k, v in asdict(spec).items() if k in {f.name for f in fields(spec)} - {"choices"}}
