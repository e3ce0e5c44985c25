"""The notebooks run from the first cell to the last, and what they define is right."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LINEAR = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)  # weights of SmolLM2-135M's layers
HEAD = 49152 * 576


def _executor() -> ModuleType:
    """`notebooks/execute.py`, which lies in no package."""
    spec = importlib.util.spec_from_file_location("execute_notebooks", FOLDER / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute = _executor()


def values(name: str, folder: Path, **expressions: str) -> dict[str, Any]:
    """Execute a notebook in `folder` and evaluate `expressions` where it ends."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    wanted = ", ".join(f"{key!r}: {expression}" for key, expression in expressions.items())
    question = f"import json, sys; print(json.dumps({{{wanted}, 'python': sys.executable}}, default=float))"
    notebook.cells.append(nbformat.v4.new_code_cell(question))
    execute.execute(notebook, folder)
    answer = json.loads(notebook.cells.pop().outputs[0].text)
    assert answer.pop("python") == sys.executable
    return answer


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_notebooks_are_whole_and_clean(path):
    """Executed from top to bottom without an error; no paths, times or versions in what is committed."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]
    assert any("image/png" in o.get("data", {}) for cell in code for o in cell.outputs)
    assert not execute.foreign(notebook)
    assert execute.clean(nbformat.read(path, as_version=4)) == notebook
    assert path.stat().st_size < 1_000_000


@pytest.mark.slow
def test_speculative_sampling(tmp_path):
    """What the lecture says of two tokens; p to 1e-12 by enumeration; the wrong rule's law as derived."""
    found = values(
        "01_speculative_sampling.ipynb",
        tmp_path,
        by_hand="{x: str(w) for x, w in by_hand.items()}",
        two_tokens="sorted([*key, w] for key, w in two_tokens.items())",
        error="max(random_error, enumeration_error)",
        p_value="sampled['p_value']",
        accepted="sampled['acceptance_rate']",
        laws="[exercise.target, exercise.draft]",
        wrong_law="wrong_law",
        wrong_p="wrong_sampled['p_value']",
        claims_hold="claims_hold",
        proof="[c['error'] for c in certified['checks'] if 'error' in c]",
        passed="right['passed']",
        rejected="not wrong['passed']",
        wrong_proof="[c['error'] for c in rejected_record['checks'] if 'error' in c]",
    )
    assert found["by_hand"] == {"A": "3/5", "B": "2/5"}
    probabilities = {tuple(branch): w for *branch, w in found["two_tokens"]}
    assert probabilities == pytest.approx({(0, 1, 0): 0.6, (0, 0, 1): 0.3, (1, 1, 1): 0.1}, abs=1e-12)
    assert found["error"] < 1e-12

    p, q = found["laws"]
    overlap = sum(map(min, p, q))
    assert found["p_value"] > 1e-6  # so often a right rule fails
    assert found["accepted"] == pytest.approx(overlap, abs=5 * (overlap * (1 - overlap) / 1e5) ** 0.5)
    derived = [min(a, b) + (1 - overlap) * a for a, b in zip(p, q, strict=True)]
    assert found["wrong_law"] == pytest.approx(derived, abs=1e-12)
    assert found["wrong_p"] < 1e-100

    assert found["claims_hold"] and found["passed"] and found["rejected"]
    assert len(found["proof"]) == 1 and found["proof"][0] < 1e-12 < 1e-3 < found["wrong_proof"][0]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1800)
