"""When sequences end: EOS inside blocks, room, stop strings across token borders, the context's end."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import greedy, plain, tiny
from scripted import Scripted, oracle

from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.model import Model
from specdec.sampling import Sampling
from specdec.stopping import StopStrings, keep
from specdec.tokenization import byte_tokenizer
from specdec.verify.token import TokenRule

PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 5]]
LONG = 40


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=4, max_size=4), st.integers(1, 4), st.integers(1, 6)),
        min_size=1,
        max_size=5,
    ),
    st.sets(st.integers(0, 4), max_size=2),
)
@settings(max_examples=150, deadline=None)
def test_keep_against_a_loop(rows, eos):
    block, count, room = (torch.tensor(x) for x in zip(*rows, strict=True))
    kept, finished, by_eos = keep(block, count, room, tuple(eos))
    for b, (tokens, n, left) in enumerate(rows):
        out, ended = [], False
        for token in tokens[:n]:
            if len(out) == left or ended:
                break
            out.append(token)
            ended = token in eos
        assert int(kept[b]) == len(out) and bool(by_eos[b]) == ended
        assert bool(finished[b]) == (ended or len(out) == left)


# ---------------------------------------------------------------- through the engine


@pytest.fixture(scope="module")
def hf() -> torch.nn.Module:
    return plain({"dtype": "float64"})


@pytest.fixture(scope="module")
def outputs(hf) -> dict[int, list[int]]:
    """What the target says without any stop."""
    return {i: greedy(hf, p, LONG) for i, p in enumerate(PROMPTS)}


def target(eos: tuple[int, ...] = (), context: int | None = None) -> Model:
    base = tiny("float64")
    return Model(base.hf, base.tokenizer, "tiny", eos, context)


def run(model: Model, script=None, gamma=4, sampling=None, **options) -> Engine:
    config = EngineConfig(**{"max_new_tokens": LONG, "batch_size": 3, **options})
    drafter = Scripted(script, gamma) if script else None
    engine = Engine(model, drafter, TokenRule(), sampling, config)
    engine.results = engine.generate(PROMPTS)
    return engine


@pytest.mark.parametrize("gamma", [1, 4, 7])
@pytest.mark.parametrize("at", range(1, 9))
def test_eos_anywhere_in_a_block(outputs, gamma, at):
    """An oracle's draft runs past the EOS; decoding stops there and counts nothing behind it."""
    eos = outputs[0][at]
    engine = run(target((eos,)), oracle(outputs, dict(enumerate(PROMPTS))), gamma)
    for i, result in enumerate(engine.results):
        ends = eos in outputs[i]
        expected = outputs[i][: outputs[i].index(eos) + 1] if ends else outputs[i]
        assert result.tokens == expected
        assert result.finish_reason == ("eos" if ends else "length")
        rows = engine.ledger.of(i)
        assert sum(r.emitted for r in rows) == len(expected)
        assert all(r.accepted <= r.emitted <= r.accepted + 1 and r.accepted <= r.depth for r in rows)
        # the draft is always right, so that every position that was tried was accepted
        assert sum(r.accepted for r in rows) == sum(r.emitted for r in rows) - sum(r.bonus for r in rows)
        if (
            ends and not rows[-1].bonus
        ):  # cut inside the draft: what lies behind was neither tried nor emitted
            assert rows[-1].depth == rows[-1].accepted == rows[-1].emitted
    _, tried, accepted = engine.ledger.position_counts()
    assert tried.tolist() == accepted.tolist()


def test_several_eos_ids(outputs, hf):
    eos = (outputs[0][7], outputs[1][5], outputs[2][3])
    for script in (
        None,
        oracle(outputs, dict(enumerate(PROMPTS))),
        oracle(outputs, dict(enumerate(PROMPTS)), 2),
    ):
        results = run(target(eos), script).results
        assert [r.tokens for r in results] == [greedy(hf, p, LONG, eos) for p in PROMPTS]
        assert {r.finish_reason for r in results} == {"eos"}


def test_ignored_eos(outputs):
    results = run(target((outputs[0][3],)), ignore_eos=True).results
    assert [r.tokens for r in results] == list(outputs.values())


def test_min_new_tokens_keeps_eos_away(outputs):
    """Also as a draft: an oracle of the unrestrained target proposes EOS, which must not pass early."""
    eos = outputs[0][2]
    model, sampling = target((eos,)), Sampling(min_new_tokens=6)
    baseline = run(model, sampling=sampling).results
    drafted = run(model, oracle(outputs, dict(enumerate(PROMPTS))), sampling=sampling).results
    assert [r.tokens for r in drafted] == [r.tokens for r in baseline]
    for r in baseline:
        assert eos not in r.tokens[:6]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_max_new_tokens(outputs, count):
    engine = run(target(), oracle(outputs, dict(enumerate(PROMPTS))), max_new_tokens=count)
    for i, r in enumerate(engine.results):
        assert (r.tokens, r.finish_reason) == (outputs[i][:count], "length")
    assert all(row.discarded == 0 for row in engine.ledger.rows)


