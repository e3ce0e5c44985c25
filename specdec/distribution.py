"""The one function that makes probabilities, for target and drafter alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.sampling import Sampling

BLOCKS = (256, 128, 64)


@dataclass(frozen=True)
class Prefix:
    """What stands before each node: committed tokens and ancestors, itself included.

    Arguments:
        tokens: `[B, T, W]` int64, right-aligned, −1 on the left.
        length: `[B, T]` int64, how many tokens that is.
        prompt_length: `[B]` int64.
    """

    tokens: Tensor
    length: Tensor
    prompt_length: Tensor

    @property
    def generated(self) -> Tensor:
        """`[B, T]`: how many of them are new."""
        return self.length - self.prompt_length[:, None]

    def last(self) -> Prefix:
        """Only the last node's."""
        return Prefix(self.tokens[:, -1:], self.length[:, -1:], self.prompt_length)


def distribution(
    logits: Tensor, sampling: Sampling, prefix: Prefix | None = None, eos_token_ids: tuple[int, ...] = ()
) -> Tensor:
    """The law from which the next token is drawn.

    Arguments:
        logits: `[B, T, V]`.
        sampling: temperature 0 gives the one-hot law of the argmax, so that greedy is no second code path.
        prefix: needed iff `sampling.needs_prefix`.
        eos_token_ids: banned while `min_new_tokens` is not reached.

    Returns:
        `[B, T, V]` probabilities, float32 (float64 if the logits are); NaN where no token is left to draw.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if sampling.needs_prefix:
        assert prefix is not None, "these sampling parameters need the prefix"
        logits = _penalise(logits.to(dtype), sampling, prefix, eos_token_ids)
    if sampling.greedy:
        best, token = _first_best(logits)
        one = torch.ones_like(best, dtype=dtype).masked_fill_(~best.isfinite(), torch.nan)
        return torch.zeros(logits.shape, dtype=dtype, device=logits.device).scatter_(-1, token, one)
    logits = logits.to(dtype)
    if sampling.temperature != 1:
        temperature = max(sampling.temperature, torch.finfo(logits.dtype).tiny)
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # the best at 0: nothing overflows
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probs = logits.softmax(-1)
    if sampling.top_p < 1:
        probs = _nucleus(probs, sampling.top_p)
    if sampling.min_p > 0:
        probs = torch.where(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0.0, probs)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _first_best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of the last dimension (NaN if there is one) and where it stands first, `[..., 1]`.

    On a CPU largest numbers are found many times as fast as their places, and whatever the strides: so first
    those of blocks.
    """
    size = next((n for n in BLOCKS if logits.shape[-1] % n == 0), None)
    if size is None or logits.device.type != "cpu":
        return logits.max(-1, keepdim=True)
    blocks = logits.unflatten(-1, (-1, size))
    block = blocks.amax(-1).argmax(-1, keepdim=True)
    inside = blocks.take_along_dim(block[..., None], -2)[..., 0, :]
    place = inside.argmax(-1, keepdim=True)
    return inside.gather(-1, place), block * size + place


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Holtzman et al. 1904.09751: the smallest set of most probable tokens whose mass reaches `top_p`."""
    vocab = probs.shape[-1]
    count = (
        min(512, vocab) if probs.device.type == "cpu" else vocab
    )  # sorting a whole vocabulary is slow on a CPU
    while True:
        top, index = probs.topk(count, -1)
        before = top.cumsum(-1) - top
        if count == vocab or bool((before[..., -1] >= top_p).all()):
            break
        count = min(count * 8, vocab)
    kept = torch.zeros_like(probs).scatter_(-1, index, torch.where(before >= top_p, 0.0, top))
    return kept / kept.sum(-1, keepdim=True)


def _penalise(logits: Tensor, sampling: Sampling, prefix: Prefix, eos_token_ids: tuple[int, ...]) -> Tensor:
    """Penalties and bans, each node with its own prefix, in the order of Hugging Face `generate`."""
    vocab = logits.shape[-1]
    real = prefix.tokens >= 0
    tokens = prefix.tokens.where(real, vocab)  # one spare column collects what is no token
    if sampling.repetition_penalty != 1:
        seen = torch.zeros(*logits.shape[:-1], vocab + 1, dtype=torch.bool, device=logits.device)
        seen = seen.scatter_(-1, tokens, True)[..., :vocab]
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    n = sampling.no_repeat_ngram_size
    if n and tokens.shape[-1] >= n:
        grams = tokens.unfold(-1, n, 1)  # [B, T, W−n+1, n]
        tail = tokens[..., tokens.shape[-1] - n + 1 :]  # the n−1 tokens before the next one
        repeats = (grams[..., :-1] == tail[..., None, :]).all(-1) & (grams < vocab).all(-1)
        logits = _ban(logits, grams[..., -1].where(repeats, vocab))
    for words in sampling.bad_words:
        *head, last = words
        hit = torch.ones_like(prefix.length, dtype=torch.bool)
        if head:
            wanted = torch.tensor(head, device=tokens.device)
            hit = (tokens[..., -len(head) :] == wanted).all(-1) if tokens.shape[-1] >= len(head) else ~hit
        logits = _ban(logits, torch.where(hit, last, vocab)[..., None])
    if sampling.min_new_tokens and eos_token_ids:
        early = prefix.generated < sampling.min_new_tokens
        eos = torch.tensor(eos_token_ids, device=logits.device)
        logits = _ban(logits, torch.where(early[..., None], eos, vocab))
    if sampling.processors:
        logits = _custom(logits, sampling, prefix)
    return logits


def _ban(logits: Tensor, tokens: Tensor) -> Tensor:
    """Logits with `tokens` `[B, T, K]` (V = none) made impossible."""
    banned = torch.zeros(*logits.shape[:-1], logits.shape[-1] + 1, dtype=torch.bool, device=logits.device)
    return logits.masked_fill(banned.scatter_(-1, tokens, True)[..., :-1], -torch.inf)


def _custom(logits: Tensor, sampling: Sampling, prefix: Prefix) -> Tensor:
    """Hugging Face processors take rows of one length, so nodes are grouped by theirs."""
    flat, ids, length = logits.flatten(0, 1).clone(), prefix.tokens.flatten(0, 1), prefix.length.flatten()
    for count in length.unique().tolist():
        rows = (length == count).nonzero()[:, 0]
        scores = flat[rows]
        for processor in sampling.processors:
            scores = processor(ids[rows, ids.shape[1] - count :], scores)
        flat[rows] = scores
    return flat.view_as(logits)
