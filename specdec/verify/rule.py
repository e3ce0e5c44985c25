"""The contract of a verification rule, a pure function of (proposal, p, random decisions), and shared steps.

A row *stands* at a node: the last one accepted so far, −1 being the root.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.errors import OptionError
from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, Purpose
from specdec.tree import Tree


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

    @classmethod
    def at(cls, tree: Tree, node: Tensor, token: Tensor) -> Verdict:
        """Everything from the root down to `node` `[B]` is accepted, then `token` `[B]` is emitted."""
        row = torch.arange(len(node), device=node.device).clamp(
            max=len(tree.depth) - 1
        )  # 0 if one tree for all
        return cls(tree.paths[row, node + 1], tree.depth[row, node + 1], token)


class Rule(ABC):
    """A verification rule. Subclasses are found by their folder; a rule is one file and one YAML.

    Class attributes say what `run.py`, the certificate and the documentation need to know.
    """

    name: ClassVar[str]
    paper: ClassVar[str]  # authors, arXiv number, section
    exact: ClassVar[bool]  # whether the emitted tokens follow the target's law
    trees: ClassVar[bool]  # whether proposals wider than a chain are taken
    kinds: ClassVar[frozenset[Kind]]  # the kinds of proposal it takes; if `exact`, for which it is
    coupled: ClassVar[bool] = False  # whether the drafter shall draw with the target's own noise

    @abstractmethod
    def __call__(self, proposal: Proposal, p: Tensor, draws: Draws) -> Verdict:
        """Verify a proposal.

        Arguments:
            proposal: the draft, N nodes.
            p: `[B, N+1, V]` the target's law after the root (index 0) and after node n (n+1), float32 or 64.
            draws: the random decisions of this step.
        """

    def expected_accepted(self, proposal: Proposal, p: Tensor) -> Tensor | None:
        """`[B]` a closed form of the accepted length along this proposal; `None` where there is none.

        Laws further down depend on the tokens drawn, so it speaks of one proposal: its mean over the
        drafter's draws is E[accepted], and for deterministic proposals it is E[accepted] itself.
        """
        return None

    def acceptance(self, p: Tensor, q: Tensor, drafts: int = 1) -> Tensor | None:
        """`[...]`: how probably a position with laws `[..., V]` takes one of `drafts` i.i.d. candidates."""
        return None

    def check(self, drafter: str, kind: Kind | str, is_chain: bool) -> None:
        """Refuse, at configuration time, a pairing that would be biased or that this rule cannot read.

        A coupled rule makes a sampling drafter draw with its own noise, whatever its `kind`.

        Raises:
            OptionError: it is such a pairing.
        """
        kind = Kind(kind)
        if self.coupled and kind is not Kind.DETERMINISTIC:
            kind = Kind.COUPLED
        if kind is Kind.COUPLED and not self.coupled:
            remedy = (
                f"has no noise in common with drafter={drafter}, whose proposals are coupled to the target's"
            )
            raise OptionError("verify", self.name, f"{remedy}; use verify=gumbel.")
        if not is_chain and not self.trees:
            remedy = f"takes chains, but drafter={drafter} proposes trees; use verify=recursive."
            raise OptionError("verify", self.name, remedy)
        if kind not in self.kinds:
            allowed = ", ".join(sorted(k.value for k in self.kinds))
            reason = f"would be biased for drafter={drafter}, whose proposals are {kind.value}"
            raise OptionError("verify", self.name, f"{reason}; it takes {allowed}.")


def ratio(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q) without 0/0: what the target finds impossible has ratio 0."""
    return torch.where(p < q, p / q, (p > 0).to(p.dtype))


def law_at(p: Tensor, node: Tensor) -> Tensor:
    """`[B, V]`: the target's law after node `node` `[B]` (−1: the root)."""
    return p[torch.arange(len(p), device=p.device), node + 1]


def or_where_empty(mass: Tensor, p: Tensor) -> Tensor:
    """Weights `[B, V]`, but p `[B, V]` in rows where rounding left no mass at all."""
    return torch.where(mass.sum(-1, keepdim=True) > 0, mass, p)


def final_purpose(bonus: Tensor) -> Tensor:
    """`[B]`: whose random numbers draw the emitted token, given where `[B]` it is a bonus."""
    return torch.where(bonus, int(Purpose.BONUS), int(Purpose.RESIDUAL))


def p_of_tokens(proposal: Proposal, p: Tensor) -> Tensor:
    """`[B, N]`: the target's probability of each drafted token at its own position."""
    rows = torch.arange(len(p), device=p.device)[:, None]
    return p[rows, torch.atleast_2d(proposal.tree.parents) + 1, proposal.tokens]


def children(proposal: Proposal, node: Tensor) -> Tensor:
    """`[B, N]` bool: the valid children of the node `[B]` where each row stands."""
    return (proposal.tree.parents == node[:, None]) & proposal.mask


def step_down(node: Tensor, among: Tensor) -> Tensor:
    """`[B]`: the first node `among` `[B, N]`, or `node` `[B]` where there is none."""
    if among.shape[1] == 0:
        return node
    return torch.where(among.any(1), among.to(torch.uint8).argmax(1), node)


def offers(proposal: Proposal, node: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Walk the tree once: each node n in turn, with the rows `[A]` that stand at its parent.

    The caller moves accepting rows down by writing to `node` `[B]`. Parents precede children and siblings are
    in order, so each row is offered its children in the order drawn, then the accepted one's, and so on.
    """
    parents, mask = torch.atleast_2d(proposal.tree.parents), proposal.mask
    for n in range(proposal.size):
        rows = ((parents[:, n] == node) & mask[:, n]).nonzero()[:, 0]
        if len(rows):
            yield n, rows


def follow(
    proposal: Proposal, p: Tensor, draws: Draws, draw: Callable[[Draws, Tensor, int], Tensor]
) -> Verdict:
    """Emit y = `draw(draws, law, depth)` at each depth, and go on while y is a drafted child."""
    node = p.new_full((len(p),), -1, dtype=torch.int64)
    token = torch.empty_like(node)
    rows = torch.arange(len(p), device=p.device)
    for depth in range(proposal.tree.max_depth + 1):
        token[rows] = draw(draws.select(rows), p[rows, node[rows] + 1], depth)
        found = children(proposal, node) & (proposal.tokens == token[:, None])
        rows = rows[found[rows].any(1)]
        if not len(rows):
            break
        node[rows] = step_down(node, found)[rows]
    return Verdict.at(proposal.tree, node, token)
