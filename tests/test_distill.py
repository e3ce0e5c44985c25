"""Self-distillation data: templates, overlap with the evaluation, shards, resuming, a user's own sources."""

import json
import random
import string

import jinja2
import pytest
import torch
from rich.console import Console

from drafters.training.shards import Answer, ShardFolder
from experiments import distill, prompts, sources
from experiments.instructions import Grammar, Overlap, instructions
from experiments.prompts import DOMAINS
from specdec import verify
from specdec.config import EngineConfig, PromptsConfig, TargetConfig
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.model import Model
from specdec.sampling import Sampling

QUIET = Console(quiet=True)
VALIDATION = prompts.BUILTIN.with_name("validation.jsonl")


@pytest.fixture(scope="module")
def target():
    return Model.load(TargetConfig(name="tiny", source="tiny"))


@pytest.fixture(scope="module")
def evaluation():
    return [prompt.text for prompt in prompts.load(PromptsConfig())]


def options(**changes):
    small = {"tokens": 500, "max_new_tokens": 8, "batch_size": 6, "round": 2, "longest_prompt": 1000}
    return distill.Options(**small | changes)


# ---------------------------------------------------------------- templates


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_slot_of_every_template_has_a_list(domain):
    grammar = Grammar(domain)
    for name, lines in grammar.lists.items():
        for line in lines:
            for _, slot, spec, _ in string.Formatter().parse(line):
                if slot == "number":
                    low, high = map(int, spec.split("-"))
                    assert low <= high, (name, line)
                elif slot not in (None, "written"):
                    bare = slot.rstrip("0123456789")
                    assert bare in grammar.lists or bare.lower() in grammar.lists, (name, line, slot)


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_template_can_be_filled(domain):
    grammar, rng = Grammar(domain, ["A text {with} braces."]), random.Random(0)
    for line in grammar.lists["prompts"]:
        assert grammar._fill(line, rng, {}).strip()


def test_bound_slots_repeat_and_differ_from_each_other():
    grammar, rng = Grammar("chat"), random.Random(1)
    for _ in range(50):
        a, b, c = grammar._fill("{person1}|{person2}|{person1}", rng, {}).split("|")
        assert a == c != b
    assert grammar._fill("{Animal1} {animal1}", rng, {})[0].isupper()
    assert 3 <= int(grammar._fill("{number:3-5}", rng, {})) <= 5


def test_a_written_text_is_taken_as_it_is():
    text = Grammar("rag", ["code {x} {{y}}"])._fill("Read: {written}", random.Random(0), {})
    assert text == "Read: code {x} {{y}}"


def test_overlap_sees_eight_words_in_a_row_and_no_fewer():
    overlaps = Overlap(["One two, three four five six seven EIGHT nine."])
    assert overlaps("and one two three four five six seven eight")
    assert not overlaps("one two three four five six seven and eight nine")


def test_twenty_thousand_prompts_are_diverse_and_never_overlap_with_the_evaluation(evaluation):
    stream = instructions(random.Random(2), Overlap(evaluation))
    asked = [next(stream) for _ in range(20_000)]
    assert len({prompt.text for prompt in asked}) > 17_000
    for domain in DOMAINS:
        texts = {prompt.text for prompt in asked if prompt.domain == domain}
        assert len(texts) > 1500, domain
    grams = {tuple(gram) for text in evaluation for gram in eights(text)}
    assert not any(tuple(gram) in grams for prompt in asked for gram in eights(prompt.text))


def eights(text):
    """All runs of eight words, found another way than `Overlap` does."""
    words = "".join(c.lower() if c.isalnum() or c == "_" else " " for c in text).split()
    return zip(*(words[i:] for i in range(8)), strict=False)


def test_the_held_out_prompts_are_none_of_the_evaluations(evaluation):
    held_out = prompts.load(PromptsConfig(name="file", path=str(VALIDATION)))
    assert {p.domain for p in held_out} == set(DOMAINS) and len(held_out) == 45
    assert not any(Overlap(evaluation)(p.text) for p in held_out)


