"""Checks of exactness on a real model, whose law is too large to enumerate.

Greedy output must equal the autoregressive output, token for token in float32 and up to numeric ties below;
sampled output must follow the law of autoregressive sampling, which a two-sample test of the first tokens
examines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specdec.config import EngineConfig
from specdec.drafter import Drafter
from specdec.engine import Engine
from specdec.exactness.goodness import LEAST_EXPECTED, bins, detectable_tv, survival
from specdec.exactness.triage import triage
from specdec.model import Model
from specdec.sampling import Sampling
from specdec.verify import Rule

Report = Callable[[str], None]


@dataclass(frozen=True)
class TwoSample:
    """A chi-square test that two samples follow one law.

    Arguments:
        observations: in each sample. cells: bins compared. pooled: outcomes that share one.
        detectable: the total variation seen with power .99 at the level of the test.
    """

    observations: int
    cells: int
    pooled: int
    chi2: float
    df: int
    p: float
    detectable: float


def two_sample(a: Mapping[Hashable, int], b: Mapping[Hashable, int], alpha: float) -> TwoSample:
    """Pearson's test of homogeneity; rare outcomes are pooled (by their joint count), none is dropped.

    With n observations each, the least visible deviation of distance TV has noncentrality 2n·TV².
    """
    outcomes = list(a.keys() | b.keys())
    table = np.array([[counts.get(o, 0) for o in outcomes] for counts in (a, b)], dtype=np.float64)
    share = table.sum(1, keepdims=True) / table.sum()
    bin_of = bins(share.min() * table.sum(0), LEAST_EXPECTED)
    seen = np.array([np.bincount(bin_of, row) for row in table])
    due = share * seen.sum(0)
    df = seen.shape[1] - 1
    chi2 = float(((seen - due) ** 2 / due).sum())
    fewest = int(table.sum(1).min())
    return TwoSample(
        observations=fewest,
        cells=seen.shape[1],
        pooled=int((np.bincount(bin_of)[bin_of] > 1).sum()),
        chi2=chi2,
        df=df,
        p=survival(chi2, df),
        detectable=detectable_tv(fewest, df, alpha) * float(np.sqrt(2.0)),
    )


def greedy_agreement(
    target: Model,
    drafter: Drafter | None,
    rule: Rule,
    prompts: Sequence[list[int]],
    config: EngineConfig,
    report: Report = lambda message: None,
) -> Counter[str]:
    """How often the greedy output equals the autoregressive one, is a numeric tie away, or is wrong."""
    found: Counter[str] = Counter()
    for number, prompt in enumerate(prompts, start=1):
        expected, actual = (
            Engine(target, draft, rule, Sampling(), config).generate([prompt])[0].tokens
            for draft in (None, drafter)
        )
        eos = () if config.ignore_eos else target.eos_token_ids
        found[triage(target, prompt, expected, actual, eos_token_ids=eos)["verdict"]] += 1
        report(f"greedy: {number} of {len(prompts)} prompts")
    return found


def sampled_agreement(
    target: Model,
    drafter: Drafter,
    rule: Rule,
    prompt: list[int],
    sequences: int,
    config: EngineConfig,
    alpha: float,
    seed: int = 0,
    compared: int = 2,
    report: Report = lambda message: None,
) -> TwoSample:
    """Autoregressive against speculative sampling of the same prompt at temperature 1, from disjoint seeds.

    The first token comes from the prefill, the same code for both: `compared` tokens after it are examined.

    Arguments:
        sequences: per sample.
        compared: how many tokens are compared jointly; each sequence is two longer, so that a draft fits.
    """
    short = replace(config, max_new_tokens=compared + 2, ignore_eos=True)
    samples: list[Counter[Hashable]] = []
    for number, draft in enumerate((None, drafter)):
        engine = Engine(target, draft, rule, Sampling(temperature=1.0), short, (2 * seed + number) % 2**64)
        counts: Counter[Hashable] = Counter()
        for start in range(0, sequences, short.batch_size):
            ids = list(range(start, min(start + short.batch_size, sequences)))
            for generation in engine.decode([prompt] * len(ids), ids):
                counts[tuple(generation.tokens[1 : 1 + compared])] += 1
            report(f"sampled, {'autoregressively' if draft is None else 'speculatively'}: {ids[-1] + 1}")
        samples.append(counts)
    return two_sample(samples[0], samples[1], alpha)
