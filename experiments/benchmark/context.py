"""Seconds of a step against the length of the text, beside the attention alone: nothing else may grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from experiments import intervals
from experiments.bandwidth import drafter_modules
from experiments.benchmark.contestants import AUTOREGRESSIVE
from experiments.machine import synchronize
from experiments.store import Run
from specdec.attention import tree_attention
from specdec.engine import Engine
from specdec.ledger import PHASES, Ledger
from specdec.model import Model

SECTION = "context"
ATTENTION = "attention"  # of the target alone, one token
FIRST_STEPS = 1  # pay for caches that are made then
ROUNDS = 9

Records = list[dict[str, Any]]


def text_of(length: int, ids: Sequence[list[int]]) -> list[int]:
    """`length` tokens of the prompts, one after the other, again and again."""
    joined = [token for prompt in ids for token in prompt]
    return (joined * (length // len(joined) + 1))[:length]


def run(
    engines: dict[str, Engine],
    ids: Sequence[list[int]],
    contexts: Sequence[int],
    repeats: int,
    store: Run,
    report: Callable[[str], None] = lambda _: None,
) -> None:
    """Decode after texts of these lengths, methods in turns; records in the store, finished ones skipped.

    Arguments:
        engines: method → engine, the autoregressive one first.
    """
    done = {(r["context"], r["repeat"], r["method"]) for r in records(store)}
    target = next(iter(engines.values())).target
    for repeat in range(-1, repeats):  # once to warm up every shape
        for context in contexts if repeat % 2 else contexts[::-1]:
            prompt = text_of(context, ids)
            for method in (ATTENTION, *engines):
                if (context, max(repeat, 0), method) in done:
                    continue
                report(f"repeat {max(repeat, 0) + 1} of {repeats}, {context} tokens of text: {method}")
                if method == ATTENTION:
                    found: dict[str, Any] = {"seconds": attention_seconds(target, context)}
                else:
                    found = _decode(engines[method], prompt)
                if repeat >= 0:
                    place = {"section": SECTION, "context": context, "repeat": repeat, "method": method}
                    store.append(place | found)


def _decode(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """Median seconds of each phase of a step."""
    engine.ledger = Ledger()
    for _ in engine.decode([prompt], [0]):
        pass
    steps = engine.ledger.step_seconds
    table = np.array(steps[FIRST_STEPS:] or steps)
    return {
        "seconds": float(np.median(table[:, 3:].sum(1))),
        "phases": dict(zip(PHASES, np.median(table[:, 3:], axis=0).tolist(), strict=True)),
        "nodes": float(table[:, 1].mean()),
        "reads": bool(drafter_modules(engine.drafter, engine.target)),
    }


@torch.inference_mode()
def attention_seconds(target: Model, context: int, tokens: int = 1, batch: int = 1) -> float:
    """Median seconds of the attention of all layers over `context` tokens of cache, nothing around it."""
    config, device = target.config, target.device
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    query = torch.randn(batch, heads, tokens, dim, device=device).to(target.dtype)
    shape = (config.num_hidden_layers, batch, kv_heads, context, dim)
    keys, values = (torch.randn(shape, device=device).to(target.dtype) for _ in range(2))
    mask = torch.zeros(batch, 1, tokens, context, device=device, dtype=target.dtype)
    taken = []
    for _ in range(ROUNDS + 1):
        synchronize(device)
        start = time.perf_counter()
        for key, value in zip(keys, values, strict=True):
            tree_attention(target.hf, query, key, value, mask, dim**-0.5)
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[1:]))


def records(store: Run) -> Records:
    return [r for r in store.records if r["section"] == SECTION]


def summarise(records: Records) -> dict[str, Any]:
    """Per method the curve (medians over repeats), and what grew that is not attention.

    `beyond`: of the autoregressive step, its growth from the shortest to the longest text without the growth
    of the attention; of a drafter, the growth of rule and bookkeeping, and of drafting where no network
    drafts (a drafting network has an attention of its own). As a share of the autoregressive step after the
    shortest text, with an interval over the repeats.
    """
    contexts = sorted({r["context"] for r in records})
    methods = list(dict.fromkeys(r["method"] for r in records))
    curves = {m: [float(np.median(_column(records, m, c))) for c in contexts] for m in methods}
    first, last = contexts[0], contexts[-1]
    step = _column(records, AUTOREGRESSIVE, first)
    beyond = {}
    for method in methods:
        if method == ATTENTION or first == last:
            continue
        if method == AUTOREGRESSIVE:
            grown = _column(records, method, last) - step
            grown = grown - (_column(records, ATTENTION, last) - _column(records, ATTENTION, first))
        else:
            grown = _host(records, method, last) - _host(records, method, first)
        beyond[method] = intervals.bootstrap((grown / step,), np.median)
    return {"contexts": contexts, "seconds": curves, "beyond": beyond}


def _column(records: Records, method: str, context: int) -> np.ndarray:
    """`[repeats]` seconds of a step."""
    here = [r for r in records if r["method"] == method and r["context"] == context]
    return np.array([r["seconds"] for r in sorted(here, key=lambda r: r["repeat"])])


def _host(records: Records, method: str, context: int) -> np.ndarray:
    """`[repeats]` seconds of everything in a step but networks."""
    here = [r for r in records if r["method"] == method and r["context"] == context]
    names = ["rule", "other"] if here[0]["reads"] else ["draft", "rule", "other"]
    return np.array([sum(r["phases"][n] for n in names) for r in sorted(here, key=lambda r: r["repeat"])])
