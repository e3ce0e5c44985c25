"""A run's answers in the format of Spec-Bench (Xia et al. 2401.07851), for its own scripts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.summary import Records


def answers(records: Records, model_id: str, method: str = "speculative") -> Iterator[dict[str, Any]]:
    """One answer per prompt: `choices` with one entry per repeat, each with a list over turns (here one).

    `decoding_steps` counts target forwards, the prefill's included; `accept_lengths` are tokens per forward,
    the target's own included and the prefill's 1 first; `new_tokens` counts an end-of-sequence token.
    `wall_time` is the sequence's own.
    """
    by_prompt: dict[str, Records] = {}
    for record in records:
        if record["method"] == method:
            by_prompt.setdefault(record["prompt"], []).append(record)
    for prompt, group in by_prompt.items():
        yield {
            "question_id": int(prompt) if prompt.isdigit() else prompt,
            "category": group[0]["domain"],
            "answer_id": f"{model_id}-{prompt}",
            "model_id": model_id,
            "choices": [_choice(r) for r in sorted(group, key=lambda r: r["repeat"])],
            "tstamp": time.time(),
        }


def _choice(record: dict[str, Any]) -> dict[str, Any]:
    lengths = [1, *record["steps"]["emitted"]]
    return {
        "index": record["repeat"],
        "turns": [record["text"]],
        "decoding_steps": [len(lengths)],
        "new_tokens": [len(record["tokens"])],
        "wall_time": [record["seconds"]],
        "accept_lengths": lengths,
    }


def write(records: Records, directory: Path, model_id: str) -> list[Path]:
    """Write `spec_bench/<model_id>-<method>.jsonl` for both methods; the paths written."""
    folder = directory / "spec_bench"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for method in dict.fromkeys(r["method"] for r in records):
        paths.append(folder / f"{model_id}-{method}.jsonl")
        lines = (json.dumps(a, ensure_ascii=False) for a in answers(records, f"{model_id}-{method}", method))
        paths[-1].write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return paths
