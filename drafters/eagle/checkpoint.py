"""Weights: published layouts of all generations and our own, fitted to a target; saved; random."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from drafters import shipped
from drafters.checkpoint_files import expect_shape, read_checkpoint
from drafters.eagle.config import Config
from drafters.eagle.model import (
    Architecture,
    EagleModel,
    default_feature_layers,
    layer_config,
    new_architecture,
)
from specdec.errors import OptionError
from specdec.model import Model

RENAMED = {  # published names → ours; the first six are the speculators'
    r"^fusion_fc\.": "fc.",
    r"^transformer\.": "layers.0.",
    r"^embedding_layernorm\.": "embedding_norm.",
    r"^pre_lm_head_layernorm\.": "norm.",
    r"^input_norm\.": "feature_norm.",
    r"^midlayer\.": "layers.0.",
}
NOT_OURS = re.compile(r"(^|\.)(t2d|verifier_norm\.weight|verifier_lm_head\.weight|rotary_emb\.inv_freq)$")
LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
PART_OF_KEY = {  # which key tells of which part
    "fc.bias": "fc_bias",
    "layers.0.self_attn.q_proj.bias": "qkv_bias",
    "layers.0.self_attn.o_proj.bias": "o_bias",
    "layers.0.mlp.gate_proj.bias": "mlp_bias",
    "layers.0.self_attn.q_norm.weight": "qk_norm",
    "embedding_norm.weight": "embedding_norm",
    "feature_norm.weight": "feature_norm",
    "norm.weight": "norm",
    "lm_head.weight": "lm_head",
    "embed_tokens.weight": "embed_tokens",
}


def load_drafter(config: Config, target: Model) -> EagleModel:
    """The network of these options, attached to the target.

    Raises:
        OptionError: there are no weights, or they do not fit; says which tensor and which shapes.
    """
    if config.weights == "random":
        return random_model(
            new_architecture(target, config.generation, config.layers, config.draft_vocab), target
        )
    path = config.checkpoint or shipped.checkpoint("eagle", target.name, target.is_random)
    fields, tensors = read_checkpoint(path, config.revision)
    return Published(path, fields, tensors, target).build().attach(target)


@dataclass
class Published:
    """A checkpoint of any layout, as it becomes a network for a target.

    Arguments:
        path: what errors call it. fields: its config.json. tensors: by published name.
    """

    path: str
    fields: Mapping[str, Any]
    tensors: dict[str, Tensor]
    target: Model

    def build(self) -> EagleModel:
        """The network with these weights, still in their dtype on the CPU."""
        self._rename()
        architecture = self._architecture()
        with torch.device("meta"):
            model = EagleModel(architecture)
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._complete(expected)
        for name, shape in expected.items():
            expect_shape(self.path, name, self.tensors[name], shape)
        if model.is_reduced:
            self._check_map()
        model.load_state_dict(self.tensors, assign=True)
        return model.eval().requires_grad_(False)

    def _rename(self) -> None:
        renamed = {}
        for name, tensor in self.tensors.items():
            name = re.sub(r"^(module\.|model\.)+", "", name)
            for pattern, ours in RENAMED.items():
                name = re.sub(pattern, ours, name)
            if not NOT_OURS.search(name):
                renamed[name] = tensor
        self.tensors = renamed
        if "fc.weight" not in renamed or "layers.0.self_attn.q_proj.weight" not in renamed:
            found = ", ".join(sorted(renamed)[:4])
            remedy = f"holds no EAGLE network: no fc.weight and layers.0.self_attn (it has {found}, …)."
            raise OptionError("drafter.checkpoint", self.path, remedy)
        if self._embeddings_are_the_targets():
            del self.tensors["embed_tokens.weight"]

    def _architecture(self) -> Architecture:
        tensors, fields = self.tensors, self.fields
        size, vocab = self.target.config.hidden_size, self.target.vocab_size
        sees_both = tensors["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * tensors["fc.weight"].shape[0]
        generation = 3 if sees_both else 1
        parts = {part for key, part in PART_OF_KEY.items() if key in tensors}
        if generation == 1 and "layers.0.input_layernorm.weight" in tensors:
            parts.add("entry_norm")
        if generation == 3 and "embed_tokens" in parts:
            size = tensors["embed_tokens.weight"].shape[1]
        return Architecture(
            generation=generation,
            layer=self._layer(size),
            vocab_size=vocab,
            draft_vocab_size=self._draft_vocabulary(vocab),
            feature_layers=self._feature_layers() if generation == 3 else (Model.FINAL,),
            feature_size=self.target.config.hidden_size,
            parts=frozenset(parts),
            norm_before_residual=bool(fields.get("norm_before_residual", False)),
        )

    def _layer(self, size: int) -> LlamaConfig:
        """A layer's sizes from config.json; without one, the target's."""
        found = re.findall(r"layers\.(\d+)\.", " ".join(self.tensors))
        layers = max(map(int, found)) + 1
        described = self.fields.get("layer") or self.fields.get("transformer_layer_config") or self.fields
        given = {name: described[name] for name in LAYER_FIELDS if described.get(name) is not None}
        if "hidden_size" not in given:
            return layer_config(self.target, layers)
        return LlamaConfig(**given | {"hidden_size": size, "num_hidden_layers": layers})

    def _draft_vocabulary(self, vocab: int) -> int:
        head, offsets = self.tensors.get("lm_head.weight"), self.tensors.get("d2t")
        if offsets is not None and len(offsets) >= vocab and not offsets.any():
            del self.tensors["d2t"]
            offsets = None
        if offsets is None and head is not None:
            if len(head) > vocab:  # padding
                self.tensors["lm_head.weight"] = head = head[:vocab]
            if len(head) < vocab:
                self.tensors["d2t"] = offsets = torch.zeros(len(head), dtype=torch.int64)
        return vocab if offsets is None else len(offsets)

    def _feature_layers(self) -> tuple[int, ...]:
        if "feature_layers" in self.fields:
            return tuple(self.fields["feature_layers"])
        nested = self.fields.get("eagle_config") or {}
        inputs = self.fields.get("eagle_aux_hidden_state_layer_ids") or nested.get(
            "eagle_aux_hidden_state_layer_ids"
        )
        layers = self.target.config.num_hidden_layers
        if not inputs:
            return default_feature_layers(layers)
        if min(inputs) < 1 or max(inputs) > layers:
            remedy = (
                f"reads the inputs of layers {inputs}; this target has layers 1 to {layers} to read from."
            )
            raise OptionError("drafter.checkpoint", self.path, remedy)
        return tuple(i - 1 for i in inputs)  # the input of layer i is the output of layer i−1

    def _embeddings_are_the_targets(self) -> bool:
        """Whether they agree, up to rounding, on a thousand rows (vocabularies may be padded differently)."""
        ours, theirs = self.tensors.get("embed_tokens.weight"), self.target.hf.get_input_embeddings().weight
        if ours is None or ours.shape[1] != theirs.shape[1]:
            return False
        rows = torch.linspace(0, min(len(ours), len(theirs)) - 1, 1000).long()
        a, b = ours[rows].float(), theirs[rows.to(theirs.device)].float().cpu()
        return torch.allclose(a, b, rtol=2**-7, atol=1e-5)

    def _complete(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse what is missing and what would be left over."""
        for what, names in {
            "lacks": sorted(expected.keys() - self.tensors.keys()),
            "has, beyond an EAGLE network's tensors,": sorted(self.tensors.keys() - expected.keys()),
        }.items():
            if names:
                remedy = (
                    f"{what} {', '.join(names[:3])} ({len(names)} in all); it is of a layout not known here."
                )
                raise OptionError("drafter.checkpoint", self.path, remedy)

    def _check_map(self) -> None:
        ids = torch.arange(len(self.tensors["d2t"])) + self.tensors["d2t"]
        vocab = self.target.vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) < len(ids):
            remedy = f"its d2t does not map to distinct tokens below {vocab}; it is for another target."
            raise OptionError("drafter.checkpoint", self.path, remedy)


