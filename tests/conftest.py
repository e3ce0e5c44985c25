"""Shared fixtures: tiny random models, each beside an untouched Hugging Face copy of the same weights."""

from __future__ import annotations

import pytest
import torch
from reference import plain, tiny

from specdec.model import Model


@pytest.fixture(scope="session")
def tiny64() -> Model:
    """float64, 260 tokens, byte tokenizer."""
    return tiny("float64")


@pytest.fixture(scope="session")
def plain64() -> torch.nn.Module:
    """The weights of `tiny64` in a plain Hugging Face model."""
    return plain({"dtype": "float64"})


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
