"""The certificate on a real model: greedy equality up to numeric ties, a two-sample test of samples."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

import drafters
from drafters import shipped
from experiments import prompts
from experiments.store import Run
from specdec import verify
from specdec.config import Config
from specdec.errors import CheckFailed, OptionError
from specdec.exactness.real_model import greedy_agreement, sampled_agreement
from specdec.model import Model

PROMPT = (
    "red green blue red green blue red green"  # a text whose next tokens are neither certain nor arbitrary
)
BATCH = 128


def run(config: Config, run_dir: Path, sequences: int, alpha: float, seed: int) -> None:
    """Check one pairing; results in `run_dir`: samples.jsonl, certificate.json/.md.

    Arguments:
        sequences: of each sample of the two-sample test. alpha: its level. seed: of the samples.

    Raises:
        OptionError: no drafter or no rule is chosen, or the rule is lossy.
        CheckFailed: the output differs by more than rounding, or follows another law.
    """
    for option, value in (("drafter", config.drafter.name), ("verify", config.verify["name"])):
        if value == "all":
            remedy = (
                f"on target={config.target.name} one pairing is certified at a time; choose, e.g. {option}="
            )
            raise OptionError(option, value, remedy + {"drafter": "ngram", "verify": "token"}[option] + ".")
    rule = verify.build(config.verify)
    if not rule.exact:
        raise OptionError("verify", rule.name, "is lossy and gets no certificate.")
    drafters.check_pairing(config.drafter, rule)
    shipped.check(config.drafter, config.target)
    target = Model.load(config.target)
    drafter = drafters.build(config.drafter, target)
    rule.check(drafter.name, drafter.kind, drafter.is_chain)
    asked = target.encode([p.text for p in prompts.load(config.prompts)])
    store = Run(run_dir, config, target=target.provenance)
    console = Console(stderr=True)
    said = {record["check"]: record for record in store.records}

    with console.status("greedy") if sys.stderr.isatty() else console.capture() as status:
        show = status.update if sys.stderr.isatty() else lambda message: None
        if "greedy" not in said:
            found = greedy_agreement(target, drafter, rule, asked, config.engine, show)
            store.append({"check": "greedy", "prompts": len(asked), "found": dict(found)})
        if "sampled" not in said:
            batched = replace(config.engine, batch_size=max(BATCH, config.engine.batch_size))
            prompt = target.tokenizer(PROMPT)["input_ids"] if target.tokenizer else [1, 2, 3]
            test = sampled_agreement(
                target, drafter, rule, prompt, sequences, batched, alpha, seed, report=show
            )
            store.append({"check": "sampled", "seed": seed, **vars(test)})

    said = {record["check"]: record for record in store.records}
    failures = _failures(said, alpha)
    text = _words(config, target, said, failures, alpha)
    store.write("certificate.json", {"passed": not failures, "failures": failures, **said})
    (store.directory / "certificate.md").write_text(text, encoding="utf-8")
    store.finish({"passed": not failures, "failures": failures})
    print(text)
    print(store.directory / "certificate.md")
    if failures:
        raise CheckFailed(f"the certificate failed: {'; '.join(failures)}")


def _failures(said: dict[str, dict[str, Any]], alpha: float) -> list[str]:
    failures = []
    if wrong := said["greedy"]["found"].get("logic bug"):
        failures.append(f"{wrong} greedy outputs differ by more than rounding")
    if said["sampled"]["p"] < alpha:
        failures.append(
            f"sampled tokens do not follow the autoregressive law (p = {said['sampled']['p']:.1e})"
        )
    return failures


def _power(detectable: float | None) -> str:
    if detectable is None or detectable >= 1:
        return "So few sequences see nothing: raise task.real_sequences."
    return f"A total variation of {detectable:.3f} would have been seen with power .99."


def _words(
    config: Config, target: Model, said: dict[str, dict[str, Any]], failures: list[str], alpha: float
) -> str:
    greedy, sampled = said["greedy"], said["sampled"]
    seed = sampled.get("seed", config.seed)  # older runs do not tell
    found = ", ".join(f"{count} {verdict}" for verdict, count in sorted(greedy["found"].items()))
    dtype = str(target.dtype).removeprefix("torch.")
    lines = [
        f"# {target.name} ({dtype}): drafter={config.drafter.name}, verify={config.verify['name']}",
        "NOT EXACT: " + "; ".join(failures) + "." if failures else "No deviation found.",
        f"- Greedy, {greedy['prompts']} prompts × {config.engine.max_new_tokens} tokens against "
        f"autoregressive decoding: {found}.",
        f"- Sampled at T = 1, seed {seed}, two samples of {sampled['observations']:,} sequences, "
        f"the two tokens after the first: χ² = {sampled['chi2']:.1f}, df = {sampled['df']}, "
        f"p = {sampled['p']:.3g} (level {alpha:g}). " + _power(sampled["detectable"]),
    ]
    return "\n\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:]) + "\n"
