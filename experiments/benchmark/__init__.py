"""Everyone in one run: our engine against Hugging Face's `generate` and other packages, its goals beside it.

Sections, each a file of this folder or a part of the race (see docs/performance.md):

- `autoregressive`, `drafters`, `hf`, `peers`: the race at batch size 1, every prompt decoded in turns;
- `batches`: tokens per second against batch size, and where speculation stops paying;
- `memory`: peak memory against weights, keys and values, drafter;
- `context`: seconds of a step against the length of the text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

import drafters
from experiments import machine, peak_memory, prompts
from experiments.bandwidth import footprint
from experiments.benchmark import batches, context, memory, peers, race, report
from experiments.benchmark.contestants import (
    AUTOREGRESSIVE,
    Contestant,
    Generate,
    assistant,
    build_drafters,
    ours,
    own_engine,
    plain_target,
    small_model,
)
from experiments.store import Run, plain
from specdec.config import Config, at_least, suggest
from specdec.drafter import Drafter
from specdec.errors import OptionError
from specdec.exactness.triage import triage
from specdec.model import Model

RACE = ("autoregressive", "drafters", "hf", "peers")
SECTIONS = (*RACE, "batches", "memory", "context")


@dataclass
class Options:
    """Options of `task=benchmark`."""

    name: str = "benchmark"
    sections: list[str] | None = None  # null = all; peers where they are installed
    drafters: list[Any] = field(default_factory=lambda: ["ngram", "small", "medusa", "eagle"])
    repeats: int = 5
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4, 16, 32])
    batch_drafter: str | None = None  # null = the fastest of the race, else the first
    memory_prompts: int = 3
    contexts: list[int] = field(default_factory=lambda: [128, 256, 512, 1024, 2048, 4096])
    context_tokens: int = 16  # decoded after each
    bandwidth_seconds: float = 1.0  # of measuring the machine

    def __post_init__(self) -> None:
        at_least("task", self, repeats=1, memory_prompts=1, context_tokens=2)
        for section in self.sections or ():
            if section not in SECTIONS:
                remedy = f"no such section; {suggest(section, SECTIONS)}"
                raise OptionError("task.sections", section, remedy)
        for name in ("batch_sizes", "contexts"):
            values = getattr(self, name)
            if not values or min(values) < 1 or sorted(set(values)) != list(values):
                raise OptionError(f"task.{name}", values, "must be rising numbers ≥ 1.")
        if self.bandwidth_seconds <= 0:
            raise OptionError("task.bandwidth_seconds", self.bandwidth_seconds, "must be > 0.")

    @property
    def chosen(self) -> list[str]:
        """The sections that run."""
        if self.sections is not None:
            return self.sections
        return [s for s in SECTIONS if s != "peers" or peers.installed()]


def run(config: Config, run_dir: Path) -> None:
    """Tables, a line of JSON, and samples.jsonl, summary.json, benchmark.png/.svg in `run_dir`."""
    task: Options = config.task
    _check(config)
    asked = prompts.load(config.prompts)
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    target = Model.load(config.target)
    wanted = task.drafters if config.drafter.name == drafters.ALL else [config.drafter]
    own, left_out = build_drafters(wanted, target)
    if task.batch_drafter is not None and task.batch_drafter not in own:
        remedy = f"is not in the race; {suggest(task.batch_drafter, own)}"
        raise OptionError("task.batch_drafter", task.batch_drafter, remedy)
    ids = target.encode([prompt.text for prompt in asked])
    facts = {"footprint": footprint(target), "threads": torch.get_num_threads()}
    store = Run(run_dir, config, target=target.provenance, **facts, **peak_memory.capacity(target.device))

    results: dict[str, Any] = {"left_out": left_out, "options": _told(own), "footprint": facts["footprint"]}
    with _progress() as say:
        if race_sections := [s for s in RACE if s in task.chosen]:
            results["bandwidth"] = _bandwidth(store, target, task, say)
            field_ = contestants(config, target, own, race_sections)
            _race(config, target, field_, asked, ids, store, say)
            results["race"] = race.summarise(store.records)
        if "batches" in task.chosen and own:
            name = task.batch_drafter or report.fastest(results.get("race", {}), own) or next(iter(own))
            many = _more_prompts(config, target, max(task.batch_sizes))
            batches.run(_both(config, target, own[name][1]), many, task.batch_sizes, task.repeats, store, say)
            results["batches"] = {"drafter": name, **batches.summarise(batches.records(store))}
        if "memory" in task.chosen:
            options = {name: options for name, (options, _) in own.items()}
            memory.run(config, options, ids[: task.memory_prompts], store, say)
            results["memory"] = {r["method"]: r for r in store.records if r["section"] == memory.SECTION}
        if "context" in task.chosen:
            fitting, too_long = _fitting(task, target, own)
            if too_long:
                results["left_out"] |= {f"context {c}": "longer than the target's" for c in too_long}
            engines = {AUTOREGRESSIVE: None, **{name: d for name, (_, d) in own.items()}}
            short = {"max_new_tokens": task.context_tokens, "ignore_eos": True}
            built = {name: own_engine(target, d, config, **short) for name, d in engines.items()}
            context.run(built, ids, fitting, task.repeats, store, say)
            results["context"] = context.summarise(context.records(store))

    goals = report.goals(results, race.records(store))
    results["goals"] = [goal.plain for goal in goals]
    console = Console() if sys.stdout.isatty() else Console(width=110)
    for table in report.tables(results, goals):
        console.print(table)
    for line in report.notes(results):
        console.print(line, highlight=False, soft_wrap=True)
    paths = [*report.plot(results, run_dir / "benchmark"), store.finish(results)]
    for path in paths:
        console.print(str(path), highlight=False, soft_wrap=True)
    print(json.dumps(plain(report.line(results)), ensure_ascii=False))


def contestants(
    config: Config, target: Model, own: dict[str, tuple[Any, Drafter]], sections: list[str]
) -> list[Contestant]:
    """Everyone that the sections ask for; the autoregressive ones always race."""
    engine = own_engine(target, None, config)
    eos, room, attention = engine.eos_token_ids, engine.room, config.target.attention
    generate = Generate(plain_target(config.target), eos, room)
    found = [ours(AUTOREGRESSIVE, engine), generate.contestant(AUTOREGRESSIVE)]
    if {"drafters", "hf", "peers"} & set(sections):
        found += [ours(name, own_engine(target, drafter, config)) for name, (_, drafter) in own.items()]
    ngram = own["ngram"][0] if "ngram" in own else None
    small = own["small"][1] if "small" in own and own["small"][1].is_chain else None
    gamma = small.max_nodes if small else 0
    if "hf" in sections and ngram:
        lookup = {"prompt_lookup_num_tokens": ngram.gamma, "max_matching_ngram_size": ngram.max_ngram}
        found.append(generate.contestant("prompt_lookup", **lookup))
    if "hf" in sections and small and (model := small_model(small, target, attention)):
        found.append(generate.contestant("assistant_model", assistant_model=assistant(model, gamma, eos)))
    for peer in peers.installed() if "peers" in sections else ():
        hf = plain_target(config.target)
        model = small_model(small, target, attention) if small else None
        found += peers.contestants(peer, hf, model, eos, room, ngram, gamma)
    return found


def _check(config: Config) -> None:
    """Refuse what cannot be compared, before anything is loaded."""
    if not config.sampling.greedy:
        remedy = "everyone's greedy tokens are compared; use sampling=greedy."
        raise OptionError("sampling.temperature", config.sampling.temperature, remedy)
    if config.engine.batch_size != 1:
        remedy = "the race runs at batch size 1; others are task.batch_sizes=[...]."
        raise OptionError("engine.batch_size", config.engine.batch_size, remedy)
    if config.engine.stop:
        raise OptionError("engine.stop", config.engine.stop, "not every contestant has stop strings.")
    if "peers" in (config.task.sections or ()) and not peers.installed():
        remedy = f"needs its packages: pip install -e '.[peers]' ({', '.join(peers.PEERS)})."
        raise OptionError("task.sections", "peers", remedy)


def _race(
    config: Config,
    target: Model,
    field_: list[Contestant],
    asked: list[prompts.Prompt],
    ids: list[list[int]],
    store: Run,
    say: Callable[[str], None],
) -> None:
    engine = own_engine(target, None, config)

    def compare(prompt: list[int], expected: list[int], actual: list[int]) -> dict[str, Any]:
        return triage(target, prompt, expected, actual, config.sampling, engine.eos_token_ids)

    race.run(field_, asked, ids, config.task.repeats, store, target.device, compare, say)


def _bandwidth(store: Run, target: Model, task: Options, say: Callable[[str], None]) -> float:
    """Bytes per second that this machine reads, measured once per run."""
    for r in store.records:
        if r["section"] == "bandwidth":
            return float(r["bandwidth"])
    say("measuring the machine")
    found = machine.read_bandwidth(target.device, task.bandwidth_seconds)
    store.append({"section": "bandwidth", "bandwidth": found})
    return found


def _both(config: Config, target: Model, drafter: Drafter) -> dict[str, Any]:
    methods = {AUTOREGRESSIVE: None, batches.SPECULATIVE: drafter}
    return {name: own_engine(target, d, config, ignore_eos=True) for name, d in methods.items()}


def _more_prompts(config: Config, target: Model, count: int) -> list[list[int]]:
    """As many prompts as the largest batch wants, if there are so many."""
    more = prompts.load(replace(config.prompts, limit=max(count, config.prompts.limit or 0)))
    return target.encode([prompt.text for prompt in more])


def _fitting(task: Options, target: Model, own: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The contexts that fit into the target's, and the others."""
    room = target.context_length - task.context_tokens
    fitting = [c for c in task.contexts if c <= room]
    if not fitting:
        raise OptionError("task.contexts", task.contexts, f"the target has room for {room} tokens of text.")
    return fitting, [c for c in task.contexts if c > room]


def _told(own: dict[str, tuple[Any, Drafter]]) -> dict[str, Any]:
    return {name: vars(options) for name, (options, _) in own.items()}


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what runs; a log of lines where it is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: console.print(what, highlight=False, soft_wrap=True)
        return
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("", total=None)
        yield lambda what: progress.update(bar, description=what)
