"""The proof: every exact rule, enumerated through the shipping code, emits the target's joint law."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from toy import Grid, Toy, block_law, closed_form, draft, emitted, max_error, mean_accepted, output_law

from specdec.proposal import Kind, Proposal
from specdec.rng import PhiloxDraws, Purpose
from specdec.tree import Tree
from specdec.verify import build, names, rule_class

TOLERANCE = 1e-12
CHAINS = [(), (-1,), (-1, 0), (-1, 0, 1), (-1, 0, 1, 2)]
TREES = [
    (-1, -1),
    (-1, -1, -1),
    (-1, -1, -1, -1),
    (-1, -1, 0, 0),
    (-1, -1, 0, 1),  # breadth first
    (-1, 0, -1, 2),  # depth first
    (-1, 0, -1, 0),  # siblings not adjacent
    (-1, 0, 0, 1),
]
ENUMERABLE = [name for name in names() if rule_class(name).exact and not rule_class(name).coupled]


def depth(parents) -> int:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return max(depths)


def widest(parents) -> int:
    return max((parents.count(parent) for parent in parents), default=0)


def pairings(max_drafts: int, min_drafts: int = 0) -> list:
    """(rule, kind, parents, V) with at most `max_drafts` different drafts."""
    return [
        pytest.param(name, kind, parents, vocab, id=f"{name}-{kind.value}-{parents}-V{vocab}")
        for name in ENUMERABLE
        for kind in sorted(rule_class(name).kinds - {Kind.COUPLED})
        for parents in CHAINS + (TREES if rule_class(name).trees else [])
        for vocab in (2, 3, 4)
        if min_drafts < vocab ** len(parents) <= max_drafts
        and (kind is not Kind.DETERMINISTIC or widest(parents) <= vocab)
    ]


def prove(name, kind, parents, vocab, seeds, drafter=draft):
    rule = build({"name": name})
    for seed in seeds:
        toy = Toy(vocab, depth(parents) + 1, seed)
        law = block_law(toy, rule, parents, kind, drafter)
        assert float((output_law(toy, law) - toy.target).abs().max()) <= TOLERANCE
        assert mean_accepted(law) == pytest.approx(
            closed_form(toy, rule, parents, kind, drafter), abs=TOLERANCE
        )


@pytest.mark.parametrize(("name", "kind", "parents", "vocab"), pairings(max_drafts=81))
def test_joint_law_and_expected_length(name, kind, parents, vocab):
    prove(name, kind, parents, vocab, seeds=range(2))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "parents", "vocab"), pairings(max_drafts=256))
def test_joint_law_and_expected_length_many_laws(name, kind, parents, vocab):
    prove(name, kind, parents, vocab, seeds=range(2, 10 if vocab ** len(parents) <= 81 else 4))


@pytest.mark.parametrize(
    ("name", "kind", "parents", "vocab"),
    [case for case in pairings(max_drafts=27, min_drafts=7) if depth(case.values[2]) > 1],
)
def test_ragged_rows(name, kind, parents, vocab):
    """Drafts that stop after a certain token: rows of one batch have different valid nodes."""
    prove(name, kind, parents, vocab, seeds=[7], drafter=partial(draft, stop=1))


@pytest.mark.parametrize("name", ENUMERABLE)
def test_a_tree_per_row_is_the_shared_tree_per_row(name):
    """`[B, N]` parents, another tree in each row: verdicts are those of each row alone with `[N]` parents."""
    rule = build({"name": name})
    shapes = TREES[3:] if rule.trees else [(-1, 0, 1, 2)]
    toy = Toy(4, 5, seed=3)
    kind = Kind.WITH_REPLACEMENT
    count = 40
    sequence, position = torch.arange(count), torch.arange(count) + 5

    def drawn(rows):
        return PhiloxDraws((3, 4), sequence[rows], position[rows])

    parts = [draft(toy, shape, kind, drawn(torch.arange(count)), count) for shape in shapes]
    pick = torch.arange(count) % len(shapes)

    def mixed(tensors):
        return torch.stack(tensors)[pick, torch.arange(count)]

    parents = torch.tensor(shapes)[pick]
    valid = mixed([part.mask for part, _ in parts])
    valid[::4, -1] = False  # the last node is a leaf in every shape
    batch = Proposal(
        mixed([part.tokens for part, _ in parts]),
        Tree(parents),
        kind,
        mixed([part.q for part, _ in parts]),
        valid,
    )
    p = toy.p[mixed([context for _, context in parts])]
    if not rule.trees:
        batch = Proposal(batch.tokens, Tree(parents[0]), kind, batch.q, valid)
    together = emitted(batch, rule(batch, p, drawn(torch.arange(count))))
    for i in range(count):
        row = torch.tensor([i])
        alone = Proposal(batch.tokens[row], Tree(parents[i]), kind, batch.q[row], valid[row])
        expected = emitted(alone, rule(alone, p[row], drawn(row)))[0]
        assert torch.equal(together[i, : len(expected)], expected)
        assert bool((together[i, len(expected) :] == -1).all())


@pytest.mark.parametrize("name", names())
def test_no_impossible_token_in_float32(name):
    """Greedy and sparse laws in float32, 4,000 rows: an exact rule never emits what p excludes."""
    rule = build({"name": name})
    toy = Toy(5, 4, seed=11)
    toy.p[toy.p < 0.15] = 0.0
    toy.p = (toy.p / toy.p.sum(1, keepdim=True)).float()
    toy.q = toy.q.float()
    rows = torch.arange(4000)
    for kind in rule.kinds:
        for parents in [(), (-1, 0, 1), *(TREES[3:6] if rule.trees else [])]:
            draws = PhiloxDraws((1, 1), rows, torch.zeros_like(rows))
            proposal, context = draft(toy, parents, kind, draws, len(rows))
            verdict = rule(proposal, toy.p[context], draws)
            nodes = torch.arange(proposal.size + 1)
            at = torch.cat((torch.full_like(rows[:, None], -1), verdict.path), 1).gather(
                1, verdict.accepted[:, None]
            )
            assert bool((toy.p[context.gather(1, at + 1)[:, 0], verdict.token] > 0).all())
            if rule.exact and proposal.size:
                law = toy.p[context[:, torch.tensor(parents) + 1]]  # [R, N, V] each node's law
                impossible = law.gather(2, proposal.tokens[..., None])[..., 0] == 0
                on_path = (verdict.path[:, :, None] == nodes[:-1]).any(1)
                assert not bool((impossible & on_path).any())


def test_block_and_traversal_agree_on_chains():
    """Traversal is the tree form of block verification: on a chain both laws are the same."""
    toy = Toy(3, 4, seed=2)
    for kind in (Kind.DETERMINISTIC, Kind.WITH_REPLACEMENT):
        laws = [block_law(toy, build({"name": name}), (-1, 0, 1), kind) for name in ("block", "traversal")]
        assert laws[0] == pytest.approx(laws[1], abs=TOLERANCE)


def test_dyadic_exhaustive_token_rule():
    """Rule and sampler under every (u, u', u'') of 64ths: the counts are the target's law exactly."""
    p, q = torch.tensor([16, 24, 24, 0]) / 64, torch.tensor([32, 16, 0, 16]) / 64
    draws = Grid()
    rows = len(draws.draft)
    tokens = draws.categorical(q.expand(rows, -1), Purpose.DRAFT)
    proposal = Proposal.chain(tokens[:, None], q.expand(rows, 1, -1))

    def counts(decisions):
        verdict = build({"name": "token"})(proposal, p.expand(rows, 2, -1), decisions)
        return torch.bincount(emitted(proposal, verdict)[:, 1], minlength=4).tolist()

    class LessOrEqual(Grid):
        def bernoulli(self, probability, purpose=Purpose.ACCEPT, index=0):
            return self.uniform(purpose).view_as(probability) <= probability

    assert counts(draws) == (p * 64**3).tolist()
    assert counts(LessOrEqual()) != (p * 64**3).tolist()


@pytest.mark.parametrize("name", [n for n in ENUMERABLE if n != "naive"])  # which does not look at q
def test_identical_laws_always_accept(name):
    """p = q: nothing is rejected by any rule that compares the two."""
    rule = build({"name": name})
    toy = Toy(3, 3, seed=1)
    toy.q = toy.p.clone()
    law = block_law(toy, rule, (-1, 0), Kind.WITH_REPLACEMENT)
    assert mean_accepted(law) == pytest.approx(2.0, abs=TOLERANCE)
    assert max_error(toy, rule, (-1, 0), Kind.WITH_REPLACEMENT) <= TOLERANCE
