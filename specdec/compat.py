"""What differs between the transformers versions that specdec supports (5.17 to 5.24)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

__all__ = ["cache_argument", "no_init_weights", "quiet_transformers"]


def cache_argument(model) -> str:
    """The keyword under which `model.forward` takes its cache: `cache` from 5.24, `past_key_values` before.

    5.17 swallows an unknown `cache=` silently in `**kwargs`, so the name is read from the signature.
    """
    return _cache_argument(type(model))


@cache
def _cache_argument(model_class: type) -> str:
    return "cache" if "cache" in inspect.signature(model_class.forward).parameters else "past_key_values"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hold back transformers' progress bars, log lines and warnings; what matters is said by specdec itself."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
