"""Peak memory of a decode against what it must hold: weights, keys and values, the drafter.

Every method has a fresh process. On CUDA the peak is the allocator's. On the CPU it is what the process grew
by since everything was imported and nothing loaded, read from /proc; elsewhere it is not known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import drafters
from experiments import machine, peak_memory
from experiments.benchmark.contestants import AUTOREGRESSIVE, own_engine
from experiments.store import Run
from specdec.cache import SlotCache
from specdec.config import Config, TargetConfig
from specdec.drafter import Drafter
from specdec.model import Model

SECTION = "memory"
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def run(
    config: Config,
    chosen: dict[str, Any],
    ids: list[list[int]],
    store: Run,
    report: Callable[[str], None] = lambda _: None,
) -> None:
    """One process per method: autoregressive, and each drafter.

    Arguments:
        chosen: name → options of the drafter. ids: decoded at batch size 1, one after the other.
    """
    done = {r["method"] for r in store.records if r["section"] == SECTION}
    for method, options in {AUTOREGRESSIVE: None, **chosen}.items():
        if method in done:
            continue
        report(f"a process for {method}")
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found = pool.submit(measure, config, options, ids).result()
        store.append({"section": SECTION, "method": method} | found)


def measure(config: Config, options: Any, ids: list[list[int]]) -> dict[str, Any]:
    """Bytes: `peak`, and `expected` with its parts `weights`, `kv`, `drafter`. For a fresh process."""
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    _load_libraries(config)
    before = resident()
    target = Model.load(config.target)
    drafter = None if options is None else drafters.build(options, target)
    engine = own_engine(target, drafter, config)
    loaded, nodes = resident(), 0 if drafter is None else drafter.max_nodes
    peak_memory.reset(target.device)
    reset_peak()
    for prompt in ids:
        list(engine.decode([prompt], [0]))
    longest = max(len(p) + engine.room(p) for p in ids) + nodes + 2
    parts = {
        "weights": held(parameters(target.hf)),
        "kv": longest * kv_bytes(target),
        "drafter": 0 if drafter is None else held(own_tensors(drafter, target)),
    }
    cuda = target.device.type == "cuda"
    peak = peak_memory.peak(target.device)["cuda"] if cuda else resident_peak() - before
    known = cuda or before > 0
    return {
        **parts,
        "expected": sum(parts.values()),
        "peak": peak if known else None,
        "loaded": loaded - before if known else None,
        "kind": "allocator" if cuda else "process",
        "threads": torch.get_num_threads(),
    }


def _load_libraries(config: Config) -> None:
    """Decode a few tokens with a tiny model, so that whatever is loaded at a first call is there."""
    tiny = TargetConfig(name="tiny", source="tiny", device=config.target.device, dtype=config.target.dtype)
    model, mode = Model.load(tiny), config.engine.compile
    if mode == "auto" and model.device.type == "cpu" and model.obstacle is None:
        mode = "on"  # as the target may be
    engine = own_engine(model, None, config, max_new_tokens=2, compile=mode)
    list(engine.decode([[1, 2, 3]], [0]))


def kv_bytes(model: Model) -> int:
    """Keys and values of one token."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * machine.dtype_bytes(model.dtype))


def parameters(module: torch.nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers."""
    yield from module.parameters()
    yield from module.buffers()


def own_tensors(drafter: Drafter, target: Model) -> list[Tensor]:
    """A drafter's weights and caches, without what it shares with the target."""
    shared = {t.untyped_storage().data_ptr() for t in parameters(target.hf)}
    return [t for t in _tensors(drafter, target, 3) if t.untyped_storage().data_ptr() not in shared]


def held(tensors: Iterator[Tensor] | list[Tensor]) -> int:
    """Bytes of the tensors' storages, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _tensors(value: Any, target: Model, depth: int) -> Iterator[Tensor]:
    if isinstance(value, torch.nn.Module):
        yield from () if value is target.hf else parameters(value)
        for module in value.modules() if value is not target.hf else ():
            # and weights kept outside of the parameters, e.g. in a tuple
            yield from (t for t in tree_leaves(vars(module)) if isinstance(t, Tensor))
    elif isinstance(value, SlotCache):
        for layer in value.slot_layers:
            yield from (layer.keys, layer.values) if layer.is_initialized else ()
    elif isinstance(value, Model):
        yield from _tensors(value.hf, target, depth)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, target, depth - 1) if depth else ()
    elif depth and type(value).__module__.startswith("drafters"):
        for item in vars(value).values():
            yield from _tensors(item, target, depth - 1)


def resident() -> int:
    """Resident bytes of this process now; 0 where the platform does not tell."""
    return _status("VmRSS")


def resident_peak() -> int:
    """The most since `reset_peak`; where that is not allowed, since the process began."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Forget the peak of resident bytes so far, where the platform can."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return


def _status(field: str) -> int:
    text = STATUS.read_text() if STATUS.exists() else ""
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0
