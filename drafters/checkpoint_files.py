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

OPTION = "drafter.checkpoint"  # what most drafters' users call it
SUFFIXES = (".safetensors", ".pt", ".bin")
WANTED = ["*.json", "*.safetensors", "*.pt", "*.bin", "*.md"]


def read_checkpoint(
    path: str, revision: str | None = None, option: str = OPTION
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, tensors on the CPU) of a drafter's checkpoint.

    Arguments:
        path: a folder with weights and a config.json, a single file of weights, or a hub id.
        option: what the user calls it.

    Raises:
        OptionError: on `option`; it cannot be had, or not be read without running pickled code.
    """
    place = Path(path).expanduser()
    if not place.exists():
        place = _from_hub(path, revision, option)
    folder = place if place.is_dir() else place.parent
    config = folder / "config.json"
    try:
        described = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    except ValueError as error:
        raise OptionError(option, path, f"{config} is no JSON ({error}).") from error
    return described, _tensors(path, _weights(place, path, option), option)


def _from_hub(path: str, revision: str | None, option: str) -> Path:
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=WANTED))
    except Exception as error:  # the hub's own errors, and those of whichever HTTP library it uses
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = (
            f"is no folder or file here, and the hub did not give it ({reason}); check the spelling, the "
            f"network and `hf auth login`, or train one: python run.py task=train drafter=… target=…"
        )
        raise OptionError(option, path, remedy) from error


def _weights(place: Path, path: str, option: str) -> list[Path]:
    """The files with weights, safetensors before pickles."""
    if place.is_file():
        return [place]
    for suffix in SUFFIXES:
        if found := sorted(file for file in place.glob(f"*{suffix}") if "optimizer" not in file.name):
            return found
    raise OptionError(option, path, f"{place} holds no weights ({', '.join(SUFFIXES)}).")


def _tensors(path: str, files: list[Path], option: str) -> dict[str, Tensor]:
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
            raise OptionError(option, path, remedy) from error
        if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
            raise OptionError(option, path, f"{file} holds more than named tensors.")
        tensors |= found
    return tensors


def expect_shape(
    path: str, name: str, tensor: Tensor, shape: tuple[int, ...], option: str = OPTION
) -> Tensor:
    """`tensor`, if it has that shape.

    Raises:
        OptionError: names the tensor and both shapes.
    """
    if tuple(tensor.shape) != shape:
        remedy = (
            f"{name} is {list(tensor.shape)}, but this target needs {list(shape)}; "
            f"the checkpoint is for another target."
        )
        raise OptionError(option, path, remedy)
    return tensor


def take_token_map(path: str, tensors: dict[str, Tensor], vocab: int, option: str = OPTION) -> Tensor | None:
    """Take `token_map` out of `tensors`: int64, the target's ids of the draft vocabulary; `None` without one.

    Raises:
        OptionError: it names a token twice, or one that is not among the target's `vocab`.
    """
    found = tensors.pop("token_map", None)
    if found is None:
        return None
    token_map = found.long()
    if token_map.dim() != 1 or token_map.min() < 0 or token_map.max() >= vocab:
        remedy = f"token_map {list(found.shape)} holds ids beyond this target's vocabulary of {vocab}."
        raise OptionError(option, path, remedy)
    if len(token_map.unique()) < len(token_map):
        raise OptionError(option, path, "token_map names a token twice.")
    return token_map
