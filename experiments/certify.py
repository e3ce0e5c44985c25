"""The certificate: every rule with every drafter, proved by enumeration, tested through the real engine."""

from __future__ import annotations

import importlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import drafters
from experiments import certificate_report, certify_real
from experiments.store import Run
from specdec import verify
from specdec.config import Config, TargetConfig, at_least
from specdec.drafter import Drafter
from specdec.engine import Engine
from specdec.errors import CheckFailed, OptionError
from specdec.exactness import certificate
from specdec.exactness.bench import Bench
from specdec.exactness.pairing import Pairing, Plan
from specdec.exactness.scenarios import MAIN, SIDE
from specdec.exactness.verdict import MOST_SEQUENCES, RERUN_FACTOR, to_rerun, verdict
from specdec.model import Model

CONTROLS = "tests.certificate_controls"
CONTROL_ALPHA = 1e-6  # what Holm leaves for the smallest p-value in a family of a thousand at 1e-3
FEW = 6  # so many pairings get all further scenarios
ROTATING = 1  # and when there are more, each gets so many
ALONE = (300, 30)  # sequences decoded once more at batch size 1: of few pairings, of many


@dataclass
class Options:
    """Options of `task=certify`."""

    name: str = "certify"
    sequences: int = 100_000  # of the main scenario of each pairing; further scenarios take a fifth
    real_sequences: int = 3000  # of each of two samples, on a target too large to enumerate
    alpha: float = 1e-3  # family-wise error of all tests together (Holm)
    power: float = 0.99  # with which the stated deviation would have been detected
    side_scenarios: int | None = (
        None  # further scenarios per pairing, in turn; None = 1, all for few pairings
    )
    controls: bool | None = (
        None  # run the wrong variants of tests/ (needs a checkout); None = not for few pairings
    )
    fresh_seed: bool = False  # a new seed from the system instead of `seed`; it is logged
    workers: int | None = None  # processes; None = as many as there are CPU cores

    def __post_init__(self) -> None:
        at_least("task", self, sequences=1000, real_sequences=100, side_scenarios=0, workers=1)
        for name in ("alpha", "power"):
            if not 0 < getattr(self, name) < 1:
                raise OptionError(f"task.{name}", getattr(self, name), "must lie strictly between 0 and 1.")


@dataclass(frozen=True)
class Job:
    """One piece of work for one process.

    Arguments:
        kind: `pairing`, `rerun` (scenario: which) or `control`.
        drafter: a drafter's name and case, or its configuration (case `None`); a control's name.
    """

    kind: str
    target: TargetConfig
    plan: Plan
    drafter: tuple[Any, str | None]
    rule: dict[str, Any] | None = None
    scenario: str = ""

    @property
    def label(self) -> str:
        return self.drafter[0] if self.rule is None else f"{label(*self.drafter)} × {self.rule['name']}"


