"""The accept/reject step alone: draft a token, verify it with the shipping rule, and test the law of what
comes out.

The lecture's exercise: five tokens, 100,000 samples, chi-square. `verify=naive` shows what a wrong rule
looks like.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from experiments.store import Run
from specdec import verify
from specdec.config import Config, at_least
from specdec.errors import CheckFailed, OptionError
from specdec.exactness import goodness
from specdec.proposal import Kind, Proposal
from specdec.rng import PhiloxSource, Purpose
from specdec.verify import Rule

CHUNK = 20_000  # samples verified at once


@dataclass
class Options:
    """Options of `task=accept_reject`."""

    name: str = "accept_reject"
    samples: int = 100_000
    target: list[float] = field(default_factory=lambda: [0.35, 0.25, 0.20, 0.15, 0.05])
    draft: list[float] = field(default_factory=lambda: [0.10, 0.40, 0.05, 0.15, 0.30])
    significance: float = 1e-6  # the chance that a right rule fails

    def __post_init__(self) -> None:
        at_least("task", self, samples=1)
        for option in ("target", "draft"):
            law = getattr(self, option)
            if len(law) < 2 or min(law) < 0 or abs(sum(law) - 1) > 1e-6:
                raise OptionError(f"task.{option}", law, "must be ≥ 2 probabilities that sum to one.")
        if len(self.target) != len(self.draft):
            raise OptionError(
                "task.draft", self.draft, f"must have {len(self.target)} tokens, as task.target has."
            )
        if not 0 < self.significance < 1:
            raise OptionError("task.significance", self.significance, "must lie in (0, 1).")


def run(config: Config, run_dir: Path) -> None:
    """Sample, print, test.

    Raises:
        CheckFailed: a rule that calls itself exact is not.
    """
    task: Options = config.task
    rule = verify.build(config.verify)
    kind = Kind.COUPLED if rule.coupled else Kind.WITH_REPLACEMENT
    rule.check("a sampled token", kind, True)
    store = Run(run_dir, config)
    drafted, emitted, accepted = sample(rule, task.target, task.draft, task.samples, config.seed)
    results = judge(task, drafted, emitted, accepted) | {"rule": rule.name, "exact": rule.exact}
    console = Console() if Console().is_terminal else Console(width=100)
    console.print(_table(task, results))
    for line in _notes(results):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(str(store.finish(results)), highlight=False, soft_wrap=True)
    if rule.exact and results["p_value"] < task.significance:
        raise CheckFailed(f"verify={rule.name} calls itself exact, but p = {results['p_value']:.2g}")


def sample(
    rule: Rule, target: list[float], draft: list[float], samples: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft, verify and emit one token, `samples` times with independent random numbers.

    Returns:
        drafted, emitted `[samples]` int64; accepted `[samples]` bool.
    """
    p, q = (torch.tensor(law, dtype=torch.float64) for law in (target, draft))
    p, q = p / p.sum(), q / q.sum()
    source, parts = PhiloxSource(seed), []
    for sequence in torch.arange(samples).split(CHUNK):
        rows = len(sequence)
        draws = source.at(sequence, torch.zeros_like(sequence))
        law = q.expand(rows, -1)
        drafted = draws.race(law, 0) if rule.coupled else draws.categorical(law, Purpose.DRAFT)
        kind = Kind.COUPLED if rule.coupled else Kind.WITH_REPLACEMENT
        proposal = Proposal.chain(drafted[:, None], law[:, None], kind)
        verdict = rule(proposal, p.expand(rows, 2, -1), draws)
        accepted = verdict.accepted > 0
        parts.append((drafted, torch.where(accepted, drafted, verdict.token), accepted))
    drafted, emitted, accepted = (torch.cat(column) for column in zip(*parts, strict=True))
    return drafted, emitted, accepted


def judge(task: Options, drafted: Tensor, emitted: Tensor, accepted: Tensor) -> dict[str, Any]:
    """Chi-square of the emitted tokens against the target's law, and the counts behind it."""
    vocab = range(len(task.target))
    fit = goodness.fit(Counter(emitted.tolist()), dict(zip(vocab, task.target, strict=True)))
    overlap = sum(min(p, q) for p, q in zip(task.target, task.draft, strict=True))
    return {
        "samples": len(emitted),
        "drafted": torch.bincount(drafted, minlength=len(vocab)).tolist(),
        "accepted": torch.bincount(drafted[accepted], minlength=len(vocab)).tolist(),
        "emitted": torch.bincount(emitted, minlength=len(vocab)).tolist(),
        "acceptance_rate": float(accepted.double().mean()),
        "overlap": overlap,
        "chi2": fit.chi2,
        "df": fit.df,
        "p_value": fit.p,
        "impossible": sum(fit.impossible.values()),
        "detectable_total_variation": goodness.detectable_tv(len(emitted), fit.df, task.significance),
    }


def _table(task: Options, results: dict[str, Any]) -> Table:
    table = Table(
        title=f"{results['samples']:,} accept/reject steps, verify={results['rule']}", box=SIMPLE_HEAD
    )
    for column in ("token", "target p", "draft q", "drafted", "accepted", "emitted", "share", "share − p"):
        table.add_column(column, justify="right")
    rows = zip(
        task.target, task.draft, results["drafted"], results["accepted"], results["emitted"], strict=True
    )
    for token, (p, q, drafted, accepted, emitted) in enumerate(rows):
        share = emitted / results["samples"]
        counts = (f"{drafted:,}", f"{accepted:,}", f"{emitted:,}")
        table.add_row(str(token), f"{p:.4f}", f"{q:.4f}", *counts, f"{share:.4f}", f"{share - p:+.4f}")
    return table


def _notes(r: dict[str, Any]) -> list[str]:
    claim = "exact" if r["exact"] else "LOSSY, and says so"
    return [
        f"Accepted {r['acceptance_rate']:.4f}; Σ min(p, q) = 1 − TV(p, q) = {r['overlap']:.4f}.",
        f"χ² = {r['chi2']:.2f} with {r['df']} degrees of freedom, p = {r['p_value']:.3g}; the rule: {claim}.",
        f"So many samples show any law at a total variation of {r['detectable_total_variation']:.4f}.",
    ]
