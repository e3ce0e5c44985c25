"""Context-dependent toy laws over a tiny vocabulary, toy drafts on them, exact laws of what a rule emits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from specdec.exactness.enumeration import enumerate_law
from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, PhiloxDraws, Purpose
from specdec.tree import Tree
from specdec.verify import Rule, Verdict


def random_laws(count: int, vocab: int, generator: torch.Generator) -> Tensor:
    """`[count, V]` float64 laws: a third dense, a third with zeros, a sixth one-hot, a sixth uniform."""
    weights = torch.rand(count, vocab, dtype=torch.float64, generator=generator).log().neg()
    style = torch.randint(6, (count, 1), generator=generator)
    keep = torch.rand(count, vocab, generator=generator) < 0.6
    keep.scatter_(1, torch.randint(vocab, (count, 1), generator=generator), True)
    weights = torch.where((style >= 2) & (style < 4) | (style == 5), weights * keep, weights)
    weights = torch.where(style == 5, (weights > 0).double(), weights)
    one_hot = torch.nn.functional.one_hot(weights.argmax(1), vocab).double()
    weights = torch.where(style == 4, one_hot, weights)
    return weights / weights.sum(1, keepdim=True)


class Toy:
    """Target and draft laws `p`, `q` `[contexts, V]` for every context of at most `length` tokens.

    Context 0 is the empty one; token x after context c leads to context c·V + x + 1.
    """

    def __init__(self, vocab: int, length: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.length = vocab, length
        count = sum(vocab**i for i in range(length + 1))
        self.p = random_laws(count, vocab, generator)
        self.q = random_laws(count, vocab, generator)

    def after(self, context: Tensor, token: Tensor) -> Tensor:
        return context * self.vocab + token + 1

    @cached_property
    def target(self) -> Tensor:
        """`[V, …, V]` (`length` times): the joint law under p."""
        return self.joint_after(())

    def joint_after(self, prefix: Sequence[int]) -> Tensor:
        """The joint law under p of the tokens that complete `prefix` to `length`."""
        context = torch.tensor([0])
        for x in prefix:
            context = self.after(context, torch.tensor([x]))
        joint = torch.ones(1, dtype=torch.float64)
        for _ in range(self.length - len(prefix)):
            joint = (joint[:, None] * self.p[context]).flatten()
            context = self.after(context[:, None], torch.arange(self.vocab)).flatten()
        return joint.view([self.vocab] * (self.length - len(prefix)))


class Grid(PhiloxDraws):
    """The shipping sampler on every triple of 64ths: 64³ rows; numbers for draft, acceptance, final token."""

    def __init__(self):
        nothing = torch.zeros(64**3, dtype=torch.int64)
        super().__init__((0, 0), nothing, nothing)
        axis = torch.arange(64, dtype=torch.float64) / 64
        self.draft, self.accept, self.final = (
            t.flatten() for t in torch.meshgrid(axis, axis, axis, indexing="ij")
        )

    def uniform(self, purpose, index=0, count=1):
        if isinstance(purpose, Tensor):  # the final token; a mutant may ask for the draft's number again
            return torch.where(purpose == int(Purpose.DRAFT), self.draft, self.final)[:, None]
        return {Purpose.DRAFT: self.draft, Purpose.ACCEPT: self.accept}[purpose][:, None]


Drafter = Callable[[Toy, Sequence[int], Kind, Draws, int], tuple[Proposal, Tensor]]


def draft(
    toy: Toy,
    parents: Sequence[int],
    kind: Kind,
    draws: Draws,
    rows: int,
    stop: int | None = None,
    root: Tensor | None = None,
) -> tuple[Proposal, Tensor]:
    """An honest proposal of any kind; no nodes below a token `stop`; `root` `[R]`: the roots' contexts.

    Returns:
        the proposal and the contexts `[R, N+1]` of root and nodes.
    """
    size = len(parents)
    context, tokens = (
        torch.zeros(rows, size + 1, dtype=torch.int64),
        torch.zeros(rows, size, dtype=torch.int64),
    )
    if root is not None:
        context[:, 0] = root
    valid = torch.ones(rows, size + 1, dtype=torch.bool)
    q = torch.zeros(rows, size, toy.vocab, dtype=torch.float64)
    depth = [0]
    for n, parent in enumerate(parents):
        depth.append(depth[parent + 1] + 1)
        at = context[:, parent + 1]
        q[:, n] = toy.q[at]
        elders = [m for m in range(n) if parents[m] == parent]
        law = q[:, n].clone()
        if kind is Kind.WITHOUT_REPLACEMENT and elders:
            law.scatter_(1, tokens[:, elders], 0.0)
        alive = valid[:, parent + 1] & (law.sum(1) > 0)
        if stop is not None and parent >= 0:
            alive &= tokens[:, parent] != stop
        if kind is Kind.COUPLED:
            x = draws.race(law, depth[parent + 1])
        elif kind is Kind.DETERMINISTIC:
            x = law.argsort(dim=1, descending=True, stable=True)[:, len(elders)]
        else:
            law[~alive] = torch.eye(toy.vocab, dtype=torch.float64)[0]  # nothing is decided for missing nodes
            x = draws.categorical(law, Purpose.DRAFT, n)
        tokens[:, n], valid[:, n + 1], context[:, n + 1] = x, alive, toy.after(at, x)
    tree = Tree(torch.tensor(parents, dtype=torch.int64))
    mask = None if bool(valid.all()) else valid[:, 1:]
    return Proposal(tokens, tree, kind, None if kind is Kind.DETERMINISTIC else q, mask), context


def emitted(proposal: Proposal, verdict: Verdict) -> Tensor:
    """`[R, 1+D+1]`: accepted length, then the tokens of the block, −1 padded."""
    path = verdict.path
    tokens = proposal.tokens.gather(1, path.clamp(min=0)) if path.shape[1] else path
    tokens = torch.cat((torch.where(path >= 0, tokens, -1), torch.full_like(verdict.token[:, None], -1)), 1)
    tokens.scatter_(1, verdict.accepted[:, None], verdict.token[:, None])
    return torch.cat((verdict.accepted[:, None], tokens), 1)


def block_law(toy: Toy, rule: Rule, parents: Sequence[int], kind: Kind, drafter: Drafter = draft) -> dict:
    """Exact law of one block: probability by (accepted, tokens…)."""

    def run(source, sequence):
        draws = source.at(sequence, torch.zeros_like(sequence))
        proposal, context = drafter(toy, parents, kind, draws, len(sequence))
        return emitted(proposal, rule(proposal, toy.p[context], draws))

    return enumerate_law(run)


def output_law(toy: Toy, law: dict) -> Tensor:
    """`[V, …, V]`: the joint law of the first `length` tokens if p goes on after the block."""
    joint = torch.zeros_like(toy.target)
    for (_, *tokens), weight in law.items():
        prefix = tuple(x for x in tokens if x >= 0)
        joint[prefix] += weight * toy.joint_after(prefix)
    return joint


def max_error(toy: Toy, rule: Rule, parents: Sequence[int], kind: Kind, drafter: Drafter = draft) -> float:
    """max |output law − target law| over all sequences of `toy.length` tokens."""
    return float((output_law(toy, block_law(toy, rule, parents, kind, drafter)) - toy.target).abs().max())


def mean_accepted(law: dict) -> float:
    return sum(accepted * weight for (accepted, *_), weight in law.items())


def closed_form(toy: Toy, rule: Rule, parents: Sequence[int], kind: Kind, drafter: Drafter = draft) -> float:
    """The mean of `rule.expected_accepted` over all drafts."""
    total = 0.0

    def run(source, sequence):
        nonlocal total
        draws = source.at(sequence, torch.zeros_like(sequence))
        proposal, context = drafter(toy, parents, kind, draws, len(sequence))
        total += float((source.weight * rule.expected_accepted(proposal, toy.p[context])).sum())
        return proposal.tokens

    enumerate_law(run)
    return total
