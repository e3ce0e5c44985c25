"""The law of what comes out, measured: one accept/reject step, and the whole loop on a tiny model.

Every test has a fixed seed. Its false-alarm probability, had the seed been fresh, is 1e-6 (`ALARM`); each$
kind has a mutant that it must reject.
"""

import itertools

import pytest
import torch
from reference import all_logits, plain, tiny
from scipy import stats

from drafters.small.chain import SmallDrafter
from specdec.config import EngineConfig
from specdec.drafter import Draw
from specdec.engine import Engine
from specdec.proposal import Proposal
from specdec.rng import PhiloxSource, Purpose
from specdec.sampling import Sampling
from specdec.verify.token import TokenRule

SAMPLES, ALARM = 100_000, 1e-6


def p_value(observed: torch.Tensor, law: torch.Tensor) -> float:
    """Chi-square of counts against a law; impossible cells must be empty, rare ones (below 5) share one."""
    observed, expected = observed.double().flatten(), observed.sum() * law.double().flatten()
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 5
    o = torch.cat([observed[~rare], observed[rare].sum()[None]])
    e = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if e[-1] < 5:  # what is left over joins the smallest cell
        smallest = e[:-1].argmin()
        o[smallest], e[smallest] = o[smallest] + o[-1], e[smallest] + e[-1]
        o, e = o[:-1], e[:-1]
    return float(stats.chi2.sf(float(((o - e) ** 2 / e).sum()), len(e) - 1))


# ---------------------------------------------------------------- one step of the rule


def one_step(p: torch.Tensor, q: torch.Tensor, drawn_from: torch.Tensor | None = None) -> torch.Tensor:
    """Counts `[V]` of the first token, from 100,000 drafts of a token, drawn from q unless told otherwise."""
    draws = PhiloxSource(7).at(torch.arange(SAMPLES), torch.zeros(SAMPLES, dtype=torch.int64))
    law = (q if drawn_from is None else drawn_from).expand(SAMPLES, -1)
    x = draws.categorical(law, Purpose.DRAFT)
    proposal = Proposal.chain(x[:, None], q.expand(SAMPLES, 1, -1))
    verdict = TokenRule()(proposal, p.expand(SAMPLES, 2, -1), draws)
    first = torch.where(verdict.accepted > 0, x, verdict.token)
    return first.bincount(minlength=len(p))


P5 = torch.tensor([0.10, 0.35, 0.05, 0.30, 0.20], dtype=torch.float64)
Q5 = torch.tensor([0.40, 0.10, 0.25, 0.05, 0.20], dtype=torch.float64)


def test_five_tokens():
    assert p_value(one_step(P5, Q5), P5) > ALARM


def test_five_tokens_with_impossible_ones():
    p = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    q = torch.tensor([0.0, 0.6, 0.2, 0.2, 0.0], dtype=torch.float64)
    counts = one_step(p, q)
    assert counts[[1, 3, 4]].tolist() == [0, 0, 0] and p_value(counts, p) > ALARM


def test_five_tokens_would_catch_a_draft_from_another_law():
    """Drawn at temperature 1/2, declared at temperature 1. Power > .999: the noncentrality is above 1,000."""
    sharper = Q5**2 / (Q5**2).sum()
    residual = (P5 - Q5).clamp(min=0)
    accept = (P5 / Q5).clamp(max=1)
    wrong = sharper * accept + (1 - (sharper * accept).sum()) * residual / residual.sum()
    noncentrality = float(SAMPLES * ((wrong - P5) ** 2 / P5).sum())
    assert stats.ncx2.sf(stats.chi2.isf(ALARM, 4), 4, noncentrality) > 0.999
    assert p_value(one_step(P5, Q5, sharper), P5) < ALARM


