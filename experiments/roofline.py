"""What the target costs at best: parameters, cache, memory, latency and throughput on known accelerators
and on this machine, which is measured; the roofline with the model's prefill, decode and verify on it.

`python run.py task=roofline target=qwen2.5-7b` is the lecture's exercise: KV size and theoretical speed at
context 4096, batch 1 and 32, on 716.8 GB/s (the row RTX 4080). No weights are needed, unless the target
itself is timed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig

from experiments import machine, roofline_report
from experiments.store import Run
from specdec import verify
from specdec.checkpoints import resolve_device
from specdec.checkpoints.random_weights import SHIPPED, shipped_architectures
from specdec.checkpoints.tiny import tiny_config
from specdec.config import Config, TargetConfig, at_least
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.model import Model
from specdec.roofline import (
    ACCELERATORS,
    DTYPE_BYTES,
    Accelerator,
    Architecture,
    Work,
    accelerator,
    decode_step,
    forward,
    free_width,
    variants,
)
from specdec.tree import Tree

SMALL_SOURCES = ("embedded", "tiny")  # targets that are timed without being asked for


@dataclass
class Options:
    """Options of `task=roofline`."""

    name: str = "roofline"
    context: int = 4096  # tokens per sequence
    batches: list[int] = field(default_factory=lambda: [1, 32])
    gamma: int = 4  # draft length of the verify forward
    weights: str = "bfloat16"  # data type of the weights: float32 | bfloat16 | fp8 | int8 | int4
    cache: str = "bfloat16"  # of keys and values
    accelerators: list[str] = field(default_factory=lambda: list(ACCELERATORS))
    bandwidth: float | None = None  # bytes per second of one more accelerator of the user's
    flops: float | None = None  # its FLOPs per second in bfloat16; null = the lecture's RTX 4080's
    machine: bool = True  # measure this machine
    seconds: float = 1.0  # for each number measured
    time_target: bool | None = None  # load the target and time it; null = if it is small

    def __post_init__(self) -> None:
        at_least("task", self, context=1, gamma=0)
        if not self.batches or min(self.batches) < 1:
            raise OptionError("task.batches", self.batches, "must be a list of numbers ≥ 1.")
        for option in ("weights", "cache"):
            if getattr(self, option) not in DTYPE_BYTES:
                choices = ", ".join(DTYPE_BYTES)
                raise OptionError(
                    f"task.{option}", getattr(self, option), f"no such type; choices: {choices}."
                )
        for name in self.accelerators:
            accelerator(name)
        for option in ("bandwidth", "flops", "seconds"):
            value = getattr(self, option)
            if value is not None and value <= 0:
                raise OptionError(f"task.{option}", value, "must be > 0.")


def run(config: Config, run_dir: Path) -> None:
    """Tables, `summary.json`, roofline.png/.svg in `run_dir`."""
    task: Options = config.task
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    arch = Architecture.from_config(read_config(config.target), config.target.name)
    device = resolve_device(config.target.device)
    store = Run(run_dir, config, threads=torch.get_num_threads(), device=str(device))
    console = Console() if Console().is_terminal else Console(width=100)
    processors = [accelerator(name) for name in task.accelerators]
    if task.bandwidth:
        flops = {"bfloat16": task.flops or ACCELERATORS["rtx4080"].peak()}
        processors.append(Accelerator(f"{task.bandwidth / 1e9:g} GB/s", task.bandwidth, flops))
    if task.machine:
        with Console(stderr=True).status("Measuring this machine"):
            processors.append(machine.measure(device, task.seconds))

    results = analyse(arch, processors, task)
    timed = task.time_target if task.time_target is not None else config.target.source in SMALL_SOURCES
    results["timed"] = time_target(config, arch, task) if timed else []
    for table in roofline_report.tables(results, task):
        console.print(table)
    for line in roofline_report.notes(results, task):
        console.print(line, highlight=False, soft_wrap=True)
    paths = roofline_report.plot(results, processors, run_dir / "roofline")
    paths.append(store.finish(results))
    for path in paths:
        console.print(str(path), highlight=False, soft_wrap=True)


def read_config(target: TargetConfig) -> dict[str, Any]:
    """The target's configuration, without its weights: a folder's, the shipped one, else the hub's.

    Raises:
        OptionError: it cannot be had.
    """
    if target.source == "tiny":
        return tiny_config(target).to_dict()
    local = Path(target.path or "") / "config.json"
    if target.path and local.is_file():
        return json.loads(local.read_text(encoding="utf-8"))
    if target.architecture in shipped_architectures():
        return json.loads((SHIPPED / f"{target.architecture}.json").read_text(encoding="utf-8"))
    if not target.path:
        raise OptionError(
            "target.path", "null", "must name a folder or a hub id whose configuration to read."
        )
    try:
        found = AutoConfig.from_pretrained(target.path, revision=target.revision)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(
            "target.path", target.path, f"its configuration cannot be read ({reason})."
        ) from error
    return found.to_dict()


def analyse(arch: Architecture, processors: list[Accelerator], task: Options) -> dict[str, Any]:
    """All numbers that need no measurement of the model."""
    weight, kv = DTYPE_BYTES[task.weights], DTYPE_BYTES[task.cache]
    steps = [
        {"accelerator": p.name, "measured": p.measured, "batch": b}
        | vars(decode_step(arch, b, task.context, p.bandwidth, weight, kv))
        | {"fits": None if p.memory is None else memory(arch, b, task) <= p.memory}
        for p in processors
        for b in task.batches
    ]
    phases = [
        {"phase": name, "batch": batch, "tokens": tokens, "context": context}
        | vars(work := phase(arch, tokens, context, batch, task))
        | {"intensity": work.intensity}
        for batch in task.batches
        for name, tokens, context in _phases(task)
    ]
    return {
        "architecture": arch.name,
        "parameters": arch.parameters if arch.known else None,
        "num_params": arch.num_params,
        "weight_bytes": weight * arch.num_params,
        "kv_bytes_per_sequence": arch.kv_bytes(task.context, kv),
        "variants": {n: v.kv_bytes(task.context, kv) for n, v in variants(arch).items()},
        "accelerators": [
            {"name": p.name, "measured": p.measured, "bandwidth": p.bandwidth, "flops": p.flops}
            | {"ridge": p.ridge(), "free_width": free_width(arch, p, task.context)}
            for p in processors
        ],
        "decode_steps": steps,
        "phases": phases,
    }


def memory(arch: Architecture, batch: int, task: Options) -> float:
    """Bytes of weights and caches."""
    return decode_step(
        arch, batch, task.context, 1.0, DTYPE_BYTES[task.weights], DTYPE_BYTES[task.cache]
    ).memory


def phase(arch: Architecture, tokens: int, context: int, batch: int, task: Options) -> Work:
    """The work of one forward in the chosen data types."""
    logits = 1 if tokens == context else None  # a prefill needs the last position's only
    return forward(arch, tokens, context, batch, DTYPE_BYTES[task.cache], DTYPE_BYTES[task.weights], logits)


def _phases(task: Options) -> list[tuple[str, int, int]]:
    """(name, new tokens, context)."""
    return [
        ("prefill", task.context, task.context),
        ("decode", 1, task.context),
        ("verify", 1 + task.gamma, task.context),
    ]


@torch.inference_mode()
def time_target(config: Config, arch: Architecture, task: Options) -> list[dict[str, Any]]:
    """Load the target and time its prefill, decode and verify forwards at batch 1.

    The context is what fits into the target's: the numbers carry the context they were measured at.
    """
    target = Model.load(config.target)
    target.compiled = Engine(target, None, verify.build({"name": "token"}), config=config.engine).compiled
    size = machine.dtype_bytes(target.dtype)
    context = min(task.context, target.context_length) - task.gamma - 1
    if context < 1:
        raise OptionError("task.gamma", task.gamma, "leaves no room in the target's context.")
    ids = torch.zeros(1, context, dtype=torch.int64, device=target.device) + 5 % target.vocab_size
    lengths = torch.tensor([context], device=target.device)
    cache = target.new_cache(1, context + task.gamma + 1)
    timed = []

    def prefill() -> None:
        cache.lengths = torch.zeros_like(cache.lengths)
        cache.settle(0)
        target.prefill(ids, lengths, cache, config.engine.prefill_chunk)

    def read(tokens: int):
        tree = Tree.chain(tokens - 1, target.device)
        return lambda: target.forward(ids[:, :1].expand(1, tokens), tree, cache)

    jobs = [
        ("prefill", context, prefill),
        ("decode", 1, read(1)),
        ("verify", 1 + task.gamma, read(1 + task.gamma)),
    ]
    for name, tokens, job in jobs:
        seconds = machine.best(job, target.device, task.seconds)
        seen = context if name == "prefill" else context + tokens
        work = forward(arch, tokens, seen, 1, size, logits=1 if name == "prefill" else None)
        timed.append(
            {
                "phase": name,
                "tokens": tokens,
                "context": seen,
                "seconds": seconds,
                "dtype": str(target.dtype)[6:],
            }
            | {"intensity": work.intensity, "flops_per_second": work.flops / seconds}
            | {"bytes_per_second": work.bytes / seconds}
        )
    return timed
