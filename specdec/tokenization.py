"""Texts to token ids and back: prompts, the byte tokenizer, and two models that share a vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdec.errors import OptionError

BYTE_SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>", "<unk>")
BYTE_VOCABULARY = 256 + len(BYTE_SPECIAL_TOKENS)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (its value is the id), then <bos>, <eos>, <pad>, <unk>; puts <bos> in front."""
    bos = BYTE_SPECIAL_TOKENS[0]
    vocabulary = {token: value for value, token in enumerate(_byte_symbols() + list(BYTE_SPECIAL_TOKENS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def _byte_symbols() -> list[str]:
    """The character by which the ByteLevel pre-tokenizer writes each byte, in byte order (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(value if value in printable else next(substitutes)) for value in range(256)]


def has_chat_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase | None, texts: Sequence[str], chat: bool = False
) -> list[list[int]]:
    """Token ids of each prompt.

    Arguments:
        tokenizer: the target's.
        texts: prompts; none may be blank.
        chat: wrap each as a user's message in the tokenizer's chat template, where it has one.

    The beginning-of-text token is the template's business, or else the tokenizer's; it never stands twice.
    """
    if tokenizer is None:
        raise OptionError("prompts", "text", "this target has no tokenizer; give token ids instead of text.")
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise OptionError(
                "prompts", repr(text), f"prompt {number} of {len(texts)} is empty; fill or remove it."
            )
    wrap = chat and has_chat_template(tokenizer)
    encoded = [_chat_ids(tokenizer, text) if wrap else tokenizer(text)["input_ids"] for text in texts]
    return [_single_bos(ids, tokenizer.bos_token_id) for ids in encoded]


def _chat_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    encoding: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return encoding["input_ids"]


def _single_bos(ids: list[int], bos: int | None) -> list[int]:
    doubled = bos is not None and ids[:2] == [bos, bos]
    return list(ids[1:] if doubled else ids)


def tokenizer_differences(
    a: PreTrainedTokenizerBase | None, b: PreTrainedTokenizerBase | None, limit: int = 3
) -> list[str]:
    """The first ids (lowest first) at which the two vocabularies hold different tokens, in words."""
    if a is None or b is None:
        return [] if a is b else ["only one of the two has a tokenizer"]
    if (vocabulary_a := a.get_vocab()) == (vocabulary_b := b.get_vocab()):
        return []
    token_a = {index: token for token, index in vocabulary_a.items()}
    token_b = {index: token for token, index in vocabulary_b.items()}
    differing = (i for i in sorted(token_a.keys() | token_b.keys()) if token_a.get(i) != token_b.get(i))
    return [
        f"id {i} is {token_a.get(i)!r} and {token_b.get(i)!r}" for i in itertools.islice(differing, limit)
    ]


def require_same_tokenizer(
    target: PreTrainedTokenizerBase | None,
    drafter: PreTrainedTokenizerBase | None,
    option: str,
    value: object,
) -> None:
    """OptionError on `option` unless the drafter's tokenizer equals the target's."""
    if differences := tokenizer_differences(target, drafter):
        remedy = (
            f"its tokenizer is not the target's (target's and drafter's {'; '.join(differences)}); "
            f"choose a drafter of the target's own family."
        )
        raise OptionError(option, value, remedy)


@dataclass(frozen=True)
class PaddedVocabulary:
    """Two models of one tokenizer, padded to different vocabulary sizes (Qwen2.5: 151936 and 152064)."""

    target_size: int
    drafter_size: int

    @property
    def identical(self) -> bool:
        return self.target_size == self.drafter_size

    @property
    def shared(self) -> int:
        """Ids below this exist in both models."""
        return min(self.target_size, self.drafter_size)

    def to_target(self, drafter_logits: torch.Tensor) -> torch.Tensor:
        """Logits `[..., drafter_size]` → `[..., target_size]`: what it lacks is cut, the rest −inf."""
        if self.identical:
            return drafter_logits
        missing = self.target_size - self.shared
        return torch.nn.functional.pad(drafter_logits[..., : self.shared], (0, missing), value=float("-inf"))

    def to_drafter(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids for the drafter's embedding; one that it lacks (padding, never text) becomes 0."""
        return ids if self.target_size <= self.drafter_size else ids.where(ids < self.drafter_size, 0)
