"""Exactness on real models: two samples of one law, bit-identity at a fixed width, numeric ties."""

import numpy as np
import pytest
import torch
from scipy import stats

from drafters.ngram.config import Config as NgramConfig
from drafters.ngram.drafter import NgramDrafter
from drafters.small.chain import SmallDrafter
from drafters.small.load import first_layers
from experiments import certify, certify_real, prompts
from specdec import verify
from specdec.config import Config, EngineConfig, PromptsConfig, TargetConfig
from specdec.engine import Engine
from specdec.exactness.real_model import greedy_agreement, sampled_agreement, two_sample
from specdec.model import Model
from specdec.sampling import Sampling
from specdec.verify.rule import Verdict
from specdec.verify.token import TokenRule

ALPHA = 1e-3


def test_two_sample_is_pearsons_test_of_homogeneity():
    a, b = {"x": 40, "y": 60, "z": 100}, {"x": 55, "y": 45, "z": 100}
    expected = stats.chi2_contingency(np.array([[40, 60, 100], [55, 45, 100]]), correction=False)
    found = two_sample(a, b, ALPHA)
    assert (found.df, found.pooled) == (2, 0)
    assert found.chi2 == pytest.approx(expected.statistic, rel=1e-12)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)


def test_two_sample_pools_rare_outcomes_and_drops_none():
    a = {"x": 100, **{i: 1 for i in range(12)}}
    b = {"x": 100, **{i + 100: 1 for i in range(12)}}
    found = two_sample(a, b, ALPHA)  # 24 outcomes seen once, in one bin: nothing differs there
    assert (found.observations, found.cells, found.pooled, found.chi2) == (112, 2, 24, 0.0)


def test_detectable_distance_has_the_stated_power():
    """1,000 simulated pairs at the detectable distance: alarms in .99 of them, within 5 standard errors."""
    n, rng = 2000, np.random.default_rng(1)
    law = np.array([0.5, 0.5])
    tv = two_sample({0: n // 2, 1: n // 2}, {0: n // 2, 1: n // 2}, ALPHA).detectable
    shifted = law + np.array([tv, -tv])
    alarms = sum(
        two_sample(dict(enumerate(x)), dict(enumerate(y)), ALPHA).p < ALPHA
        for x, y in zip(rng.multinomial(n, law, 1000), rng.multinomial(n, shifted, 1000), strict=True)
    )
    assert (
        abs(alarms / 1000 - 0.99) < 5 * (0.99 * 0.01 / 1000) ** 0.5 + 0.002
    )  # finite n against the limit law


@pytest.fixture(scope="module")
def tiny() -> Model:
    return Model.load(
        TargetConfig(name="tiny", source="tiny", vocab_size=6, hidden_size=16, dtype="float64", device="cpu")
    )


class BonusFromDraft(TokenRule):
    """Mutant: the emitted token is always the most probable one."""

    def __call__(self, proposal, p, draws):
        verdict = super().__call__(proposal, p, draws)
        rows = torch.arange(len(p))
        return Verdict(verdict.path, verdict.accepted, p[rows, verdict.accepted].argmax(-1))


def test_sampled_agreement_accepts_the_rule_and_catches_a_mutant(tiny):
    """False alarm 1e-3 by construction, here with a fixed seed; the mutant moves about half of the mass."""
    config = EngineConfig(batch_size=5000)
    small = SmallDrafter(first_layers(tiny, 1), tiny.vocab_size, 2)
    right = sampled_agreement(tiny, small, TokenRule(), [1, 2, 3], 20_000, config, ALPHA, seed=3)
    assert right.observations == 20_000
    assert right.p > ALPHA
    assert sampled_agreement(tiny, small, BonusFromDraft(), [1, 2, 3], 20_000, config, ALPHA, seed=3).p < 1e-9


def test_the_largest_seeds_serve_too(tiny):
    """Two samples take the seeds 2s and 2s + 1, which must not leave the random source's 64 bits."""
    config, small = EngineConfig(batch_size=50), SmallDrafter(first_layers(tiny, 1), tiny.vocab_size, 2)
    for seed in (2**63, 2**64 - 1):
        found = sampled_agreement(tiny, small, TokenRule(), [1, 2, 3], 50, config, ALPHA, seed=seed)
        assert found.observations == 50


@pytest.mark.parametrize("fresh", [True, False])
def test_a_real_target_is_certified_with_the_seed_asked_for(monkeypatch, tmp_path, fresh):
    """`task.fresh_seed` takes one from the system at every run, else `seed` is used."""
    seeds = []
    monkeypatch.setattr(certify.certify_real, "run", lambda *arguments: seeds.append(arguments[-1]))
    target = TargetConfig(name="smollm2-135m", source="embedded")
    task = certify.Options(fresh_seed=fresh)
    config = Config(task=task, target=target, drafter={"name": "ngram"}, verify={"name": "token"}, seed=7)
    for _ in range(2):
        certify.run(config, tmp_path)
    assert len(set(seeds)) == 2 and 7 not in seeds if fresh else seeds == [7, 7]  # alike once in 2^48


def test_greedy_agreement_is_exact_in_float64(tiny):
    small = SmallDrafter(first_layers(tiny, 1), tiny.vocab_size, 3)
    asked = [[1], [2, 3], [4, 5, 0, 1]]
    found = greedy_agreement(
        tiny, small, TokenRule(), asked, EngineConfig(max_new_tokens=20, ignore_eos=True)
    )
    assert found == {"equal": 3}


@pytest.fixture(scope="module")
def embedded_bf16() -> Model:
    return Model.load(TargetConfig(name="smollm2-135m", source="embedded", dtype="bfloat16", device="cpu"))


@pytest.mark.model
@pytest.mark.parametrize(("rule", "temperature"), [("token", 0.0), ("gumbel", 1.0)])
def test_fixed_width_makes_bf16_bit_identical(embedded_bf16, rule, temperature):
    """Every forward at one width and capacity: each row's arithmetic is the same whoever else is computed."""
    target = embedded_bf16
    asked = target.encode([p.text for p in prompts.load(PromptsConfig(limit=16))])
    config = EngineConfig(max_new_tokens=24, fixed_width=16)
    outputs = {
        drafter.name if drafter else "none": [
            g.tokens
            for g in Engine(
                target, drafter, verify.build({"name": rule}), Sampling(temperature=temperature), config, 5
            ).generate(asked)
        ]
        for drafter in (
            None,
            NgramDrafter(NgramConfig()),
            SmallDrafter(first_layers(target, 6), target.vocab_size, 4),
        )
    }
    assert outputs["ngram"] == outputs["none"]
    assert outputs["small"] == outputs["none"]


@pytest.mark.model
def test_sampled_tokens_follow_the_autoregressive_law():
    """1,500 sequences each; false alarm 1e-3, fixed seed."""
    target = Model.load(TargetConfig(name="smollm2-135m", source="embedded", dtype="float32", device="cpu"))
    prompt = target.tokenizer("red green blue red green blue red green")["input_ids"]
    found = sampled_agreement(
        target, NgramDrafter(NgramConfig()), TokenRule(), prompt, 1500, EngineConfig(batch_size=250), ALPHA
    )
    assert found.p > ALPHA


def test_a_certificate_that_could_see_nothing_says_so():
    """Too few sequences leave one bin, no degree of freedom and (in JSON) no detectable distance."""
    found = two_sample({"x": 3}, {"y": 2}, ALPHA)
    assert (found.df, found.p, found.detectable) == (0, 1.0, float("inf"))
    assert "raise task.real_sequences" in certify_real._power(None)
    assert "0.051" in certify_real._power(0.0512)
