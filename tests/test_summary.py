"""The numbers of a run that was written by hand."""

import math

import numpy as np
import pytest

from experiments import summary


def sample(method, unit, tokens, seconds, repeat=0, prompt=None, domain="chat", steps=(), **more) -> dict:
    """`steps`: (depth, accepted, emitted)."""
    columns = list(zip(*steps, strict=True)) or [(), (), ()]
    depth, accepted, emitted = (list(c) for c in columns)
    return {
        "method": method,
        "unit": unit,
        "repeat": repeat,
        "sequence": unit,
        "prompt": prompt or f"p{unit}",
        "domain": domain,
        "prompt_tokens": 3,
        "tokens": list(range(tokens)),
        "seconds": seconds,
        "unit_seconds": seconds,
        "seconds_to_first_token": 0.1,
        "finish_reason": "length",
        "phase_seconds": {"prefill": 0.25, "target": seconds / 2},
        "steps": {
            "nodes": depth,
            "depth": depth,
            "accepted": accepted,
            "emitted": emitted,
            "discarded": [0] * len(depth),
            "bonus": [int(d == a) for d, a in zip(depth, accepted, strict=True)],
        },
        **more,
    }


BY_HAND = [
    sample("autoregressive", 0, 10, 5.0),
    sample("speculative", 0, 10, 2.0, steps=[(3, 3, 4), (3, 0, 1), (3, 2, 3), (1, 1, 1)]),
    sample("speculative", 1, 20, 8.0, domain="maths", steps=[(3, 3, 4), (0, 0, 1)]),
    sample("autoregressive", 1, 20, 10.0, domain="maths"),
]


def test_by_hand():
    n = summary.numbers(BY_HAND)
    assert n["prompts"] == 2
    assert n["acceptance_rate"]["value"] == pytest.approx(9 / 11)  # tried: 4·3 + 1·1 − 2 behind a rejection
    assert n["block_efficiency"]["value"] == pytest.approx(14 / 6)
    assert n["mean_accepted"] == pytest.approx(9 / 6)
    assert n["positions"]["offered"] == [5, 4, 4]
    assert n["positions"]["tried"] == [5, 3, 3]
    assert n["positions"]["accepted"] == [4, 3, 2]
    assert n["histogram"] == [2, 1, 1, 2]
    assert n["tokens_per_second"] == {"autoregressive": pytest.approx(2.0), "speculative": pytest.approx(3.0)}
    assert n["speedup"]["value"] == pytest.approx(1.5)  # not the mean of 2.5 and 1.25
    assert n["new_tokens"] == {"autoregressive": 30, "speculative": 30}
    assert n["seconds"] == {"autoregressive": 15.0, "speculative": 10.0}
    assert n["phase_seconds"]["speculative"] == {"prefill": 0.5, "target": 5.0}
    assert n["seconds_to_first_token"] == {"autoregressive": 0.1, "speculative": 0.1}


def test_domains_in_their_order():
    found = summary.summarise(BY_HAND)
    assert list(found["domains"]) == ["chat", "maths"]
    assert found["domains"]["maths"]["speedup"]["value"] == pytest.approx(1.25)
    assert found["domains"]["maths"]["speedup"]["low"] is None  # one prompt has no spread


def test_a_units_time_counts_once_however_many_prompts_share_it():
    """Batch of two, 4 s for 10 + 30 tokens; the second repeat 2 s. Alone: 16 s a time."""
    records = [
        sample(method, 0, tokens, seconds, repeat, prompt, sequence=i)
        for method, times in (("autoregressive", (16.0, 16.0)), ("speculative", (4.0, 2.0)))
        for repeat, seconds in enumerate(times)
        for i, (prompt, tokens) in enumerate((("a", 10), ("b", 30)))
    ]
    n = summary.numbers(records)
    assert n["tokens_per_second"]["speculative"] == pytest.approx(80 / 6)
    assert n["tokens_per_second"]["autoregressive"] == pytest.approx(80 / 32)
    assert n["speedup"]["value"] == pytest.approx(32 / 6)
    assert n["phase_seconds"]["speculative"] == {"prefill": 0.5, "target": 3.0}
    assert n["prompts"] == 2


def test_an_interrupted_run_compares_only_what_both_methods_have():
    n = summary.numbers([*BY_HAND, sample("autoregressive", 2, 1000, 1.0)])
    assert n["speedup"]["value"] == pytest.approx(1.5)
    assert n["tokens_per_second"]["autoregressive"] == pytest.approx(2.0)


@pytest.mark.parametrize("records", [[], BY_HAND[:1], BY_HAND[1:2]])
def test_half_a_run_has_half_the_numbers(records):
    found = summary.summarise(records)
    assert found["overall"]["speedup"] is None


def test_no_draft_no_acceptance_rate():
    n = summary.numbers([sample("speculative", 0, 3, 1.0, steps=[(0, 0, 1), (0, 0, 1)])])
    assert math.isnan(n["acceptance_rate"]["value"]) and n["block_efficiency"]["value"] == 1.0


def test_agreement_is_counted():
    verdicts = ("equal", "equal", "numeric tie")
    records = [sample("speculative", i, 5, 1.0, agreement={"verdict": v}) for i, v in enumerate(verdicts)]
    assert summary.numbers(records)["agreement"] == {"equal": 2, "numeric tie": 1}


def test_intervals_cover():
    """40 prompts of a known speedup 2 with 20 % noise: of 100 runs about 95 intervals hold it.

    With 88 of 100 as the limit a correct interval fails with probability 1e-3 for a fresh seed.
    """
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(100):
        records = []
        for unit in range(40):
            base, fast = 10 * rng.lognormal(0, 0.2), 5 * rng.lognormal(0, 0.2)
            records += [sample("autoregressive", unit, 10, base), sample("speculative", unit, 10, fast)]
        found = summary.numbers(records)["speedup"]
        assert found["low"] < found["value"] < found["high"]
        held += found["low"] <= 2.0 <= found["high"]
    assert held >= 88


def test_an_interval_narrows_with_the_number_of_prompts():
    def width(count: int) -> float:
        rng = np.random.default_rng(2)
        records = []
        for unit in range(count):
            records += [
                sample("autoregressive", unit, 10, 10.0),
                sample("speculative", unit, 10, 5 * rng.lognormal(0, 0.3)),
            ]
        found = summary.numbers(records)["speedup"]
        return found["high"] - found["low"]

    assert 1.5 < width(20) / width(80) < 2.7  # ≈ √4
