"""What differs between the transformers versions that specdec supports (5.17 to 5.24)."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import torch
from transformers.initialization import no_init_weights
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

__all__ = ["attention_names", "cache_argument", "no_init_weights", "quiet_transformers"]


def cache_argument(model: torch.nn.Module) -> str:
    """The keyword under which `model.forward` takes its cache: `cache` from 5.24, `past_key_values` before.

    5.17 swallows an unknown `cache=` silently in `**kwargs`, so the name is read from the signature.
    """
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def attention_names() -> list[str]:
    """Every attention implementation registered with transformers, and its built-in `eager`."""
    return sorted({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()})


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hold back transformers' log lines, warnings and bars (some ignore its switch); we say what matters."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
