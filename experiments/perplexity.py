"""Perplexity of a language model on given outputs: P(output | prompt)^(−1/tokens) over all tokens."""

from __future__ import annotations

import math
from typing import Any

import torch

from specdec.drafter import Drafter
from specdec.model import Model
from specdec.tree import Tree


def report(
    target: Model, drafter: Drafter, texts: list[tuple[list[int], list[int]]]
) -> dict[str, dict[str, float]]:
    """Perplexity of the target and, where the drafter is a language model, of the drafter.

    Arguments:
        texts: (prompt, output) token ids.

    Returns:
        per model `perplexity` at temperature 1 and the number of `tokens`.
    """
    found = {"target": perplexity(target, texts)}
    model: Any = getattr(drafter, "model", None)
    if isinstance(model, Model):
        vocabulary = getattr(drafter, "vocabulary", None)
        to_drafter = vocabulary.to_drafter if vocabulary is not None else lambda tokens: tokens
        own = [tuple(to_drafter(torch.tensor([part]))[0].tolist() for part in text) for text in texts]
        found["drafter"] = perplexity(model, own)  # type: ignore[arg-type]
    return found


@torch.inference_mode()
def perplexity(model: Model, texts: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    """Over all output tokens, the prompts' own tokens not counted."""
    nats = sum(surprise(model, prompt, output) for prompt, output in texts)
    tokens = sum(len(output) for _, output in texts)
    return {"perplexity": math.exp(nats / tokens) if tokens else math.nan, "tokens": tokens}


def surprise(model: Model, prompt: list[int], output: list[int]) -> float:
    """−log P(output | prompt) in nats."""
    if not output:
        return 0.0
    features, width = model.features, model.fixed_width
    model.features, model.fixed_width = (), None
    device = model.device
    cache = model.new_cache(1, len(prompt) + len(output))
    if len(prompt) > 1:
        lengths = torch.tensor([len(prompt) - 1], device=device)
        model.prefill(torch.tensor([prompt[:-1]], device=device), lengths, cache)
        cache.settle(len(prompt) - 1)
    read = torch.tensor([[prompt[-1], *output[:-1]]], device=device)
    logits = model.forward(read, Tree.chain(len(output) - 1, device), cache).logits[0]
    model.features, model.fixed_width = features, width
    logp = logits.float().log_softmax(-1).gather(1, torch.tensor(output, device=device)[:, None])
    return -float(logp.double().sum())
