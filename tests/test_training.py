"""Training: teacher, losses and validation against slow references; the loop learns, resumes and stops."""

import copy
import dataclasses
import json

import pytest
import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_module
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import conf
import drafters
import experiments
from drafters.medusa import train as medusa_train
from drafters.medusa.config import Config as MedusaConfig
from drafters.medusa.drafter import random_heads
from drafters.small import importance, prune, pruned
from drafters.small import train as small_train
from drafters.small.config import Config as SmallConfig
from drafters.small.load import load_small
from drafters.training.batches import groups, pad, read_ahead
from drafters.training.loop import Loop, Schedule
from drafters.training.losses import LOSSES, SLICE, head_loss, soft_cross_entropy
from drafters.training.shards import Answer
from drafters.training.teacher import FeatureStore, Teacher
from drafters.training.validation import validate
from drafters.training.vocabulary import coverage, most_frequent
from experiments.card import LOSS_NAMES
from experiments.comparison import predicted_speedup
from experiments.train import trainer_of
from specdec import verify
from specdec.config import EngineConfig, TargetConfig
from specdec.engine import Engine
from specdec.errors import NumericalError, OptionError
from specdec.model import Model

VOCAB, HIDDEN = 30, 16


@pytest.fixture(scope="module")
def target():
    return Model.load(
        TargetConfig(name="tiny", source="tiny", vocab_size=VOCAB, hidden_size=HIDDEN, layers=4)
    )


@pytest.fixture(scope="module")
def answers():
    generator = torch.Generator().manual_seed(0)

    def tokens(n):
        return torch.randint(VOCAB, (n,), generator=generator).tolist()

    return [Answer(tokens(3 + i % 5 + 6 + i % 7), 3 + i % 5, 0.0, "qa") for i in range(24)]


def heads_config(**options):
    return MedusaConfig(**{"heads": 2, **options})


def plain(target, tokens):
    """States `[T, H]` and laws `[T, V]` of a plain forward, one sequence at a time."""
    with torch.no_grad():
        out = target.hf(torch.tensor([tokens]), output_hidden_states=True)
    return out.hidden_states[-1][0], out.logits[0].softmax(-1)


# ---------------------------------------------------------------- batches and vocabulary


