"""The decode loop: greedy equality, independence of the batch, room, errors, streaming."""

import itertools

import pytest
from reference import greedy, plain, tiny
from scripted import Scripted, oracle

import drafters
from specdec.config import EngineConfig
from specdec.drafter import Drafter
from specdec.engine import Engine
from specdec.errors import ContractViolation, NumericalError, OptionError
from specdec.model import Model
from specdec.rng import PhiloxSource
from specdec.sampling import Sampling
from specdec.verify import build as build_rule

PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 5], list(range(30, 60)), [7, 7], [250], [99, 98], [1, 2, 3, 1, 2]]
COUNT = 12
DRAFTERS = {
    "none": {"name": "none"},
    "ngram": {"name": "ngram", "gamma": 3},
    "small": {"name": "small", "layers": 1, "gamma": 3},
    "the target itself": {"name": "small", "layers": 2, "gamma": 5},
    "confident": {"name": "small", "layers": 1, "gamma": 4, "confidence": 0.2},
    "tree": {"name": "small", "layers": 1, "tree": [2, 2, 1]},
}


def engine(target: Model, drafter: Drafter | str, sampling=None, seed=0, on_tokens=None, **options) -> Engine:
    drafter = drafters.build(DRAFTERS[drafter], target) if isinstance(drafter, str) else drafter
    rule = build_rule({"name": "token" if drafter.is_chain else "recursive"})
    config = EngineConfig(**{"max_new_tokens": COUNT, **options})
    return Engine(target, drafter, rule, sampling, config, seed, on_tokens)


def tokens(engine: Engine, prompts=PROMPTS, ids=None) -> list[list[int]]:
    return [g.tokens for g in engine.generate(prompts, ids)]


@pytest.fixture(scope="module")
def pair() -> tuple[Model, list[list[int]]]:
    """(target, what Hugging Face `generate` makes of PROMPTS)."""
    return tiny("float64"), generated("float64")


def generated(dtype: str) -> list[list[int]]:
    hf = plain({"dtype": dtype})
    return [greedy(hf, p, COUNT, (257,)) for p in PROMPTS]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_equals_generate(pair, drafter, batch_size):
    """Ragged prompts, two of a single token; the drafter's contract holds."""
    target, expected = pair
    some = slice(0, 8 if batch_size > 1 else 3)
    run = engine(target, drafter, batch_size=batch_size, check_contract=batch_size == 3)
    assert tokens(run, PROMPTS[some]) == expected[some]
    if drafter == "the target itself":
        assert run.ledger.acceptance_rate == 1.0 and run.ledger.block_efficiency > 4


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_equals_generate_in_float32(drafter):
    assert tokens(engine(tiny("float32"), drafter, batch_size=3)) == generated("float32")


@pytest.mark.parametrize("wrong_at", [None, 0, 1, 3])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_accepted_length(pair, wrong_at, batch_size):
    """An oracle with a mistake at a known place: 0, 1, 3 or all of 4 drafted tokens are accepted."""
    target, expected = pair
    outputs, prompts = dict(enumerate(expected)), dict(enumerate(PROMPTS))
    run = engine(target, Scripted(oracle(outputs, prompts, wrong_at), 4), batch_size=batch_size)
    assert tokens(run) == expected
    for row in run.ledger.decode_rows:
        full = wrong_at is None or row.depth <= wrong_at
        assert row.accepted == (row.depth if full else wrong_at) and row.bonus == full


@pytest.mark.parametrize("fixed_width", [4, 16])
@pytest.mark.parametrize("prefill_chunk", [1, 7])
def test_options_of_the_arithmetic_change_no_token(pair, fixed_width, prefill_chunk):
    target, expected = pair
    run = engine(target, "small", batch_size=4, fixed_width=fixed_width, prefill_chunk=prefill_chunk)
    assert tokens(run) == expected


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_who_shares_the_batch_does_not_matter(tiny64, drafter):
    """Sampled, with penalties: the same tokens in batches of 1 and 8, in another order and other company."""
    sampling = Sampling(temperature=1.0, top_p=0.95, repetition_penalty=1.1, no_repeat_ngram_size=3)
    expected = tokens(engine(tiny64, drafter, sampling, seed=5, batch_size=8))
    order = [6, 0, 3, 1]
    for batch_size in (1, 3):
        some = engine(tiny64, drafter, sampling, seed=5, batch_size=batch_size)
        assert tokens(some, [PROMPTS[i] for i in order], order) == [expected[i] for i in order]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_host_knows_the_rows_whose_numbers_are_drawn(tiny64, drafter, monkeypatch):
    """Position and sequence as the device has them, at every step, while rows end and move."""
    at, looks = PhiloxSource.at, []

    def checked(self, sequence, position, pairs):
        assert pairs() == list(zip(position.tolist(), sequence.tolist(), strict=True))
        looks.append(len(sequence))
        return at(self, sequence, position, pairs)

    monkeypatch.setattr(PhiloxSource, "at", checked)
    sampling = Sampling(temperature=1.0)
    for every in (1, 4):  # a row is dropped at the reading after its end, so all rows here are of one length
        run = engine(tiny64, drafter, sampling, batch_size=8, ignore_eos=True, read_every=every)
        tokens(run, PROMPTS, [8, 3, 5, 2, 9, 11, 4, 0])
    assert looks and (drafter != "small" or len(set(looks)) > 1)


