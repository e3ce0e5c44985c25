"""The notebooks run from the first cell to the last, and what they define is right."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


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
    assert not execute.foreign(notebook, folder)
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
