"""A small model cut out of the target: its most important layers, MLP units and groups of heads.

Embeddings and head stay the target's own and are shared; the head may be cut to a draft vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from specdec.errors import OptionError
from specdec.model import Model
from specdec.products import thin_linear


@dataclass
class Cut:
    """What is kept.

    Arguments:
        layers: which layers, in order.
        units: per kept layer the MLP units kept; empty = all.
        groups: per kept layer the groups of heads kept; empty = all.
    """

    layers: list[int]
    units: list[list[int]] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)

    @property
    def shape(self) -> dict[str, int | None]:
        """Layers, MLP units and groups of heads of the result."""
        return {
            "layers": len(self.layers),
            "units": len(self.units[0]) if self.units else None,
            "groups": len(self.groups[0]) if self.groups else None,
        }


def best(importance: Tensor, count: int) -> list[int]:
    """The `count` most important of `[n]`, in their own order."""
    return sorted(importance.topk(count).indices.tolist())


class MappedHead(nn.Module):
    """The target's head over a draft vocabulary: logits `[..., V]`, −inf where a token cannot be drafted.

    Arguments:
        weight: `[V, H]` the target's.
        token_map: `[Vd]` int64.
    """

    def __init__(self, weight: Tensor, token_map: Tensor):
        super().__init__()
        self._full = (weight,)  # in a tuple: the target's, no parameter of this module
        self.register_buffer("token_map", token_map.to(weight.device))
        self.lent = (weight[self.token_map].clone(),)  # read whole, a copy

    @property
    def weight(self) -> Tensor:
        return self._full[0]

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """`[..., Vd]`."""
        return thin_linear(hidden, self.lent[0].to(hidden.dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.draft_logits(hidden)
        full = logits.new_full((*logits.shape[:-1], len(self.weight)), -torch.inf)
        return full.index_copy_(-1, self.token_map, logits)


def carve(target: Model, cut: Cut, token_map: Tensor | None = None) -> Model:
    """The small model, with copies of what is kept and the target's own embeddings and head.

    Raises:
        OptionError: the target has no parts of the names that pruning knows (those of Llama and its like).
    """
    config = copy.deepcopy(target.hf.config)
    shape = cut.shape
    config.num_hidden_layers = len(cut.layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in cut.layers]
    if shape["units"]:
        config.intermediate_size = shape["units"]
    if shape["groups"]:
        per_group = config.num_attention_heads // config.num_key_value_heads
        config.head_dim = head_dim(target)
        config.num_key_value_heads = shape["groups"]
        config.num_attention_heads = shape["groups"] * per_group
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        hf = type(target.hf)(config)
    decoder, whole = hf.get_decoder(), target.hf.get_decoder()
    for n, (layer, index) in enumerate(zip(decoder.layers, cut.layers, strict=True)):
        _fill(layer, target, whole.layers[index], cut, n)
    decoder.norm = _copy(whole.norm)
    decoder.rotary_emb = copy.deepcopy(whole.rotary_emb)
    hf.set_input_embeddings(_bare(target.hf.get_input_embeddings()))
    head = target.hf.get_output_embeddings()
    hf.set_output_embeddings(MappedHead(head.weight, token_map) if token_map is not None else _bare(head))
    left = [name for name, p in [*hf.named_parameters(), *hf.named_buffers()] if p.is_meta]
    if left:
        remedy = f"this target has parts that pruning does not know: {left[0]}."
        raise OptionError("drafter.layers", len(cut.layers), remedy)
    name = f"{target.name}[{','.join(map(str, cut.layers))}]"
    hf.eval().requires_grad_(False)
    return Model(hf, target.tokenizer, name, target.eos_token_ids, target.context_length, target.chat)


def head_dim(target: Model) -> int:
    config = target.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _fill(layer: nn.Module, target: Model, whole: nn.Module, cut: Cut, n: int) -> None:
    """Give the n-th `layer` what is kept of the target's `whole` one."""
    state = {name: p.detach() for name, p in whole.state_dict().items()}
    if cut.units:
        keep = torch.tensor(cut.units[n], device=target.device)
        for name in ("gate_proj", "up_proj"):
            _rows(state, f"mlp.{name}", keep)
        _columns(state, "mlp.down_proj", keep)
    if cut.groups:
        dim, config = head_dim(target), target.config
        per_group = config.num_attention_heads // config.num_key_value_heads
        keys = _spans(cut.groups[n], dim, target.device)
        queries = _spans(cut.groups[n], dim * per_group, target.device)
        _rows(state, "self_attn.q_proj", queries)
        _rows(state, "self_attn.k_proj", keys)
        _rows(state, "self_attn.v_proj", keys)
        _columns(state, "self_attn.o_proj", queries)
    layer.load_state_dict({name: t.clone() for name, t in state.items()}, assign=True)


def _spans(groups: list[int], width: int, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(g * width, (g + 1) * width, device=device) for g in groups])


def _rows(state: dict[str, Tensor], name: str, keep: Tensor) -> None:
    for kind in ("weight", "bias"):
        if f"{name}.{kind}" in state:
            state[f"{name}.{kind}"] = state[f"{name}.{kind}"][keep]


def _columns(state: dict[str, Tensor], name: str, keep: Tensor) -> None:
    state[f"{name}.weight"] = state[f"{name}.weight"][:, keep]


def _copy(module: nn.Module) -> nn.Module:
    copied = copy.deepcopy(module)
    copied._forward_hooks.clear()
    copied._forward_pre_hooks.clear()
    return copied


def _bare(module: nn.Module) -> nn.Module:
    """The same weights in a module of its own, without the target's hooks."""
    bare = copy.copy(module)
    bare._parameters = dict(module._parameters)
    bare._forward_hooks, bare._forward_pre_hooks = (
        type(module._forward_hooks)(),
        type(module._forward_pre_hooks)(),
    )
    return bare
