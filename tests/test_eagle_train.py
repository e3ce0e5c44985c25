"""Training EAGLE: the unrolled draft is the slow reference's; it learns, and what it saves drafts."""

import pytest
import torch
from accelerate import Accelerator
from eagle_reference import Slow
from test_eagle import SIZE, SIZES, THIRD, VOCAB, features_of
from test_model import build as build_hf
from transformers.models.llama import LlamaConfig

import drafters
from drafters.eagle import train
from drafters.eagle.config import Config
from drafters.training.batches import pad
from drafters.training.loop import Loop, Schedule
from drafters.training.shards import Answer
from drafters.training.teacher import FeatureStore, Teacher
from specdec.model import Model
from specdec.proposal import Kind

TOKEN_MAP = torch.arange(0, VOCAB, 3)


@pytest.fixture(scope="module")
def hf():
    return build_hf(LlamaConfig(**SIZES, head_dim=8))


@pytest.fixture(scope="module")
def target():
    return Model(build_hf(LlamaConfig(**SIZES, head_dim=8)), name="llama")


@pytest.fixture(scope="module")
def answers():
    g = torch.Generator().manual_seed(0)
    lengths = [(3, 9), (1, 4), (5, 6), (2, 2)]  # prompt, answer
    return [Answer(torch.randint(VOCAB, (a + b,), generator=g).tolist(), a, 0.0, "qa") for a, b in lengths]


def batch_of(target, training, answers):
    teacher = Teacher(target, training.layers, training.prompts, training.token_map)
    return FeatureStore(teacher, None, answers).read(list(range(len(answers))))


@pytest.mark.parametrize(("generation", "indices"), [(1, [-1]), (3, list(THIRD))])
def test_unrolled_steps_are_drafted_nodes(target, hf, answers, generation, indices):
    """Which anchors there are, and the logits of each at each depth, as the slow reference has them."""
    training = train.build(Config(generation=generation, layers=2, depth=3), target, TOKEN_MAP)
    training.module.double().eval()
    tensors = training.module.state_dict()
    head, embeddings = hf.get_output_embeddings().weight, hf.get_input_embeddings().weight
    slow = Slow(tensors, embeddings.double(), head[TOKEN_MAP].double(), "layers.{}.", layers=2)
    batch = batch_of(target, training, answers)
    predictions = list(training.predictions(batch))
    assert len(predictions) == 3
    for d, prediction in enumerate(predictions):
        expected_origins = [
            (b, t)
            for b, a in enumerate(answers)
            for t in range(len(a.tokens))
            if t + 1 >= a.prompt_length and t + 2 + d < len(a.tokens)
        ]
        assert list(zip(prediction.row.tolist(), prediction.origin.tolist(), strict=True)) == expected_origins
        assert (prediction.place - prediction.origin == 2 + d).all()
        for i, (b, t) in enumerate(expected_origins):
            tokens = answers[b].tokens[: t + 2 + d]
            features = features_of(hf, tokens[: t + 2], indices)[:-1]
            expected = slow.logits(tokens, t + 2, features)
            torch.testing.assert_close(prediction.logits[i].double(), expected, rtol=1e-4, atol=1e-4)


def test_regression_is_the_distance_from_the_targets_next_state(target, hf, answers):
    """Smooth L1 by hand: half the square below 1, the distance less a half above."""
    training = train.build(Config(generation=1, depth=1), target, None)
    training.module.double().eval()
    [prediction] = training.predictions(batch_of(target, training, answers))  # generation 1 has no norm
    for i, (b, t) in enumerate(zip(prediction.row.tolist(), prediction.origin.tolist(), strict=True)):
        away = (prediction.states[i].detach() - features_of(hf, answers[b].tokens, [-1])[t + 1]).abs()
        expected = torch.where(away < 1, away**2 / 2, away - 0.5).mean() * train.REGRESSION
        assert prediction.regression[i].item() == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("generation", [1, 3])
def test_it_learns_and_what_is_saved_drafts(target, answers, tmp_path, generation):
    training = train.build(Config(generation=generation, depth=2), target, TOKEN_MAP)
    teacher = Teacher(target, training.layers, training.prompts, training.token_map)
    store = FeatureStore(teacher, None, answers)
    plan = Schedule(
        steps=40, batch_positions=64, micro_positions=64, learning_rate=0.01, warmup=5, validate_every=20
    )
    torch.manual_seed(0)
    loop = Loop(training, teacher, store, store, plan, tmp_path, Accelerator(cpu=True), lambda line: None)
    history = loop.run()
    before, after = history.validations[0]["depths"], history.validations[-1]["depths"]
    assert len(after) == 2
    for depth in range(2):
        assert after[depth]["loss"] < before[depth]["loss"] - 0.2
    training.save(tmp_path / "checkpoint", "# Card")
    drafter = drafters.build({"name": "eagle", "checkpoint": str(tmp_path / "checkpoint")}, target)
    assert drafter.kind is Kind.DETERMINISTIC and drafter.model.draft_ids.tolist() == TOKEN_MAP.tolist()
    for name, tensor in training.module.state_dict().items():
        torch.testing.assert_close(
            drafter.model.state_dict()[name], tensor.to(drafter.model.state_dict()[name])
        )
    again = train.build(Config(checkpoint=str(tmp_path / "checkpoint"), depth=2), target, None)
    assert again.module.fc.weight.requires_grad and again.module.fc.weight.dtype == torch.float32


def test_cost_counts_the_rows_of_the_head_that_are_read(target):
    training = train.build(Config(generation=3), target, TOKEN_MAP)
    own = sum(p.numel() for p in training.module.parameters())
    layers = sum(p.numel() for p in target.hf.model.layers.parameters())
    assert training.relative_cost == (own + len(TOKEN_MAP) * SIZE) / (layers + VOCAB * SIZE)


def test_padding_is_not_seen(target, answers):
    training = train.build(Config(generation=3, depth=2), target, None)
    training.module.double().eval()
    together = list(training.predictions(batch_of(target, training, answers)))
    alone = list(training.predictions(batch_of(target, training, answers[1:2])))
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a.logits[a.row == 1], b.logits, rtol=0, atol=1e-9)
    assert pad(answers).tokens.shape[1] > pad(answers[1:2]).tokens.shape[1]
