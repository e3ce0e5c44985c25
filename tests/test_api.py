"""The Python interface as the README shows it."""

import pytest
from reference import greedy, plain, tiny

import drafters
import specdec
from specdec import Sampling, api
from specdec.checkpoints.tiny import save_tiny
from specdec.config import TargetConfig
from specdec.errors import OptionError


@pytest.fixture(scope="module")
def target():
    return api.load_target(TargetConfig(name="tiny", source="tiny", device="cpu", dtype="float64"))


def test_everything_public_is_there():
    assert {specdec.generate, specdec.load_target, specdec.Result} == {
        api.generate,
        api.load_target,
        api.Result,
    }
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        specdec.nonsense  # noqa: B018


def test_texts_and_token_ids(target):
    """Texts are encoded with the target's tokenizer; a single text is a list of one."""
    hf = plain({"dtype": "float64"})
    prompts = [target.encode([text])[0] for text in ("hello", "grüße 🙂")]
    expected = [greedy(hf, p, 10, target.eos_token_ids) for p in prompts]
    drafter = drafters.build({"name": "ngram"}, target)
    mixed = specdec.generate(target, drafter, ["hello", prompts[1]], max_new_tokens=10, batch_size=2)
    assert mixed.tokens == expected and [s.prompt for s in mixed.sequences] == prompts
    assert mixed.texts == [target.tokenizer.decode(t, skip_special_tokens=True) for t in expected]
    one = specdec.generate(target, None, "hello", max_new_tokens=10)
    assert one.tokens == expected[:1] and one.ledger.emitted == 10


def test_options_reach_the_engine(target):
    said: list[tuple[int, list[int]]] = []
    result = specdec.generate(
        target,
        drafters.build({"name": "small", "layers": 1}, target),
        [[1], [2], [3]],
        sampling=Sampling(temperature=1.0),
        verify="block",
        max_new_tokens=7,
        batch_size=2,
        seed=11,
        on_tokens=lambda sequence, tokens: said.append((sequence, tokens)),
    )
    assert [len(t) for t in result.tokens] == [7] * 3
    for sequence in range(3):
        assert sum((tokens for s, tokens in said if s == sequence), []) == result.tokens[sequence]
    again = specdec.generate(
        target, None, [[1]], sampling=Sampling(temperature=1.0), max_new_tokens=7, seed=12
    )
    assert again.tokens[0] != result.tokens[0]


def test_a_stop_string_is_no_list_of_letters(target):
    whole = specdec.generate(target, None, "ab", max_new_tokens=30, stop="abcdefghijklmnopqrstuvwxyz")
    assert whole.tokens == specdec.generate(target, None, "ab", max_new_tokens=30).tokens
    piece = whole.texts[0][5:7]
    assert (
        specdec.generate(target, None, "ab", max_new_tokens=30, stop=piece).texts[0]
        == (whole.texts[0][: whole.texts[0].index(piece)])
    )


def test_one_prompts_token_ids_are_no_list_of_prompts(target):
    with pytest.raises(OptionError, match=r"is one prompt's token ids; write \[\[…\]\]"):
        specdec.generate(target, None, [1, 2, 3])


def test_stop_strings(target):
    text = specdec.generate(target, None, "ab", max_new_tokens=30).texts[0]
    stop = next(c for c in text[3:] if c.isascii() and c.isprintable())
    result = specdec.generate(target, None, "ab", max_new_tokens=30, stop=[stop])
    assert result.texts[0] == text[: text.index(stop)] and result.sequences[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"verify": "nonsense"}, "verify=nonsense"),
        ({"max_new_tokens": 0}, "engine.max_new_tokens=0"),
        ({"batch_size": 0}, "engine.batch_size=0"),
        ({"stop": [""]}, "engine.stop="),
        ({"seed": -3}, "seed=-3"),
    ],
)
def test_impossible_options(target, options, option):
    with pytest.raises(OptionError, match=option):
        specdec.generate(target, None, "hello", **options)


@pytest.mark.parametrize("prompts", [[""], ["  \n"], [[]]])
def test_empty_prompts(target, prompts):
    with pytest.raises(OptionError, match="prompts=.* empty"):
        specdec.generate(target, None, prompts)


def test_a_checkpoint_folder_as_target(tmp_path):
    folder = save_tiny(TargetConfig(name="tiny", source="tiny"), tmp_path / "model")
    target = specdec.load_target(str(folder), dtype="float32", device="cpu")
    assert specdec.generate(target, None, [[5, 6]], max_new_tokens=5).tokens == [
        greedy(plain({"dtype": "float32"}), [5, 6], 5, target.eos_token_ids)
    ]
    assert tiny("float32").vocab_size == target.vocab_size