def test_batches_are_read_ahead_in_order_and_one_at_a_time():
    begun = []

    def read(n):
        begun.append(n)
        return 10 * n

    found = read_ahead(iter(range(1, 10**9)), read)
    assert next(found) == (1, 10) and next(found) == (2, 20)
    assert len(begun) <= 3  # nothing beyond the next
    found.close()
    assert list(read_ahead([1, 2, 3], read)) == [(1, 10), (2, 20), (3, 30)]
    assert list(read_ahead([], read)) == []
    with pytest.raises(ZeroDivisionError):
        next(read_ahead([0], lambda n: 1 // n))


def test_groups_hold_every_sequence_once_and_fit():
    lengths = [(7 * i) % 50 + 1 for i in range(200)]
    found = groups(lengths, 128, seed=1, epoch=0)
    assert sorted(i for group in found for i in group) == list(range(200))
    assert all(max(lengths[i] for i in g) * len(g) <= 128 for g in found)
    assert found == groups(lengths, 128, 1, 0) != groups(lengths, 128, 1, 1)
    padding = sum(max(lengths[i] for i in g) * len(g) for g in found) / sum(lengths)
    assert padding < 1.25
    assert groups([500], 128, 0, 0) == [[0]]


def test_most_frequent_tokens_and_their_share():
    said = [Answer([9, 9, 9, 1, 1, 2, 5], 3, 0.0, "qa"), Answer([0, 1, 5], 1, 0.0, "qa")]
    chosen = most_frequent(said, 3, 10, always=[7])  # 1: 3 times, 5: twice, 2: once, 9 only in a prompt
    assert chosen.tolist() == [1, 5, 7]
    assert coverage(said, chosen, 10) == pytest.approx(5 / 6)
    assert coverage(said, None, 10) == 1
    assert most_frequent(said, 99, 10).tolist() == list(range(10))


# ---------------------------------------------------------------- teacher


@pytest.mark.parametrize("prompts", ["none", "tokens", "states"])
def test_the_teachers_states_are_those_of_a_plain_forward(target, answers, prompts):
    teacher = Teacher(target, (1,), prompts)
    batch = teacher.batch(answers[:5], teacher.features(answers[:5]))
    for row, answer in enumerate(answers[:5]):
        states, _ = plain(target, answer.tokens)
        start = answer.prompt_length - 1
        shift = start if prompts == "none" else 0
        end = int(batch.lengths[row])
        assert batch.tokens[row, :end].tolist() == answer.tokens[shift:]
        assert int(batch.starts[row]) == answer.prompt_length - shift
        got = batch.features[Model.FINAL][row]
        torch.testing.assert_close(got[start - shift : end], states[start:], rtol=1e-4, atol=1e-4)
        if prompts == "tokens":
            assert not got[:start].any()
        if prompts == "states":
            torch.testing.assert_close(got[:start], states[:start], rtol=1e-4, atol=1e-4)
        assert batch.features[1].shape == batch.features[Model.FINAL].shape
        assert int(batch.answer_mask[row].sum()) == len(answer.answer)


def test_the_teachers_laws(target, answers):
    states, laws = plain(target, answers[0].tokens)
    token_map = torch.tensor([2, 5, 11])
    teacher = Teacher(target, token_map=token_map)
    torch.testing.assert_close(teacher.law(states), laws, rtol=1e-5, atol=1e-6)
    given = laws[:, token_map] / laws[:, token_map].sum(1, keepdim=True)
    torch.testing.assert_close(teacher.draft_law(states), given, rtol=1e-5, atol=1e-6)


def test_kept_states_equal_computed_ones_and_survive_more_answers(target, answers, tmp_path):
    teacher = Teacher(target)
    kept = FeatureStore(teacher, tmp_path, answers[:10], per_file=4)
    kept.complete()
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    computed = FeatureStore(teacher, None, answers)
    again = FeatureStore(teacher, tmp_path, answers, per_file=4)  # the last file has grown
    for store in (kept, again):
        a, b = store.read([1, 9, 4]), computed.read([1, 9, 4])
        assert torch.equal(a.tokens, b.tokens)
        torch.testing.assert_close(a.features[-1], b.features[-1], rtol=1e-4, atol=1e-4)


def test_states_can_be_trained_on(target, answers):
    """They come out of inference mode, which autograd refuses."""
    teacher = Teacher(target)
    batch = teacher.batch(answers[:2], teacher.features(answers[:2]))
    weight = torch.ones(HIDDEN, requires_grad=True)
    (batch.features[-1] * weight).sum().backward()
    assert weight.grad is not None


# ---------------------------------------------------------------- losses and validation


def test_soft_cross_entropy_is_minus_sum_p_log_q():
    logits, law = torch.randn(4, 6), torch.rand(4, 6).softmax(-1) * 0.9
    expected = torch.tensor(
        [
            -sum(float(p) * float(q) for p, q in zip(a, b, strict=True))
            for a, b in zip(law, logits.log_softmax(-1), strict=True)
        ]
    )
    torch.testing.assert_close(soft_cross_entropy(logits, law), expected, rtol=1e-5, atol=1e-5)


def plain_losses(logits, law):
    """By their formulas, for autograd to differentiate."""
    q = logits.softmax(-1)
    entropy = -(law * q.log()).sum(-1)
    alpha = torch.minimum(law, q).sum(-1)
    share = torch.exp(-3 * alpha.detach())
    return {
        "cross_entropy": entropy,
        "log_acceptance": -alpha.log(),
        "hybrid": share * entropy + (1 - share) * (1 - alpha),
    }


def test_cards_have_a_name_for_every_loss():
    assert LOSS_NAMES.keys() == LOSSES.keys()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("trained", [False, True])
def test_sliced_loss_has_the_gradients_of_the_plain_one(name, trained):
    """Loss and gradients against autograd through all logits at once, more rows than a slice holds."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(SLICE + 7, 5, generator=generator, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator).requires_grad_(trained)
    bias = torch.randn(11, generator=generator).requires_grad_(trained)
    laws = torch.rand(9, 11, generator=generator).softmax(-1) * 0.9
    index = torch.randint(9, (len(states),), generator=generator)
    scale = torch.rand(len(states), generator=generator)
    inputs = [states, weight, bias] if trained else [states]
    plain = plain_losses(states @ weight.T + bias, laws[index])[name]
    sliced = head_loss(LOSSES[name], states, weight, bias, laws, index)
    torch.testing.assert_close(sliced, plain, rtol=1e-5, atol=1e-5)
    for got, expected in zip(
        torch.autograd.grad((sliced * scale).sum(), inputs),
        torch.autograd.grad((plain * scale).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("few", [None, [3, 4, 7, 8, 12, 13, 20, 21, 28]])
def test_medusa_is_validated_as_by_hand(target, answers, few):
    """α, agreement, hits and ranks, position by position, from plain forwards and the heads' formula."""
    token_map = None if few is None else torch.tensor(few)
    training = medusa_train.build(heads_config(), target, token_map)
    noise = random_heads(heads_config(draft_vocab=None if few is None else len(few)), target)
    training.module.load_state_dict(noise.state_dict() | ({} if few is None else {"token_map": token_map}))
    teacher = Teacher(target, training.layers, training.prompts, token_map)
    batches = [teacher.batch(some, teacher.features(some)) for some in (answers[:3], answers[3:5])]
    result = validate(training, teacher, batches)

    ids = few or list(range(VOCAB))
    sums = [{"alpha": 0.0, "agreement": 0, "hit": 0, "positions": 0} for _ in range(2)]
    ranks = []
    for answer in answers[:5]:
        states, laws = plain(target, answer.tokens)
        for t in range(answer.prompt_length - 1, len(answer.tokens) - 2):
            logits = training.module(states[t], torch.tensor(answer.tokens[t + 1])).detach()
            row = []
            for d in range(2):
                if t + 2 + d >= len(answer.tokens):
                    continue
                q = torch.zeros(VOCAB)
                q[ids] = logits[d].softmax(-1)
                p, token = laws[t + 1 + d], answer.tokens[t + 2 + d]
                sums[d]["alpha"] += float(torch.minimum(p, q).sum())
                sums[d]["agreement"] += int(p.argmax() == q.argmax())
                sums[d]["hit"] += int(q.argmax() == token)
                sums[d]["positions"] += 1
                row.append(int((q > q[token]).sum()) if token in ids else len(ids))
            if len(row) == 2:
                ranks.append(row)
    for report, by_hand in zip(result.report(), sums, strict=True):
        n = by_hand["positions"]
        assert report["positions"] == n
        assert report["alpha"] == pytest.approx(by_hand["alpha"] / n, abs=1e-4)
        assert (report["agreement"], report["hit"]) == (by_hand["agreement"] / n, by_hand["hit"] / n)
    assert sorted(result.ranks.tolist()) == sorted(ranks)
    first, second = (r["alpha"] for r in result.report())
    assert result.expected_chain == pytest.approx(1 + first + first * second)


def test_untrained_shared_heads_are_the_targets_own_law_one_place_late(target, answers):
    """Zero blocks are the identity: every head says what the target says of the root."""
    training = medusa_train.build(heads_config(), target, None)
    states, laws = plain(target, answers[0].tokens)
    logits = training.module(states, torch.tensor(answers[0].tokens))
    for d in range(2):
        torch.testing.assert_close(logits[:, d].softmax(-1), laws, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- the loop


def make_loop(target, answers, folder, **schedule):
    training = medusa_train.build(heads_config(), target, None)
    teacher = Teacher(target, training.layers, training.prompts)
    store, held_out = FeatureStore(teacher, None, answers), FeatureStore(teacher, None, answers[:6])
    settings = {
        "steps": 12,
        "batch_positions": 64,
        "micro_positions": 32,
        "warmup": 2,
        "validate_every": 4,
        "patience": 99,
    }
    plan = Schedule(**{**settings, "learning_rate": 0.02, **schedule})
    return Loop(training, teacher, store, held_out, plan, folder, Accelerator(cpu=True), lambda line: None)


def test_it_learns(target, answers, tmp_path):
    loop = make_loop(target, answers, tmp_path, steps=60, validate_every=20)
    history = loop.run()
    first, best = history.validations[0]["merit"], history.best
    assert best > first + 0.1
    assert loop.held_out_validation().expected_chain == pytest.approx(
        best, abs=1e-6
    )  # the best weights are kept
    assert history.losses[-1][1] < history.losses[0][1]


def test_a_killed_run_ends_where_an_undisturbed_one_does(target, answers, tmp_path):
    whole = make_loop(target, answers, tmp_path / "whole")
    whole.run()

    class Killed(Exception):
        pass

    cut = make_loop(target, answers, tmp_path / "cut")
    step = cut._step

    def counted(batches):
        if cut.history.step == 10:
            raise Killed  # two steps after the last saved state
        return step(batches)

    cut._step = counted
    with pytest.raises(Killed):
        cut.run()
    again = make_loop(target, answers, tmp_path / "cut")
    again.run()
    assert again.history.step == 12
    assert again.history.losses == whole.history.losses
    for a, b in zip(again.trainable.module.parameters(), whole.trainable.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_it_stops_when_nothing_improves(target, answers, tmp_path):
    loop = make_loop(target, answers, tmp_path, steps=1000, learning_rate=1e-12, validate_every=1, patience=3)
    loop.run()
    assert loop.history.step <= 6


def test_micro_batches_change_nothing_but_memory(target, answers, tmp_path):
    """One step over two halves is the mean of their gradients."""
    loop = make_loop(target, answers, tmp_path)
    batches = list(zip(range(2), loop._batches(), strict=False))
    grads = []
    for _, batch in batches:
        loop._loss(batch, [], []).backward()
        grads.append([p.grad.clone() for p in loop.parameters])
        loop.trainable.module.zero_grad()
    captured = []
    loop.optimizer.step = lambda rate: captured.extend(p.grad.clone() for p in loop.parameters)
    loop.schedule.clip = 1e9
    loop._step(iter([b for _, b in batches]))
    for got, a, b in zip(captured, *grads, strict=True):
        torch.testing.assert_close(got, (a + b) / 2, rtol=1e-4, atol=1e-6)


def test_an_exploding_run_says_what_to_change(target, answers, tmp_path):
    loop = make_loop(target, answers, tmp_path)
    next(loop.trainable.module.parameters()).data.fill_(float("nan"))
    with pytest.raises(NumericalError, match="use a smaller task.learning_rate"):
        loop._step(loop._batches())


def test_the_learning_rate_warms_up_and_falls_to_a_tenth():
    plan = Schedule(steps=110, warmup=10, learning_rate=1.0)
    assert [plan.rate(s) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert plan.rate(10) == pytest.approx(1.0) and plan.rate(60) == pytest.approx(0.55)
    assert plan.rate(110) == pytest.approx(0.1)


# ---------------------------------------------------------------- small models


def test_block_influence_and_leave_one_out_by_hand(target, answers):
    batch = pad(answers[:4])
    layers = target.hf.get_decoder().layers
    cosines, places = torch.zeros(len(layers)), 0
    for answer in answers[:4]:
        with torch.no_grad():
            out = target.hf(torch.tensor([answer.tokens]), output_hidden_states=True)
            last = out.hidden_states[len(layers) - 1]
            positions = target.hf.get_decoder().rotary_emb(last, torch.arange(len(answer.tokens))[None])
            after = layers[-1](last, position_embeddings=positions)
        after = after[0] if isinstance(after, tuple) else after
        states = [*out.hidden_states[: len(layers)], after]
        for i in range(len(layers)):
            pairs = zip(
                states[i][0][answer.prompt_length :], states[i + 1][0][answer.prompt_length :], strict=True
            )
            cosines[i] += sum(float(F.cosine_similarity(a, b, dim=0)) for a, b in pairs)
        places += len(answer.answer)
    torch.testing.assert_close(
        importance.block_influence(target, batch), 1 - cosines / places, rtol=1e-3, atol=1e-4
    )

    def loss(model):
        total = 0.0
        for answer in answers[:4]:
            with torch.no_grad():
                logs = model(torch.tensor([answer.tokens])).logits[0].log_softmax(-1)
            total -= sum(
                float(logs[t - 1, answer.tokens[t]]) for t in range(answer.prompt_length, len(answer.tokens))
            )
        return total / places

    expected = []
    for i in range(len(layers)):
        without = copy.deepcopy(target.hf)
        del without.model.layers[i]
        for n, layer in enumerate(without.model.layers):
            layer.self_attn.layer_idx = n
        without.config.num_hidden_layers = len(layers) - 1
        expected.append(loss(without) - loss(target.hf))
    torch.testing.assert_close(
        importance.leave_one_out(target, batch), torch.tensor(expected), rtol=1e-3, atol=1e-4
    )


def test_keeping_everything_keeps_the_law(target, answers):
    tokens = torch.tensor([answers[0].tokens])
    layers = list(range(4))
    units, groups_ = target.config.intermediate_size, target.config.num_key_value_heads
    cut = prune.Cut(layers, [list(range(units))] * 4, [list(range(groups_))] * 4)
    for some in (prune.Cut(layers), cut):
        with torch.no_grad():
            assert torch.allclose(
                prune.carve(target, some).hf(tokens).logits, target.hf(tokens).logits, atol=1e-5
            )


def test_pruned_units_and_layers_equal_silenced_ones(target, answers):
    """A target whose other units are zeroed and whose other layers are skipped says the same."""
    tokens = torch.tensor([answers[1].tokens])
    keep = [1, 3]
    units = importance.unit_importance(target, pad(answers[:4]))
    cut = prune.Cut(keep, [prune.best(units[i], 9) for i in keep])
    silenced = copy.deepcopy(target.hf)
    for i, some in zip(keep, cut.units, strict=True):
        gone = [u for u in range(target.config.intermediate_size) if u not in some]
        silenced.model.layers[i].mlp.down_proj.weight.data[:, gone] = 0
    for i in (0, 2):
        silenced.model.layers[i].register_forward_hook(
            lambda m, a, o: (a[0], *o[1:]) if isinstance(o, tuple) else a[0]
        )
    with torch.no_grad():
        expected = silenced(tokens, use_cache=False).logits
        got = prune.carve(target, cut).hf(tokens, use_cache=False).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_pruned_heads_equal_silenced_ones(answers):
    """With two key/value heads of which the less important is dropped."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    two = Model(LlamaForCausalLM(config).eval().requires_grad_(False))
    ranked = importance.head_importance(two, pad(answers[:4]))
    assert ranked.shape == (2, 2)
    cut = prune.Cut([0, 1], groups=[prune.best(row, 1) for row in ranked])
    silenced = copy.deepcopy(two.hf)
    for layer, (kept,) in zip(silenced.model.layers, cut.groups, strict=True):
        gone = 1 - kept
        layer.self_attn.o_proj.weight.data[:, gone * 16 : (gone + 1) * 16] = 0
    tokens = torch.tensor([answers[0].tokens])
    with torch.no_grad():
        got = prune.carve(two, cut).hf(tokens, use_cache=False).logits
        torch.testing.assert_close(got, silenced(tokens, use_cache=False).logits, rtol=1e-4, atol=1e-5)


def test_the_most_important_are_kept_in_their_order():
    assert prune.best(torch.tensor([0.1, 5.0, 3.0, 4.0]), 2) == [1, 3]


@pytest.mark.parametrize("few", [None, [3, 4, 7, 8, 12, 29]])
def test_a_small_model_is_saved_and_loaded_and_the_target_is_untouched(target, answers, tmp_path, few):
    before = {name: t.clone() for name, t in target.hf.state_dict().items()}
    token_map = None if few is None else torch.tensor(few)
    config = SmallConfig(layers=2, units=10)
    training = small_train.build(config, target, token_map, answers)
    for parameter in training.module.parameters():
        parameter.data = (parameter.data + 0.1).bfloat16().float()
    training.save(tmp_path, "# card")
    again = load_small(SmallConfig(path=str(tmp_path)), target)
    tokens = torch.tensor([answers[0].tokens])
    with torch.no_grad():
        logits = again.hf(tokens, use_cache=False).logits
        torch.testing.assert_close(logits, training.small.hf(tokens, use_cache=False).logits)
    if few is not None:
        rest = [i for i in range(VOCAB) if i not in few]
        assert bool((logits[..., rest] == -torch.inf).all()) and bool(logits[..., few].isfinite().all())
    assert all(torch.equal(t, before[name]) for name, t in target.hf.state_dict().items())
    assert pruned.is_pruned(str(tmp_path)) and not pruned.is_pruned(str(tmp_path / "nothing"))


def test_a_small_model_learns(target, answers, tmp_path):
    training = small_train.build(SmallConfig(layers=2), target, None, answers)
    assert training.report["layers_kept"] == prune.best(torch.tensor(training.report["leave_one_out"]), 2)
    teacher = Teacher(target, training.layers, training.prompts)
    store = FeatureStore(teacher, None, answers)
    plan = Schedule(
        steps=40, batch_positions=128, micro_positions=128, learning_rate=3e-3, warmup=2, validate_every=40
    )
    history = Loop(
        training, teacher, store, store, plan, tmp_path, Accelerator(cpu=True), lambda line: None
    ).run()
    assert history.best > history.validations[0]["merit"] + 0.05


def test_predicted_speedup_is_the_papers_formula():
    alpha, cost = 0.8, 0.1
    expected = {g: (1 - alpha ** (g + 1)) / ((1 - alpha) * (g * cost + 1)) for g in range(1, 17)}
    gamma, gain = predicted_speedup(alpha, cost)
    assert (gamma, gain) == (max(expected, key=expected.get), pytest.approx(max(expected.values())))
    assert predicted_speedup(0.1, 0.9) == (0, 1.0)  # not worth drafting
    assert predicted_speedup(1.0, 0.5)[1] == pytest.approx(17 / 9)


def test_impossible_cuts_are_refused(target, answers):
    for options, message in [
        ({}, "drafter.layers=null: give the number of the target's layers to keep"),
        ({"layers": 9}, "drafter.layers=9: the target has only 4"),
        ({"layers": 1, "units": 999}, "drafter.units=999: the target has only"),
        ({"layers": 1, "groups": 2}, "drafter.groups=2: the target has only 1"),
    ]:
        with pytest.raises(OptionError, match=message):
            small_train.build(SmallConfig(**options), target, None, answers)


# ---------------------------------------------------------------- the task


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["drafter=small"], "drafter.layers=null: give the number"),
        (["drafter=small", "drafter.path=/no/such"], "training goes on only with checkpoints of task=train"),
        (["drafter=medusa", "drafter.draft_vocab=9"], "training takes task.draft_vocab"),
        (["drafter=medusa", "task.compare=[2]"], "task.compare=.*only for drafter=small"),
        (
            ["drafter=medusa", "task.draft_vocab=some"],
            "task.draft_vocab=some: must be a number of tokens, or full",
        ),
        (["drafter=medusa", "task.precision=int8"], "task.precision=int8: .*bf16"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_loaded(
    overrides, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(Model, "load", lambda *args: pytest.fail("the target was loaded"))
    with initialize_config_module("conf", version_base="1.3"):
        config = conf.resolve(compose("config", overrides=["task=train", "target=tiny", *overrides]))
    with pytest.raises(OptionError, match=message):
        experiments.run(config, tmp_path)


def test_nothing_to_learn_from_is_told(tmp_path, monkeypatch):
    """Before the loop, which would look for a batch for ever."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(experiments.distill, "distil", lambda options, target, folder, *rest: {})
    with initialize_config_module("conf", version_base="1.3"):
        overrides = ["task=train", "target=tiny", "target.device=cpu", "drafter=medusa", "task.precision=no"]
        config = conf.resolve(compose("config", overrides=overrides))
    with pytest.raises(OptionError, match=r"task\.data\.max_new_tokens=\d+: no training answer is longer"):
        experiments.run(config, tmp_path / "run")


def test_drafters_without_training_say_so():
    with pytest.raises(OptionError, match=r"^drafter=ngram: has nothing to train; .*medusa"):
        trainer_of("ngram")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_whole_task(device, tmp_path, monkeypatch):
    """`task=train` from nothing to checkpoints that draft; hidden states are computed once for all."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    target = Model.load(TargetConfig(name="tiny", source="tiny", device=device))
    for name, option, where in (
        ("eagle", "drafter.depth=2", "checkpoint"),  # reads most of the target, so it comes first
        ("medusa", "drafter.heads=2", "checkpoint"),
        ("small", "drafter.layers=1", "path"),
    ):
        overrides = [
            "task=train", f"drafter={name}", option, "target=tiny", f"target.device={device}",
            "task.precision=no",
            "task.data.tokens=300", "task.data.batch_size=8",
            "task.data.round=1", "task.data.max_new_tokens=8", "task.data.longest_prompt=300", "task.steps=4",
            "task.validate_every=2", "task.draft_vocab=100", "task.warmup=1",
        ]  # fmt: skip
        with initialize_config_module("conf", version_base="1.3"):
            config = conf.resolve(compose("config", overrides=overrides))
        run = tmp_path / name
        experiments.run(dataclasses.replace(config), run)
        summary = json.loads((run / "summary.json").read_text())
        assert summary["steps"] == 4 and summary["draft_vocab"] == 100 and 0 < summary["coverage"] <= 1
        assert (run / "curves.png").stat().st_size > 1000
        card = (run / "checkpoint" / "README.md").read_text()
        assert "| depth |" in card and "seed 0" in card
        assert (run / "checkpoint" / "curves.png").stat().st_size > 1000 and "(curves.png)" in card
        drafter = drafters.build({"name": name, where: str(run / "checkpoint")}, target)
        prompt = target.encode(["One, two, three, four"])
        rule = verify.build({"name": "naive"})
        engine = Engine(target, drafter, rule, config=EngineConfig(max_new_tokens=6, check_contract=True))
        plain = Engine(target, None, rule, config=EngineConfig(max_new_tokens=6))
        assert engine.generate(prompt)[0].tokens == plain.generate(prompt)[0].tokens
    [kept] = (tmp_path / "cache" / "distilled" / "tiny" / "features").iterdir()
    assert kept.name.endswith("-final-states")