def save_pretrained(
    model: EagleModel, folder: str | Path, card: str = "", dtype: torch.dtype | None = None
) -> Path:
    """Write config.json, model.safetensors and perhaps a card; `drafter.checkpoint=FOLDER` loads them.

    Arguments:
        dtype: of the weights; `None` = as they are.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    a = model.architecture
    layer = {
        name: getattr(a.layer, name) for name in LAYER_FIELDS if getattr(a.layer, name, None) is not None
    }
    fields = {
        "model_type": "eagle",
        "generation": a.generation,
        "feature_layers": list(a.feature_layers),  # outputs; −1: after the final norm
        "vocab_size": a.vocab_size,
        "draft_vocab_size": a.draft_vocab_size,
        "norm_before_residual": a.norm_before_residual,
        "layer": layer,
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    tensors = {
        name: tensor.to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if card:
        (folder / "README.md").write_text(card, encoding="utf-8")
    return folder


@torch.no_grad()
def random_model(architecture: Architecture, target: Model, seed: int = 0) -> EagleModel:
    """Random weights of unit gain, for timing, tests and as what training starts from."""
    model = EagleModel(architecture)
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = torch.randn(module.weight.shape, generator=generator) * module.in_features**-0.5
            module.weight.copy_(weight)
            if module.bias is not None:
                module.bias.zero_()
    if model.is_reduced:  # tokens spread over the whole vocabulary
        index = torch.arange(architecture.draft_vocab_size)
        model.d2t.copy_(index * architecture.vocab_size // architecture.draft_vocab_size - index)
    return model.eval().requires_grad_(False).attach(target)
