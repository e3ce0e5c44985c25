"""Who races: our engine with each drafter, and Hugging Face's `generate` the three ways it decodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

import drafters
from experiments.bandwidth import drafter_modules
from specdec import checkpoints, verify
from specdec.compat import quiet_transformers
from specdec.config import Config, TargetConfig
from specdec.drafter import Drafter
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.ledger import Ledger
from specdec.model import Model

OURS, HUGGING_FACE = "specdec", "transformers"
AUTOREGRESSIVE = "autoregressive"
NOT_SHIPPED = ("drafter.checkpoint", "drafter.path")  # options that would name the weights that are missing

Decode = Callable[[list[int]], list[int]]


@dataclass(frozen=True)
class Contestant:
    """One way to decode greedily at batch size 1.

    Arguments:
        side: whose code it is. method: `autoregressive`, or what drafts.
        decode: new token ids of one prompt, an end-of-sequence token included.
        facts: counts of the last decode, for the record.
    """

    side: str
    method: str
    decode: Decode
    facts: Callable[[], dict[str, Any]] = dict

    @property
    def name(self) -> str:
        return f"{self.side}: {self.method}"


def build_drafters(
    wanted: Sequence[Any], target: Model
) -> tuple[dict[str, tuple[Any, Drafter]], dict[str, str]]:
    """(name → options and drafter, name → why it is left out): without weights there is nothing to race.

    Arguments:
        wanted: names, options with a `name`, or checked options.

    Raises:
        OptionError: unknown drafter or option, or two of one name.
    """
    found: dict[str, tuple[Any, Drafter]] = {}
    left_out: dict[str, str] = {}
    for each in wanted:
        options = drafters.check({"name": each} if isinstance(each, str) else each)
        if options.name in found or options.name in left_out:
            raise OptionError("task.drafters", options.name, "is given twice.")
        try:
            found[options.name] = options, drafters.build(options, target)
        except OptionError as error:
            if error.option not in NOT_SHIPPED or error.value != "null":
                raise
            left_out[options.name] = error.remedy
    return found, left_out


def own_engine(target: Model, drafter: Drafter | None, config: Config, **changes: Any) -> Engine:
    """Our engine with the drafter's usual rule: `token` for chains, `recursive` for trees."""
    rule = verify.build({"name": "token" if drafter is None or drafter.is_chain else "recursive"})
    engine_config = replace(config.engine, **changes) if changes else config.engine
    return Engine(target, drafter, rule, config.sampling, engine_config, config.seed)


def ours(method: str, engine: Engine) -> Contestant:
    """Our engine as a contestant."""

    def decode(prompt: list[int]) -> list[int]:
        engine.ledger = Ledger()
        (generation,) = engine.decode([prompt], [0])
        return generation.tokens

    def facts() -> dict[str, Any]:
        steps = engine.ledger.step_seconds
        return {
            "steps": len(steps),
            "decode_seconds": sum(sum(step[3:]) for step in steps),
            "context": sum(step[2] for step in steps) / len(steps) if steps else None,
            "phase_seconds": engine.ledger.seconds,
        }

    return Contestant(OURS, method, decode, facts)


def plain_target(config: TargetConfig) -> PreTrainedModel:
    """The target's weights in a model of their own that our engine has not touched."""
    return checkpoints.load(config).model


def plain_copy(hf: PreTrainedModel, attention: str) -> PreTrainedModel:
    """A copy of a model of ours, without our hooks and our attention."""
    copied = copy.deepcopy(hf)
    for module in copied.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    copied.set_attn_implementation(attention)
    return copied


def small_model(drafter: Drafter, target: Model, attention: str) -> PreTrainedModel | None:
    """A plain copy of the causal language model that a drafter drafts with; `None` if it has none."""
    models = [m for m in drafter_modules(drafter, target) if isinstance(m, PreTrainedModel)]
    return plain_copy(models[0], attention) if len(models) == 1 else None


class Generate:
    """Hugging Face `generate`, greedy, at batch size 1.

    Arguments:
        hf: from `plain_target`; its generation config is replaced.
        eos: end-of-sequence tokens, none to ignore them.
        room: how many new tokens a prompt may get.
    """

    def __init__(self, hf: PreTrainedModel, eos: Sequence[int], room: Callable[[list[int]], int]):
        self.hf, self.room = hf, room
        hf.generation_config = greedy(eos)

    def __call__(self, prompt: list[int], **options: Any) -> list[int]:
        ids = torch.tensor([prompt], device=self.hf.device)
        with quiet_transformers():
            out = self.hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.room(prompt), **options
            )
        return out[0, len(prompt) :].tolist()

    def contestant(self, method: str, **options: Any) -> Contestant:
        """`generate` with these options."""
        return Contestant(HUGGING_FACE, method, lambda prompt: self(prompt, **options))


def greedy(eos: Sequence[int], **more: Any) -> GenerationConfig:
    """Greedy decoding, ended by these tokens alone."""
    return GenerationConfig(
        do_sample=False, eos_token_id=list(eos) or None, pad_token_id=eos[0] if eos else 0, **more
    )


def assistant(small: PreTrainedModel, gamma: int, eos: Sequence[int]) -> PreTrainedModel:
    """Draft exactly γ tokens at every step: `generate` takes that from the assistant alone."""
    small.generation_config = greedy(
        eos,
        num_assistant_tokens=gamma,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    return small
