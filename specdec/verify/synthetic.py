"""Synthetic acceptance: accept with given probabilities, to time random weights. Not exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.errors import OptionError
from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, Purpose
from specdec.verify.rule import Rule, Verdict, children, law_at, step_down


@dataclass(frozen=True)
class SyntheticRule(Rule):
    """Accept a node's first child with probability `acceptance[depth]`, then emit y ~ p.

    Lossy by design. E[accepted] = a₁ + a₁a₂ + … down to the end of the first path.

    Arguments:
        rates: acceptance probability by depth, given that the position before was accepted; its last entry
            holds for all deeper positions.
    """

    rates: Sequence[float] = field(default=(0.7,))

    name = "synthetic"
    paper = "none: a stand-in with a prescribed acceptance rate"
    exact = False
    trees = True
    kinds = frozenset(Kind)

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise OptionError(
                "verify.rates", list(self.rates), "must be one or more probabilities in [0, 1]."
            )

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        node = p.new_full((len(p),), -1, dtype=torch.int64)
        chance = self._by_depth(proposal, p)
        go_on = draws.bernoulli(chance.expand(len(p), -1), Purpose.ACCEPT).long().cumprod(1).bool()
        for depth in range(proposal.tree.max_depth):
            node = step_down(node, children(proposal, node) & go_on[:, depth, None])
        return Verdict.at(proposal.tree, node, draws.categorical(law_at(p, node), Purpose.BONUS))

    def _by_depth(self, proposal: Proposal, p: Tensor) -> Tensor:
        """`[D]`: the acceptance probability at each depth."""
        depth = proposal.tree.max_depth
        rates = [self.rates[min(i, len(self.rates) - 1)] for i in range(depth)]
        return torch.tensor(rates, dtype=p.dtype).to(p.device, non_blocking=True)

    def expected_accepted(self, proposal: Proposal, p: Tensor) -> Tensor:
        node, reach = p.new_full((len(p),), -1, dtype=torch.int64), torch.ones_like(p[:, 0, 0])
        total = torch.zeros_like(reach)
        for chance in self._by_depth(proposal, p):
            young = children(proposal, node)
            node, reach = step_down(node, young), reach * chance * young.any(1)
            total += reach
        return total