def test_acceptance_curves(tmp_path):
    """Every rate once more, counted step by step; drafts neither lose nor add a token."""
    found = values(
        "02_acceptance_curves.ipynb",
        tmp_path,
        names="names",
        steps="[[*key, [[r['steps'], len(r['tokens'])] for r in of_run]] for key, of_run in runs.items()]",
        curves="{name: [p['value'] for p in curve] for name, curve in curves.items()}",
        rates="rates",
        taus="{name: [[p['low'], p['value'], p['high']] for p in points] for name, points in taus.items()}",
        gammas="GAMMAS",
        same="same / sum(map(len, every))",
    )
    assert found["names"][0] == "ngram"
    runs = {(name, gamma): prompts for name, gamma, prompts in found["steps"]}
    for (name, gamma), prompts in runs.items():
        depth, accepted, emitted = (
            [x for steps, _ in prompts for x in steps[column]] for column in ("depth", "accepted", "emitted")
        )
        assert max(depth) <= gamma
        assert sum(emitted) == sum(tokens - 1 for _, tokens in prompts)  # the first is the prefill's
        low, tau, high = found["taus"][name][found["gammas"].index(gamma)]
        assert tau == pytest.approx(sum(emitted) / len(emitted))
        assert 1 <= low <= tau <= high <= gamma + 1
        tried = [[a > d for t, a in zip(depth, accepted, strict=True) if t > d <= a] for d in range(gamma)]
        if gamma == max(found["gammas"]):
            alpha = [sum(at) / len(at) for at in tried if at]
            assert [v for v in found["curves"][name] if v == v] == pytest.approx(alpha)
        if gamma == 3:
            assert found["rates"][name] == pytest.approx(sum(map(sum, tried)) / sum(map(len, tried)))
    assert found["same"] > 0.9  # all, but for numeric ties


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1800)
def test_roofline_and_speed(tmp_path):
    """The lecture's table and ridges; measured speedups from the samples; factors that leave nothing over."""
    found = values(
        "03_roofline_and_speed.ipynb",
        tmp_path,
        params="llama2[40].num_params",
        lecture="[[*key, s.memory, s.latency, s.throughput] for key, s in lecture.items()]",
        ridges="[ACCELERATORS['h100'].ridge(), ACCELERATORS['rtx4080'].ridge()]",
        timed="timed",
        runs="found",
        samples="{g: [[r['method'], len(r['tokens']), r['unit_seconds']]"
        " for r in stored.StoredRun.read(folder / f'gamma-{g}').records] for g in GAMMAS}",
    )
    assert found["params"] == 13_015_449_600
    expected = {
        (40, 1): (26.9, 8.0, 125),
        (40, 64): (79.7, 23.8, 2689),
        (40, 256): (240.8, 71.9, 3562),
        (8, 64): (33.4, 10.0, 6417),
        (8, 256): (65.6, 19.6, 13068),
    }
    for heads, batch, memory, latency, throughput in found["lecture"]:
        told = (round(memory / 1e9, 1), round(1000 * latency, 1), round(throughput))
        assert told == expected.pop((heads, batch))
    assert not expected
    assert [round(ridge) for ridge in found["ridges"]] == [295, 136]

    assert [t["phase"] for t in found["timed"]] == ["prefill", "decode", "verify"]
    for t, logits in zip(found["timed"], [1, 1, 5], strict=True):  # how fast it was is the machine's affair
        flops = 2 * (t["tokens"] * LINEAR + logits * HEAD)
        assert flops < t["flops_per_second"] * t["seconds"] < 1.15 * flops  # the rest is attention
        assert t["flops_per_second"] / t["bytes_per_second"] == pytest.approx(t["intensity"])

    assert [run["gamma"] for run in found["runs"]] == [1, 2, 4, 8]
    for run in found["runs"]:
        speed = {
            method: sum(n for m, n, _ in of_run if m == method) / sum(s for m, _, s in of_run if m == method)
            for of_run in [found["samples"][str(run["gamma"])]]
            for method in ("autoregressive", "speculative")
        }
        assert run["measured"] == pytest.approx(speed["speculative"] / speed["autoregressive"])
        assert run["textbook"] * math.prod(run["factors"].values()) == pytest.approx(run["measured"])
        assert run["held_out"] and run["error"] == pytest.approx(run["predicted"] / run["measured"] - 1)
