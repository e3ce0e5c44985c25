"""The Gumbel coupling, the lossy rules, and how rules are chosen and refused."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf
from scipy import stats
from toy import Toy, block_law, closed_form, draft, emitted, mean_accepted

from specdec.errors import OptionError
from specdec.proposal import Kind, Proposal
from specdec.rng import PhiloxSource
from specdec.tree import Tree
from specdec.verify import build, names, rule_class


def decode(toy: Toy, rule, seed: int, rows: int, length: int, parents, kind: Kind) -> torch.Tensor:
    """`[rows, length]` tokens, block by block."""
    source, out = PhiloxSource(seed), torch.full((rows, length), -1)
    context, done = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    alive = torch.arange(rows)
    while len(alive):
        draws = source.at(alive, done[alive])
        proposal, contexts = draft(toy, parents, kind, draws, len(alive), root=context[alive])
        for x in emitted(proposal, rule(proposal, toy.p[contexts], draws))[:, 1:].unbind(1):
            at = alive[(x >= 0) & (done[alive] < length)]
            x = x[(x >= 0) & (done[alive] < length)]
            out[at, done[at]] = x
            context[at], done[at] = toy.after(context[at], x), done[at] + 1
        alive = alive[done[alive] < length]
    return out


PROPOSALS = [
    ((), Kind.DETERMINISTIC),
    ((-1, 0, 1), Kind.DETERMINISTIC),
    ((-1, 0, 1), Kind.COUPLED),
    ((-1, 0), Kind.WITH_REPLACEMENT),
    ((-1, -1, 0, 1), Kind.DETERMINISTIC),
    ((-1, -1, 0, 0), Kind.WITHOUT_REPLACEMENT),
    ((-1, -1, 0, 0), Kind.WITH_REPLACEMENT),
]


def test_gumbel_output_is_bit_identical_for_every_proposal():
    toy, rule = Toy(4, 9, seed=4), build({"name": "gumbel"})
    plain = decode(toy, rule, 7, 500, 6, *PROPOSALS[0])
    for parents, kind in PROPOSALS[1:]:
        assert torch.equal(decode(toy, rule, 7, 500, 6, parents, kind), plain)
    assert not torch.equal(decode(toy, rule, 8, 500, 6, *PROPOSALS[0]), plain)
    token = build({"name": "token"})  # the same seed does not do that for other rules
    assert not torch.equal(
        decode(toy, token, 7, 500, 6, *PROPOSALS[1]), decode(toy, token, 7, 500, 6, *PROPOSALS[0])
    )


def test_gumbel_output_follows_the_target():
    """Joint χ² over 3 tokens, N = 50,000, false alarm 1e-4; power > .999 against races of p^1.3."""
    count, toy = 50_000, Toy(3, 6, seed=8)
    rule = build({"name": "gumbel"})
    toy.p = toy.p * 0.8 + 0.2 / 3  # expected counts of every cell > 5
    target = Toy(3, 3, seed=8)
    target.p = toy.p

    def p_value():
        out = decode(toy, rule, 3, count, 3, (-1, 0), Kind.COUPLED)
        cells = torch.bincount(out @ torch.tensor([9, 3, 1]), minlength=27)
        return stats.chisquare(cells.numpy(), (target.target.flatten() * count).numpy()).pvalue

    assert float(target.target.min()) * count > 5
    assert p_value() > 1e-4
    target.target  # noqa: B018  (cached before p changes)
    toy.p = toy.p**1.3 / (toy.p**1.3).sum(1, keepdim=True)
    assert p_value() < 1e-4


def test_gumbel_coupling_helps():
    toy, rule = Toy(4, 5, seed=4), build({"name": "gumbel"})
    toy.p, toy.q = 0.7 * toy.p + 0.3 / 4, 0.7 * toy.q + 0.3 / 4
    rows = torch.arange(4000)
    draws = PhiloxSource(2).at(rows, torch.zeros_like(rows))
    accepted = {}
    for kind in (Kind.COUPLED, Kind.WITH_REPLACEMENT):
        proposal, context = draft(toy, (-1, 0, 1), kind, draws, len(rows))
        accepted[kind] = float(rule(proposal, toy.p[context], draws).accepted.double().mean())
        expected = rule.expected_accepted(proposal, toy.p[context])
        if kind is Kind.COUPLED:
            assert expected is None
        else:  # 5 standard errors of a length in 0 … 3
            assert accepted[kind] == pytest.approx(float(expected.mean()), abs=5 * 1.5 / 4000**0.5)
    assert accepted[Kind.COUPLED] > accepted[Kind.WITH_REPLACEMENT]


def test_typical_accepts_by_its_criterion():
    """Against the criterion written as loops, on trees."""
    rule = build({"name": "typical", "epsilon": 0.3, "delta": 0.5})
    toy, parents = Toy(4, 4, seed=6), (-1, -1, 0, 1, 1, 3)
    source = PhiloxSource(0)
    rows = torch.arange(200)
    proposal, context = draft(toy, parents, Kind.WITH_REPLACEMENT, source.at(rows, 0 * rows), 200, stop=2)
    p = toy.p[context]
    verdict = rule(proposal, p, source.at(rows, 0 * rows))
    for b in range(200):
        best, paths = 0, {-1: ()}
        for n, parent in enumerate(parents):
            law = p[b, parent + 1]
            entropy = -float(sum(x * x.log() for x in law if x > 0))
            passes = float(law[proposal.tokens[b, n]]) > min(0.3, 0.5 * 2.718281828459045**-entropy)
            if passes and parent in paths and proposal.mask[b, n]:
                paths[n] = (*paths[parent], n)
                best = max(best, len(paths[n]))
        path = tuple(verdict.path[b, : verdict.accepted[b]].tolist())
        assert len(path) == best and path in paths.values()
    assert torch.equal(rule.expected_accepted(proposal, p), verdict.accepted.double())


@pytest.mark.parametrize("parents", [(), (-1, 0, 1), (-1, -1, 0, 2)])
def test_synthetic_accepts_at_its_rates(parents):
    rule = build({"name": "synthetic", "rates": [0.5, 0.25]})
    toy = Toy(2, 4, seed=0)
    expected = {(): 0.0, (-1, 0, 1): 0.5 + 0.125 + 0.03125, (-1, -1, 0, 2): 0.5 + 0.125 + 0.03125}[parents]
    law = block_law(toy, rule, parents, Kind.DETERMINISTIC)
    assert mean_accepted(law) == pytest.approx(expected)
    assert closed_form(toy, rule, parents, Kind.DETERMINISTIC) == pytest.approx(expected)


@pytest.mark.parametrize("name", names())
def test_every_rule_states_its_terms_and_takes_an_empty_proposal(name):
    cls = rule_class(name)
    assert cls.paper and cls.kinds and isinstance(cls.exact, bool) and isinstance(cls.trees, bool)
    config = OmegaConf.load(f"{__file__.rpartition('/tests/')[0]}/conf/verify/{name}.yaml")
    rule = build(config)
    p = torch.eye(6)[torch.tensor([4, 0, 2])][:, None]
    verdict = rule(
        Proposal.empty(3), p, PhiloxSource(0).at(torch.arange(3), torch.zeros(3, dtype=torch.int64))
    )
    assert verdict.token.tolist() == [4, 0, 2]
    assert verdict.accepted.tolist() == [0, 0, 0] and verdict.path.shape == (3, 0)
    expected = rule.expected_accepted(Proposal.empty(3), p)
    assert expected is None or expected.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", [n for n in names() if rule_class(n).exact])
def test_greedy_accepts_the_argmax_path(name):
    """One-hot p: the tree's path along the argmax is taken whole and the argmax is emitted."""
    rule = build({"name": name})
    for kind in rule.kinds - {Kind.COUPLED}:
        tree = Tree.from_paths([[0], [1], [1, 0], [1, 1]]) if rule.trees else Tree.chain(3)
        tokens = torch.tensor([[5, 1, 3, 2]] if rule.trees else [[1, 2, 6]])
        p = torch.eye(7)[torch.tensor([[1, 0, 2, 0, 4]] if rule.trees else [[1, 2, 3, 0]])]
        q = None if kind is Kind.DETERMINISTIC else torch.full((1, tree.size, 7), 1 / 7)
        accepted = []
        for seed in range(50):
            verdict = rule(
                Proposal(tokens, tree, kind, q),
                p,
                PhiloxSource(seed).at(torch.tensor([0]), torch.tensor([0])),
            )
            accepted.append(int(verdict.accepted))
            assert int(verdict.token) == {0: 1, 1: 2, 2: 4 if rule.trees else 3}[int(verdict.accepted)]
        assert max(accepted) == 2
        if kind is Kind.DETERMINISTIC:
            assert min(accepted) == 2


