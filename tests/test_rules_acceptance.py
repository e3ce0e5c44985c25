"""How much the rules accept: closed forms, their order, and the optimal-transport bound."""

from __future__ import annotations

from itertools import permutations, product

import pytest
import torch
from toy import Toy, block_law, mean_accepted, random_laws

from specdec.exactness.transport import iid_transport_bound, transport_bound
from specdec.proposal import Kind
from specdec.rng import PhiloxSource
from specdec.verify import build, names, rule_class
from specdec.verify.kseq import best_threshold, position_acceptance

IID = Kind.WITH_REPLACEMENT


def one_position(seed: int, vocab: int = 3) -> Toy:
    return Toy(vocab, 2, seed)


@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("name", [n for n in names() if rule_class(n).exact and not rule_class(n).coupled])
def test_acceptance_of_iid_siblings(name, drafts):
    """The closed form at one position = enumeration, and no rule beats optimal transport."""
    rule = build({"name": name})
    for seed in range(6):
        toy = one_position(seed)
        closed = rule.acceptance(toy.p[0], toy.q[0], drafts)
        if closed is None:
            continue
        assert float(closed) == pytest.approx(
            mean_accepted(block_law(toy, rule, (-1,) * drafts, IID)), abs=1e-12
        )
        assert float(closed) <= iid_transport_bound(toy.p[0].tolist(), toy.q[0].tolist(), drafts) + 1e-12


PAIRINGS = [
    (name, kind)
    for name in ("recursive", "traversal", "naive", "kseq")
    for kind in (IID, Kind.WITHOUT_REPLACEMENT, Kind.DETERMINISTIC)
    if kind in build({"name": name}).kinds
]


@pytest.mark.parametrize(("name", "kind"), PAIRINGS)
def test_no_rule_beats_the_transport_bound(name, kind):
    rule = build({"name": name})
    reached = []
    for seed in range(8):
        toy, drafts = one_position(seed, vocab=4), 2
        p, q = toy.p[0], toy.q[0]
        if kind is IID:
            candidates = {pair: float(q[pair[0]] * q[pair[1]]) for pair in product(range(4), repeat=2)}
        elif kind is Kind.DETERMINISTIC:
            candidates = {tuple(q.argsort(descending=True, stable=True)[:drafts].tolist()): 1.0}
        else:
            candidates = {(x,): float(q[x]) for x in range(4) if q[x] == 1}
            candidates |= {
                (x, y): float(q[x] * q[y] / (1 - q[x])) for x, y in permutations(range(4), 2) if q[x] < 1
            }
        bound = transport_bound(p.tolist(), candidates)
        accepted = mean_accepted(block_law(toy, rule, (-1,) * drafts, kind))
        assert accepted <= bound + 1e-9
        reached.append(accepted / bound if bound else 1.0)
        if kind is Kind.DETERMINISTIC:  # Σ p(children): nothing is better
            assert accepted == pytest.approx(bound, abs=1e-9)
    assert max(reached) > 0.999  # the bound is not vacuous


def test_token_closed_form_with_one_alpha():
    """(1 − α^{γ+1})/(1 − α) − 1 accepted if every context has the same laws (Leviathan et al., eq. 1)."""
    for seed in range(5):
        toy = Toy(3, 4, seed)
        toy.p, toy.q = toy.p[:1].expand_as(toy.p), toy.q[:1].expand_as(toy.q)
        alpha = 1.0 - 0.5 * float((toy.p[0] - toy.q[0]).abs().sum())
        expected = 3.0 if alpha == 1 else (1 - alpha**4) / (1 - alpha) - 1
        assert mean_accepted(block_law(toy, build({"name": "token"}), (-1, 0, 1), IID)) == pytest.approx(
            expected
        )


def test_block_accepts_at_least_token():
    gains = []
    for seed in range(25):
        toy = Toy(3, 4, seed)
        token, block = (
            mean_accepted(block_law(toy, build({"name": n}), (-1, 0, 1), IID)) for n in ("token", "block")
        )
        assert block >= token - 1e-12
        gains.append(block - token)
    assert max(gains) > 0.01


@pytest.mark.parametrize("kind", [IID, Kind.WITHOUT_REPLACEMENT, Kind.DETERMINISTIC])
def test_traversal_accepts_at_least_recursive(kind):
    gains = []
    for seed in range(12):
        for parents in ((-1, 0, 1), (-1, -1, 0, 1), (-1, -1, 0, 0), (-1, 0, -1, 0)):
            toy = Toy(3, 4 if parents == (-1, 0, 1) else 3, seed)
            rules = (build({"name": n}) for n in ("recursive", "traversal"))
            recursive, traversal = (mean_accepted(block_law(toy, rule, parents, kind)) for rule in rules)
            assert traversal >= recursive - 1e-12
            gains.append(traversal - recursive)
    if kind is Kind.DETERMINISTIC:  # both descend with Σ p(children): equal
        assert max(gains) < 1e-12
    else:
        assert max(gains) > 0.01


def test_best_threshold_is_the_root():
    """A at ρ* to 1e-6 against bisection; exactness needs only A ≤ ρβ, which must hold to rounding."""
    laws = random_laws(400, 5, torch.Generator().manual_seed(1))
    p, q = laws[:200], laws[200:]
    for count in (1, 2, 3, 8, 50):
        k = torch.full((200,), count)
        low, high = torch.ones(200, dtype=torch.float64), k.double()
        for _ in range(100):
            middle = (low + high) / 2
            beta = torch.minimum(q, p / middle[:, None]).sum(1)
            above = middle * beta >= 1 - (1 - beta) ** k
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        rho = best_threshold(p, q, k)
        alone = [best_threshold(p[i, None], q[i, None], k[i, None]) for i in range(0, 200, 20)]
        assert torch.equal(torch.cat(alone), rho[::20])  # whoever shares the batch
        a, b = (position_acceptance(torch.minimum(q, p / r[:, None]).sum(1), k) for r in (rho, high))
        assert float((a - b).abs().max()) < 1e-6
        beta = torch.minimum(q, p / rho[:, None]).sum(1)
        assert bool((position_acceptance(beta, k) <= rho * beta + 1e-14).all())


def test_gumbel_acceptance_formula():
    """N = 100,000 coupled races per pair of laws: within 4.9 standard errors (false alarm 1e-6, 8 pairs)."""
    rule, count = build({"name": "gumbel"}), 100_000
    laws = random_laws(16, 4, torch.Generator().manual_seed(5))
    for i in range(8):
        p, q = laws[2 * i], laws[2 * i + 1]
        draws = PhiloxSource(i).at(torch.arange(count), torch.zeros(count, dtype=torch.int64))
        agree = float(
            (draws.race(p.expand(count, -1), 0) == draws.race(q.expand(count, -1), 0)).double().mean()
        )
        expected = float(rule.acceptance(p, q))
        overlap = float(torch.minimum(p, q).sum())
        assert abs(agree - expected) <= 4.9 * (expected * (1 - expected) / count) ** 0.5 + 1e-12
        assert overlap / (2 - overlap) - 1e-12 <= expected <= overlap + 1e-12
