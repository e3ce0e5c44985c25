"""On the embedded target: greedy output of every drafter, and what the engine costs beside the model."""

from dataclasses import replace
from statistics import median

import pytest
import torch
from reference import greedy_together

import drafters
from experiments import prompts
from experiments.train import VALIDATION
from specdec import checkpoints
from specdec.config import EngineConfig, PromptsConfig, TargetConfig
from specdec.engine import Engine
from specdec.exactness.triage import triage
from specdec.model import Model
from specdec.progress import silent
from specdec.verify import build as build_rule

pytestmark = [pytest.mark.model, pytest.mark.timeout(3600)]

PROMPTS, TOKENS = 64, 128  # of EAGLE's trees; half of both of the other drafters
TARGET = TargetConfig(name="smollm2-135m", source="embedded", dtype="float32", device="cpu")
DRAFTERS = {
    "none": {"name": "none"},
    "ngram": {"name": "ngram"},
    "small": {"name": "small", "layers": 3},
    "tree": {"name": "small", "layers": 3, "tree": [2, 2]},
    "medusa": {"name": "medusa"},
}
SHAPES = {
    "dynamic": {},
    "dynamic, wide and deep": {"top_k": 10, "nodes": 60, "depth": 6},
    "static": {"mode": "static"},
    "chain": {"mode": "chain"},
    "without copies": {"ngram": False},
}


@pytest.fixture(scope="module")
def target() -> Model:
    return Model.load(TARGET)


@pytest.fixture(scope="module")
def asked(target) -> list[list[int]]:
    """The prompts of the evaluation and then those of training's validation, short ones first."""
    texts = [p.text for p in prompts.load(PromptsConfig())]
    texts += [p.text for p in prompts.load(PromptsConfig(name="file", path=str(VALIDATION)))]
    assert len(texts) >= PROMPTS
    return sorted(target.encode(texts[:PROMPTS]), key=len)


@pytest.fixture(scope="module")
def generated(target, asked) -> list[list[int]]:
    """Hugging Face `generate(do_sample=False)` on weights that no `Model` has touched."""
    hf = checkpoints.load(TARGET, silent).model
    return greedy_together(hf, asked, TOKENS, target.eos_token_ids)


def decode(
    target: Model, drafter: dict, asked: list[list[int]], batch_size: int, tokens: int = TOKENS // 2
) -> Engine:
    drafter = drafters.build(drafter, target)
    rule = build_rule({"name": "token" if drafter.is_chain else "recursive"})
    engine = Engine(target, drafter, rule, config=EngineConfig(max_new_tokens=tokens, batch_size=batch_size))
    engine.results = engine.generate(asked)
    return engine


def said(engine: Engine) -> list[list[int]]:
    return [g.tokens for g in engine.results]


@pytest.mark.parametrize("name", DRAFTERS)
def test_float32_equals_generate_token_for_token(target, asked, generated, name):
    engine = decode(target, DRAFTERS[name], asked[::2], batch_size=16)
    assert said(engine) == [tokens[: TOKENS // 2] for tokens in generated[::2]]


def check_eagle(target, asked, generated, shape: str, every: int, tokens: int) -> None:
    drafter = {"name": "eagle"} | SHAPES[shape]
    engine = decode(target, drafter, asked[::every], batch_size=32, tokens=tokens)
    assert said(engine) == [all_of_it[:tokens] for all_of_it in generated[::every]]
    assert engine.ledger.block_efficiency > 1.3  # it drafted


@pytest.mark.slow
def test_the_default_tree_on_all_prompts_and_tokens(target, asked, generated):
    check_eagle(target, asked, generated, "dynamic", every=1, tokens=TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("shape", list(SHAPES)[1:])
def test_no_tree_of_the_shipped_eagle_changes_greedy_output(target, asked, generated, shape):
    check_eagle(target, asked, generated, shape, every=4, tokens=TOKENS // 2)


@pytest.mark.long
@pytest.mark.parametrize("shape", list(SHAPES)[1:])
def test_nor_on_all_prompts_and_tokens(target, asked, generated, shape):
    check_eagle(target, asked, generated, shape, every=1, tokens=TOKENS)


def test_float32_one_by_one(target, asked, generated):
    engine = decode(target, DRAFTERS["ngram"], asked[::16], batch_size=1)
    assert said(engine) == [tokens[: TOKENS // 2] for tokens in generated[::16]]


@pytest.fixture(scope="module")
def target16() -> Model:
    return Model.load(replace(TARGET, dtype="bfloat16"))


def test_bfloat16_differs_only_in_numeric_ties(target16, asked):
    """Every difference from the engine's own autoregressive output is explained, none by a logic bug."""
    baseline = decode(target16, DRAFTERS["none"], asked[::8], batch_size=1).results
    for name in ("ngram", "small"):
        found = decode(target16, DRAFTERS[name], asked[::8], batch_size=1).results
        for a, b in zip(baseline, found, strict=True):
            verdict = triage(target16, a.prompt, a.tokens, b.tokens, eos_token_ids=target16.eos_token_ids)
            assert verdict["verdict"] in ("equal", "numeric tie"), verdict


def test_the_engine_itself_costs_little(target, asked):
    """All but the model's forwards: a few percent of the median step (goal: below 10 %)."""
    with torch.inference_mode():
        steps = decode(target, DRAFTERS["none"], asked[:3], batch_size=1).ledger.step_seconds
    shares = [1 - target / (draft + target + rule + other) for *_, draft, target, rule, other in steps]
    assert len(steps) > 100 and median(shares) < 0.25
