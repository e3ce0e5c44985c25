"""From the logits over the draft vocabulary to laws over the target's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.eagle.growth import Growth
from drafters.eagle.model import EagleModel
from specdec.distribution import distribution
from specdec.drafter import Draw
from specdec.sampling import Sampling

TINY = torch.finfo(torch.float32).tiny


class Laws:
    """What the drafter believes after each node of a level, processed as the target's law is.

    Arguments:
        model: the attached network.
        vocab_size: the target's V.
        sampling: the run's sampling parameters.
        eos_token_ids: the target's, for `sampling.min_new_tokens`.
    """

    def __init__(
        self, model: EagleModel, vocab_size: int, sampling: Sampling, eos_token_ids: tuple[int, ...]
    ):
        self.vocab_size, self.ids, self.eos_token_ids = vocab_size, model.draft_ids, eos_token_ids
        self.sampling = sampling

    def best(self, growth: Growth, count: int) -> tuple[Tensor, Tensor]:
        """The most probable children of each node of the last level.

        Returns:
            tokens `[B, P, k]` int64 and their probabilities `[B, P, k]`, falling; k is `count` at most.
        """
        return _best(*self._law(growth, self.sampling.ranking), count)

    def likely_winners(self, growth: Growth, count: int, draw: Draw) -> tuple[Tensor, Tensor]:
        """The children most likely to be the target's own draw, whose noise is known; returns as `best`.

        The target will emit argmin E/p. With this E, and q as good a guess of p as EAGLE's is, token x wins
        with a chance of about (q_x/E_x) / Σ (q/E): measured, it is well calibrated (LOG.md).
        """
        probs, ids = self._law(growth, self.sampling.ranking)
        if self.sampling.greedy:
            return _best(probs, ids, count)
        noise = draw.noise(self.vocab_size, growth.depth + 1, probs.device)[:, None]
        noise = noise if ids is None else noise[..., ids]
        odds = probs / noise.to(probs.dtype).clamp(min=TINY)
        tokens, best = _best(odds, ids, count)
        return tokens, best / odds.sum(-1, keepdim=True)

    def full(self, growth: Growth) -> Tensor:
        """q `[B, P, V]` after each node of the last level; one-hot where no token is left to draw."""
        probs, ids = self._law(growth, self.sampling)
        if ids is not None:
            probs = probs.new_zeros(*probs.shape[:2], self.vocab_size).index_copy_(2, ids, probs)
        return probs

    def _law(self, growth: Growth, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
        """Probabilities and the ids they belong to (`None`: all tokens in order)."""
        logits = growth.logits
        if not sampling.needs_prefix:  # then the tokens that cannot be drafted need not be there
            return distribution(logits, sampling), self.ids
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.ids is not None:
            everything = logits.new_full((*logits.shape[:2], self.vocab_size), -torch.inf)
            logits = everything.index_copy_(2, self.ids, logits)
        probs = distribution(logits, sampling, growth.prefix(), self.eos_token_ids)
        certain = torch.zeros_like(probs)
        certain[..., 0] = 1.0
        return torch.where(probs.isnan().any(-1, keepdim=True), certain, probs), None


def _best(weights: Tensor, ids: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    top = weights.topk(min(count, weights.shape[-1]), -1)
    return (top.indices if ids is None else ids[top.indices]), top.values
