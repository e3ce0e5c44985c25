"""Run directories written by hand, with numbers that can be checked on paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PIECES = {str(t): f" t{t}" for t in range(20)} | {"9": "\n", "8": "\x04"}


def record(method: str, unit: int = 0, **changes: Any) -> dict[str, Any]:
    """One sample. Speculative: two steps of γ = 3, the first accepts 1, the second all 3, of which one and
    the bonus lie behind a stop.
    """
    speculative = method == "speculative"
    steps = {
        "nodes": [3, 3] if speculative else [0] * 5,
        "depth": [3, 2] if speculative else [0] * 5,  # behind the stop nothing was tried
        "accepted": [1, 2] if speculative else [0] * 5,
        "emitted": [2, 2] if speculative else [1] * 5,
        "discarded": [0, 2] if speculative else [0] * 5,
        "bonus": [0, 0] if speculative else [1] * 5,
    }
    tokens = [1, 2, 3, 4, 5] if speculative else [1, 2, 3, 4, 5, 6]
    seconds = 2.0 if speculative else 6.0
    step_seconds = [
        [1, 3 if speculative else 0, 10 + i, 0.25, 0.5, 0.125, 0.125] for i in range(len(steps["depth"]))
    ]
    base = {
        "prompt": f"p{unit}",
        "domain": "chat" if unit % 2 == 0 else "maths",
        "sequence": unit,
        "prompt_tokens": 10,
        "tokens": tokens,
        "text": "x",
        "finish_reason": "eos",
        "seconds": seconds,
        "seconds_to_first_token": 0.5,
        "unit_seconds": seconds,
        "phase_seconds": {"prefill": 0.5, "draft": 0.5, "target": 0.5, "rule": 0.25, "other": 0.25},
        "step_seconds": step_seconds,
        "steps": steps,
        "draft_bytes": 600 if speculative else 0,
        "memory": {"process": 10**9},
        "unit": unit,
        "repeat": 0,
        "method": method,
    }
    if speculative:
        base["drafts"] = [[[2, 11, 12], None, [0]], [[4, 5, 13], None, [0, 1, 2]]]
    return base | changes


def write_run(directory: Path, units: int = 4, finished: bool = True, **options: Any) -> Path:
    """A run of `task=measure` with `units` prompts; `options`: config, flags, records."""
    directory.mkdir(parents=True)
    config = {
        "task": {"name": "measure"},
        "target": {"name": "toy"},
        "drafter": {"name": "ngram", "gamma": 3},
        "verify": {"name": "token"},
        "sampling": {"temperature": 0.0},
        "prompts": {"name": "builtin", "path": None},
        "engine": {"max_new_tokens": 6, "batch_size": 1},
        "seed": 0,
    } | options.pop("config", {})
    meta = {
        "started": {"time": "2026-11-30T00:00:00", "commit": "a" * 40, "dirty": True},
        "config": config,
        "versions": {"torch": "2.13.0"},
        "python": "3.11",
        "cpu": "A CPU",
        "cpus": 2,
        "threads": 2,
        "target": {"name": "toy", "dtype": "float32"},
        "footprint": {"weights": 1000, "kv": 10},
        "flags": options.pop("flags", []),
    }
    records = options.pop("records", None) or [
        record(method, unit, unit_seconds=(6.0 if method == "autoregressive" else 2.0) + 0.1 * unit)
        for unit in range(units)
        for method in ("autoregressive", "speculative")
    ]
    meta |= options.pop("meta", {})
    (directory / "meta.json").write_text(json.dumps(meta))
    (directory / "pieces.json").write_text(json.dumps(PIECES))
    (directory / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if finished:
        (directory / "summary.json").write_text(json.dumps({"perplexity": {"target": {"perplexity": 2.5}}}))
    return directory