@pytest.mark.parametrize(
    ("config", "option"),
    [
        ({"name": "nope"}, "verify"),
        ({"name": "token", "epsilon": 0.1}, "verify.epsilon"),
        ({"name": "typical", "epsilon": "high"}, "verify.epsilon"),
        ({"name": "typical", "epsilon": True}, "verify.epsilon"),
        ({"name": "typical", "delta": 0}, "verify.delta"),
        ({"name": "typical", "epsilon": 1.5}, "verify.epsilon"),
        ({"name": "synthetic", "rates": 0.5}, "verify.rates"),
        ({"name": "synthetic", "rates": []}, "verify.rates"),
        ({"name": "synthetic", "rates": [0.5, "a"]}, "verify.rates"),
        ({"name": "synthetic", "rates": [0.5, 1.1]}, "verify.rates"),
    ],
)
def test_wrong_parameters_are_named(config, option):
    with pytest.raises(OptionError) as error:
        build(config)
    assert error.value.option == option


def test_biased_pairings_are_refused():
    with pytest.raises(OptionError, match="drafter=medusa proposes trees"):
        build({"name": "token"}).check("medusa", Kind.DETERMINISTIC, is_chain=False)
    with pytest.raises(
        OptionError, match="biased for drafter=eagle.*deterministic; it takes with_replacement"
    ):
        build({"name": "kseq"}).check("eagle", Kind.DETERMINISTIC, is_chain=False)
    for name in names():
        if not rule_class(name).coupled:  # some would be exact, but there is no noise to draw with
            with pytest.raises(OptionError, match="coupled to the target's; use verify=gumbel"):
                build({"name": name}).check("x", Kind.COUPLED, is_chain=True)
    build({"name": "gumbel"}).check("x", Kind.COUPLED, is_chain=False)
