"""Tokens per second against batch size, both ways, and where speculation stops paying: measured, predicted.

Every sequence gets exactly as many tokens as asked for (end-of-sequence tokens are ignored), so that a
batch keeps its size until its first rows are through. The prediction for a batch size knows nothing of it:
costs and acceptance come from the steps of the other sizes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments import intervals
from experiments.benchmark.contestants import AUTOREGRESSIVE
from experiments.machine import synchronize
from experiments.store import Run
from specdec.engine import Engine
from specdec.ledger import Ledger
from specdec.speed_model import Acceptance, SpeedModel, Steps, Workload

SECTION = "batches"
LEAST_PROMPTS = 8  # decoded at every batch size, in as many batches as it takes
SPECULATIVE = "speculative"
COUNTS = ("depth", "accepted", "emitted", "nodes")
FIRST_STEPS = 1  # of every decode: they pay for caches that are made then

Records = list[dict[str, Any]]


def units(size: int, count: int) -> list[list[int]]:
    """Numbers of the prompts decoded together; when `count` prompts are too few, they come round again."""
    wanted = max(size, min(LEAST_PROMPTS, count))
    starts = range(0, max(wanted // size, 1) * size, size)
    return [[(start + i) % count for i in range(size)] for start in starts]


def run(
    engines: dict[str, Engine],
    ids: Sequence[list[int]],
    sizes: Sequence[int],
    repeats: int,
    store: Run,
    report: Callable[[str], None] = lambda _: None,
) -> None:
    """Both methods decode every unit, in turns; records in the store, finished ones skipped."""
    done = {(r["batch"], r["unit"], r["repeat"], r["method"]) for r in records(store)}
    for size in sizes:
        report(f"warming up batch {size}")
        for engine in engines.values():
            _decode(engine, [ids[i] for i in units(size, len(ids))[0]])
    for repeat in range(repeats):
        for size in sizes:
            for unit, numbers in enumerate(units(size, len(ids))):
                methods = list(engines)[:: 1 if (unit + repeat) % 2 == 0 else -1]
                for method in methods:
                    if (size, unit, repeat, method) in done:
                        continue
                    report(f"repeat {repeat + 1} of {repeats}, batch {size}: {method}")
                    found = _decode(engines[method], [ids[i] for i in numbers])
                    place = {"section": SECTION, "batch": size, "unit": unit, "repeat": repeat}
                    store.append(place | {"method": method} | found)


def _decode(engine: Engine, prompts: list[list[int]]) -> dict[str, Any]:
    engine.ledger = Ledger()
    synchronize(engine.target.device)
    start = time.perf_counter()
    tokens = sum(len(g.tokens) for g in engine.decode(prompts, list(range(len(prompts)))))
    synchronize(engine.target.device)
    seconds = time.perf_counter() - start
    rows = engine.ledger.decode_rows
    return {
        "tokens": tokens,
        "seconds": seconds,
        "prefill": engine.ledger.seconds["prefill"],
        "chain": engine.drafter.is_chain,
        "step_seconds": [[round(x, 7) for x in step] for step in engine.ledger.step_seconds],
        "rows": {name: [getattr(row, name) for row in rows] for name in COUNTS},
    }


def records(store: Run) -> Records:
    return [r for r in store.records if r["section"] == SECTION]


def summarise(records: Records) -> dict[str, Any]:
    """By batch size: tokens per second both ways, speedup measured and predicted; where it falls below 1."""
    sizes = sorted({r["batch"] for r in records})
    rows = []
    for size in sizes:
        here = [r for r in records if r["batch"] == size]
        base, fast = (_by_repeat(here, method) for method in (AUTOREGRESSIVE, SPECULATIVE))
        others = [r for r in records if r["batch"] != size]
        predicted = predict(others, workload(here)) if others else None
        measured = intervals.bootstrap((*base, *fast), speedup_of_medians)
        rows.append(
            {
                "batch": size,
                "tokens_per_second": {
                    AUTOREGRESSIVE: float(np.median(base[0] / base[1])),
                    SPECULATIVE: float(np.median(fast[0] / fast[1])),
                },
                "speedup": measured,
                "predicted": predicted,
                "error": None if predicted is None else predicted / measured["value"] - 1,
            }
        )
    found = {"batches": rows, "measured_crossing": crossing(sizes, [r["speedup"]["value"] for r in rows])}
    if len(sizes) > 1:
        dense = np.unique(np.round(np.geomspace(sizes[0], sizes[-1], 40))).astype(int).tolist()
        load = workload([r for r in records if r["batch"] == sizes[0]])
        curve = [predict(records, _scaled(load, size)) for size in dense]
        found |= {"curve": [dense, curve], "predicted_crossing": crossing(dense, curve)}
    return found


def speedup_of_medians(base_tokens, base_seconds, tokens, seconds, axis=-1) -> np.ndarray:
    """Median tokens per second over the baseline's median, both over the repeats."""
    return np.median(tokens / seconds, axis=axis) / np.median(base_tokens / base_seconds, axis=axis)


