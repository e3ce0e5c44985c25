"""All verification rules on the drafts of one real decode, with common random numbers, against the bound.

The rule of `verify` must be exact and decides what is kept; every other rule is asked about the same
proposal, the same target laws and the same random numbers, and only its answer is noted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import drafters
from experiments import intervals, plots, prompts, sweep
from experiments.root_law import distance, transport_bound_at_root
from experiments.store import Run
from specdec import verify
from specdec.config import Config, at_least
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.model import Model
from specdec.proposal import Kind, Proposal
from specdec.rng import Draws
from specdec.verify import Rule, Verdict


@dataclass
class Options:
    """Options of `task=compare_rules`."""

    name: str = "compare_rules"
    law_steps: int = 40  # steps on which the distance of lossy rules from the target's law is measured

    def __post_init__(self) -> None:
        at_least("task", self, law_steps=0)


@dataclass
class Answers:
    """What one rule said, step by step: accepted tokens, their expectation where known, distances from p."""

    accepted: list[int] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    distance: list[float] = field(default_factory=list)


class Witness(Rule):
    """The deciding rule, which asks all others about every proposal it sees.

    Arguments:
        decides: an exact rule. others: rules that take these proposals.
        law_steps: on how many steps the lossy ones' distance from p is computed.
    """

    def __init__(self, decides: Rule, others: list[Rule], law_steps: int = 0):
        self.decides, self.rules, self.law_steps = decides, [decides, *others], law_steps
        self.name, self.exact, self.trees = decides.name, decides.exact, decides.trees  # type: ignore[misc]
        self.kinds, self.coupled = decides.kinds, decides.coupled  # type: ignore[misc]
        self.forget()

    def forget(self) -> None:
        """Begin a new sample."""
        self.answers: dict[str, Answers] = defaultdict(Answers)
        self.bound: list[float] = []  # P(a candidate of the first position is kept), at best

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        if not proposal.size:
            return self.decides(proposal, p, draws)
        verdicts = [rule(proposal, p, draws) for rule in self.rules]
        for rule, verdict in zip(self.rules, verdicts, strict=True):
            answers, expected = self.answers[rule.name], rule.expected_accepted(proposal, p)
            answers.accepted += verdict.accepted.tolist()
            if expected is not None:
                answers.expected += expected.tolist()
            if not rule.exact and self.law_steps > 0:
                answers.distance += distance(rule, proposal, p)
        self.law_steps -= 1
        self.bound += transport_bound_at_root(proposal, p)
        return verdicts[0]


def run(config: Config, run_dir: Path) -> None:
    """Compare; `samples.jsonl`, `summary.json`, `rules.csv`, `rules.png`/`.svg` in `run_dir`."""
    decides = verify.build(config.verify)
    if not decides.exact:
        remedy = "decides what is kept, so it must be exact; e.g. verify=token."
        raise OptionError("verify", decides.name, remedy)
    asked = prompts.load(config.prompts)
    target = Model.load(config.target)
    drafter = drafters.build(config.drafter, target)
    others, left_out = _others(decides, drafter)
    witness = Witness(decides, others, config.task.law_steps)
    engine = Engine(target, drafter, witness, config.sampling, config.engine, config.seed)
    ids = target.encode([prompt.text for prompt in asked])
    for tokens in ids:
        engine.room(tokens)
    lossy = [rule.name for rule in others if not rule.exact]
    store = Run(run_dir, config, target=target.provenance, flags=[f"LOSSY: {name}" for name in lossy])

    done = store.keys("sequence")
    console = Console(stderr=True)
    quiet = not console.is_terminal
    for i, prompt in track(list(enumerate(asked)), "decoding", console=console, disable=quiet):
        if (i,) in done:
            continue
        witness.forget()
        [generation] = engine.decode([ids[i]], [i])
        rules = {name: vars(answers) for name, answers in witness.answers.items()}
        record = {"prompt": prompt.id, "domain": prompt.domain, "sequence": i, "tokens": generation.tokens}
        store.append(record | {"rules": rules, "bound": witness.bound})
    summary = summarise(store.records, lossy) | {"left_out": left_out}
    _tell(summary)
    table = [{"rule": name, **_flat(numbers)} for name, numbers in summary["rules"].items()]
    paths = [*sweep.write(table, run_dir / "rules"), *plot(summary, run_dir / "rules")]
    store.finish(summary)
    for path in paths:
        print(path)


def _others(decides: Rule, drafter: Any) -> tuple[list[Rule], dict[str, str]]:
    """The rules that take this drafter's proposals, and why the rest does not."""
    others, left_out = [], {}
    for name in verify.names():
        if name == decides.name:
            continue
        rule = verify.build({"name": name})
        if rule.coupled and drafter.kind is not Kind.DETERMINISTIC:
            left_out[name] = "draws its drafts with the target's own noise: never identical drafts"
            continue
        try:
            rule.check(drafter.name, drafter.kind, drafter.is_chain)
            others.append(rule)
        except OptionError as error:
            left_out[name] = str(error)
    return others, left_out


