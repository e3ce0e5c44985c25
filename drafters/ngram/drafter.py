"""Prompt lookup over prompt and output, with an index that grows with the text: no search through it."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.ngram.config import Config
from specdec.drafter import Drafter, Draw
from specdec.model import Model, Output
from specdec.proposal import Kind, Proposal
from specdec.sampling import Sampling
from specdec.sequences import Sequences


class NgramIndex:
    """The most recent continuation of every n-gram of one growing text.

    Arguments:
        sizes: n-gram lengths, longest first.
    """

    def __init__(self, sizes: range):
        self.sizes = sizes
        self.text: list[int] = []
        self.following: dict[tuple[int, ...], int] = {}  # n-gram → position of what followed it last

    def extend(self, tokens: list[int]) -> None:
        """Append tokens; each n-gram is indexed once it has a continuation."""
        text = self.text
        for token in tokens:
            at = len(text)
            for n in self.sizes:
                if n <= at:
                    self.following[tuple(text[at - n : at])] = at
            text.append(token)

    def lookup(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the most recent occurrence of the longest matching suffix."""
        at, _ = self.match()
        return self.text[at : at + count]

    def match(self, limit: int = 0) -> tuple[int, int]:
        """Where the longest matching suffix of an indexed size was followed last, and how long it is.

        Arguments:
            limit: compare beyond the longest indexed size, up to so many tokens.

        Returns:
            (position, tokens that match); (length of the text, 0) where nothing matches.
        """
        text, end = self.text, len(self.text)
        for n in self.sizes:
            at = self.following.get(tuple(text[end - n :])) if n <= end else None
            if at is not None:
                while n < min(limit, at) and text[at - n - 1] == text[end - n - 1]:
                    n += 1
                return at, n
        return end, 0


class NgramDrafter(Drafter):
    """Proposes what followed the last occurrence of the current suffix; no match means a plain step.

    Arguments:
        config: γ and the match lengths.
    """

    name = "ngram"
    kind = Kind.DETERMINISTIC
    is_chain = True

    def __init__(self, config: Config):
        self.gamma = self.max_nodes = config.gamma
        self.sizes = range(config.max_ngram, config.min_ngram - 1, -1)
        self.indices: list[NgramIndex] = []

    def begin(self, sequences: Sequences, output: Output, sampling: Sampling, capacity: int) -> None:
        self.indices = [NgramIndex(self.sizes) for _ in range(sequences.batch)]
        for index, prompt, block in zip(self.indices, sequences.prompts, sequences.last_block, strict=True):
            index.extend(prompt)
            index.extend(block)

    def propose(self, sequences: Sequences, draw: Draw, depth: int) -> Proposal:
        drafts = [index.lookup(min(self.gamma, depth)) for index in self.indices]
        width = max(map(len, drafts))
        tokens = torch.tensor([d + [0] * (width - len(d)) for d in drafts], dtype=torch.int64)
        lengths = torch.tensor([len(d) for d in drafts])
        device = sequences.ids.device
        return Proposal.chain(tokens.to(device), lengths=lengths.to(device))

    def commit(self, sequences: Sequences, path: Tensor, accepted: Tensor, output: Output) -> None:
        for index, block in zip(self.indices, sequences.last_block, strict=True):
            index.extend(block)

    def select(self, rows: Tensor) -> None:
        self.indices = [self.indices[i] for i in rows.tolist()]


def build(config: Config, target: Model) -> NgramDrafter:
    return NgramDrafter(config)
