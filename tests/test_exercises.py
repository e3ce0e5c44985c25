"""The lecture's exercises as tasks: roofline of a target, the accept/reject step, the mini-benchmark;
speed model.
"""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import drafters
import experiments
from experiments import accept_reject, mini_benchmark, perplexity, questions, roofline
from experiments.questions import Question
from specdec import verify
from specdec.config import Config, EngineConfig, TargetConfig
from specdec.errors import CheckFailed, OptionError
from specdec.sampling import Sampling
from specdec.verify import Rule, Verdict


def config(task, target="tiny", **options) -> Config:
    shipped = target if target != "tiny" else None
    return Config(
        task={"name": task, **options},
        target=TargetConfig(
            name=target, source="hf" if shipped else "tiny", architecture=shipped, chat=False
        ),
        drafter={"name": "none"},
        verify={"name": "token"},
        sampling=Sampling(temperature=0.0, processors=[]),
        engine=EngineConfig(max_new_tokens=8, batch_size=25),
    )


# ---------------------------------------------------------------- roofline


def test_exercise_1_in_one_command(tmp_path, capsys):
    """KV size and theoretical speed of Qwen2.5-7B; the numbers are worked out in test_roofline.py."""
    experiments.run(config("roofline", "qwen2.5-7b", machine=False, bandwidth=716.8e9), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["kv_bytes_per_sequence"] == 234_881_024 and summary["num_params"] == 7_615_283_200
    own = [s for s in summary["decode_steps"] if s["accelerator"] == "716.8 GB/s"]
    assert [(s["batch"], round(s["throughput"], 1)) for s in own] == [(1, 46.3), (32, 1008.4)]
    assert summary["timed"] == []  # its weights are not here
    assert {"roofline.png", "roofline.svg"} <= {p.name for p in tmp_path.iterdir()}
    said = capsys.readouterr().out
    assert "235 MB" in said and "46.3" in said and "1,008" in said


def test_a_small_target_is_timed(tmp_path):
    experiments.run(config("roofline", context=64, machine=False, seconds=0.01), tmp_path)
    timed = json.loads((tmp_path / "summary.json").read_text())["timed"]
    assert [(t["phase"], t["tokens"], t["context"]) for t in timed] == [
        ("prefill", 59, 59), ("decode", 1, 60), ("verify", 5, 64),
    ]  # fmt: skip
    assert all(t["seconds"] > 0 and t["flops_per_second"] * t["seconds"] > 0 for t in timed)


def test_a_model_that_does_not_fit_is_marked(tmp_path):
    experiments.run(config("roofline", "llama3-8b", machine=False, batches=[1, 256]), tmp_path)
    steps = json.loads((tmp_path / "summary.json").read_text())["decode_steps"]
    fits = {(s["accelerator"], s["batch"]): s["fits"] for s in steps}
    assert fits["RTX 3090", 1] and not fits["RTX 3090", 256] and fits["H200 SXM", 1]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("context", 0),
        ("batches", []),
        ("batches", [0]),
        ("weights", "int3"),
        ("bandwidth", 0.0),
        ("accelerators", ["x"]),
    ],
)
def test_roofline_refuses(option, value):
    with pytest.raises(OptionError, match=rf"task\.{option}"):
        roofline.Options(**{option: value})


# ---------------------------------------------------------------- accept/reject


