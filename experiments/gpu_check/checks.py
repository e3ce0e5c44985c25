"""Right before fast: the tests that need CUDA, and the certificate of exactness on the device."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import drafters
from experiments import certify
from specdec import verify
from specdec.config import TargetConfig
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.exactness.pairing import Plan
from specdec.exactness.verdict import verdict
from specdec.model import Model

ROOT = Path(__file__).parent.parent.parent
ALPHA, POWER = 1e-3, 0.99
ENUMERABLE = {"vocab_size": 5, "hidden_size": 8, "layers": 2, "dtype": "float64"}
OUTCOMES = ("passed", "failed", "error", "skipped", "deselected")


def tests(arguments: Sequence[str], seconds: float, needed: bool = True) -> dict[str, Any]:
    """Counts of a pytest run in its own process; `ok` if nothing failed and, if `needed`, some passed."""
    if not (ROOT / "tests").is_dir():
        return {"ok": False, "told": "the tests lie in a checkout, which this installation has not"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    start = time.perf_counter()
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"ok": False, "told": f"not finished within {seconds:.0f} s"}
    last = (ended.stdout.strip().splitlines() or [ended.stderr.strip()])[-1]
    counts = {word: count(last, word) for word in OUTCOMES}
    ok = ended.returncode == 0 and (counts["passed"] > 0 or not needed)
    told = last if ok or not counts["failed"] + counts["error"] else ended.stdout[-2000:]
    return {"ok": ok, **counts, "told": told, "seconds": time.perf_counter() - start}


def count(line: str, word: str) -> int:
    """`3 passed, 1 skipped in 2.00s`, "passed" → 3."""
    found = re.search(rf"(\d+) {word}", line)
    return int(found[1]) if found else 0


def certificate(
    device: str,
    pairs: Sequence[Sequence[str]],
    sequences: int,
    seconds: float,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Certify pairings of [drafter, rule], every case of the drafter, until the time is up."""
    config = TargetConfig(name="enumerable", source="tiny", chat=False, device=device, **ENUMERABLE)
    jobs = [job for drafter, rule in pairs for job in _jobs(config, drafter, rule, sequences)]
    records, end = [], time.perf_counter() + seconds
    start = time.perf_counter()
    for job in jobs:
        if records and time.perf_counter() > end:
            break
        report(f"certificate: {job.label}")
        records.append(certify.perform(job))
    found = verdict(records, ALPHA, POWER)
    return {
        "ok": found["passed"],
        "failures": found["failures"],
        "sequences": sequences,
        "pairings": [job.label for job in jobs[: len(records)]],
        "not_reached": [job.label for job in jobs[len(records) :]],
        "seconds": time.perf_counter() - start,
    }


def _jobs(config: TargetConfig, drafter: str, rule: str, sequences: int) -> list[certify.Job]:
    """One per case of the drafter that the rule takes without bias."""
    target, found = Model.load(config), []
    for case, built in drafters.cases(drafter, target).items():
        try:
            Engine(target, built, verify.build({"name": rule}))
        except OptionError:
            continue
        plan = Plan(sequences, 0, one_by_one=min(20, sequences // 20))
        found.append(certify.Job("pairing", config, plan, (drafter, case), {"name": rule}))
    return found
