"""Expected accepted lengths of top-down rules, from the chance each node has once its turn comes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.proposal import Proposal
from specdec.rng import Draws, Purpose
from specdec.verify.rule import p_of_tokens


def elders(proposal: Proposal) -> Tensor:
    """`[1 or B, N, N]` bool: entry [n, m] says whether m is an older sibling of n."""
    parents = torch.atleast_2d(proposal.tree.parents)
    older = torch.ones(proposal.size, proposal.size, dtype=torch.bool, device=parents.device).tril(-1)
    return (parents[:, :, None] == parents[:, None, :]) & older


def accepted_after_elders(proposal: Proposal, chance: Tensor) -> Tensor:
    """`[B]` E[accepted], `chance` `[B, N]` being a node's once its parent is accepted, its elders refused."""
    refused = torch.where(elders(proposal), 1.0 - chance[:, None, :], 1.0).prod(-1)
    return accepted_along_paths(proposal, chance * refused)


def accepted_along_paths(proposal: Proposal, chance: Tensor) -> Tensor:
    """`[B]` E[accepted], `chance` `[B, N]` being a node's if its parent is accepted."""
    parents = torch.atleast_2d(proposal.tree.parents).expand_as(chance) + 1
    reach = (
        torch.cat((torch.ones_like(chance[:, :1]), chance), 1)
        if proposal.size
        else chance.new_ones(len(chance), 1)
    )
    for n in range(proposal.size):
        reach[:, n + 1] *= reach.gather(1, parents[:, n, None])[:, 0]
    return reach[:, 1:].sum(1)


def accepted_if_drawn(proposal: Proposal, p: Tensor) -> Tensor:
    """`[B]` E[accepted] of the rules that draw y ~ p and descend while y is a child."""
    same = proposal.tokens[:, :, None] == proposal.tokens[:, None, :]
    repeated = (elders(proposal) & same & proposal.mask[:, None, :]).any(-1)
    return accepted_along_paths(proposal, p_of_tokens(proposal, p) * proposal.mask * ~repeated)


def chances(
    walk: Callable[[Proposal, Tensor, Draws, Tensor], object], proposal: Proposal, p: Tensor
) -> Tensor:
    """`[B, N]`: each node's chance once its parent is accepted, its elders refused, read off a rule.

    Arguments:
        walk: (proposal, p, draws, node `[B]`) → anything; the rule, starting at `node`.
    """
    noted = _Refusal(p.new_zeros(proposal.tokens.shape), torch.arange(len(p), device=p.device))
    for parent in proposal.tree.parents.unique().tolist():
        walk(proposal, p, noted, torch.full((len(p),), parent, device=p.device))
    return noted.chance


class _Refusal:
    """`Draws` that refuse every candidate and note the chance it had."""

    def __init__(self, chance: Tensor, rows: Tensor):
        self.chance, self.rows = chance, rows

    def bernoulli(self, probability: Tensor, purpose: int = Purpose.ACCEPT, index: int = 0) -> Tensor:
        columns = probability.reshape(len(self.rows), -1)
        nodes = slice(index, index + columns.shape[1])
        self.chance[self.rows, nodes] = torch.maximum(self.chance[self.rows, nodes], columns)
        return torch.zeros_like(probability, dtype=torch.bool)

    def categorical(self, probs: Tensor, purpose: int | Tensor, index: int = 0) -> Tensor:
        return probs.argmax(-1)

    def race(self, probs: Tensor, depth: int) -> Tensor:
        return probs.argmax(-1)

    def select(self, rows: Tensor) -> _Refusal:
        return _Refusal(self.chance, self.rows[rows])