def test_seeds_and_identities(tiny64):
    sampling = Sampling(temperature=1.0)
    once = engine(tiny64, "small", sampling, seed=1, batch_size=4)
    same_prompt = tokens(once, [[1, 2]] * 4)
    assert len({tuple(t) for t in same_prompt}) == 4
    assert tokens(engine(tiny64, "small", sampling, seed=1, batch_size=4), [[1, 2]] * 4) == same_prompt
    assert tokens(engine(tiny64, "small", sampling, seed=2), [[1, 2]]) != same_prompt[:1]
    assert tokens(engine(tiny64, "small", sampling, seed=2**63), [[1, 2]]) != same_prompt[:1]


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_impossible_seeds(tiny64, seed):
    with pytest.raises(OptionError, match="seed="):
        engine(tiny64, "none", seed=seed)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_fit_into_the_room(tiny64, drafter):
    """γ larger than what is left: never drafted deeper than could be kept, and nothing is thrown away."""
    for count in (1, 2, 5):
        run = engine(tiny64, drafter, max_new_tokens=count, batch_size=8, check_contract=True)
        assert [len(t) for t in tokens(run)] == [count] * 8
        for sequence in range(8):
            left = count
            for row in run.ledger.of(sequence):
                assert row.depth <= left - 1 and row.discarded == 0
                left -= row.emitted
            assert left == 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
@pytest.mark.parametrize("drafter", ["none", "ngram", "the target itself"])
def test_streamed_pieces_make_up_the_output(tiny64, drafter, sampling):
    """Each committed block arrives once, in order, never empty, and none after a sequence has ended."""
    said: dict[int, list[int]] = {}
    calls = []

    def on_tokens(sequence: int, block: list[int]) -> None:
        said.setdefault(sequence, []).extend(block)
        calls.append(len(block))

    run = engine(tiny64, drafter, sampling, on_tokens=on_tokens, batch_size=3)
    assert tokens(run) == [said[i] for i in range(len(PROMPTS))]
    assert min(calls) >= 1 and len(calls) == len(run.ledger.rows)


def test_times_are_in_order(tiny64):
    for g in engine(tiny64, "ngram", batch_size=3).generate(PROMPTS):
        assert 0 < g.seconds_to_first_token <= g.seconds


def test_the_clock_misses_nothing(tiny64, monkeypatch):
    """The phases add up to the whole time from start to end; here each look at the clock takes a second."""
    ticks = itertools.count()
    monkeypatch.setattr("specdec.ledger.time.perf_counter", lambda: float(next(ticks)))
    run = engine(tiny64, "small", max_new_tokens=60)
    result = run.generate(PROMPTS[:1])[0]
    assert len(run.ledger.step_seconds) > 5  # a phase left out would lack a second per step
    assert sum(run.ledger.seconds.values()) == pytest.approx(result.seconds, abs=2)


def test_step_seconds_hold_the_shape_of_the_forward(tiny64):
    """Room for 2, 3 and 9 tokens more: the batch shrinks only after the step that ended a row."""
    short = Model(tiny64.hf, tiny64.tokenizer, context_length=12)
    prompts = [list(range(9)), list(range(8)), [1, 2]]
    run = engine(short, "none", batch_size=3)
    run.generate(prompts)
    shapes = [step[:3] for step in run.ledger.step_seconds]
    assert shapes == [(3, 0, 10), (3, 0, 11), (2, 0, 11), *((1, 0, n) for n in range(6, 12))]


