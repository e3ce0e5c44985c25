"""Where the small model comes from: a checkpoint, shipped weights, or the target's own first layers."""

from __future__ import annotations

import copy

from torch import nn

from drafters import shipped
from drafters.small.config import Config
from drafters.small.pruned import is_pruned, load_pruned
from specdec.config import TargetConfig
from specdec.errors import OptionError
from specdec.model import Model
from specdec.tokenization import require_same_tokenizer


def load_small(config: Config, target: Model) -> Model:
    """The draft model.

    Raises:
        OptionError: none is shipped and neither `path` nor `layers` is given, or the tokenizers differ.
    """
    if config.layers is not None:
        return first_layers(target, config.layers)
    path = config.path or shipped.checkpoint("small", target.name, target.is_random)
    if is_pruned(path):
        config.refuse_loading_options()
        return load_pruned(path, target)
    return _from_checkpoint(config, target)


def first_layers(target: Model, layers: int) -> Model:
    """The target cut after its first `layers` layers; all weights are shared, nothing is trained."""
    depth = target.config.num_hidden_layers
    if layers > depth:
        raise OptionError("drafter.layers", layers, f"the target has only {depth} layers.")
    memo = {id(parameter): parameter for parameter in target.hf.parameters()}
    memo |= {id(layer): layer for layer in list(target.hf.get_decoder().layers)[layers:]}
    small = copy.deepcopy(target.hf, memo)
    decoder = small.get_decoder()
    decoder.layers = nn.ModuleList(list(decoder.layers)[:layers])
    small.config.get_text_config().num_hidden_layers = layers
    for module in small.modules():  # after the cut: the layers cut off are the target's, hooks and all
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return Model(small, target.tokenizer, f"{target.name}[:{layers}]", context_length=target.context_length)


def _from_checkpoint(config: Config, target: Model) -> Model:
    dtype = str(target.dtype).removeprefix("torch.") if config.dtype == "auto" else config.dtype
    options = TargetConfig(
        name=config.path or "",
        path=config.path,
        revision=config.revision,
        dtype=dtype,
        device=str(target.device),
        trust_remote_code=config.trust_remote_code,
    )
    try:
        model = Model.load(options)
    except OptionError as error:
        why = error.remedy.partition(";")[0].rstrip(".")
        remedy = f"{why}; check it, or leave drafter.path out for shipped weights."
        raise OptionError(error.option.replace("target.", "drafter."), error.value, remedy) from error
    require_same_tokenizer(target.tokenizer, model.tokenizer, "drafter.path", config.path)
    return model
