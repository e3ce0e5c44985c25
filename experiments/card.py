"""The card of a trained drafter: a README.md beside its weights that tells how they came about."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from experiments.store import git_state, machine
from specdec.config import Config
from specdec.model import Model

LOSS_NAMES = {
    "cross_entropy": "cross-entropy to the target's law",
    "log_acceptance": "−log Σ min(p, q)",
    "hybrid": "cross-entropy going over to 1 − Σ min(p, q)",
}
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon for the matrices, AdamW for the rest"}


def training_card(config: Config, target: Model, summary: dict[str, Any]) -> str:
    """Recipe, data and held-out acceptance as Markdown."""
    task, data, best = config.task, summary["data"], summary["best"]
    vocab, share = summary["draft_vocab"] or target.vocab_size, summary["coverage"]
    temperatures = ", ".join(map(str, data["temperatures"]))
    cpu, versions = machine()["cpu"], machine()["versions"]
    facts = {
        "target": f"{target.name} ({target.provenance.get('source', target.name)})",
        "parameters trained": f"{summary['parameters']:,}",
        "draft vocabulary": f"{vocab:,} tokens, which are {share:.1%} of the answers' tokens",
        "data": f"{data['answer_tokens']:,} tokens in {data['answers']:,} answers of the target to "
        f"{task.data.source} prompts, temperatures {temperatures}, seed {config.seed}",
        "training": f"{summary['steps']:,} steps, {summary['positions']:,} positions, "
        f"{summary['minutes']:.0f} minutes; {OPTIMIZERS[task.optimizer]}, learning rate "
        f"{task.learning_rate} (warm-up {task.warmup} steps, then a cosine), {task.batch_positions} places "
        f"per step, {LOSS_NAMES[task.loss]}",
        "machine": f"{cpu}, torch {versions['torch']}, commit {git_state()['commit']}",
    }
    lines = [f"# {config.drafter.name} for {target.name}", ""]
    lines += [f"- **{name}**: {fact}" for name, fact in facts.items()]
    lines += ["", "Held-out prompts of the evaluation's kind (none of its own), answered greedily:", ""]
    lines += ["| depth | positions | α = Σ min(p, q) | same argmax |", "| --- | --- | --- | --- |"]
    for depth, n in enumerate(best["depths"], start=1):
        lines.append(f"| {depth} | {n['positions']:,} | {n['alpha']:.3f} | {n['agreement']:.3f} |")
    if by_nodes := summary["tuned"].get("block_efficiency_by_nodes"):
        lines += ["", "| nodes of the greedy tree | tokens per target forward |", "| --- | --- |"]
        lines += [f"| {nodes} | {tau:.3f} |" for nodes, tau in by_nodes.items()]
    lines += ["", "![learning curves](curves.png)"]
    command = f"python run.py task=train drafter={config.drafter.name} target={config.target.name}"
    made = replace(
        task, data=replace(task.data, tokens=data["answer_tokens"])
    )  # what it took, not what was asked
    changed = [*_changed("drafter", config.drafter), *_changed("task", made)]
    return "\n".join([*lines, "", f"Made with `{' '.join([command, *changed])}`.", ""])


def _changed(prefix: str, options: Any) -> list[str]:
    """The options that are not at their defaults, as on the command line."""
    found = []
    for field in fields(options):
        value = getattr(options, field.name)
        default = field.default if field.default is not MISSING else field.default_factory()
        if is_dataclass(value):
            found += _changed(f"{prefix}.{field.name}", value)
        elif value != default and field.name not in ("name", "output"):
            found.append(f"{prefix}.{field.name}={value}".replace(" ", ""))
    return found
