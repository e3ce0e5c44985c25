"""What a GPU must show, in one command and minutes: `experiments/gpu_check.sh` (see docs/performance.md).

Tests that need CUDA, the certificate on the device, then random weights of a large target: the cost of
verify forwards (eager, compiled, CUDA graph), autoregressive speed against the memory bandwidth, the
drafters' steps, and the speedup at prescribed acceptance rates against the speed model. A part that fails is
told and does not end the others. The same runs on a CPU with a tiny target.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from experiments import machine, peak_memory
from experiments.gpu_check import checks, decoding, forwards, report
from experiments.store import Run
from specdec.config import Config, at_least
from specdec.errors import CheckFailed, OptionError
from specdec.model import Model
from specdec.roofline import ACCELERATORS, Accelerator

PARTS = ("tests", "certificate", "forwards", "autoregressive", "synthetic", "drafters", "compiled")
MEASURE_SECONDS = 0.3  # of each number of an accelerator that is not known
PARTIAL = "so_far.json"  # what a run that is killed leaves
MEDUSA = {"name": "medusa", "weights": "random", "heads": 4, "nodes": 64}
EAGLE = {
    "name": "eagle",
    "weights": "random",
    "draft_vocab": 32000,
    "depth": 5,
    "top_k": 10,
    "nodes": 60,
    "ngram": False,
}
CHAIN = EAGLE | {"mode": "chain", "depth": 4}


@dataclass
class Options:
    """Options of `task=gpu_check`."""

    name: str = "gpu_check"
    parts: list[str] = field(default_factory=lambda: list(PARTS))
    seconds: float = 400.0  # no part begins later than this
    tests: list[str] = field(default_factory=lambda: ["-m", "cuda", "tests"])  # arguments of pytest
    tests_seconds: float = 120.0
    certificate: list[list[str]] = field(
        default_factory=lambda: [["small", "block"], ["eagle", "recursive"], ["medusa", "traversal"]]
    )  # drafter, rule
    certificate_sequences: int = 20_000
    certificate_seconds: float = 60.0
    widths: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    contexts: list[int] = field(default_factory=lambda: [512, 4096])
    batches: list[int] = field(default_factory=lambda: [1, 8, 32])
    compile_widths: list[int] = field(default_factory=lambda: [1, 16])  # at the first batch, context
    forward_seconds: float = 0.15  # of measuring each shape
    prompt_tokens: int = 512
    new_tokens: int = 128
    drafters: list[Any] = field(default_factory=lambda: [dict(MEDUSA), dict(EAGLE)])
    synthetic: Any = field(default_factory=lambda: dict(CHAIN))  # the drafter at prescribed acceptance
    rates: list[float] = field(default_factory=lambda: [0.6, 0.7, 0.8, 0.9])
    synthetic_tokens: int = 256
    repeats: int = 3

    def __post_init__(self) -> None:
        at_least("task", self, prompt_tokens=1, new_tokens=8, synthetic_tokens=8, repeats=1)
        at_least("task", self, certificate_sequences=1000)
        for part in self.parts:
            if part not in PARTS:
                raise OptionError("task.parts", part, f"no such part; choices: {', '.join(PARTS)}.")
        for name in ("widths", "contexts", "batches"):
            values = getattr(self, name)
            if not values or min(values) < 1 or sorted(set(values)) != list(values):
                raise OptionError(f"task.{name}", values, "must be rising numbers ≥ 1.")
        if self.widths[0] != 1:
            remedy = "must begin with 1, with which the others are compared."
            raise OptionError("task.widths", self.widths, remedy)
        if not all(0 < rate < 1 for rate in self.rates):
            raise OptionError("task.rates", self.rates, "must lie strictly between 0 and 1.")
        if any(len(pair) != 2 for pair in self.certificate):
            remedy = "must be pairs [drafter,rule], e.g. [[small,block]]."
            raise OptionError("task.certificate", self.certificate, remedy)


def run(config: Config, run_dir: Path) -> None:
    """`summary.json` and `gpu_check.md` in `run_dir`; the tables are printed too.

    Raises:
        CheckFailed: a test, the certificate or a part failed. A goal that was not reached is no failure.
    """
    task: Options = config.task
    start = time.perf_counter()
    end = start + task.seconds
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    say = _say
    say("loading the target")
    target = Model.load(config.target)
    _check_lengths(task, target)
    facts = peak_memory.capacity(target.device)
    store = Run(run_dir, config, target=target.provenance, threads=torch.get_num_threads(), **facts)
    results: dict[str, Any] = {"device": str(target.device), **facts, "target": target.provenance}
    here = accelerator(target, facts.get("accelerator", ""))
    results["bandwidth"] = bandwidth(target.device, here)
    for part in task.parts:
        if time.perf_counter() > end:
            results[part] = {"error": f"not begun within {task.seconds:.0f} s"}
            continue
        began = time.perf_counter()
        say(part)
        try:
            results[part] = perform(part, config, target, here, end, say)
        except Exception as error:  # the other parts go on; the run fails at its end
            results[part] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        results[f"{part}_seconds"] = time.perf_counter() - began
        store.write(PARTIAL, results)
    results["seconds"] = time.perf_counter() - start

    goals = report.goals(results)
    results["goals"] = [goal.plain for goal in goals]
    text = report.markdown(results, goals)
    (run_dir / "gpu_check.md").write_text(text, encoding="utf-8")
    print(text)
    print(store.finish(results))
    (run_dir / PARTIAL).unlink(missing_ok=True)
    if failed := failures(results):
        raise CheckFailed(f"the check failed: {'; '.join(failed)}")


def perform(
    part: str, config: Config, target: Model, here: Accelerator, end: float, say: Callable[[str], None]
) -> dict[str, Any] | list[dict[str, Any]]:
    """One part's results on the accelerator `here`; `end`: after which nothing more is compiled."""
    task: Options = config.task
    length, tokens = task.prompt_tokens, task.new_tokens
    if part == "tests":
        return checks.tests(task.tests, task.tests_seconds, needed=target.device.type == "cuda")
    if part == "certificate":
        pairs, device = task.certificate, str(target.device)
        return checks.certificate(device, pairs, task.certificate_sequences, task.certificate_seconds, say)
    if part == "forwards":
        return _forwards(task, target, here, say)
    if part == "compiled":
        return _compiled(task, target, end, say)
    if part == "autoregressive":
        return decoding.autoregressive(config, target, task.batches, length, tokens, here.bandwidth)
    if part == "drafters":
        return decoding.drafter_steps(config, target, task.drafters, task.batches, length, tokens // 4)
    return decoding.synthetic(
        config, target, task.synthetic, task.rates, length, task.synthetic_tokens, task.repeats
    )


def _forwards(
    task: Options, target: Model, here: Accelerator, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every shape in every mode that can run a grid, and what the roofline says of it."""
    rows = []
    for batch in task.batches:
        for context in task.contexts:
            say(f"forwards: batch {batch}, context {context}")
            for mode in forwards.modes(target.device):
                for width in task.widths:
                    shape = (mode, batch, context, width)
                    rows.append(forwards.measure(target, *shape, task.forward_seconds))
                    forwards.release(target.device)
            rows += [forwards.roofline(target, here, batch, context, width) for width in task.widths]
    return rows


def _compiled(task: Options, target: Model, end: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A few shapes through `torch.compile`, which takes its time."""
    rows: list[dict[str, Any]] = []
    for width in task.compile_widths:
        if rows and time.perf_counter() > end:
            break
        say(f"compiling a forward of width {width}")
        shape = (forwards.COMPILED, task.batches[0], task.contexts[0], width)
        rows.append(forwards.measure(target, *shape, task.forward_seconds))
    return rows


def accelerator(target: Model, name: str) -> Accelerator:
    """What the target runs on: its data sheet where it is known, else measured."""
    words = name.lower().replace("-", " ").split()
    known = next((a for key, a in ACCELERATORS.items() if key in words), None)
    if known is not None:
        return known
    with torch.inference_mode():
        dtype = str(target.dtype).removeprefix("torch.")
        flops = {dtype: machine.matmul_rate(target.device, target.dtype, MEASURE_SECONDS)}
        return Accelerator(
            name or str(target.device),
            machine.read_bandwidth(target.device, MEASURE_SECONDS),
            flops,
            measured=True,
        )


def bandwidth(device: torch.device, here: Accelerator) -> dict[str, float | None]:
    """Bytes per second: `measured`, and the data `sheet`'s where the accelerator is known."""
    if here.measured:
        return {"measured": here.bandwidth, "sheet": None}
    return {"measured": machine.read_bandwidth(device, MEASURE_SECONDS), "sheet": here.bandwidth}


def failures(results: dict[str, Any]) -> list[str]:
    """Parts that broke, and checks that say no."""
    found = []
    for part in PARTS:
        result = results.get(part)
        if report.broke(result):
            found.append(f"{part}: {result['error']}")
        elif isinstance(result, dict) and result.get("ok") is False:
            found.append(f"{part}: {result.get('told') or '; '.join(result['failures'])}")
    return found


def _check_lengths(task: Options, target: Model) -> None:
    """Refuse shapes that the target's context cannot hold."""
    longest = max(task.contexts) + max(task.widths)
    if longest > target.context_length:
        remedy = f"with task.widths need {longest} tokens; the target has {target.context_length}."
        raise OptionError("task.contexts", task.contexts, remedy)
    longest = task.prompt_tokens + max(task.new_tokens, task.synthetic_tokens)
    if longest > target.context_length:
        remedy = f"with the new tokens needs {longest} tokens; the target has {target.context_length}."
        raise OptionError("task.prompt_tokens", task.prompt_tokens, remedy)


def _say(what: str) -> None:
    Console(file=sys.stderr).print(what, highlight=False, soft_wrap=True)
