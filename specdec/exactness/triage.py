"""Why two greedy outputs differ: a numeric tie of the arithmetic, or a logic bug.

A forward of one token and a forward of several round differently, so that in low precision the greedy outputs
of any speculative decoder part ways at near-ties. Teacher forcing tells these from bugs: at the first
difference the model reads the common prefix once more, and there both continuations must be equally good up
to rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from specdec.distribution import distribution
from specdec.model import Model
from specdec.sampling import Sampling
from specdec.sequences import Sequences
from specdec.tree import Tree

ROUNDING = 4  # a tie is a gap below this many units in the last place of the largest logit


def triage(
    target: Model,
    prompt: list[int],
    expected: list[int],
    actual: list[int],
    sampling: Sampling | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Compare two greedy outputs of one prompt.

    Arguments:
        target: the model both came from.
        prompt: token ids. expected, actual: the two outputs' token ids.
        sampling: its penalties are applied before the comparison.

    Returns:
        `verdict`: `equal`, `numeric tie` or `logic bug`; and at the first difference `position`, the two
            `tokens`,
        `gap`: how far (in log-probability) the worse of them lies below the best token, `tolerance`.
    """
    if expected == actual:
        return {"verdict": "equal"}
    at = next((i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), None)
    if at is None:  # one stops where the other goes on: stopping does not depend on rounding
        return {
            "verdict": "logic bug",
            "position": min(len(expected), len(actual)),
            "tokens": None,
            "gap": None,
        }
    prefix = [*prompt, *expected[:at]]
    device = target.device
    one = torch.ones(1, dtype=torch.int64, device=device)
    sequences = Sequences([prefix], 0 * one, one)
    sequences.prompt_length = len(prompt) * one
    wanted, target.features = target.features, ()
    output = target.prefill(
        sequences.tokens[:, : len(prefix)], sequences.lengths, target.new_cache(1, len(prefix))
    )
    target.features = wanted
    untruncated = replace(sampling or Sampling(), temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    nothing = torch.empty(1, 0, dtype=torch.int64, device=device)
    law = distribution(
        output.logits, untruncated, sequences.prefix(Tree.chain(0, device), nothing), eos_token_ids
    )
    log_p = law[0, 0].double().log()
    gap = float(log_p.max() - log_p[[expected[at], actual[at]]].min())
    tolerance = ROUNDING * torch.finfo(target.dtype).eps * float(output.logits.abs().max())
    return {
        "verdict": "numeric tie" if gap <= tolerance else "logic bug",
        "position": at,
        "tokens": [expected[at], actual[at]],
        "gap": gap,
        "tolerance": tolerance,
    }