def run(config: Config, run_dir: Path) -> None:
    """Certify; results in `run_dir`: samples.jsonl, certificate.json/.md/.png/.svg.

    Raises:
        CheckFailed: something is not exact.
    """
    options: Options = config.task
    if config.target.source != "tiny":
        seed = _new_seed(config)
        certify_real.run(config, run_dir, options.real_sequences, options.alpha, seed)
        return
    bench = _bench(config.target)
    pairings, refused = find_pairings(config, bench)
    store = Run(run_dir, config, target=bench.target().provenance)
    seed = _seed(config, store)
    plans = _plans(config, len(pairings), seed)
    jobs = [
        Job("pairing", config.target, plan, *pairing) for pairing, plan in zip(pairings, plans, strict=True)
    ]
    missing = None
    wanted = len(pairings) > FEW if options.controls is None else options.controls
    if wanted:
        names, missing = _control_names()
        jobs += [Job("control", config.target, replace(plans[0], main=MAIN), (name, None)) for name in names]

    workers = options.workers or (1 if bench.target().device.type == "cuda" else os.cpu_count() or 1)
    done = {_key(record) for record in store.records}
    _work([job for job in jobs if _job_key(job) not in done], workers, store)
    again = []
    for drafter, rule, scenario in to_rerun(store.records, options.alpha):
        job = next(
            j for j in jobs if j.kind == "pairing" and (label(*j.drafter), j.rule["name"]) == (drafter, rule)
        )
        again.append(replace(job, kind="rerun", scenario=scenario))
    _work(again, workers, store)

    result = verdict(store.records, options.alpha, options.power)
    result |= {"seed": seed, "refused": refused, "controls_missing": missing}
    paths = certificate_report.write(store, result)
    console = Console() if sys.stdout.isatty() else Console(width=110)
    console.print(certificate_report.verdict_in_words(result), highlight=False)
    for path in paths:
        console.print(str(path), highlight=False, soft_wrap=True)
    store.finish({"passed": result["passed"], "failures": result["failures"]})
    if not result["passed"]:
        raise CheckFailed(f"the certificate failed: {'; '.join(result['failures'][:5])}")


def label(drafter: Any, case: str | None) -> str:
    """How reports call a drafter."""
    name = drafter if isinstance(drafter, str) else drafter.name
    return f"{name}: {case}" if case else name


def find_pairings(config: Config, bench: Bench) -> tuple[list[tuple], list[dict[str, str]]]:
    """What is to be certified, (drafter and case, rule) each, and what is refused and why.

    Raises:
        OptionError: one pairing is asked for, and it is refused.
    """
    rules = verify.names() if config.verify["name"] == verify.ALL else [config.verify]
    rules = [rule if isinstance(rule, dict) else {"name": rule} for rule in rules]
    for rule in rules:
        verify.build(rule)
    pairings, refused = [], []
    for spec, drafter, problem in _drafters(config, bench):
        if drafter is None:
            refused.append({"drafter": label(*spec), "rule": "all", "reason": str(problem)})
            continue
        for rule in rules:
            try:
                Engine(bench.target(), drafter, verify.build(rule))
            except OptionError as error:
                refused.append({"drafter": label(*spec), "rule": rule["name"], "reason": error.remedy})
                problem = error
            else:
                pairings.append((spec, rule))
    if not pairings:
        raise problem or OptionError("drafter", config.drafter.name, "has nothing to certify.")
    return sorted(pairings, key=lambda pairing: pairing[1]["name"]), refused


def _drafters(
    config: Config, bench: Bench
) -> Iterator[tuple[tuple[Any, str | None], Any, OptionError | None]]:
    """The drafters asked for: all, one with its own cases, or one as it is configured."""
    chosen, target = config.drafter, bench.target()
    names = drafters.names() if chosen.name == drafters.ALL else [chosen.name]
    if chosen.name != drafters.ALL and chosen != drafters.config_class(chosen.name)():
        yield (chosen, None), drafters.build(chosen, target), None
        return
    for name in names:
        try:
            cases = drafters.cases(name, target)
        except OptionError as error:
            yield (name, ""), None, error
        else:
            for case, drafter in cases.items():
                yield (name, case), drafter, None


