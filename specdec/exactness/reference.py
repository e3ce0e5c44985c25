"""The target's law once more, by another way: what the certificate compares the engine's output with.

A plain Hugging Face forward over every context (no cache, no tree, its own attention), then temperature,
truncation and penalties in numpy, token by token, written from the papers, not from `specdec.distribution`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np
import torch

from specdec.compat import no_init_weights, quiet_transformers
from specdec.model import Model
from specdec.sampling import Sampling

Outcome = tuple[int, ...]


class Reference:
    """Exact laws of a model whose vocabulary is small enough to write every outcome down.

    Arguments:
        target: the model; its weights are copied into a fresh instance in float64, on the CPU.
            (Not with eager attention, whose softmax is float32 even there.)
    """

    def __init__(self, target: Model):
        state = {name: value.detach().cpu().double() for name, value in target.hf.state_dict().items()}
        with quiet_transformers(), no_init_weights():
            config = copy.deepcopy(target.hf.config)
            self.hf = type(target.hf)._from_config(config, attn_implementation="sdpa", dtype=torch.float64)
        self.hf.load_state_dict(state)
        self.hf.eval()
        self.eos_token_ids = target.eos_token_ids
        self._logits: dict[Outcome, np.ndarray] = {}

    def next(self, prompt: Sequence[int], contexts: Sequence[Outcome], sampling: Sampling) -> np.ndarray:
        """`[C, V]`: the law of the next token after `prompt` and each of `contexts`, all of one length."""
        texts = [(*prompt, *context) for context in contexts]
        missing = [text for text in texts if text not in self._logits]
        if missing:
            with torch.inference_mode():
                logits = self.hf(input_ids=torch.tensor(missing), use_cache=False).logits[:, -1]
            self._logits |= dict(zip(missing, logits.numpy(), strict=True))
        return np.stack(
            [
                processed(self._logits[text], sampling, text, len(context), self.eos_token_ids)
                for text, context in zip(texts, contexts, strict=True)
            ]
        )

    def joint(self, prompt: Sequence[int], sampling: Sampling, length: int) -> dict[Outcome, float]:
        """The law of the first `length` new tokens; an end-of-sequence token makes an outcome shorter."""
        ended: dict[Outcome, float] = {}
        growing: dict[Outcome, float] = {(): 1.0}
        for _ in range(length):
            longer: dict[Outcome, float] = {}
            laws = self.next(prompt, list(growing), sampling) if growing else ()
            for (context, weight), law in zip(growing.items(), laws, strict=True):
                for token in np.flatnonzero(law):
                    outcome = (*context, int(token))
                    place = ended if token in self.eos_token_ids else longer
                    place[outcome] = weight * float(law[token])
            growing = longer
        return ended | growing


def processed(
    logits: np.ndarray, sampling: Sampling, text: Outcome, generated: int, eos_token_ids: Sequence[int]
) -> np.ndarray:
    """`[V]`: the law that logits `[V]` become under `sampling`.

    Arguments:
        text: prompt and new tokens so far, of which `generated` are new.
    """
    score = [float(x) for x in logits]
    if sampling.repetition_penalty != 1.0:  # Keskar et al. 1909.05858
        for token in set(text):
            penalty = sampling.repetition_penalty
            score[token] = score[token] * penalty if score[token] < 0 else score[token] / penalty
    for token in _banned(sampling, text, generated, eos_token_ids):
        score[token] = -math.inf
    if sampling.temperature == 0.0:
        law = np.zeros(len(score))
        law[score.index(max(score))] = 1.0
        return law
    score = [s / sampling.temperature for s in score]
    if sampling.top_k:
        floor = sorted(score, reverse=True)[: sampling.top_k][-1]
        score = [s if s >= floor else -math.inf for s in score]
    law = np.array([math.exp(s - max(score)) for s in score])
    law /= law.sum()
    if sampling.top_p < 1.0:  # Holtzman et al. 1904.09751
        mass, kept = 0.0, []
        for token in sorted(range(len(law)), key=lambda t: -law[t]):
            if mass >= sampling.top_p:
                break
            kept.append(token)
            mass += law[token]
        law = _only(law, kept)
    if sampling.min_p > 0.0:
        law = _only(law, [t for t in range(len(law)) if law[t] >= sampling.min_p * law.max()])
    return law


def _banned(sampling: Sampling, text: Outcome, generated: int, eos_token_ids: Sequence[int]) -> set[int]:
    banned: set[int] = set()
    n = sampling.no_repeat_ngram_size
    if n:
        for start in range(len(text) - n + 1):
            *head, last = text[start : start + n]
            if tuple(head) == text[len(text) - n + 1 :]:
                banned.add(last)
    for *head, last in sampling.bad_words:
        if tuple(head) == text[len(text) - len(head) :]:
            banned.add(last)
    if generated < sampling.min_new_tokens:
        banned.update(eos_token_ids)
    return banned


def _only(law: np.ndarray, kept: list[int]) -> np.ndarray:
    out = np.zeros_like(law)
    out[kept] = law[kept]
    return out / out.sum()
