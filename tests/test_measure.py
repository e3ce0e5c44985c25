"""The main job from the command line on the tiny target: whole, interrupted, killed, resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from reference import tiny

from experiments import measure, prompts, summary
from experiments.store import plain
from specdec.config import EngineConfig, PromptsConfig
from specdec.engine import Engine
from specdec.verify.token import TokenRule

ROOT = Path(__file__).parent.parent
METHODS = ("autoregressive", "speculative")


def command(directory: Path, *options: str) -> list[str]:
    run = [sys.executable, str(ROOT / "run.py"), "target=tiny", "target.device=cpu"]
    return [*run, "engine.threads=1", f"hydra.run.dir={directory}", *options]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def samples(directory: Path) -> list[dict]:
    path = directory / "samples.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def started(directory: Path, lines: int, *options: str) -> subprocess.Popen:
    """A run in its own process group that has finished so many samples and is in the middle of the next."""
    process = subprocess.Popen(
        command(directory, *options),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory.parent,
    )
    deadline = time.monotonic() + 240
    while len(samples(directory)) < lines and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


def finish(directory: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(directory, *options),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=directory.parent,
    )


def complete(directory: Path, count: int) -> dict:
    """The finished run holds every prompt once per method, no matter how often it was interrupted."""
    records = samples(directory)
    keys = [(r["method"], r["sequence"]) for r in records]
    assert sorted(keys) == sorted((m, s) for m in METHODS for s in range(count))
    found = json.loads((directory / "summary.json").read_text())
    assert found["overall"]["prompts"] == count
    for name in ("meta.json", "acceptance.png", "acceptance.svg"):
        assert (directory / name).stat().st_size > 0
    return found


def test_ctrl_c_keeps_what_is_finished_and_resume_goes_on(tmp_path):
    """Batches of two within a file of prompts; the resumed run ends with the numbers of an unbroken one."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"id": i, "text": f"prompt {i} " * (i % 5 + 1)}) + "\n" for i in range(16))
    )
    options = (
        "drafter=ngram",
        "prompts=file",
        f"prompts.path={file}",
        "engine.batch_size=2",
        "engine.max_new_tokens=100",
        "task.warmup_tokens=1",
    )
    directory = tmp_path / "run"
    process = started(directory, 2, *options)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "interrupted; the same command with resume=true goes on" in err and "Traceback" not in err
    kept = samples(directory)
    assert 2 <= len(kept) < 32 and not (directory / "summary.json").exists()

    result = finish(directory, *options, "resume=true")
    assert result.returncode == 0, result.stderr
    assert samples(directory)[: len(kept)] == kept
    found = complete(directory, 16)
    assert found["overall"]["agreement"] == {"equal": 16}
    check_against_the_engine(directory, file)


def check_against_the_engine(directory: Path, file: Path) -> None:
    """Tokens, counts and finish reasons are those of the engine; the table's numbers those of the samples."""
    target = tiny("float32")
    asked = prompts.load(PromptsConfig(name="file", path=str(file)))
    engine = Engine(target, None, TokenRule(), config=EngineConfig(max_new_tokens=100))
    expected = engine.generate(target.encode([p.text for p in asked]))
    records = samples(directory)
    for r in records:
        assert r["tokens"] == expected[r["sequence"]].tokens
        assert r["finish_reason"] == expected[r["sequence"]].finish_reason
        assert sum(r["steps"]["emitted"]) == len(r["tokens"]) - 1  # the first comes from the prefill
        assert r["seconds_to_first_token"] <= r["seconds"] <= r["unit_seconds"]
    found = json.loads((directory / "summary.json").read_text())
    again = plain(summary.summarise(records))
    assert found["overall"]["speedup"] == again["overall"]["speedup"]
    assert found["overall"]["positions"] == again["overall"]["positions"]


@pytest.mark.slow
def test_a_killed_run_is_completed(tmp_path):
    """Killed twice without warning; a line cut short on the way is repaired."""
    options = ("drafter=small", "drafter.layers=1", "prompts.limit=6", "engine.max_new_tokens=60")
    directory = tmp_path / "run"
    for lines, resume in ((2, ()), (6, ("resume=true",))):
        process = started(directory, lines, *options, *resume)
        process.kill()
        process.communicate()
        assert not (directory / "summary.json").exists()
        with open(directory / "samples.jsonl", "a") as file:
            file.write('{"method": "specu')
    result = finish(directory, *options, "resume=true")
    assert result.returncode == 0, result.stderr
    complete(directory, 6)


def test_units_are_batches_of_one_domain():
    """Seven at a time: nine prompts of two domains make batches of 7, 1 and 1 or less, each sequence once."""
    target = tiny("float32")
    asked = [prompts.Prompt(str(i), "maths" if i in (2, 5) else "chat", "x" * (i + 1)) for i in range(9)]
    engine = Engine(target, None, TokenRule())
    units = list(measure._units(asked, target, engine, 7))
    assert [[p.domain for p in unit.prompts] for unit in units] == [["chat"] * 7, ["maths"] * 2]
    assert sorted(s for unit in units for s in unit.sequences) == list(range(9))
    for unit in units:
        assert [asked[s] for s in unit.sequences] == unit.prompts
        assert unit.ids == target.encode([p.text for p in unit.prompts])
