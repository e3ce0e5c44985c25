"""Verification rules, one file each, found by name: a new rule is a new file here and a YAML in `conf/verify`."""

from __future__ import annotations

import importlib
import pkgutil

from specdec.errors import OptionError
from specdec.verify.rule import Rule, Verdict

__all__ = ["Rule", "Verdict", "names", "rule_class"]


def names() -> list[str]:
    """The names of all rules."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in {"rule"})


def rule_class(name: str) -> type[Rule]:
    """The rule of that name.

    Raises:
        OptionError: there is none.
    """
    if name not in names():
        raise OptionError("verify", name, f"no such rule; there are {', '.join(names())}.")
    module = importlib.import_module(f"{__name__}.{name}")
    return next(c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Rule) and c.__dict__.get("name") == name)
