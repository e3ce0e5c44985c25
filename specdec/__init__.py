"""specdec: speculative decoding with pluggable drafters, proved exactness and honest speedups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.sampling import Sampling

if TYPE_CHECKING:
    from specdec.api import Result, generate, load_target

__all__ = ["Result", "Sampling", "generate", "load_target"]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first used."""
    if name in __all__:
        from specdec import api

        return getattr(api, name)
    raise AttributeError(f"module 'specdec' has no attribute '{name}'")
