"""The run's directory survives kills, full disks and second thoughts."""

import contextlib
import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.store import Run, plain
from specdec.config import Config
from specdec.errors import OptionError, SpecdecError


def config(resume: bool = False, **more) -> Config:
    chosen = {"task": {"name": "measure"}, "drafter": {"name": "none"}, "verify": {"name": "token"}}
    return Config(**chosen, resume=resume, **more)


def lines(run: Run) -> list[dict]:
    return [json.loads(line) for line in (run.directory / "samples.jsonl").read_text().splitlines()]


def test_samples_are_on_disk_when_appended(tmp_path):
    run = Run(tmp_path / "deep" / "run", config(), device="cpu")
    run.append({"prompt": "qa-1", "method": "speculative", "tokens": torch.tensor([1, 2]), "text": "ü"})
    run.append({"prompt": "qa-1", "method": "baseline", "tokens": np.array([1, 2]), "text": ""})
    assert [line["tokens"] for line in lines(run)] == [[1, 2], [1, 2]]
    assert run.keys("prompt", "method") == {("qa-1", "speculative"), ("qa-1", "baseline")}
    assert run.summary is None
    path = run.finish({"speedup": np.float64(1.5)})
    assert path.name == "summary.json" and run.summary == {"speedup": 1.5}


def test_meta_says_what_ran(tmp_path):
    run = Run(tmp_path, config(seed=11), device="cpu", dtype="float32")
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["config"]["seed"] == 11 and meta["config"]["drafter"] == {"name": "none"}
    assert (meta["device"], meta["dtype"]) == ("cpu", "float32")
    assert meta["versions"]["torch"] == torch.__version__
    assert {"started", "python", "platform", "cpu", "cpus", "versions"} <= meta.keys()
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    assert meta["started"]["commit"] == (head or None)
    assert run.records == []


def test_a_budget_of_nodes_found_since_is_no_reason_to_mix_two(tmp_path):
    """`drafter.nodes=null` may mean another number by the time a run is resumed."""
    Run(tmp_path, config(), max_nodes=15).close()
    with pytest.raises(
        OptionError, match="drafter.nodes=null: was 15 nodes .* now 9; give them in a new run"
    ):
        Run(tmp_path, config(resume=True), max_nodes=9)
    Run(tmp_path, config(resume=True), max_nodes=15).close()


def test_resume_goes_on_after_a_line_cut_short(tmp_path):
    first = Run(tmp_path, config())
    first.append({"prompt": "a"})
    first.append({"prompt": "b"})
    samples = tmp_path / "samples.jsonl"
    samples.write_bytes(samples.read_bytes()[:-4])  # killed while writing b

    second = Run(tmp_path, config(resume=True))
    assert second.keys("prompt") == {("a",)}
    second.append({"prompt": "b"})
    assert lines(second) == [{"prompt": "a"}, {"prompt": "b"}]
    assert len(json.loads((tmp_path / "meta.json").read_text())["resumed"]) == 1


def test_another_runs_directory_is_refused(tmp_path):
    Run(tmp_path, config())
    with pytest.raises(OptionError, match="resume=true"):
        Run(tmp_path, config())
    with pytest.raises(OptionError, match=r"^seed=5: was 0"):
        Run(tmp_path, config(resume=True, seed=5))


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    Run(tmp_path, config())
    (tmp_path / "samples.jsonl").write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(OptionError, match="line 2 is no JSON"):
        Run(tmp_path, config(resume=True))


@contextlib.contextmanager
def files_limited_to(size: int):
    """A real short write: the system refuses bytes beyond `size` in any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_what_is_finished(tmp_path):
    run = Run(tmp_path, config())
    run.append({"prompt": "a"})
    before = (tmp_path / "samples.jsonl").read_bytes()
    with files_limited_to(len(before) + 100), pytest.raises(SpecdecError) as caught:
        run.append({"prompt": "b", "text": "x" * 1000})
    message = str(caught.value)
    assert str(tmp_path / "samples.jsonl") in message and "kept (1)" in message and "resume=true" in message
    assert (tmp_path / "samples.jsonl").read_bytes() == before  # no half a line
    with files_limited_to(8), pytest.raises(SpecdecError, match=r"summary\.json"):
        run.finish({"speedup": 1.5})
    assert run.summary is None
    run.append({"prompt": "b"})  # there is room again
    run.finish({})
    assert len(lines(run)) == 2 and run.summary == {}


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SpecdecError, match="file/run.*choose another hydra.run.dir"):
        Run(tmp_path / "file" / "run", config())


def test_plain_values():
    assert plain({"a": math.nan, 2: (math.inf, np.float32(0.5)), "s": {3, 1}, "p": Path("x")}) == {
        "a": None, "2": [None, 0.5], "s": [1, 3], "p": "x",
    }  # fmt: skip


def test_two_processes_do_not_write_one_run(tmp_path):
    """While one process is at work, another with resume=true is refused; afterwards it may go on."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from experiments.store import Run\n"
        "from specdec.config import Config\n"
        "from specdec.errors import OptionError\n"
        "try:\n"
        "    Run(Path(sys.argv[1]), Config(task={'name': 'x'}, resume=True))\n"
        "except OptionError as error:\n"
        "    print(error)\n"
    )

    def other() -> str:
        arguments = [sys.executable, "-c", code, str(tmp_path / "run")]
        return subprocess.run(
            arguments, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent
        ).stdout

    ours = Run(tmp_path / "run", Config(task={"name": "x"}))
    assert "another process is at work there" in other()
    ours.close()
    assert other() == ""
