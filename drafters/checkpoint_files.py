"""The files of a drafter's checkpoint (a folder, a file, a hub id), opened without running pickled code."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.errors import OptionError

SUFFIXES = (".safetensors", ".pt", ".bin")
WANTED = ["*.json", "*.safetensors", "*.pt", "*.bin", "*.md"]


def read_checkpoint(path: str, revision: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, tensors on the CPU) of a drafter's checkpoint.

    Arguments:
        path: a folder with weights and a config.json, a single file of weights, or a hub id.

    Raises:
        OptionError: on `drafter.checkpoint`; it cannot be had, or not be read without running pickled code.
    """
    place = Path(path).expanduser()
    if not place.exists():
        place = _from_hub(path, revision)
    folder = place if place.is_dir() else place.parent
    config = folder / "config.json"
    try:
        described = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    except ValueError as error:
        raise OptionError("drafter.checkpoint", path, f"{config} is no JSON ({error}).") from error
    return described, _tensors(path, _weights(place, path))


def _from_hub(path: str, revision: str | None) -> Path:
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=WANTED))
    except Exception as error:  # the hub's own errors, and those of whichever HTTP library it uses
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = (
            f"is no folder or file here, and the hub did not give it ({reason}); check the spelling, the "
            f"network and `hf auth login`, or train one: python run.py task=train drafter=… target=…"
        )
        raise OptionError("drafter.checkpoint", path, remedy) from error


def _weights(place: Path, path: str) -> list[Path]:
    """The files with weights, safetensors before pickles."""
    if place.is_file():
        return [place]
    for suffix in SUFFIXES:
        if found := sorted(file for file in place.glob(f"*{suffix}") if "optimizer" not in file.name):
            return found
    raise OptionError("drafter.checkpoint", path, f"{place} holds no weights ({', '.join(SUFFIXES)}).")


def _tensors(path: str, files: list[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            if file.suffix == ".safetensors":
                found = load_file(file)
            else:
                found = torch.load(file, map_location="cpu", weights_only=True)
        except (
            SafetensorError,
            pickle.UnpicklingError,
            OSError,
            RuntimeError,
            EOFError,
            ValueError,
        ) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            remedy = f"{file} cannot be read as tensors only ({reason}); if damaged, fetch it again."
            raise OptionError("drafter.checkpoint", path, remedy) from error
        if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
            raise OptionError("drafter.checkpoint", path, f"{file} holds more than named tensors.")
        tensors |= found
    return tensors


def expect_shape(path: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`tensor`, if it has that shape.

    Raises:
        OptionError: names the tensor and both shapes.
    """
    if tuple(tensor.shape) != shape:
        remedy = (
            f"{name} is {list(tensor.shape)}, but this target needs {list(shape)}; "
            f"the checkpoint is for another target."
        )
        raise OptionError("drafter.checkpoint", path, remedy)
    return tensor
