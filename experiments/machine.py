"""This machine, measured: bytes per second from memory, FLOPs per second of matrix products; CPU or CUDA."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from experiments.store import cpu_model
from specdec.roofline import DTYPE_BYTES, Accelerator

DTYPES = ("float32", "bfloat16")
LEAST_BUFFER, CACHE_FACTOR, MEMORY_SHARE = 2**30, 4, 0.25  # of the buffer that is streamed
SIZES = (512, 1024, 2048, 4096, 8192)  # of the matrices, until one takes long enough
LONG_ENOUGH = 0.1  # share of the time for one kind of measurement
LEAST_ROUNDS = 3


def measure(device: torch.device, seconds: float = 1.0) -> Accelerator:
    """The machine as an `Accelerator`, the best of many rounds of about `seconds` for each number.

    Bandwidth is that of reading, as decoding does: the faster of a sum and a matrix-vector product over a
    buffer larger than any cache.
    """
    with torch.inference_mode():
        flops = {name: matmul_rate(device, getattr(torch, name), seconds) for name in DTYPES}
        bandwidth = read_bandwidth(device, seconds)
    return Accelerator(_name(device), bandwidth, flops, _memory(device), measured=True)


def read_bandwidth(device: torch.device, seconds: float = 1.0, size: int | None = None) -> float:
    """Bytes per second of reading a buffer of `size` bytes (by default larger than the caches)."""
    columns = 8192
    rows = max((size or buffer_bytes(device)) // (columns * 4), 1)
    buffer = torch.ones(rows, columns, device=device)  # written once, so that every page exists
    vector = torch.ones(columns, device=device)
    kernels: list[Callable[[], object]] = [buffer.sum, lambda: buffer @ vector]
    return max(4 * rows * columns / best(kernel, device, seconds / 2) for kernel in kernels)


def matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float = 1.0) -> float:
    """FLOPs per second of square matrix products, of the size that runs best."""
    rate = 0.0
    for size in SIZES:
        a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
        once = best(lambda a=a, b=b: a @ b, device, seconds / len(SIZES))
        rate = max(rate, 2.0 * size**3 / once)
        if once > LONG_ENOUGH * seconds:
            break
    return rate


def buffer_bytes(device: torch.device) -> int:
    """Several times the largest cache, at least a gigabyte, at most a share of the free memory."""
    wanted = max(CACHE_FACTOR * cache_bytes(device), LEAST_BUFFER)
    free = _free_memory(device)
    return int(min(wanted, MEMORY_SHARE * free)) if free else wanted


def cache_bytes(device: torch.device) -> int:
    """The last level of cache; 0 where the platform does not tell."""
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    found = [re.fullmatch(r"(\d+)([KMG])", path.read_text().strip()) for path in sizes]
    return max((int(m[1]) * units[m[2]] for m in found if m), default=0)


def dtype_bytes(dtype: torch.dtype) -> float:
    """Bytes per number."""
    return DTYPE_BYTES[str(dtype).removeprefix("torch.")]


def best(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The shortest of as many rounds as fit into `seconds`, after one to warm up."""
    shortest, rounds = float("inf"), 0
    work()
    synchronize(device)
    end = time.perf_counter() + seconds
    while rounds < LEAST_ROUNDS or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        synchronize(device)
        shortest, rounds = min(shortest, time.perf_counter() - start), rounds + 1
    return shortest


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, {torch.get_num_threads()} threads"


def _memory(device: torch.device) -> float | None:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return _meminfo("MemTotal")


def _free_memory(device: torch.device) -> float | None:
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else _meminfo("MemAvailable")


def _meminfo(field: str) -> float | None:
    info = Path("/proc/meminfo")
    found = re.search(rf"^{field}:\s+(\d+) kB", info.read_text(), re.MULTILINE) if info.exists() else None
    return 1024.0 * int(found[1]) if found else None
