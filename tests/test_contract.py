"""The drafter contract at run time: every broken promise is caught, and named with drafter and step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference import tiny

from drafters.small.certify import cases
from drafters.small.tree import SmallTreeDrafter
from specdec import verify
from specdec.config import EngineConfig
from specdec.drafter import Drafter, Draw
from specdec.engine import Engine
from specdec.errors import ContractViolation
from specdec.proposal import Kind, Proposal
from specdec.sampling import Sampling
from specdec.tree import Tree

PROMPTS = [[0, 1, 2], [3]]


@pytest.fixture(scope="module")
def target():
    return tiny(vocab_size=5, hidden_size=16)


def tampered(drafter: Drafter, change) -> Drafter:
    """The drafter with `change(proposal, draw)` applied to what it proposes."""
    honest = drafter.propose

    def propose(sequences, draw, depth):
        proposal = honest(sequences, draw, depth)
        return change(proposal, draw) if proposal.size else proposal

    drafter.propose = propose
    return drafter


def decode(target, drafter, rule="naive", temperature=1.0, check=True):
    config = EngineConfig(max_new_tokens=8, batch_size=2, check_contract=check)
    return Engine(target, drafter, verify.build({"name": rule}), Sampling(temperature), config).generate(
        PROMPTS
    )


CASES = [
    "chain",
    "chain that stops",
    "tree with replacement",
    "tree without replacement",
    "tree deterministic",
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", ["naive", "gumbel"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_honest_drafters_pass(target, case, rule, temperature):
    checked = decode(target, cases(target)[case], rule, temperature)
    unchecked = decode(target, cases(target)[case], rule, temperature, check=False)
    assert [g.tokens for g in checked] == [g.tokens for g in unchecked]  # looking changes nothing


class Colder(Draw):
    """Draws from q², while the drafter declares q."""

    def __call__(self, q, depth, node):
        return self.inner(q**2 / (q**2).sum(-1, keepdim=True), depth, node)

    def __init__(self, inner):
        super().__init__(inner.draws, inner.coupled)
        self.inner = inner


def colder(drafter):
    honest = drafter.propose
    drafter.propose = lambda sequences, draw, depth: honest(sequences, Colder(draw), depth)
    return drafter


def own_generator(proposal, draw, generator=torch.Generator()):  # noqa: B008 - one stream for all calls
    return replace(proposal, tokens=torch.randint(5, proposal.tokens.shape, generator=generator))


def drawn(proposal, draw):
    first = draw(torch.ones(len(proposal.tokens), 5), 1, 0)
    return replace(proposal, tokens=(first[:, None] + torch.arange(proposal.size)) % 5)


def orphaned(proposal, draw):
    exists = torch.arange(proposal.size) > 0
    return replace(proposal, valid=exists.expand_as(proposal.tokens))


BROKEN = {
    "declared q is not what was drawn from": (
        "chain",
        colder,
        "node 0 was drawn from another law than the declared q",
    ),
    "declared q of siblings without replacement": (
        "tree without replacement",
        colder,
        "was drawn from another law than the declared q",
    ),
    "randomness of its own": (
        "chain",
        lambda d: tampered(d, own_generator),
        "proposing twice with the same draws gives two proposals",
    ),
    "the argmax instead of the draw": (
        "chain",
        lambda d: tampered(d, lambda p, draw: replace(p, tokens=p.q.argmax(-1))),
        "is not the token that was drawn",
    ),
    "q is missing": (
        "chain",
        lambda d: tampered(d, lambda p, draw: replace(p, q=None)),
        "sampled tokens need their q",
    ),
    "another kind than declared": (
        "tree with replacement",
        lambda d: tampered(d, lambda p, draw: replace(p, kind=Kind.WITHOUT_REPLACEMENT)),
        "declares with_replacement but proposes without_replacement",
    ),
    "a tree instead of chains": (
        "chain",
        lambda d: tampered(d, lambda p, draw: replace(p, tree=Tree(torch.tensor([-1] * p.size)))),
        "declares chains but proposes a tree",
    ),
    "equal siblings, deterministic": (
        "tree deterministic",
        lambda d: tampered(d, lambda p, draw: replace(p, tokens=torch.zeros_like(p.tokens), valid=None)),
        "two siblings carry the same token",
    ),
    "a deterministic drafter with q": (
        "tree deterministic",
        lambda d: tampered(d, lambda p, draw: replace(p, q=torch.ones(*p.tokens.shape, 5))),
        "deterministic tokens have no q",
    ),
    "deterministic tokens that are drawn": (
        "tree deterministic",
        lambda d: tampered(d, drawn),
        "depend on more than the context",
    ),
    "more nodes than max_nodes": (
        "tree with replacement",
        lambda d: setattr(d, "max_nodes", 1) or d,
        "nodes are more than max_nodes=1",
    ),
    "an orphan": (
        "chain",
        lambda d: tampered(d, orphaned),
        "a node exists whose parent does not",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_promise_is_named_with_drafter_and_step(target, what):
    case, breaking, said = BROKEN[what]
    with pytest.raises(ContractViolation, match=said) as caught:
        decode(target, breaking(cases(target)[case]))
    assert str(caught.value).startswith("drafter=small broke its contract at step ")
    decode(target, breaking(cases(target)[case]), rule="naive", check=False)  # unseen where nobody looks


def test_the_step_is_the_step(target):
    """The first violation is in the third drafted block of the longest row."""
    drafter = cases(target)["chain"]
    calls = []

    def later(proposal, draw):
        calls.append(1)
        return own_generator(proposal, draw) if len(calls) > 4 else proposal  # each step proposes twice

    with pytest.raises(ContractViolation, match="at step 2: "):
        decode(target, tampered(drafter, later))


def test_tokens_that_nobody_drew(target):
    """A sampled proposal whose tokens come from nowhere near the engine's random source."""

    class Clock(SmallTreeDrafter):
        def propose(self, sequences, draw, depth):
            if depth == 0:
                return Proposal.empty(sequences.batch)
            tokens = sequences.lengths[:, None] % 5
            return Proposal.chain(tokens, torch.full((*tokens.shape, 5), 0.2))

        def commit(self, *args):
            pass

    honest = cases(target)["chain"]
    drafter = Clock(honest.model, 5, [1], "with_replacement")
    with pytest.raises(
        ContractViolation, match="step 0: node 0 was not drawn from the engine's random source"
    ):
        decode(target, drafter)


def test_deeper_than_asked(target):
    class Deep(SmallTreeDrafter):
        def propose(self, sequences, draw, depth):
            return super().propose(sequences, draw, max(depth, 2))

    honest = cases(target)["chain"]
    with pytest.raises(ContractViolation, match=r"it drafts deeper than asked \([01]\)"):
        decode(target, Deep(honest.model, 5, [1, 1], "with_replacement"))
