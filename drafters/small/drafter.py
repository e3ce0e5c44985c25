"""A small causal language model drafts: a chain, or a tree where `drafter.tree` asks for one."""

from drafters.small.chain import SmallDrafter
from drafters.small.config import Config
from drafters.small.load import load_small
from drafters.small.tree import SmallTreeDrafter
from specdec.model import Model

__all__ = ["SmallDrafter", "SmallTreeDrafter", "build"]


def build(config: Config, target: Model) -> SmallDrafter:
    model, eos = load_small(config, target), target.eos_token_ids
    if config.tree:
        return SmallTreeDrafter(model, target.vocab_size, config.tree, config.siblings, eos)
    return SmallDrafter(model, target.vocab_size, config.gamma, config.confidence, eos)
