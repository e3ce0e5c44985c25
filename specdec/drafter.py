"""The contract of a drafter: what the engine asks of whatever proposes tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from specdec.graphs import Record
from specdec.model import Output
from specdec.proposal import Kind, Proposal
from specdec.rng import Draws, PhiloxDraws, Purpose
from specdec.sampling import Sampling
from specdec.sequences import Sequences


class Draw:
    """How a drafter turns a law into a token; a sampling drafter must draw through it and nothing else.

    Arguments:
        draws: the step's random decisions.
        coupled: draw with the target's own noise (`verify=gumbel`).
    """

    def __init__(self, draws: Draws, coupled: bool = False):
        self.draws, self.coupled = draws, coupled

    def __call__(self, q: Tensor, depth: int, node: int) -> Tensor:
        """Draw node number `node` at tree depth `depth` (1 = first drafted token) from `q` `[B, V]` → `[B]`.

        K nodes of one depth, numbered from `node` on, are drawn at once from `q` `[B, K, V]` → `[B, K]`.
        """
        return (
            self.draws.race(q, depth - 1) if self.coupled else self.draws.categorical(q, Purpose.DRAFT, node)
        )

    def noise(self, vocab: int, depth: int, device: torch.device) -> Tensor:
        """E `[B, V]` ~ Exp(1) on which the target's token of depth `depth` will win, with `coupled`."""
        assert self.coupled and isinstance(self.draws, PhiloxDraws)
        return self.draws.noise(vocab, depth - 1, device)


class Drafter(ABC):
    """Proposes token trees.

    The engine calls `begin` once per batch, then `propose` and `commit` in turn, and `select` when rows
    finish. `propose` must be a pure function of the drafter's state: called twice with the same draws it
    proposes the same.

    Attributes:
        name: as in `drafter=…`.
        kind: how its tokens are drawn; a rule refuses what it would bias.
        is_chain: whether every proposal is a chain.
        max_nodes: the most nodes a proposal can have.
        features: layers whose hidden states `commit` wants to see in `Output.features` (see
            `Model.features`).
        compiled: set by the engine before `begin`: whether networks are to run as `compile` made them.
        record: set likewise: how their forwards are recorded, if they are to be.
        bytes_read: of weights so far; `None` = what its modules' forwards read, which are watched.
    """

    name: str
    kind: Kind = Kind.DETERMINISTIC
    is_chain: bool = True
    max_nodes: int = 0
    features: tuple[int, ...] = ()
    compiled: bool = False
    record: Record | None = None
    bytes_read: int | None = None

    def compile(self, batch: int) -> None:  # noqa: B027 - a drafter without networks has nothing to do
        """Make its networks ready to run compiled, for batches of up to `batch` rows.

        Raises:
            OptionError: they cannot be compiled.
        """

    @abstractmethod
    def begin(self, sequences: Sequences, output: Output, sampling: Sampling, capacity: int) -> None:
        """A new batch: prompts have been read and the first token is committed.

        Arguments:
            sequences: prompt + first token of each row.
            output: the prefill's output.
            sampling: what the drafter's own law should be processed with.
            capacity: slots per row that a cache of the drafter's may need.
        """

    @abstractmethod
    def propose(self, sequences: Sequences, draw: Draw, depth: int) -> Proposal:
        """Draft after the last committed token, at most `depth` ≥ 0 tokens deep: no row has room for more."""

    @abstractmethod
    def commit(self, sequences: Sequences, path: Tensor, accepted: Tensor, output: Output) -> None:
        """The last proposal was verified and `sequences` has grown.

        Arguments:
            sequences: with the emitted tokens appended (`last_block` on the host).
            path: `[B, D]` accepted nodes, −1 padded; accepted: `[B]` how many.
            output: the target's output over root and nodes.
        """

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Only these rows (int64 indices) go on."""


class NoDrafter(Drafter):
    """Proposes nothing: speculative decoding without a draft is autoregressive decoding."""

    name = "none"

    def begin(self, sequences: Sequences, output: Output, sampling: Sampling, capacity: int) -> None:
        pass

    def propose(self, sequences: Sequences, draw: Draw, depth: int) -> Proposal:
        return Proposal.empty(sequences.batch, sequences.ids.device)

    def commit(self, sequences: Sequences, path: Tensor, accepted: Tensor, output: Output) -> None:
        pass

    def select(self, rows: torch.Tensor) -> None:
        pass
