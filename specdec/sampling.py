"""How logits become a law: temperature, truncation and prefix-dependent penalties (no torch needed)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.errors import OptionError


@dataclass
class Sampling:
    """Sampling parameters, applied to target and drafter alike.

    Order as in Hugging Face `generate`: penalties and bans on the raw logits, then temperature, top-k, top-p,
    min-p.
    """

    temperature: float = 0.0  # 0 = greedy: the one-hot law of the argmax
    top_k: int = 0  # keep the k most probable tokens; 0 = off
    top_p: float = 1.0  # keep the smallest set with at least this mass
    min_p: float = 0.0  # keep tokens with at least this fraction of the largest probability
    repetition_penalty: float = (
        1.0  # Keskar et al. 1909.05858: divide positive, multiply negative logits of seen tokens
    )
    no_repeat_ngram_size: int = 0  # ban tokens that would repeat an n-gram of prompt + output; 0 = off
    min_new_tokens: int = 0  # ban end-of-sequence tokens before this many new tokens
    bad_words: list[list[int]] = field(default_factory=list)  # banned token sequences
    # Python API only: Hugging Face `LogitsProcessor`s, called per tree node with that node's own prefix.
    processors: Any = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            remedy = "must be ≥ 0 and finite; 0 means greedy."
            raise OptionError("sampling.temperature", self.temperature, remedy)
        if not 0 < self.top_p <= 1:
            raise OptionError("sampling.top_p", self.top_p, "must lie in (0, 1]; 1 switches it off.")
        if not 0 <= self.min_p <= 1:
            raise OptionError("sampling.min_p", self.min_p, "must lie in [0, 1]; 0 switches it off.")
        if self.top_k < 0:
            raise OptionError("sampling.top_k", self.top_k, "must be ≥ 0; 0 switches it off.")
        if not 0 < self.repetition_penalty < math.inf:
            raise OptionError(
                "sampling.repetition_penalty", self.repetition_penalty, "must be > 0; 1 switches it off."
            )
        if self.no_repeat_ngram_size < 0:
            raise OptionError(
                "sampling.no_repeat_ngram_size", self.no_repeat_ngram_size, "must be ≥ 0; 0 switches it off."
            )
        if self.min_new_tokens < 0:
            raise OptionError(
                "sampling.min_new_tokens", self.min_new_tokens, "must be ≥ 0; 0 switches it off."
            )
        if any(not words for words in self.bad_words):
            raise OptionError("sampling.bad_words", self.bad_words, "must not hold an empty token sequence.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def ranking(self) -> Sampling:
        """For ranking tokens: truncation does not change ranks, and greedy knows only the first."""
        temperature = 1.0 if self.greedy else self.temperature
        return replace(self, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)

    @property
    def needs_prefix(self) -> bool:
        """Whether the law of a token depends on the tokens before it beyond the logits."""
        return bool(
            self.repetition_penalty != 1
            or self.no_repeat_ngram_size
            or self.min_new_tokens
            or self.bad_words
            or self.processors
        )
