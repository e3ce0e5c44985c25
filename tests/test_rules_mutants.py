"""Every mutant is caught by the enumeration, by an error of the size reported elsewhere."""

from __future__ import annotations

import pytest
import torch
from mutants import MUTANTS, MissIsDrawnAnew, ResidualReusesTheDraftsNumber, TextbookRecursive
from toy import Grid, Toy, block_law, draft, emitted, max_error, output_law

from specdec.proposal import Kind, Proposal
from specdec.rng import Purpose
from specdec.verify import build


def largest_error(mutant) -> float:
    """Over 16 toy laws, joint over the first two tokens."""

    def drafter(toy, parents, kind, draws, rows):
        proposal, context = draft(toy, parents, kind, mutant.draws(draws), rows)
        return mutant.proposal(proposal), context

    length = 3 if 0 in mutant.parents else 2
    toys = (Toy(mutant.vocab, length, seed) for seed in range(16))
    return max(max_error(toy, mutant.rule(), mutant.parents, mutant.kind, drafter) for toy in toys)


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.enumerable], ids=lambda m: m.name)
def test_mutant_is_caught(mutant):
    error = largest_error(mutant)
    assert error > 1e-3
    assert mutant.reported / 5 < error < mutant.reported * 5


def test_textbook_recursive_is_the_shipping_rule():
    """The mutants' host without a mistake: an independent implementation, branch by branch the same."""
    for seed in range(6):
        for parents in ((-1, -1, -1), (-1, -1, 0, 0)):
            toy = Toy(3, 3, seed)
            laws = [
                block_law(toy, rule, parents, Kind.WITHOUT_REPLACEMENT)
                for rule in (build({"name": "recursive"}), TextbookRecursive())
            ]
            for outcome in laws[0].keys() | laws[1].keys():  # some differ by branches of weight 1e-17
                assert laws[0].get(outcome, 0.0) == pytest.approx(laws[1].get(outcome, 0.0), abs=1e-12)


def test_a_miss_drawn_anew_gives_the_children_more():
    """With m = Σ p(no child): p (1 + m) for a child and p m for others, so TV = m (1 − m)."""
    for seed in range(16):
        toy = Toy(4, 2, seed)
        p, children = toy.p[0], toy.q[0].argsort(descending=True, stable=True)[:2]
        m = 1.0 - p[children].sum()
        expected = p * m
        expected[children] += p[children]
        found = output_law(toy, block_law(toy, MissIsDrawnAnew(), (-1, -1), Kind.DETERMINISTIC)).sum(1)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
        assert float((found - p).abs().sum() / 2) == pytest.approx(float(m * (1 - m)), abs=1e-12)


def test_shared_noise_is_caught_exhaustively():
    """Draft and residual from one number, every (u, u') of 64ths: invisible to branches, exact here."""
    p, q = torch.tensor([8, 8, 24, 24]) / 64, torch.tensor([16, 16, 16, 16]) / 64
    draws = Grid()
    rows = len(draws.draft)
    tokens = draws.categorical(q.expand(rows, -1), Purpose.DRAFT)
    proposal = Proposal.chain(tokens[:, None], q.expand(rows, 1, -1))

    def first_token_law(rule):
        first = emitted(proposal, rule(proposal, p.expand(rows, 2, -1), draws))[:, 1]
        return torch.bincount(first, minlength=4) / rows

    assert torch.equal(first_token_law(build({"name": "token"})), p)
    # Tokens 0 and 1 come from u < 1/2 and are rejected half the time; with the same u the residual's lower
    # half, token 2, takes over every time: it gets 1/4 + 1/4 and token 3 keeps 1/4.
    assert first_token_law(ResidualReusesTheDraftsNumber()).tolist() == [1 / 8, 1 / 8, 1 / 2, 1 / 4]
