"""The enumerating random source itself: known laws, replay, multi-step loops, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from toy import Toy, draft, emitted

from specdec.exactness.enumeration import EnumerationError, enumerate_law
from specdec.exactness.transport import iid_transport_bound, transport_bound
from specdec.proposal import Kind
from specdec.rng import Purpose
from specdec.verify import build


def at_zero(source, sequence):
    return source.at(sequence, torch.zeros_like(sequence))


@pytest.mark.parametrize("rows", [1, 3, 1 << 15])
def test_two_dice_and_a_coin(rows):
    """Sum of two loaded dice, thrown again once if a coin says so: against a direct convolution."""
    die = torch.tensor([0.5, 0.0, 0.2, 0.3], dtype=torch.float64)

    def run(source, sequence):
        draws, count = at_zero(source, sequence), len(sequence)
        total = sum(draws.categorical(die.expand(count, -1), Purpose.DRAFT, i) for i in range(2))
        again = draws.bernoulli(torch.full((count,), 0.25, dtype=torch.float64)).nonzero()[:, 0]
        third = draws.select(again).categorical(die.expand(len(again), -1), Purpose.BONUS)
        return total.index_add(0, again, third)[:, None]

    law = enumerate_law(run, rows)
    two = torch.zeros(7, dtype=torch.float64)
    three = torch.zeros(10, dtype=torch.float64)
    for i, a in enumerate(die):
        for j, b in enumerate(die):
            two[i + j] += a * b
            for k, c in enumerate(die):
                three[i + j + k] += a * b * c
    expected = 0.25 * three
    expected[:7] += 0.75 * two
    assert set(law) == {(i,) for i in range(10) if expected[i] > 0}
    for (outcome,), weight in law.items():
        assert weight == pytest.approx(float(expected[outcome]), abs=1e-15)


def test_bernoulli_matrix_is_independent_decisions_and_certainties_are_none():
    chance = torch.tensor([[0.3, 0.0, 0.6, 1.0]], dtype=torch.float64)
    runs = []

    def run(source, sequence):
        runs.append(len(sequence))
        return at_zero(source, sequence).bernoulli(chance.expand(len(sequence), -1)).long()

    law = enumerate_law(run)
    expected = {(1, 0, 1, 1): 0.18, (1, 0, 0, 1): 0.12, (0, 0, 1, 1): 0.42, (0, 0, 0, 1): 0.28}
    assert law == pytest.approx(expected)
    assert sum(runs) == 4  # every branch ran once


def test_several_nodes_at_once_are_independent_decisions():
    coins = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    law = enumerate_law(
        lambda source, seq: at_zero(source, seq).categorical(coins.expand(len(seq), -1, -1), Purpose.DRAFT)
    )
    assert law == {(0, 0): 0.125, (0, 1): 0.125, (1, 0): 0.375, (1, 1): 0.375}


def test_weights_are_scaled_to_laws():
    law = enumerate_law(
        lambda source, seq: at_zero(source, seq).categorical(
            torch.tensor([[3.0, 0.0, 1.0]]).expand(len(seq), -1), 0
        )[:, None]
    )
    assert law == {(0,): 0.75, (2,): 0.25}


@pytest.mark.parametrize(
    ("name", "parents"), [("token", (-1, 0)), ("block", (-1, 0)), ("recursive", (-1, -1, 0))]
)
def test_whole_loop_with_rows_that_finish(name, parents):
    """Decoding to 4 tokens block by block, finished rows dropped: the joint law is the target's."""
    length, rule = 4, build({"name": name})
    toy = Toy(2, length + 3, seed=5)
    short = Toy(2, length, seed=0)
    short.p = toy.p

    def run(source, sequence):
        out = torch.full((len(sequence), length), -1)
        rows = torch.arange(len(sequence))
        context, done = torch.zeros_like(rows), torch.zeros_like(rows)
        while len(rows):
            draws = source.at(sequence[rows], done[rows])
            proposal, contexts = draft(
                toy, parents, Kind.WITH_REPLACEMENT, draws, len(rows), root=context[rows]
            )
            new = emitted(proposal, rule(proposal, toy.p[contexts], draws))[:, 1:]
            for x in new.unbind(1):
                more = (x >= 0) & (done[rows] < length)
                at = rows[more]
                out[at, done[at]] = x[more]
                context[at], done[at] = toy.after(context[at], x[more]), done[at] + 1
            rows = rows[done[rows] < length]
        return out

    law = enumerate_law(run)
    error = max(abs(weight - float(short.target[outcome])) for outcome, weight in law.items())
    assert error <= 1e-12
    assert len(law) == int((short.target > 0).sum())


def test_refusals():
    with pytest.raises(EnumerationError, match="continuous"):
        enumerate_law(lambda source, seq: at_zero(source, seq).race(torch.ones(len(seq), 2), 0)[:, None])
    with pytest.raises(EnumerationError, match="negative"):
        enumerate_law(
            lambda source, seq: (
                at_zero(source, seq).bernoulli(torch.full((len(seq),), torch.nan)).long()[:, None]
            )
        )
    with pytest.raises(EnumerationError, match="negative"):
        enumerate_law(
            lambda source, seq: at_zero(source, seq).bernoulli(torch.full((len(seq),), 1.5)).long()[:, None]
        )
    calls = []

    def forgetful(source, sequence):
        calls.append(0)
        probs = torch.tensor([[0.5, 0.5]] if len(calls) == 1 else [[1.0, 0.0, 0.0]])
        return at_zero(source, sequence).categorical(probs.expand(len(sequence), -1), 0)[:, None]

    with pytest.raises(EnumerationError, match="state"):
        enumerate_law(forgetful)


def test_transport_bound_program_agrees_with_its_formula():
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        p, q = torch.rand(2, 4, dtype=torch.float64, generator=generator).pow(3).unbind(0)
        p, q = (p / p.sum()).tolist(), (q / q.sum()).tolist()
        for drafts in (1, 2, 3):
            tuples = torch.cartesian_prod(*[torch.arange(4)] * drafts).view(-1, drafts).tolist()
            law = {
                tuple(t): float(torch.tensor([q[x] for x in t], dtype=torch.float64).prod()) for t in tuples
            }
            assert transport_bound(p, law) == pytest.approx(iid_transport_bound(p, q, drafts), abs=1e-9)
        overlap = sum(map(min, zip(p, q, strict=True)))
        assert iid_transport_bound(p, q, 1) == pytest.approx(overlap, abs=1e-12)
    assert transport_bound([0.5, 0.5], {(0, 1): 1.0}) == pytest.approx(1.0)
    assert transport_bound([1.0], {(): 1.0}) == 0.0