def _plans(config: Config, pairings: int, seed: int) -> list[Plan]:
    """Few pairings get every further scenario; many take turns, so that every rule meets all of them."""
    options: Options = config.task
    few = pairings <= FEW
    count = options.side_scenarios
    count = min(len(SIDE), (len(SIDE) if few else ROTATING) if count is None else count)
    main = MAIN
    if replace(config.sampling, processors=()) != MAIN.sampling:
        main = replace(MAIN, name="as configured", sampling=config.sampling)
    turns = [[SIDE[(i * count + k) % len(SIDE)].name for k in range(count)] for i in range(pairings)]
    alone = min(ALONE[0] if few else ALONE[1], options.sequences // 20)
    return [Plan(options.sequences, seed, main, tuple(side), alone, engine=config.engine) for side in turns]


def _seed(config: Config, store: Run) -> int:
    """The seed of the run; a resumed run goes on with the one that it began with."""
    began = next((record["seed"] for record in store.records if "seed" in record), None)
    return began if began is not None else _new_seed(config)


def _new_seed(config: Config) -> int:
    return secrets.randbits(48) if config.task.fresh_seed else config.seed


def _control_names() -> tuple[list[str], str | None]:
    try:
        return list(importlib.import_module(CONTROLS).controls()), None
    except ModuleNotFoundError:
        return (
            [],
            "the wrong variants lie in tests/, which this installation has not; run them from a checkout",
        )


def _job_key(job: Job) -> tuple:
    return (
        ("control", job.drafter[0])
        if job.kind == "control"
        else ("pairing", label(*job.drafter), job.rule["name"])
    )


def _key(record: dict[str, Any]) -> tuple:
    if "control" in record:
        return ("control", record["control"])
    return ("rerun" if record.get("rerun") else "pairing", record["drafter"], record["rule"])


def _work(jobs: Sequence[Job], workers: int, store: Run) -> None:
    """Do the jobs, a line for each; what is finished is on disk."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("certifying", total=len(jobs))

        def finished(job: Job, record: dict[str, Any]) -> None:
            store.append(record)
            progress.advance(bar)
            console.print(certificate_report.line(job.label, record), highlight=False, soft_wrap=True)

        if min(workers, len(jobs)) <= 1:
            for job in jobs:
                finished(
                    job,
                    perform(
                        job, lambda what, job=job: progress.update(bar, description=f"{job.label}: {what}")
                    ),
                )
            return
        with ProcessPoolExecutor(
            min(workers, len(jobs)), get_context("spawn"), torch.set_num_threads, (1,)
        ) as pool:
            running = {pool.submit(perform, job): job for job in jobs}
            try:
                for future in as_completed(running):
                    finished(running[future], future.result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


@lru_cache(maxsize=1)
def _cached_bench(fields: tuple) -> Bench:
    return Bench(TargetConfig(**dict(fields)))


@lru_cache(maxsize=64)
def _cases(name: str, target: Model) -> dict[str, Drafter]:
    return drafters.cases(name, target)


def _bench(config: TargetConfig) -> Bench:
    return _cached_bench(tuple(sorted(vars(config).items())))


def perform(job: Job, report: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """One job's record; an unforeseen error says whose it was."""
    try:
        return _perform(job, report)
    except Exception as error:
        error.add_note(f"while certifying {job.label}")
        raise


def _perform(job: Job, report: Callable[[str], None]) -> dict[str, Any]:
    bench = _bench(job.target)
    if job.kind == "control":
        wrong = importlib.import_module(CONTROLS).controls()[job.drafter[0]]
        report("negative control")
        return certificate.control(wrong.name, wrong.pairing, bench, job.plan, CONTROL_ALPHA, wrong.wrap)
    name, case = job.drafter
    build = (lambda t: drafters.build(name, t)) if case is None else (lambda t: _cases(name, t)[case])
    pairing = Pairing(label(name, case), verify.build(job.rule), build)
    if job.kind == "pairing":
        return certificate.certify(pairing, bench, job.plan, report)
    scenario = next(s for s in (job.plan.main, *SIDE) if s.name == job.scenario)
    factor = max(1, min(RERUN_FACTOR, MOST_SEQUENCES // round(job.plan.sequences * scenario.share)))
    report(f"again with {factor} times the sequences")
    tests = certificate.run_scenario(pairing, bench, job.plan, scenario, factor, salt="rerun")
    return {
        "drafter": pairing.drafter,
        "rule": pairing.rule.name,
        "scenario": scenario.name,
        "rerun": True,
        "seed": job.plan.seed,
        "tests": tests,
    }
