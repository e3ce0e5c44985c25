"""Fifty questions through the model, speculatively; exact match; ten errors looked at and told apart by
rules.

An error is, by the first rule that applies, one of the

- reference: the stored answer disagrees with its own check;
- answer parsing: the right answer is the last one in the text, but not where and how it was asked for;
- prompt: asked again in the other wording, the model answers rightly, or the text was cut off before any
answer;
- model: anything else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from scipy import stats

import drafters
from experiments import questions, summary
from experiments.questions import Question
from experiments.store import Run
from specdec import verify
from specdec.config import Config, at_least
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.model import Model

WORDINGS = ("short", "steps")
CATEGORIES = ("reference", "answer parsing", "prompt", "model")


@dataclass
class Options:
    """Options of `task=mini_benchmark`."""

    name: str = "mini_benchmark"
    path: str | None = None  # JSONL of questions; null = the built-in fifty
    wording: str = "steps"  # steps (reasoning first) | short (the answer only)
    errors: int = 10  # how many errors are looked at

    def __post_init__(self) -> None:
        at_least("task", self, errors=0)
        if self.wording not in WORDINGS:
            raise OptionError(
                "task.wording", self.wording, f"no such wording; choices: {', '.join(WORDINGS)}."
            )


def run(config: Config, run_dir: Path) -> None:
    """Answers in samples.jsonl, accuracy and the errors looked at in summary.json."""
    task: Options = config.task
    rule = verify.build(config.verify)
    asked = questions.load(Path(task.path).expanduser() if task.path else questions.BUILTIN)
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    target = Model.load(config.target)
    drafter = drafters.build(config.drafter, target)
    engine = Engine(target, drafter, rule, config.sampling, config.engine, config.seed)
    store = Run(run_dir, config, target=target.provenance, threads=torch.get_num_threads())
    console = Console() if Console().is_terminal else Console(width=110)

    done = {r["id"]: r for r in store.records}
    missing = [q for q in asked if q.id not in done]
    for start in range(0, len(missing), config.engine.batch_size):
        group = missing[start : start + config.engine.batch_size]
        for q, (text, reason) in zip(group, answer(engine, group, task.wording), strict=True):
            done[q.id] = judge(q, text, reason)
            store.append(done[q.id])
        if not console.is_terminal:
            Console(stderr=True).print(f"answered {start + len(group)} of {len(missing)}")
    wrong = spread([q for q in asked if not done[q.id]["right"]], task.errors)
    errors = explain(engine, wrong, done, task.wording)
    results = summarise(asked, done) | {
        "errors": errors,
        "categories": Counter(e["category"] for e in errors),
    }
    results["flags"] = summary.flags(rule, target)
    _print(console, results, store.finish(results))


def spread(wrong: list[Question], limit: int) -> list[Question]:
    """At most `limit` errors: the first of each subject, then the second of each, and so on."""
    turn: Counter[str] = Counter()
    ordered = []
    for i, q in enumerate(wrong):
        turn[q.subject] += 1
        ordered.append((turn[q.subject], i, q))
    return [q for _, _, q in sorted(ordered, key=lambda entry: entry[:2])[:limit]]


def answer(engine: Engine, asked: list[Question], wording: str) -> list[tuple[str, str]]:
    """(text, finish reason) per question."""
    prompts = engine.target.encode([q.asked(wording) for q in asked])
    return [(g.text or "", g.finish_reason) for g in engine.generate(prompts)]


def judge(q: Question, text: str, reason: str) -> dict[str, Any]:
    """One sample: what was read off the text, and whether it matches exactly."""
    found = q.strict(text)
    return {
        "id": q.id,
        "subject": q.subject,
        "text": text,
        "finish_reason": reason,
        "found": found,
        "lenient": q.lenient(text),
        "answer": q.answer,
        "right": q.right(found),
    }


def explain(
    engine: Engine, wrong: list[Question], done: dict[str, Any], wording: str
) -> list[dict[str, Any]]:
    """The category of each error, the question asked once more in the other wording."""
    other = next(w for w in WORDINGS if w != wording)
    second = dict(zip([q.id for q in wrong], answer(engine, wrong, other) if wrong else [], strict=True))
    return [
        done[q.id]
        | {"question": q.question, "category": category(q, done[q.id], second[q.id][0])}
        | {"asked_again": second[q.id][0]}
        for q in wrong
    ]


def category(q: Question, sample: dict[str, Any], asked_again: str) -> str:
    """Whose fault the error is, by the module's rules."""
    if not q.sound:
        return "reference"
    if q.right(sample["lenient"]):
        return "answer parsing"
    cut_off = sample["finish_reason"] in ("length", "context") and sample["found"] is None
    if cut_off or q.right(q.strict(asked_again)):
        return "prompt"
    return "model"


def summarise(asked: list[Question], done: dict[str, Any]) -> dict[str, Any]:
    """Accuracy with a 95 % Wilson interval, per subject and overall, strictly and leniently read."""

    def share(group: list[Question], lenient: bool) -> dict[str, float]:
        right = sum(q.right(done[q.id]["lenient" if lenient else "found"]) for q in group)
        interval = stats.binomtest(right, len(group)).proportion_ci(method="wilson")
        ends = {"low": float(interval.low), "high": float(interval.high)}
        return {"right": right, "questions": len(group), "value": right / len(group)} | ends

    subjects = {s: [q for q in asked if q.subject == s] for s in dict.fromkeys(q.subject for q in asked)}
    groups = {**subjects, "all": asked}
    return {
        "accuracy": {name: share(group, False) for name, group in groups.items()},
        "accuracy_lenient": {name: share(group, True) for name, group in groups.items()},
    }


def _print(console: Console, results: dict[str, Any], path: Path) -> None:
    table = Table(title="exact match", box=SIMPLE_HEAD)
    for column in ("subject", "right", "of", "accuracy [95 %]", "read leniently"):
        table.add_column(column, justify="left" if column == "subject" else "right")
    for subject, a in results["accuracy"].items():
        interval = f"{a['value']:.2f} [{a['low']:.2f}, {a['high']:.2f}]"
        lenient = f"{results['accuracy_lenient'][subject]['value']:.2f}"
        table.add_row(subject, str(a["right"]), str(a["questions"]), interval, lenient)
    console.print(table)
    for e in results["errors"]:
        said = " ".join(e["text"].split())
        lines = (
            f"{e['category']:<15} {e['id']}: {e['question']}",
            f"{'':<15} wanted {e['answer']}, read {e['found']}: {said[-200:]!r}",
        )
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    counted = ", ".join(f"{results['categories'].get(c, 0)} {c}" for c in CATEGORIES)
    console.print(f"errors looked at: {counted}", highlight=False)
    for flag in results["flags"]:
        console.print(f"! {flag}", highlight=False)
    console.print(str(path), highlight=False, soft_wrap=True)