def test_the_context_ends(outputs):
    """Ragged prompts hit a context of 9 tokens at different times; drafts never reach over its end."""
    engine = run(target(context=9), oracle(outputs, dict(enumerate(PROMPTS))), gamma=7)
    for i, r in enumerate(engine.results):
        assert (r.tokens, r.finish_reason) == (outputs[i][: 9 - len(PROMPTS[i])], "context")
    for i in range(3):
        left = 9 - len(PROMPTS[i])
        for row in engine.ledger.of(i):
            assert row.depth <= left - 1 and row.discarded == 0
            left -= row.emitted


def test_a_prompt_that_fills_the_context():
    model = target(context=5)
    engine = Engine(model, None, TokenRule())
    assert engine.room([1, 2, 3, 4]) == 1
    with pytest.raises(OptionError, match="prompts=<5 tokens>: fills the target's context of 5 tokens"):
        engine.generate([[1], [1, 2, 3, 4, 5]])


# ---------------------------------------------------------------- stop strings


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_stop_strings_against_a_search(text, stops):
    tokenizer = byte_tokenizer()
    tokens = list(text.encode())
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    expected = min(ends, default=None)
    for size in (1, 3, 50):  # however the tokens are dealt out
        watch, found, fed = StopStrings(tokenizer, stops), None, 0
        for start in range(0, len(tokens), size):
            hit = watch.feed(tokens[start : start + size])
            if hit is not None:
                found = fed + hit
                break
            fed += len(tokens[start : start + size])
        assert found == expected
    assert (
        StopStrings(tokenizer, stops).cut(text)
        == text[: min([text.find(s) for s in stops if s in text] or [None])]
    )


@pytest.mark.parametrize("text", ["ein Wörtchen — fin", "数え上げ数", "a\n\nb", "🙂🙃🙂"])
def test_stop_strings_of_many_bytes(text):
    """Characters of two, three and four byte tokens; a stop string is complete with its last byte."""
    tokenizer, tokens = byte_tokenizer(), list(text.encode())
    for start in range(len(text)):
        stop = text[start : start + 3]
        watch = StopStrings(tokenizer, [stop])
        end = len(text[: text.find(stop) + len(stop)].encode())
        assert [watch.feed([t]) for t in tokens[:end]] == [None] * (end - 1) + [1]


def test_a_long_stop_string_is_found_in_a_long_text():
    tokenizer = byte_tokenizer()
    stop = "ß" * 30
    tokens = list(("x" * 500 + stop).encode())
    assert StopStrings(tokenizer, [stop]).feed(tokens) == len(tokens)
    assert StopStrings(tokenizer, [stop]).feed(tokens[:-1]) is None


@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_stop_strings_inside_a_block(gamma):
    """The tiny model speaks in bytes: make two bytes of its own output the stop string."""
    prompt = [65, 66]
    model = target()
    said = (
        Engine(model, None, TokenRule(), config=EngineConfig(max_new_tokens=LONG))
        .generate([prompt])[0]
        .tokens
    )
    text = byte_tokenizer().decode(said)
    at = next(i for i in range(4, LONG) if said[i] < 128 and said[i + 1] < 128)
    stop = bytes(said[at : at + 2]).decode()
    end = text.find(stop)
    script = oracle({0: said}, {0: prompt})
    for drafter in (None, Scripted(script, gamma)):
        config = EngineConfig(max_new_tokens=LONG, stop=[stop, "never said"])
        engine = Engine(model, drafter, TokenRule(), config=config)
        result = engine.generate([prompt])[0]
        assert result.finish_reason == "stop"
        assert result.tokens == said[: len(result.tokens)] and byte_tokenizer().decode(
            result.tokens
        ).endswith(stop)
        assert result.text == text[:end]
        assert engine.ledger.emitted == len(result.tokens)


def test_what_comes_first_in_a_block_ends_it():
    """A stop string and an EOS in one accepted block, in both orders."""
    prompt, model = [65, 66], target()
    config = EngineConfig(max_new_tokens=LONG)
    said = Engine(model, None, TokenRule(), config=config).generate([prompt])[0].tokens
    new = [i for i in range(3, LONG) if said[i] not in said[:i]]  # first occurrences
    stop_at = next(i for i in new if said[i] < 128 and i + 1 in new and i - 1 in new)
    for eos_at, reason in ((stop_at + 1, "stop"), (stop_at - 1, "eos")):
        config = EngineConfig(max_new_tokens=LONG, stop=[chr(said[stop_at])])
        drafter = Scripted(oracle({0: said}, {0: prompt}), 30)
        engine = Engine(target((said[eos_at],)), drafter, TokenRule(), config=config)
        result = engine.generate([prompt])[0]
        assert result.tokens == said[: min(stop_at, eos_at) + 1]
        assert result.finish_reason == reason


def test_stop_strings_need_a_tokenizer():
    model = tiny("float64", vocab_size=9)
    with pytest.raises(OptionError, match="engine.stop=.*need a target with a tokenizer"):
        Engine(model, None, TokenRule(), config=EngineConfig(stop=["x"]))
