"""The race at batch size 1: everyone decodes every prompt, in turns, several times; ratios with intervals.

A unit is a prompt. Its time is the median over the repeats, so that an interruption does not count; the
interval comes from resampling prompts. Contestants are compared by their tokens per second over all prompts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from experiments import intervals
from experiments.benchmark.contestants import Contestant
from experiments.machine import synchronize
from experiments.prompts import Prompt
from experiments.store import Run

SECTION = "race"
Records = list[dict[str, Any]]
Compare = Callable[[list[int], list[int], list[int]], dict[str, Any]]  # (prompt, expected, actual) → verdict


def turns(count: int, prompt: int, repeat: int) -> list[int]:
    """In which order `count` contestants decode a prompt: everyone is first in turn, odd repeats reversed."""
    start = (prompt + repeat) % count
    order = [*range(start, count), *range(start)]
    return order[::-1] if repeat % 2 else order


def run(
    contestants: Sequence[Contestant],
    prompts: Sequence[Prompt],
    ids: Sequence[list[int]],
    repeats: int,
    store: Run,
    device: torch.device,
    compare: Compare,
    report: Callable[[str], None] = lambda _: None,
) -> None:
    """Every contestant decodes every prompt `repeats` times; records in the store, finished ones skipped.

    Arguments:
        compare: explains a difference from the first contestant's tokens.
    """
    done = {(r["contestant"], r["prompt"], r["repeat"]) for r in records(store)}
    first: dict[str, list[int]] = {}
    for r in records(store):
        if r["contestant"] == contestants[0].name:
            first.setdefault(r["prompt"], r["tokens"])
    for contestant in contestants:  # whatever is made at a first call is made before anything is timed
        report(f"warming up {contestant.name}")
        if any((contestant.name, prompt.id, r) not in done for prompt in prompts for r in range(repeats)):
            contestant.decode(ids[0])
    for repeat in range(repeats):
        for n, prompt in enumerate(prompts):
            report(f"repeat {repeat + 1} of {repeats}, {prompt.id}")
            for i in turns(len(contestants), n, repeat):
                contestant = contestants[i]
                if (contestant.name, prompt.id, repeat) in done:
                    continue
                synchronize(device)
                start = time.perf_counter()
                tokens = contestant.decode(ids[n])
                synchronize(device)
                seconds = time.perf_counter() - start
                if i == 0:
                    first.setdefault(prompt.id, tokens)
                place = {"section": SECTION, "contestant": contestant.name, "side": contestant.side}
                store.append(
                    place
                    | {"method": contestant.method, "prompt": prompt.id, "domain": prompt.domain}
                    | {"repeat": repeat, "prompt_tokens": len(ids[n]), "tokens": tokens, "seconds": seconds}
                    | {"facts": contestant.facts()}
                )
            _agree(store, prompt.id, ids[n], first[prompt.id], compare)


def _agree(store: Run, prompt: str, ids: list[int], expected: list[int], compare: Compare) -> None:
    """Compare everyone's tokens for a prompt with the first contestant's, once per contestant."""
    told = {r["contestant"] for r in store.records if r["section"] == "agreement" and r["prompt"] == prompt}
    for r in records(store):
        if r["prompt"] == prompt and r["contestant"] not in told:
            told.add(r["contestant"])
            found = {"section": "agreement", "contestant": r["contestant"], "prompt": prompt}
            store.append(found | compare(ids, expected, r["tokens"]))


def records(store: Run) -> Records:
    """The timed decodes."""
    return [r for r in store.records if r["section"] == SECTION]


def columns(records: Records, name: str) -> tuple[list[str], np.ndarray, np.ndarray]:
    """(prompts, tokens `[prompts]`, seconds `[prompts]`) of a contestant, medians over the repeats."""
    by_prompt: dict[str, list[tuple[int, float]]] = {}
    for r in records:
        if r["contestant"] == name:
            by_prompt.setdefault(r["prompt"], []).append((len(r["tokens"]), r["seconds"]))
    medians = [np.median(np.array(x, dtype=float), axis=0) for x in by_prompt.values()]
    tokens, seconds = np.array(medians).reshape(-1, 2).T
    return list(by_prompt), tokens, seconds


def ratio(records: Records, first: str, second: str) -> intervals.Interval:
    """How many times `second`'s tokens per second `first` reaches, over the prompts that both decoded."""
    by_prompt = []
    for name in (second, first):
        prompts, tokens, seconds = columns(records, name)
        by_prompt.append(dict(zip(prompts, zip(tokens, seconds, strict=True), strict=True)))
    shared = [p for p in by_prompt[0] if p in by_prompt[1]]
    base, own = (np.array([found[p] for p in shared], dtype=float).reshape(-1, 2).T for found in by_prompt)
    return intervals.compare(list(base), list(own))


def summarise(all_records: Records) -> dict[str, Any]:
    """Per contestant: tokens per second with its interval, spread of repeats, agreement, cost of a step."""
    timed = [r for r in all_records if r["section"] == SECTION]
    agreed = [r for r in all_records if r["section"] == "agreement"]
    found = {}
    for name in dict.fromkeys(r["contestant"] for r in timed):
        own = [r for r in timed if r["contestant"] == name]
        prompts, tokens, seconds = columns(timed, name)
        facts = [r["facts"] for r in own if r["facts"].get("steps")]
        found[name] = {
            "side": own[0]["side"],
            "method": own[0]["method"],
            "prompts": len(prompts),
            "domains": len({r["domain"] for r in own}),
            "repeats": 1 + max(r["repeat"] for r in own),
            "tokens": float(tokens.sum()),
            "tokens_per_second": intervals.bootstrap((tokens, seconds), intervals.ratio),
            "spread": _spread(own),
            "agreement": dict(Counter(r["verdict"] for r in agreed if r["contestant"] == name)),
            **_steps(own, facts),
        }
    return found


def _spread(own: Records) -> float:
    """Median over prompts of the quartile distance of the repeats' seconds, as a share of their median."""
    shares = []
    for prompt in {r["prompt"] for r in own}:
        low, middle, high = np.percentile([r["seconds"] for r in own if r["prompt"] == prompt], [25, 50, 75])
        shares.append((high - low) / middle)
    return float(np.median(shares))


def _steps(own: Records, facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Of our own engine: seconds per step, tokens per step (τ), mean context."""
    if not facts:
        return {}
    steps = sum(f["steps"] for f in facts)
    emitted = sum(len(r["tokens"]) - 1 for r in own)  # the first token comes from the prefill
    return {
        "seconds_per_step": float(np.median([f["decode_seconds"] / f["steps"] for f in facts])),
        "block_efficiency": emitted / steps,
        "context": sum(f["context"] * f["steps"] for f in facts) / steps,
    }
