"""The structured schema of a run (the only part of `specdec/` that configuration knows; imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdec.errors import OptionError
from specdec.sampling import Sampling


@dataclass
class TargetConfig:
    """Which target model, from where, in what precision."""

    name: str = "???"
    source: str = "hf"  # embedded | hf | tiny
    path: str | None = None  # local folder or hub id (source=hf)
    revision: str | None = None
    weights: str = "pretrained"  # pretrained | random (shipped architecture, for timing only)
    architecture: str | None = None  # shipped architecture under specdec/architectures/, used by weights=random
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16 | float64
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    device_map: str | None = None  # "auto": spread over devices with accelerate
    chat: bool = True  # wrap prompts in the model's chat template where it has one
    trust_remote_code: bool = False
    # source=tiny: a random Llama of this size, reproducible from its own seed
    vocab_size: int = 260
    hidden_size: int = 32
    layers: int = 2
    seed: int = 0


@dataclass
class PromptsConfig:
    """What is asked."""

    name: str = "builtin"
    path: str | None = None  # JSONL, Parquet or text (one prompt a line)
    limit: int | None = None  # at most this many, spread evenly over the domains
    domains: list[str] | None = None  # only these


@dataclass
class EngineConfig:
    """How decoding runs."""

    max_new_tokens: int = 48
    batch_size: int = 1
    stop: list[str] = field(default_factory=list)  # stop strings; the text is cut before them
    ignore_eos: bool = False
    prefill_chunk: int = 512  # prompt tokens per prefill forward
    check_contract: bool = False  # re-draw every proposal and compare it with its declaration
    fixed_width: int | None = None  # pad every forward to this many tokens, so that widths do not change rounding
    threads: int | None = None  # CPU threads; null = as the machine has

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("batch_size", 1), ("prefill_chunk", 1), ("fixed_width", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise OptionError(f"engine.{name}", value, f"must be ≥ {least}.")
        if any(not s for s in self.stop):
            raise OptionError("engine.stop", self.stop, "must not hold an empty string.")


@dataclass
class Config:
    """A whole run. `task`, `drafter` and `verify` are open here: each is checked by its own dataclass."""

    task: Any = "???"
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: Any = "???"
    verify: Any = "???"
    sampling: Sampling = field(default_factory=Sampling)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    experiment: Any = None
    seed: int = 0
    resume: bool = False
