"""Prompts to ids, the byte tokenizer, and drafters whose vocabulary is the target's or not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.checkpoints import context_length, eos_token_ids, load
from specdec.config import TargetConfig
from specdec.errors import OptionError
from specdec.progress import silent
from specdec.tokenization import (
    PaddedVocabulary,
    byte_tokenizer,
    encode_prompts,
    require_same_tokenizer,
    tokenizer_differences,
)

BOS = 256
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1).filter(str.strip))
def test_bytes_are_their_own_ids(text):
    tokenizer = byte_tokenizer()
    [ids] = encode_prompts(tokenizer, [text])
    if not any(special in text for special in tokenizer.all_special_tokens):
        assert ids == [BOS, *text.encode()]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_bos_stands_once(tokenizer):
    assert encode_prompts(tokenizer, ["<bos>hi"]) == [[BOS, *b"hi"]]


def test_chat_template_wraps_the_prompt(tokenizer):
    tokenizer.chat_template = TEMPLATE
    assert encode_prompts(tokenizer, ["hi"], chat=True) == [[*b"[user]hi>"]]
    assert encode_prompts(tokenizer, ["hi"], chat=False) == [[BOS, *b"hi"]]


def test_chat_template_that_writes_bos_itself(tokenizer):
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
    assert encode_prompts(tokenizer, ["hi"], chat=True) == [[BOS, *b"[user]hi>"]]


def test_chat_without_template_is_plain(tokenizer):
    assert encode_prompts(tokenizer, ["hi"], chat=True) == [[BOS, *b"hi"]]


@pytest.mark.parametrize("blank", ["", "  \n"])
def test_an_empty_prompt_is_named(tokenizer, blank):
    with pytest.raises(OptionError, match="prompt 2 of 3 is empty"):
        encode_prompts(tokenizer, ["a", blank, "b"])


def test_text_without_tokenizer():
    with pytest.raises(OptionError, match="token ids"):
        encode_prompts(None, ["a"])


def test_tokenizers_that_do_not_differ(tokenizer):
    assert tokenizer_differences(tokenizer, byte_tokenizer()) == tokenizer_differences(None, None) == []
    assert tokenizer_differences(tokenizer, None) == ["only one of the two has a tokenizer"]


def test_a_drafter_with_another_tokenizer_is_refused_with_the_first_difference(tokenizer):
    other = byte_tokenizer()
    other.add_tokens(["<think>"])
    with pytest.raises(OptionError, match="id 260 is None and '<think>'") as caught:
        require_same_tokenizer(tokenizer, other, "drafter.path", "other/model")
    assert (caught.value.option, caught.value.value) == ("drafter.path", "other/model")
    require_same_tokenizer(tokenizer, byte_tokenizer(), "drafter.path", "same/model")


def test_a_larger_drafter_vocabulary_is_cut():
    """Qwen2.5: the drafter of 152064 ids, here 7, the target of 151936, here 5."""
    vocabulary = PaddedVocabulary(target_size=5, drafter_size=7)
    logits = torch.arange(7.0)[None]
    assert vocabulary.to_target(logits).tolist() == [[0, 1, 2, 3, 4]]
    assert vocabulary.to_drafter(torch.tensor([0, 4])).tolist() == [0, 4]
    assert vocabulary.shared == 5 and not vocabulary.identical


def test_a_smaller_drafter_vocabulary_never_proposes_what_it_lacks():
    vocabulary = PaddedVocabulary(target_size=7, drafter_size=5)
    law = vocabulary.to_target(torch.zeros(2, 5)).softmax(-1)
    assert torch.equal(law, torch.tensor([[0.2] * 5 + [0.0] * 2] * 2))
    assert vocabulary.to_drafter(torch.tensor([[4, 5, 6]])).tolist() == [[4, 0, 0]]


def test_equal_vocabularies_are_left_alone():
    vocabulary = PaddedVocabulary(5, 5)
    logits = torch.randn(3, 5)
    assert vocabulary.to_target(logits) is logits


def tiny(**fields):
    return load(TargetConfig(name="tiny", source="tiny", device="cpu", **fields), silent).model


def test_eos_is_what_generate_uses(tokenizer):
    model = tiny()
    model.generation_config.eos_token_id = [7, 9]
    assert eos_token_ids(model, tokenizer) == {7, 9}
    model.generation_config.eos_token_id = None
    assert eos_token_ids(model, tokenizer) == {257}
    model.config.eos_token_id = None
    assert eos_token_ids(model, tokenizer) == {257}
    assert eos_token_ids(model) == frozenset()


def test_context_length():
    assert context_length(tiny()) == 2048
