"""Typical acceptance: keep what the target finds plausible enough. Not exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import OptionError
from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, Purpose
from specdec.verify.rule import Rule, Verdict, law_at, p_of_tokens


@dataclass(frozen=True)
class TypicalRule(Rule):
    """Accept x iff p(x) > min(ε, δ·exp(−H(p))); of a tree the deepest accepted path, the first among equals.

    Lossy: what it emits does not follow p. Report its measured distance, not a certificate.

    Arguments:
        epsilon: probability that is always enough, in (0, 1].
        delta: fraction of exp(−H(p)), the probability of an average token, that is enough; > 0.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    name = "typical"
    paper = "Medusa, Cai et al. 2401.10774, Section 2.3.1 (typical acceptance)"
    exact = False
    trees = True
    kinds = frozenset(Kind)

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise OptionError("verify.epsilon", self.epsilon, "must lie in (0, 1].")
        if self.delta <= 0:
            raise OptionError("verify.delta", self.delta, "must be > 0.")

    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        node = p.new_full((len(p),), -1, dtype=torch.int64)
        if proposal.size:
            reach = self.accepted_nodes(proposal, p)
            depth = proposal.tree.depth[:, 1:] * reach
            node = torch.where(reach.any(1), depth.argmax(1), node)
        return Verdict.at(proposal.tree, node, draws.categorical(law_at(p, node), Purpose.BONUS))

    def accepted_nodes(self, proposal: Proposal, p: Tensor) -> Tensor:
        """`[B, N]` bool: the nodes that pass and whose ancestors all pass."""
        threshold = torch.full_like(p[..., 0], self.epsilon)  # [B, N+1]
        for v in (proposal.tree.parents.unique() + 1).tolist():
            entropy = torch.special.entr(p[:, v]).sum(-1)
            threshold[:, v] = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        at_parent = torch.atleast_2d(proposal.tree.parents + 1).expand(len(p), -1)
        passes = (p_of_tokens(proposal, p) > threshold.gather(1, at_parent)) & proposal.mask
        return ~(proposal.tree.ancestors[:, 1:, 1:] & ~passes[:, None, :]).any(-1)

    def expected_accepted(self, proposal: Proposal, p: Tensor) -> Tensor:
        if not proposal.size:
            return torch.zeros_like(p[:, 0, 0])
        return (proposal.tree.depth[:, 1:] * self.accepted_nodes(proposal, p)).amax(1).to(p.dtype)