# ---------------------------------------------------------------- shards


def test_shards_come_back_as_they_were_written(tmp_path):
    folder = ShardFolder(tmp_path)
    answers = [Answer([1, 2, 3, 4], 2, 0.7, "qa"), Answer([5, 6, 7], 1, 0.0, "chat")]
    folder.write(3, answers)
    folder.write(0, answers[:1])
    assert folder.numbers == [0, 3] and folder.read(3) == answers
    assert list(folder.answers()) == [answers[0], *answers]
    assert answers[0].answer == [3, 4]


def test_a_damaged_shard_is_named(tmp_path):
    folder = ShardFolder(tmp_path)
    folder.write(0, [Answer([1, 2], 1, 0.0, "qa")])
    folder.file(0).write_bytes(folder.file(0).read_bytes()[:40])
    with pytest.raises(OptionError, match=r"shard-00000.safetensors cannot be read .*delete it"):
        folder.read(0)


def test_other_provenance_is_refused(tmp_path):
    folder = ShardFolder(tmp_path)
    folder.begin({"seed": 1, "round": 2})
    folder.begin({"seed": 1, "round": 2})
    with pytest.raises(OptionError, match=r"^task.seed=2: .*holds answers with seed=1"):
        folder.begin({"seed": 2, "round": 2})


# ---------------------------------------------------------------- distilling


def test_answers_are_the_targets_own_at_their_temperature(target, tmp_path):
    folder = ShardFolder(tmp_path)
    distill.distil(options(), target, folder, seed=5, console=QUIET)
    greedy = [a for a in folder.answers() if a.temperature == 0]
    config = EngineConfig(max_new_tokens=8)
    engine = Engine(target, None, verify.build({"name": "token"}), Sampling(), config)
    for answer in greedy[:8]:
        assert engine.generate([answer.tokens[: answer.prompt_length]])[0].tokens == answer.answer
    assert {a.temperature for a in folder.answers()} == {0.0, 0.7, 1.0}


def test_an_interrupted_run_ends_with_the_same_answers(target, tmp_path):
    whole, cut = ShardFolder(tmp_path / "whole"), ShardFolder(tmp_path / "cut")
    counts = distill.distil(options(), target, whole, seed=5, console=QUIET)
    distill.distil(options(tokens=150), target, cut, seed=5, console=QUIET)
    assert len(cut.numbers) < len(whole.numbers)
    cut.file(1).unlink()  # and a shard was lost
    assert distill.distil(options(), target, cut, seed=5, console=QUIET)["answers"] == counts["answers"]
    assert list(cut.answers()) == list(whole.answers())


def test_no_prompt_is_asked_twice(target, tmp_path):
    folder = ShardFolder(tmp_path)
    distill.distil(options(tokens=2000), target, folder, seed=0, console=QUIET)
    asked = [tuple(a.tokens[: a.prompt_length]) for a in folder.answers()]
    assert len(set(asked)) == len(asked) and len(asked) > 150


def test_temperatures_meet_prompts_of_every_length(target, tmp_path):
    """A round is sorted by length, so a fixed temperature per place in the round would confound the two."""
    folder = ShardFolder(tmp_path)
    distill.distil(
        options(tokens=10**9, source="text", path=str(long_text(tmp_path)), prompt_tokens=5, round=3),
        target,
        folder,
        0,
        QUIET,
    )
    places = {}
    for number in folder.numbers:
        places.setdefault(number % 3, set()).add(folder.read(number)[0].temperature)
    assert all(len(seen) == 3 for seen in places.values())


def long_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(str(i) for i in range(400)), encoding="utf-8")
    return path


