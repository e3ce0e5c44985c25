"""The draft trees: EAGLE-2's dynamic one, and those of a fixed shape, ranked or drawn. No loop over nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.eagle.growth import Growth
from drafters.eagle.laws import Laws
from drafters.eagle.shape import Level
from specdec.drafter import Draw
from specdec.proposal import Kind, Proposal
from specdec.tree import Tree

ANSWERS_AT_ONCE = {"cpu"}  # of a GPU nothing is asked between two levels: waiting takes longer than a level


@dataclass(frozen=True)
class Copies:
    """What followed the last words the last time they occurred, row by row.

    Arguments:
        tokens: `[B, γ]` int64. length: `[B]` how many of them a row has.
        confidence: `[B, γ]` log probability that all of them up to this one are right.
    """

    tokens: Tensor
    length: Tensor
    confidence: Tensor

    def wrong_by(self, depth: int) -> Tensor:
        """`[B]`: the chance that not all of the first `depth` tokens are there and right."""
        if depth > self.tokens.shape[1]:
            return torch.ones_like(self.confidence[:, 0])
        return torch.where(self.length < depth, 1.0, -self.confidence[:, depth - 1].expm1())


def dynamic_tree(
    growth: Growth,
    best: Callable[[Growth, int], tuple[Tensor, Tensor]],
    depth: int,
    top_k: int,
    nodes: int,
    room: Tensor,
    copies: Copies | None = None,
    stop_below: float = 0.0,
) -> Proposal:
    """EAGLE-2 (2406.16858, sections 4.1 and 4.2): expand by confidence, then keep the most confident nodes.

    A node's score is the product of the chances down to it, in EAGLE-2 the draft's probabilities. On each
    level the `top_k` best nodes get `top_k` children each; of all nodes the `nodes` best stay. What EAGLE-2
    has not: a row gets no further level that is unlikely to be of use.

    Arguments:
        best: given k, the k best children of each node of the last level and their chances (see `Laws`).
        depth: levels.
        room: `[B]` no node of a row is deeper, so that its tree is the same whoever shares its batch.
        copies: one more branch, whose nodes compete with the others by their own confidence.
        stop_below: the least chance, for another level, that the text goes on through the nodes it would
            expand and that the copied branch is wrong by then.
    """
    tokens, scores, parents = [], [], []
    going = room > 0  # [B] rows that get another level
    number, score = None, None  # [B, k] of the nodes to expand; at first the root alone
    first = 0
    for level in range(depth):
        x, probability = best(growth, top_k)  # [B, P, k]
        children = x.shape[2]
        gain = probability.log()
        gain = gain if score is None else score[..., None] + gain
        mother = torch.full_like(x, -1) if number is None else number[..., None].expand_as(x)
        x, gain, mother = x.flatten(1), gain.flatten(1), mother.flatten(1)
        tokens.append(x)
        parents.append(mother)
        scores.append(gain.masked_fill(~going[:, None], -torch.inf))
        if level + 1 == depth:
            break
        score, place = gain.topk(min(top_k, gain.shape[1]), -1)
        of_use = score.exp().sum(1) * (1 if copies is None else copies.wrong_by(level + 2))
        going = going & (level + 1 < room) & (of_use >= stop_below)
        if going.device.type in ANSWERS_AT_ONCE and not going.any():
            break
        growth.grow(x.gather(1, place), place // children)
        number = first + place
        first += x.shape[1]
    score, tree = torch.cat(scores, 1), Tree(torch.cat(parents, 1))
    grown = Proposal(torch.cat(tokens, 1), tree, Kind.DETERMINISTIC, valid=score > -torch.inf)
    if copies is not None:
        length = torch.minimum(copies.length, room)
        grown, at = with_branch(grown, copies.tokens, length, grown.size, depth)
        beyond = growth.memory.slots[: at.shape[1]] >= length[:, None]
        sure = copies.confidence.to(score.dtype).masked_fill(beyond, -torch.inf)
        score = torch.nn.functional.pad(score, (0, at.shape[1]), value=-torch.inf)
        score = score.scatter_reduce(1, at, sure, "amax")
    return most_confident(grown, score, nodes)


def most_confident(proposal: Proposal, score: Tensor, count: int) -> Proposal:
    """The `count` best nodes of each row, each with its parent, as no child scores higher.

    Arguments:
        score: `[B, N]`, −∞ where there is no node.

    Returns:
        In the old order, which puts parents before children; nodes that do not exist come last, so that a
        node's number does not depend on who shares the batch.
    """
    size = proposal.size
    # a stable sort puts a parent before a child of equal score
    best, chosen = score.sort(dim=1, descending=True, stable=True)
    chosen = chosen.masked_fill(best == -torch.inf, size)[:, :count].sort(1).values
    valid = chosen < size
    number = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    number = number.new_full((len(chosen), size + 1), -1).scatter_(1, chosen, number)  # of every old node
    chosen = chosen.clamp(max=size - 1)
    mother = torch.atleast_2d(proposal.tree.parents).expand(len(chosen), -1).gather(1, chosen)
    mother = torch.where(valid & (mother >= 0), number.gather(1, mother.clamp(min=0)), -1)
    return Proposal(proposal.tokens.gather(1, chosen), Tree(mother), proposal.kind, valid=valid)


@dataclass(frozen=True)
class Step:
    """One level of a fixed shape, on the device (see `Level`).

    Arguments:
        parent, rank, expanded: as in `Level`.
        width: most children of a node. counts: how many parents have more than s children, for s = 0, 1, …
        keep: for s = 1, 2, …, which of the parents with more than s−1 children have more than s.
    """

    first: int
    parent: Tensor
    rank: Tensor
    expanded: Tensor
    counts: tuple[int, ...]
    keep: tuple[Tensor, ...]

    @property
    def width(self) -> int:
        return len(self.counts)


class FixedShape:
    """A static tree on a device.

    Arguments:
        levels: from `levels_of`.
    """

    def __init__(self, levels: Sequence[Level], device: torch.device):
        def tensor(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.steps, self.trees = [], []
        parents: list[int] = []
        for level in levels:
            parents += level.parents
            ranks = range(max(level.rank) + 1)
            having = [[p for p, r in zip(level.parent, level.rank, strict=True) if r == s] for s in ranks]
            keep = [
                [elder.index(p) for p in younger if p in elder]  # ranks have gaps only where nothing is drawn
                for elder, younger in zip(having, having[1:], strict=False)
            ]
            self.steps.append(
                Step(
                    level.first,
                    tensor(level.parent),
                    tensor(level.rank),
                    tensor(level.expanded),
                    tuple(map(len, having)),
                    tuple(map(tensor, keep)),
                )
            )
            self.trees.append(Tree(tensor(parents)))
        self.drafted = sum(len(level.expanded) for level in levels)


def fixed_tree(growth: Growth, laws: Laws, shape: FixedShape, depth: int, kind: Kind, draw: Draw) -> Proposal:
    """A tree of a given shape: each node's best tokens in their order, or tokens drawn from its law."""
    tokens, exists, declared = [], [], []
    alive = torch.ones_like(growth.sequences.root, dtype=torch.bool)  # [B, P] the expanded nodes that exist
    for level, step in enumerate(shape.steps[:depth]):
        if kind is Kind.DETERMINISTIC:
            best, probability = laws.best(growth, step.width)
            x = best[:, step.parent, step.rank]
            there = (probability[:, step.parent, step.rank] > 0) & alive[:, step.parent]
        else:
            q = laws.full(growth)
            x, there = siblings(q, alive, step, kind, draw, level + 1)
            declared.append(q[:, step.parent])
        tokens.append(x)
        exists.append(there)
        if level + 1 < min(depth, len(shape.steps)):
            alive = there[:, step.expanded]
            growth.grow(x[:, step.expanded], step.parent[step.expanded].expand_as(alive))
    tree = shape.trees[min(depth, len(shape.steps)) - 1]
    q = torch.cat(declared, 1) if declared else None
    return Proposal(torch.cat(tokens, 1), tree, kind, q, torch.cat(exists, 1))


