"""The random source: published vectors, disjoint streams, inverse CDF, the exponential race."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from scipy import stats

from specdec.rng import (
    PhiloxDraws,
    PhiloxSource,
    Purpose,
    _compiled_row_noise,
    _first_possible,
    inverse_cdf,
    philox,
)

ALMOST_ONE = 1.0 - 2.0**-53


# Known-answer vectors distributed with Random123 (kat_vectors, philox4x32 10): counter, key, result.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert list(philox(tuple(counter), tuple(key))) == expected
    words = philox(tuple(torch.tensor([c]) for c in counter), tuple(key))
    assert [int(w) for w in words] == expected


def test_integer_and_tensor_paths_give_the_same_numbers():
    sequence, position = torch.arange(300), torch.arange(300) * 7 + 3
    many = PhiloxSource(2**40 + 5).at(sequence, position)
    purpose = torch.arange(300) % 5
    for ask in (lambda d: d.uniform(Purpose.ACCEPT, 2, 3), lambda d: d.uniform(int(Purpose.BONUS))):
        rows = [ask(PhiloxSource(2**40 + 5).at(sequence[i, None], position[i, None])) for i in range(300)]
        assert torch.equal(ask(many), torch.cat(rows))
    one_by_one = [many.select(torch.tensor([i])).uniform(purpose[i, None]) for i in range(300)]
    assert torch.equal(many.uniform(purpose), torch.cat(one_by_one))


def test_batch_independence_and_select():
    alone = PhiloxSource(1).at(torch.tensor([5]), torch.tensor([17]))
    crowd = PhiloxSource(1).at(torch.arange(64), torch.arange(64) + 12)
    probs = torch.rand(64, 1000, dtype=torch.float64)
    row = torch.tensor([5])
    for d in (crowd, crowd.select(torch.arange(3, 60)).select(torch.arange(2, 9))):
        i = 5 if d is crowd else 0
        p = probs if d is crowd else probs[5:12]
        assert d.categorical(p, Purpose.DRAFT, 1)[i] == alone.categorical(probs[row], Purpose.DRAFT, 1)[0]
        assert d.race(p, 2)[i] == alone.race(probs[row], 2)[0]
        assert torch.equal(d.uniform(Purpose.ACCEPT, 0, 4)[i], alone.uniform(Purpose.ACCEPT, 0, 4)[0])


@pytest.mark.parametrize("rows", [3, 40])  # few: Python integers; many: tensors
def test_several_nodes_at_once_are_the_nodes_one_by_one(rows):
    probs = torch.rand(rows, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    draws = PhiloxSource(5).at(torch.arange(rows), torch.arange(rows) + 9)
    one_by_one = [draws.categorical(probs[:, k], Purpose.DRAFT, 11 + k) for k in range(4)]
    assert torch.equal(draws.categorical(probs, Purpose.DRAFT, 11), torch.stack(one_by_one, 1))
    raced = torch.stack([draws.race(probs[:, k], 2) for k in range(4)], 1)
    assert torch.equal(draws.race(probs, 2), raced)


def test_no_number_serves_two_decisions():
    """Over purposes, indices, sequences, positions, seeds: 53-bit numbers all distinct.

    False alarm: 8,640 numbers, birthday probability 4e-9.
    """
    sequence, position = (
        t.flatten() for t in torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
    )
    numbers = [
        PhiloxSource(seed).at(sequence, position).uniform(purpose, index, 3)
        for seed in (0, 1, 2**32, 2**63)
        for purpose in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESIDUAL, Purpose.BONUS, Purpose.RACE)
        for index in (0,)
    ]
    flat = torch.cat([n.flatten() for n in numbers])
    assert len(flat.unique()) == len(flat) == 8640


def test_race_noise_is_keyed_by_absolute_position():
    probs = torch.rand(1, 5000)
    early = PhiloxSource(3).at(torch.tensor([2]), torch.tensor([10]))
    late = PhiloxSource(3).at(torch.tensor([2]), torch.tensor([13]))
    assert torch.equal(early.noise(5000, 3, probs.device), late.noise(5000, 0, probs.device))
    assert not torch.equal(early.noise(5000, 0, probs.device), late.noise(5000, 0, probs.device))
    assert early.race(probs, 3) == late.race(probs, 0)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
def test_compiled_noise_is_the_same_noise():
    """Bit for bit, at the ends of every counter and key as well (products overflow there)."""
    last = 2**32 - 1
    for seed in (0, 12345678901234567, 2**64 - 1):
        source, plain = PhiloxSource(seed), PhiloxSource(seed)
        source.compile(1001)
        assert source._row_noise.__wrapped__.func is _compiled_row_noise
        for sequence, position in ((0, 0), (7, 2**31), (last, last), (1, 2)):
            where = torch.tensor([sequence]), torch.tensor([position])
            expected = plain.at(*where).noise(1001, 0, torch.device("cpu"))
            assert torch.equal(source.at(*where).noise(1001, 0, torch.device("cpu")), expected)


def test_compiled_noise_that_differs_is_not_used(monkeypatch):
    monkeypatch.setattr("specdec.rng._compiled_row_noise", lambda key, who, at, vocab: torch.ones(vocab))
    source, where = PhiloxSource(1), (torch.tensor([3]), torch.tensor([4]))
    source.compile(100)
    expected = PhiloxSource(1).at(*where).noise(100, 0, torch.device("cpu"))
    assert torch.equal(source.at(*where).noise(100, 0, torch.device("cpu")), expected)


def test_uniforms_look_uniform_and_independent():
    """KS of 100,000 uniforms and of the products of neighbours' residues; false alarm 1e-4 each, seed fixed.

    Power: the same test rejects u² and a stream that repeats.
    """
    u = (
        PhiloxSource(11)
        .at(torch.arange(25_000), torch.zeros(25_000, dtype=torch.int64))
        .uniform(1, 0, 4)
        .numpy()
    )
    assert stats.kstest(u.ravel(), "uniform").pvalue > 1e-4
    shifted = (u[:, :-1] + u[:, 1:]).ravel() % 1.0
    assert stats.kstest(shifted, "uniform").pvalue > 1e-4
    assert stats.kstest(u.ravel() ** 1.05, "uniform").pvalue < 1e-4
    assert stats.kstest((2 * u).ravel() % 1.0, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(u.T) - np.eye(4)).max() < 4.5 / np.sqrt(25_000)


ADVERSARIAL = {
    "leading zeros": [0.0, 0.0, 0.0, 0.25, 0.75],
    "trailing zeros": [0.25, 0.75, 0.0, 0.0],
    "zeros everywhere between": [0.0, 0.5, 0.0, 0.0, 0.5, 0.0],
    "one-hot first": [1.0, 0.0, 0.0],
    "one-hot middle": [0.0, 1.0, 0.0],
    "one-hot last": [0.0, 0.0, 1.0],
    "short of one": [0.3, 0.7 - 1e-8, 0.0],
    "over one": [0.0, 0.6, 0.4 + 1e-7, 0.0],
    "tiny beside one": [0.0, 1.0, 1e-30, 0.0],
    "tiny only": [0.0, 1e-37, 0.0, 2e-37, 0.0],
    "weights": [0.0, 12.5, 0.0, 3.0],
}


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ADVERSARIAL)
def test_inverse_cdf_never_returns_the_impossible(case, dtype, parallel):
    probs = torch.tensor(ADVERSARIAL[case], dtype=dtype)
    for u in (0.0, 2.0**-53, 0.25, 0.5, 1.0 - 2.0**-30, ALMOST_ONE):
        u_t = torch.tensor([u], dtype=torch.float64)
        rows = probs[None]
        cdf = rows.cumsum(-1, dtype=torch.float64)
        x = int(_first_possible(cdf, rows, u_t) if parallel else inverse_cdf(rows, u_t))
        assert probs[x] > 0
        # the definition, in exact order: first token whose cumulative weight exceeds u · total
        exact = np.cumsum(probs.double().numpy())
        assert x == int(np.argmax(exact > u * exact[-1]))


def test_inverse_cdf_large_vocabulary():
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(8, 150_000, generator=generator) ** 30
    probs[:, :1000] = probs[:, -1000:] = 0.0
    probs[torch.rand(probs.shape, generator=generator) < 0.5] = 0.0
    probs /= probs.sum(1, keepdim=True)
    for u in (0.0, 0.3, ALMOST_ONE):
        u_t = torch.full((8,), u, dtype=torch.float64)
        x = inverse_cdf(probs, u_t)
        assert bool((probs.gather(1, x[:, None]) > 0).all())
        assert torch.equal(x, _first_possible(probs.cumsum(1, dtype=torch.float64), probs, u_t))
        if u == 0.0:
            assert torch.equal(x, (probs > 0).int().argmax(1))
        if u == ALMOST_ONE:  # a tail below 2^-53 may be skipped, nothing else
            cdf = probs.double().cumsum(1)
            assert bool((cdf.gather(1, x[:, None])[:, 0] >= (1 - 1e-15) * cdf[:, -1]).all())


class Prescribed(PhiloxDraws):
    """The shipping sampler on prescribed uniforms."""

    def __init__(self, u: torch.Tensor):
        super().__init__(
            (0, 0), torch.zeros(len(u), dtype=torch.int64), torch.zeros(len(u), dtype=torch.int64)
        )
        self.u = u

    def uniform(self, purpose=0, index=0, count=1):
        return self.u[:, None].expand(-1, count)


@pytest.mark.parametrize(
    "weights", [[1, 2, 3, 58], [0, 64, 0], [0, 32, 0, 32], [16] * 4, [63, 1], [1, 0, 63]]
)
def test_dyadic_exhaustive_sampler(weights):
    """Driven by every u = j/64, a law in 64ths comes out exactly; `<=` in place of `<` would not do that."""
    u = torch.arange(64, dtype=torch.float64) / 64
    probs = torch.tensor(weights, dtype=torch.float64) / 64
    x = Prescribed(u).categorical(probs.expand(64, -1), Purpose.DRAFT)
    assert torch.bincount(x, minlength=len(weights)).tolist() == weights
    for w in weights:
        chance = torch.full((64,), w / 64, dtype=torch.float64)
        assert int(Prescribed(u).bernoulli(chance).sum()) == w
        assert int((u <= chance).sum()) == min(w + 1, 64)  # what the wrong comparison gives


def test_race_never_picks_the_impossible_and_ties_do_not_matter():
    draws = PhiloxSource(9).at(torch.arange(5000), torch.zeros(5000, dtype=torch.int64))
    probs = torch.tensor([0.0, 1e-38, 0.0, 1.0 - 1e-7, 0.0])
    assert set(draws.race(probs.expand(5000, -1), 0).tolist()) <= {1, 3}
    one_hot = torch.tensor([0.0, 0.0, 1.0])
    assert set(draws.race(one_hot.expand(5000, -1), 1).tolist()) == {2}


def test_race_follows_its_law():
    """χ² at N = 200,000; false alarm 1e-4, power > .999 against the mutant that races E/p²."""
    count = 200_000
    probs = torch.tensor([0.05, 0.1, 0.15, 0.3, 0.4], dtype=torch.float64)
    draws = PhiloxSource(21).at(torch.arange(count), torch.zeros(count, dtype=torch.int64))
    expected = (probs * count).numpy()

    def p_value(law):
        seen = torch.bincount(draws.race(law.expand(count, -1), 0), minlength=5).numpy()
        return stats.chisquare(seen, expected).pvalue

    assert p_value(probs) > 1e-4
    assert p_value(probs**2) < 1e-4


@pytest.mark.cuda
def test_cpu_and_cuda_agree():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    sequence, position = torch.arange(200), torch.arange(200) * 3
    probs = torch.rand(200, 5000, dtype=torch.float64).where(torch.rand(200, 5000) < 0.5, 0.0)
    for rows in (torch.arange(4), torch.arange(200)):
        host = PhiloxSource(4).at(sequence[rows], position[rows])
        device = PhiloxSource(4).at(sequence[rows].cuda(), position[rows].cuda())
        assert torch.equal(host.uniform(1, 0, 7), device.uniform(1, 0, 7).cpu())
        why = torch.arange(len(rows)) % len(Purpose)
        assert torch.equal(host.uniform(why, 0, 2), device.uniform(why.cuda(), 0, 2).cpu())
        assert torch.equal(host.categorical(probs[rows], 0), device.categorical(probs[rows].cuda(), 0).cpu())
        assert torch.equal(host.race(probs[rows], 1), device.race(probs[rows].cuda(), 1).cpu())
