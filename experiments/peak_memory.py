"""Memory of the process and of the accelerator."""

from __future__ import annotations

import sys
from typing import Any

import torch


def reset(device: torch.device) -> None:
    """Start looking for the accelerator's peak afresh (the process's own peak cannot be reset)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> dict[str, int]:
    """Peak bytes: `process` since it began, `cuda` since `reset`."""
    found = {"process": process_peak()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.max_memory_allocated(device)
    return found


def process_peak() -> int:
    """Peak resident bytes of this process; 0 where the platform does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def capacity(device: torch.device) -> dict[str, Any]:
    """The accelerator's name and bytes, for the run's metadata."""
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    return {"accelerator": properties.name, "accelerator_memory": properties.total_memory}
