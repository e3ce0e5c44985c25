"""Drafters, one folder each, found by name.

A drafter `x` is a folder `drafters/x/` with

- `config.py`: a dataclass `Config`, `name: str = "x"` first, its options with their defaults, its checks in
  `__post_init__` (raising `OptionError("drafter.<option>", ...)`); imports no torch. If it can tell,
  `proposes()` says what its proposals are (`check_pairing`) and `wants_shipped` whether it takes weights that
  are shipped for the target;
- `drafter.py`: `build(config: Config, target) -> Drafter`;

and a `conf/drafter/x.yaml` with the same options. What shall be certified of it, `certify.py` says:

- `cases(target) -> dict[str, Drafter]`: drafters by what sets them apart ("" if nothing does), for a target
  of any vocabulary size, random weights allowed. Without that file the drafter is certified with its default
  options.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.config import from_mapping, suggest
from specdec.errors import OptionError

if TYPE_CHECKING:
    from specdec.drafter import Drafter
    from specdec.verify import Rule

ALL = "all"


@dataclass
class All:
    """`drafter=all`."""

    name: str = ALL


def names() -> list[str]:
    """The names of all drafters of this version."""
    return sorted(config.parent.name for config in Path(__file__).parent.glob("*/config.py"))


def config_class(name: str) -> type[Any]:
    """The dataclass of a drafter's options.

    Raises:
        OptionError: this version has no such drafter.
    """
    if name not in names():
        remedy = f"this drafter is not part of this version; {suggest(name, names())}"
        raise OptionError("drafter", name, remedy)
    return importlib.import_module(f"drafters.{name}.config").Config


def check(config: Mapping[str, Any] | Any) -> Any:
    """A drafter's options as its own dataclass, names, types and values checked; needs no torch.

    `drafter=all` passes as it is: a task that knows what to do with all of them asks for it by `ALL`.

    Raises:
        OptionError: unknown drafter, unknown option, wrong type or impossible value.
    """
    if not isinstance(config, Mapping):  # checked already
        return config
    if "name" not in config:
        raise OptionError("drafter", dict(config), f"must be chosen; {suggest('', names())}")
    if config["name"] == ALL:
        return All()
    return from_mapping(config_class(config["name"]), config, "drafter")


def check_pairing(config: Any, rule: Rule) -> None:
    """Refuse, before anything is loaded, a rule that would be biased for a drafter of these options.

    A drafter's `Config` may say by `proposes() -> (kind, is_chain)` what its proposals are; `None` means that
    only the built drafter knows. The engine checks once more.

    Raises:
        OptionError: the pairing is biased, or the rule cannot read the drafter's trees.
    """
    if hasattr(config, "proposes"):
        kind, is_chain = config.proposes()
        rule.check(config.name, kind, is_chain is not False)


def build(config: Mapping[str, Any] | Any, target: Any) -> Drafter:
    """The drafter of these options for this target.

    Raises:
        OptionError: as `check`, or the drafter cannot serve this target.
    """
    config = check(config)
    if config.name == ALL:
        remedy = f"is only for task=certify, benchmark and gpu_check; {suggest('', names())}"
        raise OptionError("drafter", ALL, remedy)
    return importlib.import_module(f"drafters.{config.name}.drafter").build(config, target)


def cases(name: str, target: Any) -> dict[str, Drafter]:
    """What is to be certified of a drafter: its own `certify.cases`, or it with its default options.

    Raises:
        OptionError: no such drafter, or its default options cannot serve this target.
    """
    cls = config_class(name)
    if importlib.util.find_spec(f"drafters.{name}.certify") is None:
        return {"": build(cls(), target)}
    return importlib.import_module(f"drafters.{name}.certify").cases(target)
