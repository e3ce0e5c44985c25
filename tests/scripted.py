"""A drafter that proposes what a test wrote down, so that every acceptance pattern can be brought about."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.drafter import Drafter, Draw
from specdec.model import Output
from specdec.proposal import Kind, Proposal
from specdec.sampling import Sampling
from specdec.sequences import Sequences

Script = Callable[[int, list[int]], Sequence[int]]


class Scripted(Drafter):
    """Proposes the chain `script(sequence, tokens so far)`, at most γ long and no longer than there is room.

    Attributes:
        offered: per proposal the depths and room asked for, for tests to look at.
    """

    name = "scripted"
    kind = Kind.DETERMINISTIC

    def __init__(self, script: Script, gamma: int = 4):
        self.script, self.gamma = script, gamma
        self.max_nodes = gamma

    def begin(self, sequences: Sequences, output: Output, sampling: Sampling, capacity: int) -> None:
        pass

    def propose(self, sequences: Sequences, draw: Draw, depth: int) -> Proposal:
        drafts = []
        for row, length in enumerate(sequences.lengths.tolist()):
            text = sequences.tokens[row, :length].tolist()
            drafts.append(list(self.script(int(sequences.ids[row]), text))[: min(self.gamma, depth)])
        width = max(map(len, drafts))
        tokens = torch.tensor([d + [0] * (width - len(d)) for d in drafts], dtype=torch.int64)
        return Proposal.chain(tokens, lengths=torch.tensor([len(d) for d in drafts]))

    def commit(self, sequences: Sequences, path: Tensor, accepted: Tensor, output: Output) -> None:
        pass

    def select(self, rows: Tensor) -> None:
        pass


def oracle(
    outputs: dict[int, list[int]], prompts: dict[int, list[int]], wrong_at: int | None = None
) -> Script:
    """Knows what the target will say; if `wrong_at` is given, that drafted position (0-based) is wrong."""

    def script(sequence: int, text: list[int]) -> list[int]:
        draft = outputs[sequence][len(text) - len(prompts[sequence]) :]
        if wrong_at is not None and wrong_at < len(draft):
            draft = [*draft[:wrong_at], (draft[wrong_at] + 1) % 256, *draft[wrong_at + 1 :]]
        return draft

    return script