def summarise(records: list[dict[str, Any]], lossy: list[str]) -> dict[str, Any]:
    """Per rule: accepted tokens per step and the share of steps that accept the first position; by prompt.

    Arguments:
        records: each with `rules` (see `Answers`) and `bound`.
        lossy: rules that do not keep the target's law.
    """
    records = [r for r in records if r["bound"]]
    steps = np.array([len(r["bound"]) for r in records], dtype=float)
    names = list(records[0]["rules"]) if records else []

    def sums(name: str, of) -> np.ndarray:
        return np.array([of(r["rules"][name]) for r in records], dtype=float)

    base = sums(names[0], lambda a: sum(a["accepted"])) if names else steps
    found = {}
    for name in names:
        accepted = sums(name, lambda a: sum(a["accepted"]))
        first = sums(name, lambda a: sum(x > 0 for x in a["accepted"]))
        expected = [x for r in records for x in r["rules"][name]["expected"]]
        distances = [x for r in records for x in r["rules"][name]["distance"]]
        found[name] = {
            "exact": name not in lossy,
            "mean_accepted": intervals.bootstrap((accepted, steps), intervals.ratio),
            "expected_accepted": float(np.mean(expected)) if expected else None,
            "relative": intervals.bootstrap((accepted, base), intervals.ratio),
            "first_position": intervals.bootstrap((first, steps), intervals.ratio),
            "total_variation": float(np.mean(distances)) if distances else (None if name in lossy else 0.0),
            "largest_total_variation": max(distances) if distances else None,
        }
    known = [(sum(r["bound"]), len(r["bound"])) for r in records if None not in r["bound"]]
    bound = intervals.bootstrap(tuple(np.array(known, dtype=float).reshape(-1, 2).T), intervals.ratio)
    return {"rules": found, "transport_bound": bound, "steps": int(steps.sum()), "prompts": len(records)}


def plot(summary: dict[str, Any], stem: Path) -> list[Path]:
    """Accepted tokens per step, and acceptance of the first position beside the bound."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, measure, label in (
        (left, "mean_accepted", "accepted tokens per step (95 % interval)"),
        (right, "first_position", "share of steps that accept the first position"),
    ):
        for row, (_, numbers) in enumerate(summary["rules"].items()):
            point = numbers[measure]
            color = "tab:blue" if numbers["exact"] else "firebrick"
            if point["low"] is not None:
                axes.plot([point["low"], point["high"]], [row, row], color=color, lw=2)
            axes.plot(point["value"], row, "o", color=color)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    if summary["transport_bound"]["value"] == summary["transport_bound"]["value"]:
        right.axvline(summary["transport_bound"]["value"], color="black", ls="--", label="optimal transport")
        right.legend()
    names = [name if n["exact"] else f"{name} (lossy)" for name, n in summary["rules"].items()]
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    figure.suptitle("Verification rules on identical drafts and common random numbers")
    return plots.save(figure, stem)


def _tell(summary: dict[str, Any]) -> None:
    table = Table(title="rules on identical drafts", box=SIMPLE_HEAD)
    for name in ("rule", "accepted", "expected", "relative", "first position", "TV to target"):
        table.add_column(name, justify="left" if name == "rule" else "right")
    for name, n in summary["rules"].items():
        expected, tv = n["expected_accepted"], n["total_variation"]
        table.add_row(
            name if n["exact"] else f"{name} (LOSSY)",
            *(_shown(n[measure]) if measure else ("–" if expected is None else f"{expected:.3f}")
              for measure in ("mean_accepted", "", "relative", "first_position")),
            "not measured" if tv is None else "0 (exact)" if n["exact"] else f"{tv:.3f}",
        )  # fmt: skip
    console = Console(width=110)
    console.print(table)
    console.print(f"optimal-transport bound of the first position: {_shown(summary['transport_bound'])}")
    for name, reason in summary["left_out"].items():
        console.print(f"left out: {name}: {reason}", highlight=False, soft_wrap=True)


def _shown(x: dict[str, float | None]) -> str:
    interval = f" [{x['low']:.3f}, {x['high']:.3f}]" if x["low"] is not None else ""
    return f"{x['value']:.3f}{interval}"


def _flat(numbers: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in numbers.items():
        if isinstance(value, dict):
            row |= {name: value["value"], f"{name}_low": value["low"], f"{name}_high": value["high"]}
        else:
            row[name] = value
    return row
