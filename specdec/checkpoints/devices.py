"""Where a model runs and in what precision, settled before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import torch

from specdec.errors import OptionError

CPUINFO = Path("/proc/cpuinfo")


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a device, else the CPU; OptionError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            remedy = "no usable CUDA device (driver, or torch built for the CPU); use target.device=cpu."
            raise OptionError("target.device", name, remedy)
        if (device.index or 0) >= count:
            raise OptionError("target.device", name, f"there are {count} CUDA devices: 0 to {count - 1}.")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and on CPUs that multiply it in hardware, else float32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or cpu_multiplies_bfloat16() else torch.float32
    return getattr(torch, name)


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has AMX-BF16 or AVX512-BF16."""
    try:
        capabilities = torch.cpu.get_capabilities()
    except (AttributeError, RuntimeError):
        capabilities = dict.fromkeys(CPUINFO.read_text().split(), True) if CPUINFO.exists() else {}
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))
