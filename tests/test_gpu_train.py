"""Data and training on a GPU where there is no GPU: the whole script on the tiny target."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from reference import tiny
from safetensors.torch import load_file

import drafters
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.verify import build

SCRIPT = Path(__file__).parent.parent / "experiments" / "gpu_train.sh"
SMALL = {
    "OPTIONS": "target.device=cpu target.dtype=float32 engine.threads=1",
    "TRAIN": "task.data.batch_size=8 task.data.round=1 task.data.max_new_tokens=8 task.draft_vocab=100 "
    "task.data.longest_prompt=300 task.steps=4 task.warmup=1 task.validate_every=2 task.precision=no "
    "task.batch_positions=512 task.micro_positions=512",
    "SMALL": "drafter.layers=1 task.compare=[1] task.compare_steps=2",
    "MEASURE": "prompts.limit=1 engine.max_new_tokens=8",
}
CHECKPOINT = {"eagle": "checkpoint", "medusa": "checkpoint", "small": "path"}
NO_NETWORK = """
import socket, sys
def refused(event, arguments):
    if event == "socket.getaddrinfo" or event == "socket.connect" and arguments[0].family != socket.AF_UNIX:
        print(event, arguments, file=open({log!r}, "a"))
        raise OSError("no network here")
sys.addaudithook(refused)
"""


@pytest.fixture
def offline(tmp_path) -> tuple[dict[str, str], Path]:
    """An environment in which every attempt to reach another machine fails, and where it is written down."""
    guard, log = tmp_path / "guard", tmp_path / "attempts"
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(NO_NETWORK.format(log=str(log)))
    environment = os.environ | SMALL | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(guard), os.environ.get("PYTHONPATH")]))
    environment["SPECDEC_CACHE"] = str(tmp_path / "cache")
    attempt = "import socket; socket.create_connection(('localhost', 9))"
    assert subprocess.run([sys.executable, "-c", attempt], capture_output=True, env=environment).returncode
    assert "getaddrinfo" in log.read_text()  # it works
    log.unlink()
    return environment, log


@pytest.mark.slow
def test_the_whole_script_on_the_tiny_target(tmp_path, offline):
    """Data once, three trainings, three measurements; what was trained drafts, and changes no output."""
    environment, attempts = offline
    output = tmp_path / "trained"
    script = ["bash", str(SCRIPT), "tiny", "300", str(output)]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=550, env=environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not attempts.exists(), attempts.read_text()

    target = tiny("float32")
    prompt, rule, config = target.encode(["One, two, three"]), build({"name": "naive"}), EngineConfig()
    plain = Engine(target, None, rule, config=config).generate(prompt)[0].tokens
    for name, option in CHECKPOINT.items():
        trained, run = output / name, output / "runs" / name
        summary = json.loads((run / "summary.json").read_text())
        assert summary["steps"] == 4 and summary["draft_vocab"] == 100
        assert 300 <= summary["data"]["answer_tokens"] < 300 + 8 * 8  # at most a shard more than asked for
        card = (trained / "README.md").read_text()
        assert card.startswith(f"# {name} for tiny") and "4 steps" in card and "(curves.png)" in card
        assert (trained / "curves.png").stat().st_size > 1000

        [weights] = trained.glob("*.safetensors")
        drafter = drafters.build({"name": name, option: str(trained)}, target)
        stored = sum(tensor.numel() for tensor in load_file(weights).values())
        assert stored == summary["parameters"] + 100  # and the map of the draft vocabulary
        engine = Engine(target, drafter, rule, config=config)
        assert engine.generate(prompt)[0].tokens == plain
        assert sum(row.nodes for row in engine.ledger.rows) > 0

        measured = json.loads((output / "runs" / f"measure-{name}" / "summary.json").read_text())
        assert measured["overall"]["prompts"] == 1 and measured["overall"]["agreement"] == {"equal": 1}
        meta = json.loads((output / "runs" / f"measure-{name}" / "meta.json").read_text())
        assert meta["config"]["drafter"][option] == str(trained)
    for folder in (tmp_path / "cache" / "distilled").iterdir():
        assert len(list((folder / "features").iterdir())) == 1  # EAGLE's states serve all three
    assert "layers kept" in ended.stdout
