"""The main job: every prompt autoregressively and speculatively, interleaved, and what was gained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import drafters
from drafters import shipped
from experiments import peak_memory, perplexity, plots, prompts, summary, table
from experiments.bandwidth import DraftMeter, footprint
from experiments.store import Run
from specdec import verify
from specdec.config import Config, at_least
from specdec.engine import Engine
from specdec.exactness.triage import triage
from specdec.ledger import Counts, Ledger, Row
from specdec.model import Model

METHODS = ("autoregressive", "speculative")


@dataclass
class Options:
    """Options of `task=measure`."""

    name: str = "measure"
    repeats: int = 1  # how often every prompt is decoded by both methods
    warmup_tokens: int = 8  # decoded by both methods before anything is timed
    perplexity: bool = True  # at the end, of target and drafter on the outputs

    def __post_init__(self) -> None:
        at_least("task", self, repeats=1, warmup_tokens=0)


@dataclass(frozen=True)
class Unit:
    """Prompts that are decoded together; at batch size 1 a single prompt. The unit of every interval."""

    index: int
    prompts: list[prompts.Prompt]
    ids: list[list[int]]
    sequences: list[int]  # identities in the random source


def run(config: Config, run_dir: Path) -> None:
    """Measure; results in `run_dir`: samples.jsonl, summary.json, acceptance.png/.svg."""
    rule = verify.build(config.verify)
    drafters.check_pairing(config.drafter, rule)
    shipped.check(config.drafter, config.target)
    asked = prompts.load(config.prompts)
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    target = Model.load(config.target)
    with Console(stderr=True).status("Preparing the drafter") if sys.stderr.isatty() else nullcontext():
        drafter = drafters.build(config.drafter, target)
    engines = {
        name: Engine(target, draft, rule_, config.sampling, config.engine, config.seed)
        for name, draft, rule_ in (
            ("autoregressive", None, verify.build({"name": "token"})),
            ("speculative", drafter, rule),
        )
    }
    units = list(_units(asked, target, engines["autoregressive"], config.engine.batch_size))
    flags = summary.flags(rule, target)
    facts = {"footprint": footprint(target), "threads": torch.get_num_threads(), "flags": flags}
    facts |= peak_memory.capacity(target.device) | {"max_nodes": drafter.max_nodes}
    own = engines["speculative"]
    facts["compiled"] = {
        "target": own.compiled,
        "drafter": own.drafts_compiled,
        "seconds": target.compile_seconds,
    }
    store = Run(run_dir, config, target=target.provenance, **facts)

    extra: dict[str, Any] = {}
    finished = False
    try:
        _warm_up(engines, units[0], config.task.warmup_tokens)
        _measure(engines, units, config.task.repeats, store, target)
        if config.task.perplexity:
            extra["perplexity"] = perplexity.report(target, drafter, _texts(units, store.records))
        finished = True
    finally:
        if store.records:
            _write_pieces(store, target)
            _report(store, {"flags": flags, **extra}, finished)


def _units(asked: list[prompts.Prompt], target: Model, engine: Engine, size: int) -> Iterator[Unit]:
    """Batches within one domain, every prompt checked against the context before anything is decoded."""
    ids = target.encode([prompt.text for prompt in asked])
    for tokens in ids:
        engine.room(tokens)
    order = sorted(range(len(asked)), key=lambda i: [p.domain for p in asked].index(asked[i].domain))
    batches: list[list[int]] = []
    for i in order:
        if batches and len(batches[-1]) < size and asked[batches[-1][0]].domain == asked[i].domain:
            batches[-1].append(i)
        else:
            batches.append([i])
    for index, batch in enumerate(batches):
        yield Unit(index, [asked[i] for i in batch], [ids[i] for i in batch], batch)


def _warm_up(engines: dict[str, Engine], unit: Unit, tokens: int) -> None:
    if tokens:
        for engine in engines.values():  # the very ones: they keep what they record
            asked, engine.config = engine.config, replace(engine.config, max_new_tokens=tokens)
            list(engine.decode(unit.ids, unit.sequences))
            engine.config = asked


def _measure(engines: dict[str, Engine], units: list[Unit], repeats: int, store: Run, target: Model) -> None:
    """Both methods take turns prompt by prompt, in the order A B, B A, A B, …, so that drift cancels."""
    done = store.keys("unit", "repeat", "method", "sequence")
    outputs = {
        (r["unit"], r["method"], r["sequence"]): r["tokens"] for r in store.records
    }  # of a resumed run
    console = Console(stderr=True)
    meter = DraftMeter(engines["speculative"].drafter, target)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("decoding", total=len(units) * repeats * len(METHODS))
        for repeat in range(repeats):
            for unit in units:
                order = METHODS if (unit.index + repeat) % 2 == 0 else METHODS[::-1]
                for method in order:
                    progress.update(bar, description=f"{method:<14} {unit.prompts[0].id}")
                    if not all((unit.index, repeat, method, s) in done for s in unit.sequences):
                        for record in _decode(engines[method], unit, meter):
                            key = (unit.index, repeat, method, record["sequence"])
                            outputs[key[0], method, key[3]] = record["tokens"]
                            record |= {"unit": unit.index, "repeat": repeat, "method": method}
                            if method == order[-1]:
                                record["agreement"] = _agreement(outputs, unit, record, engines, target)
                            if key not in done:
                                store.append(record)
                    progress.advance(bar)
                    if not console.is_terminal and method == order[-1]:
                        console.print(
                            f"decoded {unit.index + 1 + repeat * len(units)} of {len(units) * repeats}"
                        )


def _decode(engine: Engine, unit: Unit, meter: DraftMeter) -> list[dict[str, Any]]:
    """One record per prompt, whatever several prompts share (the unit's seconds) repeated in each."""
    engine.ledger = Ledger(trace=engine.drafter.max_nodes > 0)
    peak_memory.reset(engine.target.device)
    meter.take()
    by_sequence = {g.sequence: g for g in engine.decode(unit.ids, unit.sequences)}
    shared: dict[str, Any] = {"memory": peak_memory.peak(engine.target.device)}
    watched = engine.record is None or not engine.drafter.max_nodes  # recorded forwards cannot be
    if watched or engine.drafter.bytes_read is not None:
        shared["draft_bytes"] = meter.take()
    seconds = max(g.seconds for g in by_sequence.values())
    records = []
    for prompt, sequence in zip(unit.prompts, unit.sequences, strict=True):
        generation, rows = by_sequence[sequence], engine.ledger.of(sequence)
        steps = {name: [int(getattr(row, name)) for row in rows if not row.prefill] for name in Counts.FIELDS}
        records.append(
            {
                "prompt": prompt.id,
                "domain": prompt.domain,
                "sequence": sequence,
                "prompt_tokens": len(generation.prompt),
                "tokens": generation.tokens,
                "text": generation.text,
                "finish_reason": generation.finish_reason,
                "seconds": generation.seconds,
                "seconds_to_first_token": generation.seconds_to_first_token,
                "unit_seconds": seconds,
                "phase_seconds": engine.ledger.seconds,
                "step_seconds": [[round(x, 7) for x in step] for step in engine.ledger.step_seconds],
                "steps": steps,
                **shared,
                **_drafts(rows),
            }
        )
    return records


def _drafts(rows: list[Row]) -> dict[str, Any]:
    """What was drafted, step by step: token ids, parents (null for a chain), accepted nodes."""
    drafts = [row.draft for row in rows if row.draft is not None and not row.prefill]
    return {"drafts": [[d.tokens, d.parents, d.path] for d in drafts]} if drafts else {}


def _write_pieces(store: Run, target: Model) -> None:
    """`pieces.json`: the text of every token that occurs, so that a report needs no tokenizer."""
    if target.tokenizer is None:
        return
    found = {t for r in store.records for t in r["tokens"]}
    found |= {t for r in store.records for tokens, _, _ in r.get("drafts", ()) for t in tokens}
    store.write("pieces.json", {str(t): target.tokenizer.decode([t]) for t in sorted(found)})


def _texts(units: list[Unit], records: summary.Records) -> list[tuple[list[int], list[int]]]:
    """(prompt, output) of the baseline."""
    prompt_of = {s: ids for unit in units for s, ids in zip(unit.sequences, unit.ids, strict=True)}
    baseline = [r for r in records if r["method"] == METHODS[0] and r["repeat"] == 0]
    return [(prompt_of[r["sequence"]], r["tokens"]) for r in baseline]


def _agreement(
    outputs: dict, unit: Unit, record: dict[str, Any], engines: dict[str, Engine], target: Model
) -> dict[str, Any] | None:
    """Greedy decoding must agree with the baseline token for token, unless the rule is lossy; a difference is
    explained."""
    engine = engines["speculative"]
    if not engine.sampling.greedy or not engine.rule.exact:
        return None
    a, b = (outputs.get((unit.index, method, record["sequence"])) for method in METHODS)
    if a is None or b is None:
        return None
    prompt = unit.ids[unit.sequences.index(record["sequence"])]
    return triage(target, prompt, a, b, engine.sampling, engine.eos_token_ids)


def _report(store: Run, extra: dict[str, Any], finished: bool) -> None:
    """The table and the plot; `summary.json` only when everything is there."""
    results = summary.summarise(store.records) | extra
    console = Console() if sys.stdout.isatty() else Console(width=100)
    console.print(table.results(results))
    for line in table.notes(results):
        console.print(line, highlight=False, soft_wrap=True)
    paths = plots.acceptance(results, store.directory / "acceptance")
    if finished:
        store.finish(results)
    for path in [*paths, *sorted(store.directory.glob("*.json*"))]:
        console.print(str(path), highlight=False, soft_wrap=True)
    if not finished:
        console.print("the run is not finished; the same command with resume=true goes on")
