"""The packages `economize` and `flashspec` as contestants (extra `peers`): same target, drafters and prompts.

Both are given the draft length, the n-gram lengths and the very same small model; each gets CUDA graphs where
it has them. `flashspec: composite` is that package's own default for a target with a small model.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from experiments.benchmark.contestants import AUTOREGRESSIVE, Contestant, Decode
from specdec.compat import quiet_transformers

PEERS = ("economize", "flashspec")
NAME = "target"  # what the packages' logs call the models that they are given


def installed() -> list[str]:
    """The peers that can race here."""
    return [name for name in PEERS if importlib.util.find_spec(name) is not None]


def contestants(
    peer: str,
    hf: PreTrainedModel,
    small: PreTrainedModel | None,
    eos: Sequence[int],
    room: Callable[[list[int]], int],
    ngram: Any,
    gamma: int,
) -> list[Contestant]:
    """One peer's contestants.

    Arguments:
        hf: the plain target, for this peer alone.
        small: the small drafter's model, `None` to go without.
        eos, room: as in `Generate`.
        ngram: options of prompt lookup (`gamma`, `max_ngram`, `min_ngram`), `None` to go without.
        gamma: draft length of the small model.
    """
    build = {"economize": _economize, "flashspec": _flashspec}[peer]
    with quiet_transformers():
        methods = build(hf, small, eos, room, ngram, gamma)
    return [Contestant(peer, method, _quiet(decode)) for method, decode in methods]


def _quiet(decode: Decode) -> Decode:
    """Without what transformers says about how the packages call it."""

    def quiet(prompt: list[int]) -> list[int]:
        with quiet_transformers():
            return decode(prompt)

    return quiet


Methods = list[tuple[str, Decode]]


def _economize(hf, small, eos, room, ngram, gamma) -> Methods:
    import economize
    from economize.techniques.draft_model import DraftModelConfig
    from economize.techniques.lookup import LookupConfig

    def method(width: int, *technique: Any) -> Decode:
        options = economize.DecodeConfig(cycle_length=width, cuda_graphs=hf.device.type == "cuda")
        model = economize.apply(hf, *technique, decoding=options)

        def decode(prompt: list[int]) -> list[int]:
            ids = torch.tensor(prompt, device=hf.device)
            return model.decode(ids, room(prompt), stop=list(eos) or None).tokens.tolist()

        return decode

    found = [(AUTOREGRESSIVE, method(1))]
    if ngram is not None:
        lookup = LookupConfig(max_ngram=ngram.max_ngram, min_ngram=ngram.min_ngram)
        found.append(("ngram", method(ngram.gamma + 1, lookup)))
    if small is not None:
        module = "economize.techniques.draft_model.technique"
        loaders = {"load_draft_model": lambda *_: small, "load_local_tokenizer": lambda _: None}
        with patch.multiple(module, **loaders):  # it loads from a path only; ours is not always one
            found.append(("small", method(gamma + 1, DraftModelConfig(model=NAME))))
    return found


def _flashspec(hf, small, eos, room, ngram, gamma) -> Methods:
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel

    logging.getLogger("flashspec").setLevel(logging.ERROR)
    device, dtype = hf.device, hf.dtype

    def method(gamma: int, drafter: Any, strategy: str) -> Decode:
        config = FlashSpecConfig(
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            eos_token_ids=tuple(eos),
            drafter_strategy=strategy,
            bandit=BanditConfig(n_arms=1),
            sampling=SamplingConfig(gamma=gamma, temperature=0.0),
        )
        wrapped = TargetModel(NAME, device, dtype, model=hf)
        engine = SpeculativeEngine(config, [drafter], wrapped)

        def decode(prompt: list[int]) -> list[int]:
            ids = torch.tensor([prompt], device=device)
            result = engine.generate(ids, max_new_tokens=room(prompt))
            return result.output_ids[0, : result.n_tokens_generated].tolist()

        return decode

    found = []
    if ngram is not None:
        lookup = NgramDrafter(max_ngram=ngram.max_ngram, min_ngram=ngram.min_ngram)
        found.append(("ngram", method(ngram.gamma, lookup, "bandit")))
    if small is not None:
        for name, strategy in (("small", "bandit"), ("composite", "auto")):
            drafter = HuggingFaceDrafter(NAME, device, dtype, temperature=0.0, model=small)
            found.append((name, method(gamma, drafter, strategy)))
    return found