def test_a_fixed_width_that_a_draft_would_exceed(tiny64):
    with pytest.raises(OptionError, match="engine.fixed_width=3: .* drafter=small need 4"):
        engine(tiny64, "small", fixed_width=3)


# ---------------------------------------------------------------- what must stop with a clear error


def poisoned(at: int, row: int, value: float) -> Model:
    """A model whose `at`-th forward (0 = prefill) gives one row logits of `value`."""
    model, calls = tiny("float64"), iter(range(10**6))

    def hook(module, args, logits):
        if next(calls) == at:
            logits[row, ..., 3] = value
        return logits

    model.hf.get_output_embeddings().register_forward_hook(hook)
    return model


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("at", "row"), [(0, 1), (4, 0)])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9)])
def test_bad_logits_name_step_and_row(sampling, at, row, value):
    run = engine(poisoned(at, row, value), "ngram", sampling, batch_size=2)
    with pytest.raises(
        NumericalError, match=rf"NaN or infinity at step {at}, row {row} \(sequence {row + 5}\)"
    ):
        run.generate(PROMPTS[:2], ids=[5, 6])


def test_sequences_that_had_finished_are_kept():
    """Row 0 has room for 3 tokens; then the other row meets NaN, now as row 0 of what is left."""
    model = poisoned(6, 0, float("nan"))
    short = Model(model.hf, model.tokenizer, context_length=12)
    expected = tokens(engine(Model(tiny("float64").hf, context_length=12), "none"), [list(range(9))])
    with pytest.raises(NumericalError, match=r"step 6, row 0 \(sequence 1\)") as caught:
        engine(short, "none", batch_size=2).generate([list(range(9)), [1, 2]])
    assert [(g.sequence, g.tokens) for g in caught.value.finished] == [(0, expected[0])]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_when_every_token_is_banned(drafter, temperature):
    """4 tokens, none may come twice: after prompt + 3 nothing is left. Drafts that run into it do no harm."""
    model = tiny("float64", vocab_size=4)
    sampling = Sampling(temperature=temperature, no_repeat_ngram_size=1)
    run = engine(model, drafter, sampling, max_new_tokens=3)
    assert sorted(tokens(run, [[2]])[0]) == [0, 1, 3]
    with pytest.raises(NumericalError, match="sampling leaves no token possible at step .*, row 0"):
        engine(model, drafter, sampling, max_new_tokens=4).generate([[2]])


@pytest.mark.parametrize("prompt", [[260], [-1], [1, 10**9]])
def test_prompts_of_unknown_tokens(tiny64, prompt):
    with pytest.raises(OptionError, match=r"prompts=.*it has ids 0 … 259"):
        engine(tiny64, "none").generate([[1], prompt])


def test_bad_words_of_unknown_tokens(tiny64):
    with pytest.raises(OptionError, match=r"sampling.bad_words=300.*it has ids 0 … 259"):
        engine(tiny64, "none", Sampling(bad_words=[[1], [2, 300]]))


def test_an_empty_prompt(tiny64):
    with pytest.raises(OptionError, match="a prompt is empty"):
        engine(tiny64, "none").generate([[1], []])


def test_identities_must_differ(tiny64):
    with pytest.raises(ValueError, match="as many different ids"):
        engine(tiny64, "none").generate([[1], [2]], ids=[3, 3])


def test_no_prompts_no_work(tiny64):
    assert engine(tiny64, "none").generate([]) == []


def test_a_drafter_that_is_not_deterministic_is_caught(tiny64):
    """`check_contract` proposes twice; the rest of the contract is tested with the certificate."""
    fresh = iter(range(10_000))
    liar = Scripted(lambda sequence, text: [next(fresh) % 250, 1])
    with pytest.raises(ContractViolation, match="depend on more than the context"):
        engine(tiny64, liar, check_contract=True).generate(PROMPTS[:1])


def test_a_pairing_that_would_be_biased_is_refused(tiny64):
    drafter = drafters.build(DRAFTERS["tree"], tiny64)
    with pytest.raises(OptionError, match="takes chains, but drafter=small proposes trees"):
        Engine(tiny64, drafter, build_rule({"name": "token"}))


def test_processors_reach_target_and_drafter(tiny64):
    """With the target as its own drafter every token is accepted only if both laws are processed alike."""
    sampling = Sampling(
        temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.3, no_repeat_ngram_size=2, bad_words=[[5]]
    )
    run = engine(tiny64, "the target itself", sampling, batch_size=3)
    run.generate(PROMPTS)
    assert run.ledger.acceptance_rate > 0.999
