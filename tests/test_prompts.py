"""The built-in prompts are what they claim; files of the user's are read, or refused with the place named."""

import collections
import json

import pytest

from experiments.prompts import DOMAINS, Prompt, load, spread
from specdec.config import PromptsConfig
from specdec.errors import OptionError


def file_config(path, name="file", **more) -> PromptsConfig:
    return PromptsConfig(name=name, path=str(path), **more)


@pytest.fixture
def write(tmp_path):
    def write(name: str, *lines: str | bytes):
        path = tmp_path / name
        content = (line if isinstance(line, bytes) else line.encode() for line in lines)
        path.write_bytes(b"\n".join(content))
        return path

    return write


def test_builtin_prompts_cover_every_domain():
    prompts = load(PromptsConfig())
    count = collections.Counter(p.domain for p in prompts)
    assert len(prompts) >= 54
    assert set(count) == set(DOMAINS) and min(count.values()) >= 6
    assert len({p.id for p in prompts}) == len({p.text for p in prompts}) == len(prompts)
    for prompt in prompts:
        carries_a_passage = prompt.domain in ("extraction", "summarisation", "rag")
        assert len(prompt.text.split()) >= (100 if carries_a_passage else 8)


def test_limit_takes_as_many_of_each_domain():
    prompts = load(PromptsConfig(limit=20))
    assert sorted(collections.Counter(p.domain for p in prompts).values()) == [2] * 7 + [3] * 2
    assert prompts == load(PromptsConfig(limit=20))
    everything = load(PromptsConfig())
    assert prompts == [p for p in everything if p in prompts]  # in the file's order
    assert load(PromptsConfig(limit=1000)) == everything


def test_limit_fills_up_when_a_domain_runs_out():
    prompts = [Prompt(str(i), domain, "x") for i, domain in enumerate("aaaab")]
    assert [p.id for p in spread(prompts, 4)] == ["0", "1", "2", "4"]


def test_domains_restrict_and_unknown_ones_are_refused():
    chosen = load(PromptsConfig(domains=["maths", "qa"]))
    assert {p.domain for p in chosen} == {"maths", "qa"}
    with pytest.raises(OptionError, match=r"prompts\.domains=math: .*did you mean maths\?.*qa, rag"):
        load(PromptsConfig(domains=["math"]))


def test_json_lines(write):
    path = write(
        "a.jsonl",
        '{"text": "One", "id": 7, "domain": "x"}',
        "",
        '{"prompt": "Two", "task_id": "HumanEval/0"}',
        '{"turns": ["Drei", "Vier"], "question_id": 81, "category": "writing"}',
        '{"text": "Line\\u2028separator"}',
    )
    assert load(file_config(path)) == [
        Prompt("7", "x", "One"),
        Prompt("HumanEval/0", "other", "Two"),
        Prompt("81", "writing", "Drei"),
        Prompt("4", "other", "Line\u2028separator"),
    ]
    spec_bench = load(file_config(path, name="spec_bench", domains=["writing"]))
    assert spec_bench == [Prompt("81", "writing", "Drei")]


def test_a_given_id_may_be_a_later_lines_number(write):
    path = write("a.jsonl", '{"text": "a", "id": "2"}', '{"text": "b"}', '{"text": "c"}')
    assert [p.id for p in load(file_config(path))] == ["2", "3", "4"]


def test_parquet_with_missing_cells(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"id": ["x", None, None], "domain": [None, "qa", None], "text": ["A", "B", "C"]})
    frame.to_parquet(tmp_path / "a.parquet")
    found = load(file_config(tmp_path / "a.parquet"))
    assert found == [Prompt("x", "other", "A"), Prompt("2", "qa", "B"), Prompt("3", "other", "C")]


def test_text_file(write):
    assert [p.text for p in load(file_config(write("a.txt", "\ufeffOne", "", "Zwei ü")))] == ["One", "Zwei ü"]


def test_parquet(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"question_id": [1, 2], "category": ["qa", "rag"], "turns": [["A", "B"], ["C"]]})
    frame.to_parquet(tmp_path / "a.parquet")
    assert load(file_config(tmp_path / "a.parquet")) == [Prompt("1", "qa", "A"), Prompt("2", "rag", "C")]


@pytest.mark.parametrize(
    ("lines", "place", "what"),
    [
        (['{"text": "ok"}', '{"text": "cut'], "line 2", "no JSON"),
        (['{"text": "ok"}', "", '["a"]'], "line 3", "no JSON object"),
        (['{"text": "  "}'], "line 1", "empty"),
        (['{"turns": []}'], "line 1", "empty"),
        (['{"body": "x"}'], "line 1", "text, prompt, turns"),
        (['{"text": 5}'], "line 1", "no text but 5"),
        (['{"text": "a", "id": 1}', '{"text": "b", "id": 1}'], "line 2", "the id 1 occurs twice"),
        ([b'{"text": "\xff"}'], "line 1", "UTF-8"),
        (['{"text": "cut emoji \\ud83d"}'], "line 1", "half a character"),
        (['{"text": "a", "domain": "all"}'], "line 1", "rename it"),
    ],
)
def test_broken_lines_are_named(write, lines, place, what):
    path = write("a.jsonl", *lines)
    with pytest.raises(OptionError) as caught:
        load(file_config(path))
    assert str(caught.value).startswith(f"prompts.path={path}, {place}: ")
    assert what in str(caught.value)


def test_unusable_files(tmp_path, write):
    for path, what in [
        (tmp_path / "missing.jsonl", "no such file"),
        (write("empty.jsonl"), "no prompt"),
        (write("a.docx", "x"), r"choices: \.jsonl"),
        (write("a.parquet", json.dumps({"text": "x"})), "not readable as Parquet|needs pandas"),
    ]:
        with pytest.raises(OptionError, match=what) as caught:
            load(file_config(path))
        assert caught.value.option == "prompts.path" and str(path) in str(caught.value)
