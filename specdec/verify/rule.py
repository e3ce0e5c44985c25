"""The contract of a verification rule: a pure function of (proposal, p, random decisions)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.errors import OptionError
from specdec.proposal import Kind, Proposal
from specdec.rng import Draws


@dataclass(frozen=True)
class Verdict:
    """What a rule decided.

    Arguments:
        path: `[B, D]` int64, the accepted nodes from depth 1 downwards, −1 after the last.
        accepted: `[B]` int64, how many nodes of `path` are accepted.
        token: `[B]` int64, the token emitted after them (correction or bonus).
    """

    path: Tensor
    accepted: Tensor
    token: Tensor


class Rule(ABC):
    """A verification rule. Subclasses are found by their folder; a rule is one file and one YAML.

    Class attributes say what `run.py`, the certificate and the documentation need to know.
    """

    name: ClassVar[str]
    paper: ClassVar[str]  # authors, arXiv number, section
    exact: ClassVar[bool]  # whether the emitted tokens follow the target's law
    trees: ClassVar[bool]  # whether proposals wider than a chain are taken
    kinds: ClassVar[frozenset[Kind]]  # the kinds of proposal for which `exact` holds
    coupled: ClassVar[bool] = False  # whether the drafter shall draw with the target's own noise

    @abstractmethod
    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        """Verify a proposal.

        Arguments:
            proposal: the draft, N nodes.
            p: `[B, N+1, V]` the target's law after the root (index 0) and after node n (index n+1), float32 or 64.
            draws: the random decisions of this step.
        """

    def expected_accepted(self, proposal: Proposal, p: Tensor) -> Tensor | None:
        """`[B]` the probability-weighted accepted length given this proposal's laws, where a closed form exists."""
        return None

    def check(self, drafter: str, kind: Kind, is_chain: bool) -> None:
        """Refuse a pairing that would be biased (or that this rule cannot read), at configuration time."""
        if not is_chain and not self.trees:
            raise OptionError("verify", self.name, f"takes chains, but drafter={drafter} proposes trees; use verify=recursive.")
        if kind not in self.kinds:
            allowed = ", ".join(sorted(k.value for k in self.kinds))
            raise OptionError(
                "verify", self.name, f"would be biased for drafter={drafter}, whose proposals are {kind.value}; it takes {allowed}."
            )


def normalise(mass: Tensor, fallback: Tensor) -> Tensor:
    """`mass` `[B, V]` scaled to sum one; rows without mass (rounding only) take `fallback`."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total.where(total > 0, 1.0), fallback)
