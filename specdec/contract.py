"""The drafter contract at run time (`engine.check_contract=true`): is the draft what it says it is?"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.drafter import Drafter, Draw
from specdec.errors import ContractViolation
from specdec.proposal import Kind, Proposal
from specdec.rng import PhiloxSource
from specdec.sequences import Sequences


class _Recorder(Draw):
    """Remembers what each node was drawn from and what came out."""

    def __init__(self, draw: Draw):
        super().__init__(draw.draws, draw.coupled)
        self.drawn: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, q: Tensor, depth: int, node: int) -> Tensor:
        token = super().__call__(q, depth, node)
        laws, tokens = (q, token) if q.dim() == 3 else (q[:, None], token[:, None])
        for k in range(laws.shape[1]):
            self.drawn[node + k] = (laws[:, k].clone(), tokens[:, k])
        return token


def check_proposal(
    drafter: Drafter, proposal: Proposal, sequences: Sequences, draw: Draw, depth: int, step: int
) -> None:
    """Draft again and compare with what was declared.

    Raises:
        ContractViolation: names the drafter, the step and the broken promise.
    """

    def demand(holds: bool, promise: str) -> None:
        if not holds:
            raise ContractViolation(f"drafter={drafter.name} broke its contract at step {step}: {promise}.")

    if proposal.size == 0:
        return
    kind = Kind.COUPLED if draw.coupled and drafter.kind is not Kind.DETERMINISTIC else drafter.kind
    mask, tree = proposal.mask, proposal.tree
    demand(proposal.kind is kind, f"it declares {kind.value} but proposes {proposal.kind.value}")
    is_chain = (tree.parents == torch.arange(-1, tree.size - 1, device=mask.device)) | ~mask
    demand(bool(is_chain.all()) or not drafter.is_chain, "it declares chains but proposes a tree")
    demand(
        proposal.size <= drafter.max_nodes,
        f"{proposal.size} nodes are more than max_nodes={drafter.max_nodes}",
    )
    demand(tree.max_depth <= depth, f"it drafts deeper than asked ({depth})")
    parents = torch.atleast_2d(tree.parents).expand_as(proposal.tokens)
    parent_exists = torch.where(parents < 0, True, mask.gather(1, parents.clamp(min=0)))
    demand(bool((parent_exists | ~mask).all()), "a node exists whose parent does not")

    if kind is Kind.DETERMINISTIC:
        other = PhiloxSource(0x9E3779B97F4A7C15).at(sequences.ids, sequences.lengths)
        again = drafter.propose(sequences, Draw(other, draw.coupled), depth)
        demand(proposal.q is None, "deterministic tokens have no q")
        demand(
            _same(proposal, again),
            "its tokens depend on more than the context, so they are not deterministic",
        )
    else:
        recorder = _Recorder(draw)
        again = drafter.propose(sequences, recorder, depth)
        demand(_same(proposal, again), "proposing twice with the same draws gives two proposals")
        for node in range(proposal.size):
            rows = mask[:, node]
            if not rows.any():
                continue
            if kind is Kind.COUPLED and node not in recorder.drawn:
                continue  # ranked by the target's noise: no rule that takes it can be biased by it
            demand(node in recorder.drawn, f"node {node} was not drawn from the engine's random source")
            q, token = recorder.drawn[node]
            demand(
                torch.equal(token[rows], proposal.tokens[rows, node]),
                f"node {node} is not the token that was drawn",
            )
            if kind is not Kind.COUPLED:
                demand(proposal.q is not None, "sampled tokens need their q")
                assert proposal.q is not None
                declared = _declared(proposal, node)
                demand(
                    torch.allclose(q[rows].to(declared.dtype), declared[rows], rtol=1e-5, atol=1e-7),
                    f"node {node} was drawn from another law than the declared q",
                )
    if kind in (Kind.DETERMINISTIC, Kind.WITHOUT_REPLACEMENT):
        same = (proposal.tokens[:, :, None] == proposal.tokens[:, None, :]) & (
            parents[:, :, None] == parents[:, None, :]
        )
        both = (
            mask[:, :, None]
            & mask[:, None, :]
            & ~torch.eye(proposal.size, dtype=torch.bool, device=mask.device)
        )
        demand(not bool((same & both).any()), "two siblings carry the same token")


def _same(a: Proposal, b: Proposal) -> bool:
    return (
        a.tokens.shape == b.tokens.shape
        and torch.equal(a.mask, b.mask)
        and torch.equal(a.tree.parents, b.tree.parents)
        and torch.equal(a.tokens[a.mask], b.tokens[b.mask])
    )


def _declared(proposal: Proposal, node: int) -> Tensor:
    """The law `[B, V]` that node was declared to be drawn from: q, elders zeroed if without replacement."""
    assert proposal.q is not None
    law = proposal.q[:, node]
    if proposal.kind is not Kind.WITHOUT_REPLACEMENT:
        return law
    parents = torch.atleast_2d(proposal.tree.parents).expand_as(proposal.tokens)
    earlier = (parents[:, :node] == parents[:, node : node + 1]) & proposal.mask[:, :node]  # [B, node]
    law = law.clone()
    for sibling in range(node):
        rows = earlier[:, sibling].nonzero()[:, 0]
        law[rows, proposal.tokens[rows, sibling]] = 0.0
    return law / law.sum(-1, keepdim=True)
