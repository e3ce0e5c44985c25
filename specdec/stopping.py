"""When a sequence ends: end-of-sequence tokens inside a block, room, stop strings across token borders."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


def keep(
    block: Tensor, count: Tensor, room: Tensor, eos_token_ids: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """How much of an emitted block stays.

    Arguments:
        block: `[B, D]` emitted tokens, of which row b has `count[b]`.
        room: `[B]` how many more tokens a row may get.
        eos_token_ids: a sequence ends with the first of these, which is kept.

    Returns:
        kept `[B]` int64; finished `[B]` bool; by_eos `[B]` bool.
    """
    count = torch.minimum(count, room)
    by_eos = torch.zeros_like(count, dtype=torch.bool)
    if eos_token_ids:
        steps = torch.arange(block.shape[1], device=block.device)
        ends = torch.tensor(eos_token_ids).to(block.device, non_blocking=True)
        eos = (block[..., None] == ends).any(-1) & (steps < count[:, None])
        by_eos = eos.any(1)
        count = torch.where(by_eos, eos.int().argmax(1) + 1, count)
    return count, by_eos | (count == room), by_eos


class StopStrings:
    """Watches one sequence's text for stop strings, re-decoding only a bounded tail.

    Arguments:
        tokenizer: decodes token ids.
        stops: the strings.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: list[str]):
        self.tokenizer, self.stops = tokenizer, stops
        # A character can take four byte tokens: this many tokens always cover the longest stop string.
        self.window = 4 * max(map(len, stops)) + 4
        self.tail: list[int] = []

    def feed(self, tokens: list[int]) -> int | None:
        """How many of `tokens` are needed to complete a stop string, or `None` if none is completed."""
        for i, token in enumerate(tokens):
            self.tail = [*self.tail[-self.window :], token]
            text = self.tokenizer.decode(self.tail)
            if any(stop in text for stop in self.stops):
                return i + 1
        return None

    def cut(self, text: str) -> str:
        """`text` up to its first stop string."""
        return text[: min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=len(text))]