def test_exercise_2(tmp_path, capsys):
    """100,000 samples of five tokens: a right rule fails with probability 1e-6; the acceptance is Σ
    min(p, q) = 0.6.
    """
    experiments.run(config("accept_reject"), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["samples"] == 100_000 == sum(summary["emitted"]) and summary["df"] == 4
    assert summary["acceptance_rate"] == pytest.approx(0.6, abs=0.008)  # five standard errors
    assert summary["p_value"] > 1e-6
    assert "χ²" in capsys.readouterr().out


def test_the_lectures_two_tokens():
    """Target [.6, .4], draft [.9, .1]: A accepted with 2/3 (share .6), B always (.1), A rejected → B (.3)."""
    drafted, emitted, accepted = accept_reject.sample(
        verify.build({"name": "token"}), [0.6, 0.4], [0.9, 0.1], 100_000, seed=0
    )
    five = 5 * 0.5 / 100_000**0.5  # standard errors of a share, at most
    assert float(((drafted == 0) & accepted).double().mean()) == pytest.approx(0.6, abs=five)
    assert float(((drafted == 1) & accepted).double().mean()) == pytest.approx(0.1, abs=five)
    assert float(((drafted == 0) & ~accepted).double().mean()) == pytest.approx(0.3, abs=five)
    assert bool((emitted[(drafted == 0) & ~accepted] == 1).all())
    assert float((emitted == 0).double().mean()) == pytest.approx(0.6, abs=five)


@pytest.mark.parametrize("name", [n for n in verify.names() if n not in ("synthetic", "typical")])
def test_every_exact_rule_passes(name):
    task = accept_reject.Options(samples=20_000)
    result = accept_reject.judge(
        task, *accept_reject.sample(verify.build({"name": name}), task.target, task.draft, 20_000, 1)
    )
    assert result["p_value"] > 1e-6 and result["impossible"] == 0


class ResamplesFromTarget(Rule):
    """The mutant: after a rejection it draws from p, not from the residual."""

    name, paper, exact, trees = "mutant", "", True, False
    kinds = verify.rule_class("token").kinds

    def __call__(self, proposal, p, draws):
        right = verify.rule_class("token")()(proposal, p, draws)
        wrong = draws.categorical(p[:, 0], 2)
        token = torch.where(right.accepted == 0, wrong, right.token)
        return Verdict(right.path, right.accepted, token)


def test_a_wrong_rule_is_caught(tmp_path, monkeypatch):
    """Its law is off by a total variation far beyond what 100,000 samples detect (0.0125 with power 0.99)."""
    monkeypatch.setattr(verify, "build", lambda _: ResamplesFromTarget())
    with pytest.raises(CheckFailed, match="calls itself exact"):
        experiments.run(config("accept_reject"), tmp_path)


def test_accept_reject_refuses():
    for options in ({"target": [0.5, 0.6]}, {"draft": [1.0, 0.0]}, {"samples": 0}, {"significance": 0.0}):
        with pytest.raises(OptionError, match="task"):
            accept_reject.Options(**options)


# ---------------------------------------------------------------- mini-benchmark


def test_the_fifty_questions_are_sound():
    asked = questions.load()
    assert len(asked) == 50 == len({q.id for q in asked}) == len({q.question for q in asked})
    assert all(q.sound for q in asked)
    assert Counter(bool(q.choices) for q in asked) == {True: 25, False: 25}
    letters = Counter(q.answer for q in asked if q.choices)
    assert max(letters.values()) <= 8  # no letter is worth guessing


SUM = Question("s", "arithmetic", "What is 1,000 plus 200?", "1200", "1000 + 200")
PICK = Question("c", "geography", "Which river?", "B", "The Danube", ("The Rhine", "The Danube", "The Elbe"))


@pytest.mark.parametrize(
    ("q", "text", "strict", "lenient"),
    [
        (SUM, "1000 + 200 = 1200. Answer: 1,200", "1200", "1200"),
        (SUM, "ANSWER : 1200.0 metres", "1200", "1200"),
        (SUM, "Answer: 7. No, wait. Answer: **1200**", "1200", "1200"),
        (SUM, "The sum is 1200.", None, "1200"),
        (SUM, "Answer: -5", "-5", "-5"),
        (SUM, "I do not know.", None, None),
        (PICK, "Answer: B", "B", "B"),
        (PICK, "answer: (c)", "C", None),
        (PICK, "It is the danube", None, "B"),
        (PICK, "A river flows through it: B. The Danube", None, "B"),
        (PICK, "A long river.", None, None),
        (PICK, "Answer: Bratislava", None, None),
    ],
)
def test_reading_answers(q, text, strict, lenient):
    assert q.strict(text) == strict and q.lenient(text) == lenient


@pytest.mark.parametrize(
    ("q", "text", "reason", "again", "category"),
    [
        (Question("x", "arithmetic", "1 + 1?", "3", "1 + 1"), "Answer: 2", "eos", "Answer: 2", "reference"),
        (SUM, "It is 1200.", "eos", "Answer: 5", "answer parsing"),
        (SUM, "Answer: 5", "eos", "Answer: 1200", "prompt"),
        (SUM, "Well, let us see", "length", "Answer: 5", "prompt"),
        (SUM, "Answer: 5", "length", "Answer: 5", "model"),
        (SUM, "It is 5.", "eos", "It is 6.", "model"),
    ],
)
def test_categories_of_errors(q, text, reason, again, category):
    sample = mini_benchmark.judge(q, text, reason)
    assert not sample["right"]
    assert mini_benchmark.category(q, sample, again) == category


def test_exercise_3_runs_and_resumes(tmp_path, capsys):
    experiments.run(config("mini_benchmark", errors=3), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy"]["all"]["questions"] == 50 and len(summary["errors"]) == 3
    assert len({e["subject"] for e in summary["errors"]}) == 3  # spread over the subjects
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 50 and "errors looked at" in capsys.readouterr().out
    (tmp_path / "summary.json").unlink()
    (tmp_path / "samples.jsonl").write_text("\n".join(lines[:30]) + "\n")
    again = config("mini_benchmark", errors=3)
    again.resume = True
    experiments.run(again, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_questions_of_the_users(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "1", "subject": "s", "question": "2?", "answer": "2", "check": "1 + 1"}\n\n')
    assert [q.answer for q in questions.load(path)] == ["2"]
    known = {"id": "1", "subject": "s", "question": "2?", "answer": "2", "check": "1 + 1"}
    for changes, message in (
        ({"answer": 2}, 'answer must be a text, e.g. "answer": "2"'),
        ({"answer": "two"}, "could not convert"),
        ({"check": "1 +"}, "invalid syntax"),
        ({"check": "1 / 0"}, "by zero"),
        ({"choices": "ABC"}, "its choices are no list of texts"),
    ):
        path.write_text(json.dumps(known | changes))
        with pytest.raises(OptionError, match=f"line 1: is no question .*{re.escape(message)}"):
            questions.load(path)
    for text, message in (
        ('{"id": "1"}\n', "line 1: is no question"),
        ('"text"', "line 1: is no question .no JSON object"),
        (2 * (json.dumps(known) + "\n"), "line 2: the id 1 occurs twice"),
    ):
        path.write_text(text)
        with pytest.raises(OptionError, match=message):
            questions.load(path)
    large = questions.Question("1", "s", "?", answer="1234567", check="1234567")
    assert large.strict("Answer: 1,234,567") == "1234567" and large.right(large.strict("Answer: 1234567"))
    with pytest.raises(OptionError, match="no such file"):
        questions.load(Path("nowhere.jsonl"))
    with pytest.raises(ValueError, match="no calculation"):
        questions.calculate("__import__('os')")


# ---------------------------------------------------------------- speed model over stored runs


def test_a_stored_sweep_is_predicted(tmp_path, capsys):
    """The command on real runs of the tiny target; its arithmetic is tested in test_speed_model.py."""
    for gamma in (1, 2, 4):
        c = config("measure", warmup_tokens=2)
        c.drafter = {"name": "ngram", "gamma": gamma}
        c.prompts.limit, c.engine.batch_size, c.engine.max_new_tokens = 4, 1, 24
        c.drafter = drafters.check(c.drafter)
        experiments.run(c, tmp_path / str(gamma))
    out = tmp_path / "model"
    experiments.run(config("speed_model", runs=[str(tmp_path)], longest=6), out)
    [group] = json.loads((out / "summary.json").read_text())["groups"]
    assert [r["gamma"] for r in group["runs"]] == [1, 2, 4] and all(r["held_out"] for r in group["runs"])
    for r in group["runs"]:
        product = r["textbook"]
        for factor in r["factors"].values():
            product *= factor
        assert product == pytest.approx(r["measured"])
    assert [p["gamma"] for p in group["curve"]] == list(range(7)) and group["median_error"] >= 0
    assert (out / "speed_model.png").exists() and "median error" in capsys.readouterr().out


def test_the_speed_model_needs_runs(tmp_path):
    with pytest.raises(OptionError, match="runs=null: must name finished runs"):
        experiments.run(config("speed_model"), tmp_path)


# ---------------------------------------------------------------- the main job, what it says at its end


def measured(**task) -> Config:
    made = config("measure", warmup_tokens=0, **task)
    made.drafter = drafters.check({"name": "ngram", "gamma": 2})
    made.prompts.limit, made.engine.batch_size = 2, 1
    return made


def test_a_run_interrupted_at_its_last_part_is_not_finished(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    report = perplexity.report
    monkeypatch.setattr(perplexity, "report", interrupted)
    with pytest.raises(KeyboardInterrupt):
        experiments.run(measured(perplexity=True), tmp_path)
    assert "the run is not finished" in capsys.readouterr().out and not (tmp_path / "summary.json").exists()
    monkeypatch.setattr(perplexity, "report", report)
    again = measured(perplexity=True)
    again.resume = True
    experiments.run(again, tmp_path)
    assert "perplexity" in json.loads((tmp_path / "summary.json").read_text())


def test_what_a_lossy_rule_emits_is_not_called_a_bug(tmp_path, capsys):
    made = measured()
    made.verify = {"name": "synthetic", "rates": [0.9]}
    experiments.run(made, tmp_path / "measure")
    summary = json.loads((tmp_path / "measure" / "summary.json").read_text())
    assert summary["overall"]["agreement"] == {} and "bug" not in capsys.readouterr().out
    assert [flag[:5] for flag in summary["flags"]] == ["LOSSY", "rando"]
    made = config("mini_benchmark", errors=0)
    made.verify = {"name": "synthetic", "rates": [0.9]}
    experiments.run(made, tmp_path / "questions")
    assert "! LOSSY: verify=synthetic" in capsys.readouterr().out
