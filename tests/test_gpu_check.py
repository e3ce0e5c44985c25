"""The GPU check where there is no GPU: its arithmetic, its refusals, and all of it on the tiny target."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from reference import next_logits, plain, tiny

import conf
from experiments import gpu_check
from experiments.gpu_check import checks, decoding, forwards, report
from specdec.config import from_mapping
from specdec.errors import CheckFailed, OptionError
from specdec.ledger import Ledger, Row
from specdec.roofline import Accelerator, Architecture, forward

ROOT = Path(__file__).parent.parent
SMALL = (
    "target=tiny", "target.device=cpu", "target.dtype=float32", "engine.threads=1", "task.widths=[1,16]",
    "task.contexts=[16,32]", "task.batches=[1,2]", "task.forward_seconds=0.01", "task.prompt_tokens=16",
    "task.new_tokens=16", "task.synthetic_tokens=32", "task.repeats=2", "task.rates=[0.6,0.9]",
    "task.certificate=[[small,block]]", "task.certificate_sequences=1000", "task.certificate_seconds=1",
)  # fmt: skip


def config(*overrides: str):
    with initialize_config_module("conf", version_base="1.3"):
        made = conf.resolve(compose("config", overrides=["task=gpu_check", *overrides]))
    made.task = from_mapping(gpu_check.Options, made.task, "task")
    return made


def test_what_it_asks_for_on_a_gpu():
    """The target, data type and shapes of the check as it is meant."""
    made = config()
    assert (made.target.architecture, made.target.weights) == ("llama3-8b", "random")
    assert (made.target.dtype, made.target.device) == ("bfloat16", "cuda")
    assert made.task.widths == [1, 2, 4, 8, 16, 32, 64] and made.task.rates == [0.6, 0.7, 0.8, 0.9]
    assert made.task.contexts == [512, 4096] and made.task.batches == [1, 8, 32]


def test_without_a_gpu_the_default_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match=r"target\.device=cuda: no usable CUDA device"):
        gpu_check.run(config(), tmp_path)


@pytest.mark.parametrize(
    ("override", "option"),
    [
        ("task.parts=[forward]", "task.parts"),
        ("task.widths=[2,16]", "task.widths"),
        ("task.batches=[8,1]", "task.batches"),
        ("task.rates=[1.0]", "task.rates"),
        ("task.certificate=[[small]]", "task.certificate"),
        ("task.new_tokens=1", "task.new_tokens"),
        ("task.contexts=[4096]", "task.contexts"),  # the tiny target sees 2048
        ("task.prompt_tokens=2040", "task.prompt_tokens"),
    ],
)
def test_refused(override, option, tmp_path):
    with pytest.raises(OptionError) as caught:
        gpu_check.run(config(*SMALL, override), tmp_path)
    assert caught.value.option == option and not list(tmp_path.iterdir())


# ---------------------------------------------------------------- forwards


def test_the_forward_that_is_timed_is_one_after_a_filled_cache():
    """With the cache filled by a real prefill, its logits are those of the whole text."""
    target, hf = tiny("float64"), plain({"dtype": "float64"})
    work = forwards.prepared(target, 1, 5, 3)
    cache = next(c.cell_contents for c in work.__closure__ if hasattr(c.cell_contents, "slot_layers"))
    text = [7, 8, 9, 10, 11]
    full = target.new_cache(1, 8)
    target.prefill(torch.tensor([text]), torch.tensor([5]), full)
    for own, other in zip(cache.slot_layers, full.slot_layers, strict=True):
        own.keys, own.values, own.is_initialized = other.keys, other.values, True
    logits = work().logits
    torch.testing.assert_close(logits[0, 2], next_logits(hf, [*text, 0, 1, 2]))
    torch.testing.assert_close(work().logits, logits)  # and again: nothing moved on
    assert forwards.prepared(target, 3, 5, 2)().logits.shape == (3, 2, 260)


def test_seconds_are_those_of_one_call():
    """A call that takes 2 ms, timed for 50 ms."""
    import time

    found = forwards.seconds_of(lambda: time.sleep(0.002), torch.device("cpu"), 0.05)
    assert 0.002 <= found < 0.02


def test_a_mode_that_does_not_work_is_told_and_ends_nothing(monkeypatch):
    target = tiny("float32")
    monkeypatch.setattr(forwards, "graphed", lambda work: 1 / 0)
    row = forwards.measure(target, forwards.GRAPH, 1, 8, 1, 0.01)
    assert row["seconds"] is None and row["error"].startswith("ZeroDivisionError")
    assert forwards.measure(target, forwards.EAGER, 1, 8, 1, 0.01)["seconds"] > 0


def test_bytes_of_a_step():
    """Weights without the embedding table, and keys and values of every token of every row."""
    target = tiny("float32")
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    assert forwards.step_bytes(target, 3, 100) == 4 * (260 * 32 + 2 * layer + 32) + 3 * 100 * 2 * 2 * 16 * 4


def row(mode: str, width: int, seconds: float | None, batch: int = 1, length: int = 512, **more) -> dict:
    return {"mode": mode, "batch": batch, "context": length, "width": width, "seconds": seconds, **more}


def test_costs_are_relative_to_one_token_of_the_same_mode_batch_and_context():
    rows = [row("eager", 1, 2.0), row("eager", 16, 3.0), row("graph", 1, 1.0), row("graph", 16, 1.05),
            row("graph", 16, 9.0, batch=8), row("graph", 32, None)]  # fmt: skip
    assert forwards.relative(rows) == {
        ("eager", 1, 512, 1): 1.0, ("eager", 1, 512, 16): 1.5,
        ("graph", 1, 512, 1): 1.0, ("graph", 1, 512, 16): 1.05,
    }  # fmt: skip


# ---------------------------------------------------------------- decoding


def ledger(steps: int, accepted: int, gamma: int, step: tuple[float, float]) -> Ledger:
    """Equal steps of (draft, target) seconds after a prefill of a tenth of a second."""
    made = Ledger(seconds={"prefill": 0.1, "draft": steps * step[0], "target": steps * step[1]})
    made.rows = [Row(0, 0, 0, 0, 1, 0, True, prefill=True)]
    made.rows += [Row(0, gamma, gamma, accepted, accepted + 1, 0, False) for _ in range(steps)]
    made.step_seconds = [(1, gamma, 10, *step, 0.0, 0.0) for _ in range(steps)]
    return made


def test_speed_and_workload_of_known_counts():
    base, fast = ledger(10, 0, 0, (0.0, 0.02)), ledger(4, 2, 4, (0.01, 0.03))
    assert decoding.speed([base, base]) == pytest.approx(22 / 0.6)
    assert decoding.speed([fast]) == pytest.approx(13 / 0.26)
    assert decoding.seconds_of_step(fast) == pytest.approx(0.04)
    waits = ledger(5, 0, 0, (0.0, 0.02))
    waits.step_seconds[4] = (1, 0, 10, 0.0, 0.02, 0.03, 0.01)  # the one of four in which tokens are read
    assert decoding.seconds_of_step(waits) == pytest.approx(0.03)
    load = decoding.workload([base], [fast], 11)
    assert (load.tokens, load.context, load.prefill, load.drafter_prefill) == (11, 10.0, 0.1, 0.0)


def test_synthetic_acceptance_gives_the_block_efficiency_of_the_formula(monkeypatch):
    """τ = (1 − α⁵)/(1 − α) for γ = 4: 2.31 and 3.36 at .6 and .8. With some 345 and 237 steps of standard
    deviation 1.4 and 1.6, five standard errors are .38 and .53; the rates .7 and .9 would be off by more."""
    made = config(*SMALL)
    target = tiny("float32")
    found = decoding.synthetic(made, target, made.task.synthetic, [0.6, 0.8], 16, 200, 4)
    for r, error in zip(found, (0.38, 0.53), strict=True):
        assert r["gamma"] == 4
        assert abs(r["block_efficiency"] - (1 - r["rate"] ** 5) / (1 - r["rate"])) < error
        assert r["error"] == pytest.approx(r["predicted"] / r["measured"] - 1)


def test_an_engine_mode_that_does_not_work_is_told_and_the_others_stay(monkeypatch):
    made, target, build = config(*SMALL), tiny("float32"), decoding.engine

    def engine(*args, compile, **changes):
        if compile == "graphs":
            raise RuntimeError("capture failed\nlong story")
        return build(*args, compile=compile, **changes)

    monkeypatch.setattr(decoding, "engine", engine)
    monkeypatch.setattr(decoding, "modes", lambda device: ("off", "graphs", "auto"))
    rows = decoding.autoregressive(made, target, [1], 16, 12, bandwidth=1e9)
    assert [(r["mode"], r.get("error")) for r in rows] == [
        ("compile=off", None), ("compile=graphs", "RuntimeError: capture failed"), ("compile=auto", None),
        ("compile=graphs, read_every=1", "RuntimeError: capture failed"),
    ]  # fmt: skip
    steps = decoding.drafter_steps(made, target, made.task.drafters[:1], [1], 16, 24)
    assert [r["mode"] for r in steps] == ["compile=off", "compile=graphs"] and steps[1]["error"]


def test_autoregressive_and_drafters_on_the_tiny_target():
    made, target = config(*SMALL), tiny("float32")
    rows = decoding.autoregressive(made, target, [1, 2], 16, 12, bandwidth=1e9)
    assert [r["batch"] for r in rows if r["mode"] in (None, "compile=off")] == [1, 2]
    for r in rows:
        assert r["tokens_per_second"] == pytest.approx(r["batch"] / r["seconds_per_step"])
        read = forwards.step_bytes(target, r["batch"], 16 + 6)
        assert r["fraction"] == pytest.approx(read / r["seconds_per_step"] / 1e9)
    steps = decoding.drafter_steps(made, target, made.task.drafters, [1, 2], 16, 24)
    assert [(r["drafter"], r["batch"], r["nodes"]) for r in steps] == [
        ("medusa", 1, 64), ("medusa", 2, 64), ("eagle", 1, 60), ("eagle", 2, 60),
    ]  # fmt: skip
    assert all(r["draft"] > 0 and r["target"] > 0 for r in steps)


# ---------------------------------------------------------------- checks, report, the whole run


def test_counts_of_a_test_run():
    line = "== 2 failed, 13 passed, 1 skipped, 100 deselected in 3.1s =="
    found = {word: checks.count(line, word) for word in checks.OUTCOMES}
    assert found == {"failed": 2, "passed": 13, "error": 0, "skipped": 1, "deselected": 100}


def test_the_tests_run_in_a_process_of_their_own():
    good = checks.tests(["tests/test_tree.py", "-k", "chain"], 60)
    assert good["ok"] and good["passed"] > 0 and good["failed"] == 0
    skipped = checks.tests(["-m", "cuda", "tests/test_rng.py"], 60, needed=False)
    assert skipped["ok"] and skipped["failed"] == 0
    assert checks.tests(["tests/test_tree.py"], 0.01)["told"] == "not finished within 0 s"


def test_the_certificate_stops_when_its_time_is_up_and_says_what_it_left():
    found = checks.certificate("cpu", [["small", "block"]], 1000, 0.0)
    assert found["ok"] and not found["failures"]
    assert found["pairings"] == ["small: chain × block"]
    assert found["not_reached"] == ["small: chain that stops × block"]  # the rule takes no trees


def results() -> dict:
    return {
        "device": "cuda:0", "accelerator": "NVIDIA H200", "seconds": 300.0,
        "target": {"name": "llama3-8b", "dtype": "bfloat16", "weights": "random"},
        "bandwidth": {"measured": 4.2e12, "sheet": 4.8e12},
        "tests": {"ok": True, "told": "2 passed"},
        "certificate": {"ok": False, "pairings": ["a"], "not_reached": ["b"], "sequences": 1000,
                        "failures": ["a: wrong"]},
        "autoregressive": [{"mode": None, "batch": 1, "seconds_per_step": 0.004, "tokens_per_second": 250.0,
                            "bytes_per_second": 3.84e12, "fraction": 0.8}],
        "forwards": [row("eager", 1, 0.010), row("eager", 16, 0.010), row("graph", 1, 0.004),
                     row("graph", 16, 0.005), row("roofline", 1, 0.003), row("roofline", 16, 0.0033)],
        "compiled": [row("compiled", 1, 0.005, compile_seconds=41.0)],
        "drafters": [{"drafter": "eagle", "mode": "compile=off", "batch": 1, "nodes": 60, "draft": 0.002,
                      "target": 0.004, "overhead": 0.001},
                     {"drafter": "eagle", "mode": "compile=graphs", "error": "no"}],
        "synthetic": {"error": "RuntimeError: out of memory"},
    }  # fmt: skip


def test_the_goals_and_the_document_of_known_results():
    found = {g.label: (round(g.measured["value"], 3), g.verdict) for g in report.goals(results())}
    assert found == {
        "autoregressive: share of the memory bandwidth": (80.0, "reached"),
        "verify(16) against one token, graph, batch 1, context 512 (roofline 1.10)": (1.25, "not reached"),
        "the whole check": (5.0, "reached"),
    }
    text = report.markdown(results(), report.goals(results()))
    for line in (
        "NVIDIA H200; llama3-8b, bfloat16, weights random; reads 4.200 TB/s measured, data sheet 4.80 TB/s.",
        "Certificate: FAILED (1 pairings at N = 1,000; not reached in time: b): a: wrong.",
        "| – | 1 | 4.00 | 250.0 | 3.840 | 80% |",
        "| graph | 1 | 512 | 4.00 | 1.00 | 1.25 |",
        "| roofline | 1 | 512 | 3.00 | 1.00 | 1.10 |",
        "| graph | 1 | 512 | 16 | 10.00 | 5.00 | 2.00 | – |",
        "| compiled | 1 | 512 | 1 | 10.00 | 5.00 | 2.00 | 41 |",
        "| eagle | compile=off | 1 | 60 | 2.00 | 4.00 | 1.00 | 0.50 |",
        "eagle, compile=graphs: no",
        "**synthetic failed**: RuntimeError: out of memory",
    ):
        assert line in text, line
    assert gpu_check.failures(results()) == [
        "certificate: a: wrong",
        "synthetic: RuntimeError: out of memory",
    ]


def test_a_known_accelerator_is_taken_from_its_data_sheet_another_is_measured(monkeypatch):
    monkeypatch.setattr(gpu_check.machine, "read_bandwidth", lambda *_: 4.2e12)
    monkeypatch.setattr(gpu_check.machine, "matmul_rate", lambda *_: 7e14)
    target, cpu = tiny("float32"), torch.device("cpu")
    for name, sheet in (("NVIDIA H200", 4.8e12), ("NVIDIA A100-SXM4-80GB", 2.039e12)):
        here = gpu_check.accelerator(target, name)
        assert gpu_check.bandwidth(cpu, here) == {"measured": 4.2e12, "sheet": sheet}
    here = gpu_check.accelerator(target, "Some GPU")
    assert (here.bandwidth, here.peak("float32")) == (4.2e12, 7e14)
    assert gpu_check.bandwidth(cpu, here) == {"measured": 4.2e12, "sheet": None}


def test_the_roofline_of_a_forward():
    """Memory-bound: the time of its bytes; with little arithmetic to spare, that of its FLOPs."""
    target = tiny("float32")
    arch = Architecture.from_config(target.config)
    for flops in (1e15, 1e6):
        here = Accelerator("x", 1e9, {"float32": flops})
        work = forward(arch, 4, 36, 2, 4.0)
        expected = work.bytes / 1e9 if flops == 1e15 else work.flops / 1e6
        assert forwards.roofline(target, here, 2, 32, 4)["seconds"] == pytest.approx(expected)


def test_a_part_that_breaks_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decoding, "synthetic", lambda *_: 1 / 0)
    made = config(*SMALL, "task.parts=[synthetic,autoregressive]")
    with pytest.raises(CheckFailed, match="synthetic: ZeroDivisionError"):
        gpu_check.run(made, tmp_path)
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["synthetic"]["error"].startswith("ZeroDivisionError")
    assert len(found["autoregressive"]) >= 2
    assert (tmp_path / "gpu_check.md").read_text() in capsys.readouterr().out


def test_nothing_begins_when_the_time_is_up(tmp_path, monkeypatch):
    made = config(*SMALL, "task.parts=[autoregressive,drafters]", "task.seconds=0")
    with pytest.raises(CheckFailed, match="not begun within 0 s"):
        gpu_check.run(made, tmp_path)


@pytest.mark.slow
def test_the_whole_script_on_the_tiny_target(tmp_path):
    """Every part, as on a GPU, in one command; a compiled forward needs a compiler, which may be missing."""
    script = ["bash", str(ROOT / "experiments" / "gpu_check.sh"), *SMALL, f"hydra.run.dir={tmp_path / 'run'}"]
    script += ["task.tests=[tests/test_tree.py]", "task.compile_widths=[1]"]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(script, capture_output=True, text=True, timeout=550, env=environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert all(found[part] for part in gpu_check.PARTS)
    assert found["tests"]["ok"] and found["certificate"]["ok"]
    assert all(r["seconds"] for r in found["forwards"])
    assert [r["mode"] for r in found["forwards"]].count("eager") == 2 * 2 * 2
    assert [r["rate"] for r in found["synthetic"]] == [0.6, 0.9]
    assert np.isfinite([r["predicted"] for r in found["synthetic"]]).all()
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names >= {"gpu_check.md", "summary.json", "meta.json"} and gpu_check.PARTIAL not in names
    assert (tmp_path / "run" / "gpu_check.md").read_text() in ended.stdout
