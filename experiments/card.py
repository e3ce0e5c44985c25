"""The card of a trained drafter: a README.md beside its weights that tells how they came about."""

from __future__ import annotations

from typing import Any

from experiments.store import git_state, machine
from specdec.config import Config
from specdec.model import Model


def training_card(config: Config, target: Model, summary: dict[str, Any]) -> str:
    """Recipe, data and held-out acceptance as Markdown."""
    task, data, best = config.task, summary["data"], summary["best"]
    facts = {
        "target": f"{target.name} ({target.provenance.get('source', target.name)})",
        "parameters trained": f"{summary['parameters']:,}",
        "draft vocabulary": f"{summary['draft_vocab'] or target.vocab_size:,} tokens, {summary['coverage']:.1%} of the answers' tokens",
        "data": f"{data['answer_tokens']:,} tokens in {data['answers']:,} answers of the target to {task.data.source} prompts, "
        f"temperatures {', '.join(map(str, data['temperatures']))}, seed {config.seed}",
        "training": f"{summary['steps']:,} steps, {summary['positions']:,} positions, {summary['minutes']:.0f} minutes, "
        f"AdamW, learning rate {task.learning_rate} (warm-up {task.warmup} steps, then a cosine), "
        f"cross-entropy to the target's law",
        "machine": f"{machine()['cpu']}, torch {machine()['versions']['torch']}, commit {git_state()['commit']}",
    }
    lines = [f"# {config.drafter.name} for {target.name}", ""]
    lines += [f"- **{name}**: {fact}" for name, fact in facts.items()]
    lines += [
        "",
        "Held-out prompts of the evaluation's kind, answered greedily (the evaluation's own are not among them):",
        "",
    ]
    lines += ["| depth | positions | α = Σ min(p, q) | same argmax |", "| --- | --- | --- | --- |"]
    for depth, n in enumerate(best["depths"], start=1):
        lines.append(f"| {depth} | {n['positions']:,} | {n['alpha']:.3f} | {n['agreement']:.3f} |")
    for nodes, tau in summary["tuned"].get("block_efficiency_by_nodes", {}).items():
        lines.append(
            f"{'' if nodes != '1' else chr(10)}- greedy tree of {nodes} nodes: {tau:.3f} tokens per target forward"
        )
    command = f"python run.py task=train drafter={config.drafter.name} target={config.target.name}"
    lines += ["", f"Made with `{command} task.steps={task.steps} task.data.tokens={task.data.tokens}`.", ""]
    return "\n".join(lines)
