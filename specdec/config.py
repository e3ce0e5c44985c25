"""The structured schema of a run (the only part of `specdec/` that configuration knows; imports no torch)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from specdec.errors import OptionError
from specdec.sampling import Sampling

T = TypeVar("T")
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
COMPILE = ("auto", "on", "off", "graphs")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass
class TargetConfig:
    """Which target model, from where, in what precision."""

    name: str = "???"
    source: str = "hf"  # embedded | hf | tiny
    path: str | None = None  # local folder or hub id (source=hf)
    revision: str | None = None
    weights: str = "pretrained"  # pretrained | random (shipped architecture, for timing only)
    architecture: str | None = None  # one of specdec/architectures/, for weights=random
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16 | float64
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    device_map: str | None = None  # "auto": spread over devices with accelerate
    attention: str = "sdpa"  # name of a registered attention implementation
    chat: bool = True  # wrap prompts in the model's chat template where it has one
    trust_remote_code: bool = False
    # source=tiny: a random Llama of this size, reproducible from its own seed
    vocab_size: int = 260
    hidden_size: int = 32
    layers: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {
            "source": ("embedded", "hf", "tiny"),
            "weights": ("pretrained", "random"),
            "dtype": DTYPES,
            "device_map": (None, "auto"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise OptionError(f"target.{name}", value, f"no such choice; {suggest(value, allowed)}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise OptionError("target.device", self.device, "no such device; choose auto, cpu, cuda, cuda:N.")
        at_least("target", self, vocab_size=2, hidden_size=1, layers=1)
        if self.path and self.source != "hf":
            raise OptionError("target.path", self.path, f"is not read by target={self.name}; use target=hf.")


@dataclass
class PromptsConfig:
    """What is asked."""

    name: str = "builtin"
    path: str | None = None  # JSONL, Parquet or text (one prompt a line)
    limit: int | None = None  # at most this many, spread evenly over the domains
    domains: list[str] | None = None  # only these

    def __post_init__(self) -> None:
        at_least("prompts", self, limit=1)
        reads = self.name in ("file", "spec_bench")
        if reads and not self.path:
            raise OptionError("prompts.path", "null", f"must name the file that prompts={self.name} reads.")
        if self.path and not reads:
            remedy = f"is not read by prompts={self.name}; use prompts=file."
            raise OptionError("prompts.path", self.path, remedy)


@dataclass
class EngineConfig:
    """How decoding runs."""

    max_new_tokens: int = 32
    batch_size: int = 1
    stop: list[str] = field(default_factory=list)  # stop strings; the text is cut before them
    ignore_eos: bool = False
    prefill_chunk: int = 512  # prompt tokens per prefill forward
    check_contract: bool = False  # re-draw every proposal and compare it with its declaration
    fixed_width: int | None = None  # pad every forward to this many tokens, so that all round alike
    threads: int | None = None  # CPU threads; null = as the machine has
    read_every: int | None = None  # autoregressive steps per look at the tokens; null = 1 on CPUs, else 4
    # auto, on, off, graphs. on: torch.compile (on CUDA recorded as well); graphs: recorded CUDA forwards;
    compile: str = "auto"  # auto: torch.compile for large bfloat16 models on CPUs, else off

    def __post_init__(self) -> None:
        if self.compile not in COMPILE:
            remedy = f"no such choice; {suggest(self.compile, COMPILE)}"
            raise OptionError("engine.compile", self.compile, remedy)
        at_least(
            "engine",
            self,
            max_new_tokens=1,
            batch_size=1,
            prefill_chunk=1,
            fixed_width=1,
            threads=1,
            read_every=1,
        )
        if any(not s for s in self.stop):
            raise OptionError("engine.stop", self.stop, "must not hold an empty string.")


@dataclass
class Config:
    """A whole run. `task`, `drafter` and `verify` are open here: each is checked by its own owner."""

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
    runs: Any = None  # stored runs that a task reads: a folder, a pattern, or a list of them
    logger: str | None = None  # a tracker besides the files: see experiments/trackers.py

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise OptionError("seed", self.seed, "must lie between 0 and 2^64 − 1.")


def at_least(group: str, config: object, **least: int) -> None:
    """Refuse values below their minimum.

    Raises:
        OptionError: names `group.field`; `None` passes.
    """
    for name, minimum in least.items():
        value = getattr(config, name)
        if value is not None and value < minimum:
            raise OptionError(f"{group}.{name}", value, f"must be ≥ {minimum}.")


def suggest(wrong: object, choices: Iterable[object]) -> str:
    """The end of an error message: the nearest choice, if one is near, and all of them."""
    names = ["null" if choice is None else str(choice) for choice in choices]
    near = difflib.get_close_matches(str(wrong), names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}choices: {', '.join(names)}" if names else ""


def from_mapping(cls: type[T], mapping: Mapping[str, Any], group: str) -> T:
    """A dataclass from plain values, each checked against its field's name and type.

    Raises:
        OptionError: names `group.field`; also whatever the dataclass's own `__post_init__` refuses.
    """
    schema = OmegaConf.structured(cls)
    OmegaConf.set_readonly(schema, False)  # frozen dataclasses
    try:
        return OmegaConf.to_object(OmegaConf.merge(schema, dict(mapping)))  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise _in_a_list(cls, mapping, group) or explain(error, group) from error


def _in_a_list(cls: type, mapping: Mapping[str, Any], group: str) -> OptionError | None:
    """The library does not say which list it found a wrong element in."""
    for name, kind in get_type_hints(cls).items():
        kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        lists = [part for part in kinds if get_origin(part) is list]
        value = mapping.get(name)
        if lists and value is not None and not any(_fits(value, part) for part in lists):
            return OptionError(f"{group}.{name}", value, f"must be {describe(kind)}.")
    return None


def _fits(value: Any, kind: Any) -> bool:
    """Whether plain values are of a type, as far as that is plain; a text may be read as anything later."""
    if get_origin(kind) is list:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return is_list and all(_fits(item, get_args(kind)[0]) for item in value)
    return kind not in WORDS or isinstance(value, (str, int, float) if kind is float else (str, kind))


def explain(error: OmegaConfBaseException, group: str = "", value: object = None) -> OptionError:
    """The error of the configuration library in our terms: option, value, remedy.

    Arguments:
        group: prefix of the option, where the error came from a part of the configuration.
        value: what the user wrote, where the error does not know it.
    """
    option = ".".join(filter(None, (group, error.full_key or str(error.key or ""))))
    value = next((v for v in (error.value, value) if v is not None), "null")
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        parent = error.parent_node if isinstance(error.parent_node, DictConfig) else ()
        remedy = f"no such option; {suggest(error.key, [key for key in parent if key != 'hydra'])}"
        return OptionError(option, value, remedy.rstrip("; "))
    if isinstance(error, MissingMandatoryValue):
        return OptionError(option, "???", "must be given.")
    if isinstance(error, ValidationError):
        hints = get_type_hints(error.object_type) if isinstance(error.object_type, type) else {}
        if error.key in hints:
            return OptionError(option, value, f"must be {describe(hints[error.key])}.")
    return OptionError(option, value, str(error).splitlines()[0])


def describe(kind: Any) -> str:
    """A field's type in words: `list[str] | None` as "a list [..., ...] of text or null"."""
    if isinstance(kind, UnionType):
        return " or ".join(describe(part) for part in get_args(kind))
    if get_origin(kind) is list:
        return f"a list [..., ...] of {describe(get_args(kind)[0])}"
    return WORDS.get(kind, str(kind))