def crossing(sizes: Sequence[float], speedups: Sequence[float]) -> float | None:
    """The batch size at which the speedup falls below 1, between the sizes in log B; `None`: it never does.

    If it does not even start above 1, that is the smallest size.
    """
    if speedups[0] < 1:
        return float(sizes[0])
    points = list(zip(sizes, speedups, strict=True))
    for (a, fa), (b, fb) in itertools.pairwise(points):
        if fb < 1 <= fa:
            return float(a * (b / a) ** ((fa - 1) / (fa - fb)))
    return None


def predict(records: Records, load: Workload) -> float:
    """The speed model's speedup for a workload, its costs and acceptance from these records."""
    model = SpeedModel.fit(Steps.concatenate(steps(r) for r in records))
    fast = [r for r in records if r["method"] == SPECULATIVE]
    columns = {name: sum((r["rows"][name] for r in fast), []) for name in COUNTS}
    chains = all(r["chain"] for r in fast)
    if not chains:
        columns["nodes"] = columns["depth"]
    acceptance = Acceptance.counted(**columns)
    drafts = chain_drafts(acceptance, load.batch) if chains else _tree_drafts(fast)
    return model.predict(acceptance, load, drafts).speedup


def chain_drafts(acceptance: Acceptance, batch: float) -> tuple[list[float], list[float], list[float]]:
    """Width of a batch's forward: the longest of its rows' chains, rows drafting independently.

    Returns:
        (nodes, depth, share of steps), as `SpeedModel.predict` wants them.
    """
    at_least = np.concatenate([[1.0], 1 - (1 - acceptance.drafted) ** batch, [0.0]])
    lengths = np.arange(acceptance.gamma + 1, dtype=float).tolist()
    return lengths, lengths, (-np.diff(at_least)).tolist()


def _tree_drafts(fast: Records) -> tuple[list[float], list[float], list[float]]:
    """The shapes of the trees that were verified, with their shares."""
    shapes = np.concatenate([np.stack([s.nodes, s.depth], 1) for r in fast for s in [steps(r)]])
    values, count = np.unique(shapes, axis=0, return_counts=True)
    return values[:, 0].tolist(), values[:, 1].tolist(), (count / count.sum()).tolist()


def steps(record: dict[str, Any]) -> Steps:
    """A decode's steps; the depth of a step is that of its deepest row."""
    rows, depths, at = record["step_seconds"], [], 0
    for batch in (int(row[0]) for row in rows):
        depths.append(max(record["rows"]["depth"][at : at + batch], default=0))
        at += batch
    deep = None if record["chain"] else depths[FIRST_STEPS:]
    return Steps.from_rows(rows[FIRST_STEPS:], deep, record["method"] == SPECULATIVE)


def workload(here: Records) -> Workload:
    """What was decoded at one batch size."""
    base = [r for r in here if r["method"] == AUTOREGRESSIVE]
    fast = [r for r in here if r["method"] == SPECULATIVE]
    batch, context = base[0]["batch"], [step[2] for r in base for step in r["step_seconds"]]
    prefill = float(np.median([r["prefill"] for r in base]))
    return Workload(
        tokens=float(np.mean([r["tokens"] / batch for r in base])),
        context=float(np.mean(context)) if context else 1.0,
        batch=batch,
        prefill=prefill,
        drafter_prefill=max(float(np.median([r["prefill"] for r in fast])) - prefill, 0.0),
    )


def _scaled(load: Workload, batch: float) -> Workload:
    """The same work for more sequences; reading prompts takes as much longer."""
    times = batch / load.batch
    return Workload(load.tokens, load.context, batch, load.prefill * times, load.drafter_prefill * times)


def _by_repeat(here: Records, method: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, seconds), each `[repeats]`, summed over units."""
    repeats = sorted({r["repeat"] for r in here})
    own = [r for r in here if r["method"] == method]
    sums = [[(r["tokens"], r["seconds"]) for r in own if r["repeat"] == k] for k in repeats]
    tokens, seconds = np.array([np.sum(x, axis=0) for x in sums], dtype=float).T
    return tokens, seconds
