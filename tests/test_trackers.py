"""Trackers: nothing unless chosen, a clear word when the package is missing, the right numbers when not."""

import json
import sys
from types import SimpleNamespace

import pytest

from experiments import trackers
from specdec.errors import OptionError


@pytest.fixture
def run_dir(tmp_path):
    meta = {"config": {"drafter": {"name": "ngram", "gamma": 4}, "seed": 0}}
    summary = {"overall": {"speedup": {"value": 1.5, "low": None}, "prompts": 3, "ok": True}, "flags": ["x"]}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


OPTIONS = {"drafter.name": "ngram", "drafter.gamma": 4, "seed": 0}
NUMBERS = {"overall/speedup/value": 1.5, "overall/prompts": 3}


def test_nothing_is_imported_unless_chosen(run_dir):
    trackers.check(None)
    trackers.log(None, run_dir)
    assert not set(trackers.TRACKERS) & set(sys.modules)


def test_an_unknown_tracker_and_a_missing_package_are_told(monkeypatch):
    with pytest.raises(OptionError, match="logger=wandbb: no such tracker; did you mean wandb"):
        trackers.check("wandbb")
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    for name in trackers.TRACKERS:
        with pytest.raises(OptionError, match=f"logger={name}: its package is not installed: pip install "):
            trackers.check(name)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_options_and_numbers_arrive(run_dir, monkeypatch, name):
    said = []
    run = SimpleNamespace(log=lambda n: said.append(n), finish=lambda: said.append("finished"))
    fake = SimpleNamespace(
        init=lambda **options: (said.append(options), run)[1], log=run.log, finish=run.finish
    )
    monkeypatch.setitem(sys.modules, name, fake)
    trackers.log(name, run_dir)
    opened, numbers, finished = said
    assert opened["project"] == "specdec" and opened["config"] == OPTIONS
    assert numbers == NUMBERS and finished == "finished"


def test_mlflow_gets_parameters_metrics_and_files(run_dir, monkeypatch):
    said = {"files": []}

    class Active:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            said["ended"] = True

    fake = SimpleNamespace(
        set_experiment=lambda name: said.update(experiment=name),
        start_run=lambda run_name: Active(),
        log_params=lambda p: said.update(params=p),
        log_metrics=lambda m: said.update(metrics=m),
        log_artifact=lambda path: said["files"].append(path.rpartition("/")[2]),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    trackers.log("mlflow", run_dir)
    assert said["params"] == {name: str(value) for name, value in OPTIONS.items()}
    assert said["metrics"] == NUMBERS and said["ended"] and said["files"] == ["meta.json", "summary.json"]


def test_tensorboard_gets_options_as_text_and_scalars(run_dir, monkeypatch):
    said = {"scalars": {}}

    class Writer:
        def __init__(self, log_dir):
            said["folder"] = log_dir

        def __enter__(self):
            return self

        def __exit__(self, *_):
            said["closed"] = True

        def add_text(self, tag, text):
            said[tag] = text

        def add_scalar(self, tag, value, step):
            said["scalars"][tag, step] = value

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    trackers.log("tensorboard", run_dir)
    assert said["folder"] == str(run_dir / "tensorboard") and said["closed"]
    assert said["scalars"] == {(name, 0): value for name, value in NUMBERS.items()}
    assert said["options"].split() == [x for name, v in OPTIONS.items() for x in (f"{name}:", str(v))]


def test_an_unfinished_run_is_not_logged(run_dir, monkeypatch):
    (run_dir / "summary.json").unlink()
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    trackers.log("wandb", run_dir)