def siblings(
    q: Tensor, alive: Tensor, step: Step, kind: Kind, draw: Draw, depth: int
) -> tuple[Tensor, Tensor]:
    """Draw one level: the eldest child of every node, then the second ones, and so on.

    Arguments:
        q: `[B, P, V]` the expanded nodes' laws. alive: `[B, P]` which of them exist.

    Returns:
        tokens `[B, W]` and which exist `[B, W]`: distinct siblings run out with the support of q.
    """
    law, going = q, alive
    certain = torch.zeros_like(q[:, :1])
    certain[..., 0] = 1.0
    tokens, exists, first = [], [], step.first
    for s, count in enumerate(step.counts):
        if s:
            law, going = law[:, step.keep[s - 1]], going[:, step.keep[s - 1]]
        # where no node is wanted the draw is a certainty, so that it decides nothing
        x = draw(torch.where(going[..., None], law, certain), depth, first)  # [B, count]
        tokens.append(x)
        exists.append(going)
        first += count
        if kind is not Kind.WITH_REPLACEMENT and s + 1 < step.width:
            law = law.scatter(2, x[..., None], 0.0)
            mass = law.sum(2, keepdim=True)
            going, law = going & (mass[..., 0] > 0), law / torch.where(mass > 0, mass, 1.0)
    return torch.cat(tokens, 1), torch.cat(exists, 1)


def with_branch(
    proposal: Proposal, branch: Tensor, length: Tensor, first: int, levels: int
) -> tuple[Proposal, Tensor]:
    """Graft a chain onto a deterministic tree; where it runs along the tree, the tree's nodes are used.

    Arguments:
        branch: `[B, γ]` int64. length: `[B]`, how many of them each row has.
        first: number of the first grafted node, at least N: the same in every step, whoever shares the batch.
        levels: depth of the tree.

    Returns:
        The grown tree, and `[B, γ]` the nodes that the chain runs over.
    """
    tokens, mask = proposal.tokens, proposal.mask
    parents = torch.atleast_2d(proposal.tree.parents).expand_as(tokens)
    if lacking := first - proposal.size:
        tokens, mask = (torch.nn.functional.pad(t, (0, lacking)) for t in (tokens, mask))
        parents = torch.nn.functional.pad(parents, (0, lacking), value=-1)
    step = torch.arange(branch.shape[1], device=branch.device)
    at = (first + step).repeat(len(branch), 1)  # the nodes of the chain, if all of them are new
    above = torch.full_like(branch[:, :1], -1)
    for i in range(min(levels, branch.shape[1])):
        same = (parents == above) & (tokens == branch[:, i : i + 1]) & mask
        found, node = same.max(1)
        above = at[:, i : i + 1] = torch.where(found, node, at[:, i])[:, None]
    hangs = torch.nn.functional.pad(at[:, :-1], (1, 0), value=-1)
    new = (step < length[:, None]) & (at == first + step)
    grown = Proposal(
        torch.cat([tokens, branch], 1),
        Tree(torch.cat([parents, hangs], 1)),
        Kind.DETERMINISTIC,
        valid=torch.cat([mask, new], 1),
    )
    return grown, at
