"""Reading the tokens only every few steps changes nothing but when the host waits."""

import itertools
from dataclasses import replace

import pytest
import torch
from reference import greedy, plain, tiny
from torch.utils._python_dispatch import TorchDispatchMode

import drafters
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.errors import NumericalError, OptionError
from specdec.model import Model
from specdec.sampling import Sampling
from specdec.verify import build as build_rule

PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 5], list(range(30, 60)), [7, 7]]
COUNT = 13
EVERY = [2, 3, 5, 100]


def run(
    target: Model, every: int | None, rule="token", sampling=None, drafter="none", on_tokens=None, **options
):
    config = EngineConfig(**{"max_new_tokens": COUNT, "read_every": every, "batch_size": 3, **options})
    drafter = drafters.build({"name": drafter}, target)
    return Engine(target, drafter, build_rule({"name": rule}), sampling, config, 3, on_tokens)


@pytest.fixture(scope="module")
def hf():
    return plain({"dtype": "float64"})


def ending(eos: tuple[int, ...] = (), context: int | None = None) -> Model:
    base = tiny("float64")
    return Model(base.hf, base.tokenizer, "tiny", eos, context)


@pytest.mark.parametrize("every", EVERY)
def test_greedy_equals_generate(hf, every):
    """Sequences of a batch end at different steps, between two readings: nothing after an end is kept."""
    outputs = [greedy(hf, p, COUNT) for p in PROMPTS]
    eos = (outputs[0][1], outputs[2][6], outputs[3][9])
    expected = [greedy(hf, p, COUNT, eos) for p in PROMPTS]
    assert len({*map(len, expected)}) > 2
    engine = run(ending(eos), every)
    results = engine.generate(PROMPTS)
    assert [r.tokens for r in results] == expected
    assert [r.finish_reason for r in results] == ["eos" if t[-1] in eos else "length" for t in expected]
    assert engine.ledger.emitted == sum(map(len, expected))
    assert len(engine.ledger.rows) == sum(map(len, expected))  # a row per step and live sequence


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("rule", ["token", "gumbel"])
def test_draws_ledger_and_ends_do_not_change(every, rule):
    """Drawn with penalties, ended by stop strings, by the context or by the count."""
    sampling = Sampling(temperature=1.0, repetition_penalty=1.2, no_repeat_ngram_size=3, min_new_tokens=2)
    target = ending(context=36)
    said = []
    once = run(target, 1, rule, sampling)
    plainly = once.generate(PROMPTS)
    stops = [plainly[1].text[2:4], plainly[4].text[5:7]]
    for options in ({}, {"stop": stops}):
        once = run(target, 1, rule, sampling, **options)
        engine = run(target, every, rule, sampling, on_tokens=lambda *block: said.append(block), **options)
        expected, found = once.generate(PROMPTS), engine.generate(PROMPTS)
        still = {"seconds": 0.0, "seconds_to_first_token": 0.0}
        assert [replace(g, **still) for g in found] == [replace(g, **still) for g in expected]
        for sequence in range(len(PROMPTS)):
            assert engine.ledger.of(sequence) == once.ledger.of(sequence)
            assert found[sequence].tokens == [x for s, block in said if s == sequence for x in block]
        said.clear()
    assert {g.finish_reason for g in expected} >= {"stop", "context"}


def test_the_last_of_several_readings_may_be_short():
    """As many looks as it takes, and each step's time is booked once."""
    target, looks = ending(), []
    engine = run(target, 5, on_tokens=lambda _, block: looks.append(len(block)))
    engine.generate(PROMPTS[:1])
    assert looks == [1, 5, 5, 2]  # the first token at once
    assert len(engine.ledger.step_seconds) == COUNT - 1
    assert [context for _, _, context, *_ in engine.ledger.step_seconds] == list(range(4, 3 + COUNT))


class Waits(TorchDispatchMode):
    """Counts the operations for which a GPU's host would have to wait."""

    ASKING = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        masks = name.startswith("index") and any(x is not None and x.dtype == torch.bool for x in args[1])
        if masks or name.startswith(self.ASKING):
            self.found.append(name)
        return operation(*args, **(kwargs or {}))


def test_nobody_waits_between_two_readings(monkeypatch):
    """Nothing asks a tensor for its values but the readings, of which there is one in seven steps."""
    monkeypatch.setattr("specdec.rng._FEW", 0)  # on a CPU few numbers come from the host, which asks what for
    waits, tolist = Waits(), torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: waits.found.append("tolist") or tolist(self))
    for temperature, every in itertools.product((0.0, 1.0), (7, 1)):
        counts = []
        for tokens in (8, 15, 22, 29):
            waits.found.clear()
            with waits:
                engine = run(ending(), every, sampling=Sampling(temperature), max_new_tokens=tokens)
                engine.generate(PROMPTS[:1])
            counts.append(len(waits.found))
        assert [b - a for a, b in itertools.pairwise(counts)] == 3 * [7 // every], waits.found


def test_a_broken_step_is_named_when_it_is_read(hf):
    """NaN at the third step, read after the fifth; what a sequence does after its end does not count."""
    outputs = [greedy(hf, p, COUNT) for p in PROMPTS[:2]]
    target = ending((outputs[0][1],))
    calls, forward = [], target.forward

    def spoiled(*inputs):
        output = forward(*inputs)
        calls.append(None)
        if len(calls) == 3:
            output.logits[row] = torch.nan
        return output

    target.forward = spoiled
    row = 1
    with pytest.raises(NumericalError, match="step 3, row 1"):
        run(target, 5).generate(PROMPTS[:2])
    row = 0
    calls.clear()
    assert [g.tokens for g in run(target, 5).generate(PROMPTS[:2])] == [outputs[0][:2], outputs[1]]


def test_drafts_are_read_at_every_step():
    """A drafter needs the tokens; its steps emit several."""
    assert run(ending(), 4, drafter="ngram").read_every == 1
    assert run(ending(), None).read_every == 1  # on a CPU there is nothing to run ahead of
    with pytest.raises(OptionError, match=r"engine\.read_every=0: must be ≥ 1"):
        run(ending(), 0)