def test_plain_text_is_continued(target, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij" * 10, encoding="utf-8")
    asked = sources.text(path, target, 16)
    assert len(asked) == 101 // 16  # 100 bytes and the token that begins a text
    assert [i for _, ids in asked for i in ids] == target.tokenizer("abcdefghij" * 10)["input_ids"][:96]
    with pytest.raises(OptionError, match="holds fewer than 1000 tokens"):
        sources.text(path, target, 1000)


def test_conversations_and_single_prompts(target, tmp_path):
    path = tmp_path / "chat.jsonl"
    lines = [{"text": "Hello there", "domain": "qa"}, {"turns": ["First", "Second"]}]
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    asked = sources.chat(path, target)
    assert [domain for domain, _ in asked] == ["qa", "chat"]
    assert asked[1][1] == target.encode(["First"])[0]
    for line, message in [
        ("[1]", "line 1: is no JSON object|line 1=.*no JSON object|is no JSON object"),
        ("{", "is no JSON"),
        ('{"x": 1}', "has none of the fields messages, text"),
        ("", r"task\.path=.*chat\.jsonl: holds no message of the role user: it is empty"),
        ('{"text": "cut emoji \\ud83d"}', "half a character"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "no chat template; use task.source=text"),
    ]:
        path.write_text(line, encoding="utf-8")
        with pytest.raises(OptionError, match=message):
            sources.chat(path, target)


def test_every_user_turn_of_a_conversation_is_a_prompt(tmp_path):
    class Template:
        def apply_chat_template(self, messages, add_generation_prompt, return_dict):
            assert add_generation_prompt and return_dict
            return {"input_ids": [len(m["content"]) for m in messages]}

    class Target:
        chat, tokenizer = True, Template()

    path = tmp_path / "chat.jsonl"
    turns = [("system", "a"), ("user", "bb"), ("assistant", "ccc"), ("user", "dddd")]
    path.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}), encoding="utf-8")
    assert sources.chat(path, Target()) == [("chat", [1, 2]), ("chat", [1, 2, 3, 4])]
    turns = [{"role": "user", "content": "a\u2028b"}]  # no end of a line; a byte-order mark is no text
    path.write_text(json.dumps({"messages": turns}, ensure_ascii=False), encoding="utf-8-sig")
    assert sources.chat(path, Target()) == [("chat", [3])]


@pytest.mark.parametrize(
    ("role", "content", "message"),
    [
        ("human", "Hi", "holds no message of the role user: its roles are human; rename them"),
        ("user", "cut emoji \ud83d", "half a character"),
        ("user", "refused", r"line 1: the target's chat template refuses the conversation \(no such role\)"),
    ],
)
def test_conversations_that_cannot_be_used(tmp_path, role, content, message):
    class Template:
        def apply_chat_template(self, messages, add_generation_prompt, return_dict):
            raise jinja2.TemplateError("no such role")

    class Target:
        chat, tokenizer = True, Template()

    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": role, "content": content}]}))
    with pytest.raises(OptionError, match=message):
        sources.chat(path, Target())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "texts"}, "task.source=texts: no such source; did you mean text"),
        ({"source": "text"}, "task.path=null: must name the file"),
        ({"temperatures": []}, "task.temperatures"),
        ({"tokens": 0}, "task.tokens=0: must be ≥ 1"),
    ],
)
def test_impossible_options_are_refused(changes, message):
    with pytest.raises(OptionError, match=message):
        options(**changes)


def test_the_tally_counts_and_estimates(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(distill.time, "perf_counter", lambda: now[0])
    tally = distill.Tally(1000)
    tally.add([Answer([1] * 110, 10, 0.0, "qa")])  # there already
    tally.start()
    now[0] = 10.0
    tally.add([Answer([1] * 210, 10, 1.0, "qa")])
    assert tally.tokens == 300 and tally.tokens_per_second == 20
    assert tally.line(4) == "shard 4: 300 of 1,000 answer tokens, 20 tok/s, about 1 min left"
    assert tally.summary()["domains"]["qa"] == {"answers": 2, "answer_tokens": 300}


def test_torch_is_not_seeded_by_it(target, tmp_path):
    before = torch.random.get_rng_state()
    distill.distil(options(tokens=20), target, ShardFolder(tmp_path), seed=0, console=QUIET)
    assert torch.equal(before, torch.random.get_rng_state())