def test_the_lecture_on_two_tokens():
    """Target [.6, .4], draft [.9, .1]: A accepted with 2/3, B always; a rejected A gives B."""
    p, q = (torch.tensor([x], dtype=torch.float64) for x in ([0.6, 0.4], [0.9, 0.1]))
    rule = TokenRule()
    drafts = [Proposal.chain(torch.tensor([[x]]), q[:, None]) for x in (0, 1)]
    chance = [float(rule.chance(draft, p[:, None].expand(1, 2, 2))) for draft in drafts]
    assert chance == pytest.approx([2 / 3, 1.0], abs=1e-15)
    assert float(rule.acceptance(p, q)) == pytest.approx(0.7, abs=1e-15)  # .6 + .1
    residual = rule.residual(drafts[0], p, torch.tensor([0]))[0]
    assert (residual / residual.sum()).tolist() == pytest.approx([0.0, 1.0], abs=1e-15)
    counts = one_step(p[0], q[0])
    assert p_value(counts, p[0]) > ALARM


# ---------------------------------------------------------------- the whole loop


def joint_law(vocab: int, prompt: list[int], count: int, temperature: float) -> torch.Tensor:
    """`[V, …, V]`: product of the conditionals of plain forwards."""
    hf = plain({"dtype": "float64", "vocab_size": vocab})
    law = torch.ones([vocab] * count, dtype=torch.float64)
    for tail in itertools.product(range(vocab), repeat=count):
        rows = (all_logits(hf, [*prompt, *tail[:-1]])[len(prompt) - 1 :] / temperature).softmax(-1)
        law[tail] = rows[torch.arange(count), list(tail)].prod()
    return law


class Sharper(Draw):
    """The mutant: draws from q at half the temperature that is declared."""

    def __call__(self, q, depth, node):
        return super().__call__(q * q, depth, node)


class DishonestDrafter(SmallDrafter):
    def propose(self, sequences, draw, depth):
        return super().propose(sequences, Sharper(draw.draws, draw.coupled), depth)


def sample(
    drafter_class, vocab: int, count: int, gamma: int, prompt: list[int], samples=SAMPLES
) -> torch.Tensor:
    """Counts `[V, …, V]` of sequences decoded in one batch, drafted by an unrelated model."""
    target = tiny("float32", vocab_size=vocab)
    stranger = tiny("float32", vocab_size=vocab, layers=1, hidden_size=8, seed=1)
    drafter = drafter_class(stranger, vocab, gamma)
    config = EngineConfig(max_new_tokens=count, batch_size=samples)
    engine = Engine(target, drafter, TokenRule(), Sampling(temperature=1.0), config, source=3)
    found = torch.tensor([g.tokens for g in engine.generate([prompt] * samples)])
    assert 0.2 < engine.ledger.acceptance_rate < 0.95  # both outcomes are exercised
    cell = sum(found[:, i] * vocab ** (count - 1 - i) for i in range(count))
    return cell.bincount(minlength=vocab**count).view([vocab] * count)


def test_joint_law_of_three_tokens_of_the_engine():
    """125 cells. A total variation of .022 would be seen with power > .999."""
    assert stats.ncx2.sf(stats.chi2.isf(ALARM, 124), 124, 4 * SAMPLES * 0.022**2) > 0.999
    counts = sample(SmallDrafter, vocab=5, count=3, gamma=3, prompt=[2, 0, 1])
    assert p_value(counts, joint_law(5, [2, 0, 1], 3, 1.0)) > ALARM


@pytest.mark.slow
def test_joint_law_of_four_tokens_of_the_engine():
    """81 cells, γ = 2: acceptances, corrections and bonus tokens, and the step after each."""
    counts = sample(SmallDrafter, vocab=3, count=4, gamma=2, prompt=[1])
    assert p_value(counts, joint_law(3, [1], 4, 1.0)) > ALARM


def test_joint_law_would_catch_a_dishonest_drafter():
    """A fifth of the samples is enough for it."""
    counts = sample(DishonestDrafter, vocab=5, count=3, gamma=3, prompt=[2, 0, 1], samples=SAMPLES // 5)
    assert p_value(counts, joint_law(5, [2, 0, 1], 3, 1.0)) < ALARM
