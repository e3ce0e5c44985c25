"""A reduced draft vocabulary: the tokens the target says most often, and the exact way back to its ids."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from drafters.training.shards import Answer


def most_frequent(answers: Iterable[Answer], size: int, vocab: int, always: Iterable[int] = ()) -> Tensor:
    """The target's ids of the draft vocabulary.

    Arguments:
        answers: whose tokens are counted (prompts are not).
        size: Vd ≤ V.
        vocab: V.
        always: ids that belong to it however rare, e.g. those that end a sequence.

    Returns:
        `[Vd]` int64, rising. Of equally frequent tokens the smaller ids are taken.
    """
    counts = token_counts(answers, vocab)
    counts[list(always)] = counts.sum() + 1
    order = counts.argsort(descending=True, stable=True)
    return order[: min(size, vocab)].sort().values


def token_counts(answers: Iterable[Answer], vocab: int) -> Tensor:
    """`[V]` int64: how often the target said each token."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for answer in answers:
        counts += torch.bincount(torch.tensor(answer.answer, dtype=torch.int64), minlength=vocab)
    return counts


def coverage(answers: Iterable[Answer], token_map: Tensor | None, vocab: int) -> float:
    """The share of the answers' tokens that the draft vocabulary holds."""
    if token_map is None:
        return 1.0
    counts = token_counts(answers, vocab)
    return float(counts[token_map.cpu()].sum() / counts.sum().clamp(min=1))
