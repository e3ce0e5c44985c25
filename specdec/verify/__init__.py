"""Verification rules, one file each, found by name: a new rule is a file here and a YAML in `conf/verify`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, get_origin, get_type_hints

from specdec.errors import OptionError
from specdec.verify.rule import Rule, Verdict

__all__ = ["Rule", "Verdict", "build", "names", "rule_class"]

ALL = "all"
_NOT_RULES = {"rule", "expectation"}


def names() -> list[str]:
    """The names of all rules."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _NOT_RULES)


def rule_class(name: str) -> type[Rule]:
    """The rule of that name.

    Raises:
        OptionError: there is none.
    """
    if name == ALL:
        raise OptionError("verify", name, f"is only for task=certify; there are {', '.join(names())}.")
    if name not in names():
        raise OptionError("verify", name, f"no such rule; there are {', '.join(names())}.")
    module = importlib.import_module(f"{__name__}.{name}")
    found = (c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Rule))
    return next(c for c in found if c.__dict__.get("name") == name)


def build(config: Mapping[str, Any]) -> Rule:
    """The rule `config["name"]` with the rest of `config` as its parameters.

    Raises:
        OptionError: no such rule or parameter, or a parameter of the wrong type or out of range.
    """
    cls = rule_class(config["name"])
    given = {key: value for key, value in config.items() if key != "name"}
    known = inspect.signature(cls).parameters
    hints = get_type_hints(cls.__init__)
    for key, value in given.items():
        if key not in known:
            has = ", ".join(known) or "none"
            raise OptionError(
                f"verify.{key}", value, f"verify={cls.name} has no such parameter; it has: {has}."
            )
        _check_type(f"verify.{key}", value, hints[key])
    return cls(**given)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_type(option: str, value: Any, hint: Any) -> None:
    """Numbers and lists of numbers are all that rules take."""
    if get_origin(hint) is Sequence:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if not (is_list and all(map(_is_number, value))):
            raise OptionError(option, value, "must be a list of numbers, e.g. [0.8,0.6].")
    elif not _is_number(value) or (hint is int and not isinstance(value, int)):
        raise OptionError(option, value, f"must be {'an integer' if hint is int else 'a number'}.")
