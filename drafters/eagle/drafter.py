"""EAGLE drafts from the target's own hidden states, seen in the forward that verifies.

What was drafted from approximated states is never kept: after every verification the accepted tokens are read
again with the target's true features, in the one forward that the next draft needs anyway.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from drafters import budget
from drafters.eagle.checkpoint import load_drafter
from drafters.eagle.config import Config
from drafters.eagle.growth import Forward, Growth, Memory, eager, try_out
from drafters.eagle.laws import Laws
from drafters.eagle.model import EagleModel
from drafters.eagle.shape import built_in_paths, chain_paths, levels_of
from drafters.eagle.trees import Copies, FixedShape, dynamic_tree, fixed_tree, with_branch
from drafters.ngram.drafter import NgramIndex
from specdec.compiled import compiled, try_sizes
from specdec.drafter import Drafter, Draw
from specdec.model import Model, Output
from specdec.products import prepare
from specdec.proposal import Kind, Proposal
from specdec.sampling import Sampling
from specdec.sequences import Sequences

KINDS = {
    "top_k": Kind.DETERMINISTIC,
    "with_replacement": Kind.WITH_REPLACEMENT,
    "without_replacement": Kind.WITHOUT_REPLACEMENT,
    "coupled": Kind.COUPLED,
}
NGRAM = 4  # longest match looked for
LONGEST = 16  # that is told from longer ones
# After n matching words a copy goes on rightly n times in n + 1.6 if greedy, in n + 3.5 at temperature 1
# (measured, LOG.md): doubt at temperature 0, and what temperature adds.
DOUBT = 1.6, 1.9


class EagleDrafter(Drafter):
    """Drafts trees with an EAGLE network.

    Arguments:
        model: the network, attached to the target.
        config: shape of the draft and how its tokens are chosen.
        target: for its vocabulary and end-of-sequence tokens.
    """

    name = "eagle"

    def __init__(self, model: EagleModel, config: Config, target: Model):
        self.model, self.config, self.kind = model, config, KINDS[config.siblings]
        self.vocab_size, self.eos_token_ids = target.vocab_size, target.eos_token_ids
        self.features = model.architecture.feature_layers
        self.top_k = min(config.top_k, model.architecture.draft_vocab_size)
        self.nodes = budget.nodes(config, target)
        self.shape: FixedShape | None = None
        if config.mode == "dynamic":
            k, below = self.top_k, config.depth - 1  # levels below the first
            self.depth, self.drafted = config.depth, k * below
            candidates = k + below * k * k + (config.ngram_gamma if config.copies else 0)
            self.max_nodes = self.tree_nodes = min(self.nodes, candidates)
            widest = min(k, self.nodes)
        else:
            levels = levels_of(self._paths())
            self.shape = FixedShape(levels, target.device)
            self.depth, self.drafted = len(levels), self.shape.drafted
            self.tree_nodes = sum(level.size for level in levels)
            self.max_nodes = self.tree_nodes + (config.ngram_gamma if config.copies else 0)
            widest = max(level.size for level in levels)
        self.is_chain = widest == 1 and not config.copies
        self.indices: list[NgramIndex] = []
        self._last: Memory | None = None
        self._compiled: Forward | None = None
        self._ready: set[int] = set()  # batch sizes that have been compiled for

    @torch.inference_mode()
    def compile(self, batch: int) -> None:
        prepare(self.model, self.model.head[0])
        run = self._compiled = self._compiled or compiled(eager)
        try_sizes(lambda rows: try_out(self.model, run, rows), batch, self._ready)

    def begin(self, sequences: Sequences, output: Output, sampling: Sampling, capacity: int) -> None:
        device = sequences.ids.device
        slots = sequences.tokens.shape[1] + max(self.drafted, self.depth) + self.max_nodes + 1
        run = self._compiled if self.compiled and self._compiled else eager
        self.memory = self._last = Memory(
            self.model, sequences.batch, slots, device, run, self.record, self._last
        )
        self.laws = Laws(self.model, self.vocab_size, sampling, self.eos_token_ids)
        self.doubt = DOUBT[0] + DOUBT[1] * sampling.temperature
        self.unread = [
            output.features[layer] for layer in self.features
        ]  # of tokens whose entries are missing
        self.count: Tensor | None = (
            sequences.prompt_length.clone()
        )  # [B] how many; None = no entry is missing
        self.longest = int(sequences.longest) - 1
        self._catch_up(sequences)
        if self.config.copies:
            sizes = range(max(NGRAM, self.config.ngram_min), self.config.ngram_min - 1, -1)
            self.indices = [NgramIndex(sizes) for _ in range(sequences.batch)]
            for index, prompt, block in zip(
                self.indices, sequences.prompts, sequences.last_block, strict=True
            ):
                index.extend([*prompt, *block])

    @torch.inference_mode()
    def propose(self, sequences: Sequences, draw: Draw, depth: int) -> Proposal:
        self._catch_up(sequences)
        levels = min(self.depth, depth)
        if levels == 0:
            return Proposal.empty(sequences.batch, sequences.ids.device)
        kind = Kind.COUPLED if draw.coupled and self.kind is not Kind.DETERMINISTIC else self.kind
        growth = Growth(self.memory, self.root, sequences, self.drafted)
        copies = self._copies(depth) if self.indices else None
        if self.shape is None:
            room = sequences.room - 1
            best = self.laws.best
            if kind is Kind.COUPLED:
                best = partial(self.laws.likely_winners, draw=draw)
            proposal = dynamic_tree(
                growth, best, levels, self.top_k, self.tree_nodes, room, copies, self.config.stop_below
            )
            proposal = replace(proposal, kind=kind)
        else:
            proposal = fixed_tree(growth, self.laws, self.shape, levels, kind, draw)
            if copies is not None:
                proposal, _ = with_branch(proposal, copies.tokens, copies.length, self.tree_nodes, levels)
        growth.close()
        return proposal

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return self.model.bytes_read

    def commit(self, sequences: Sequences, path: Tensor, accepted: Tensor, output: Output) -> None:
        self._catch_up(sequences)
        width = max(map(len, sequences.last_block))
        nodes = torch.cat([torch.zeros_like(accepted)[:, None], path + 1], 1)[
            :, :width
        ]  # the root, then the path
        index = nodes.clamp(min=0)[..., None]
        features = (output.features[layer] for layer in self.features)
        self.unread = [f.gather(1, index.to(f.device).expand(-1, -1, f.shape[2])) for f in features]
        self.count, self.longest = accepted + 1, sequences.longest - 1
        for index_, block in zip(self.indices, sequences.last_block, strict=False):
            index_.extend(block)

    def select(self, rows: Tensor) -> None:
        self.memory.cache.select(rows)
        self.unread = [f[rows.to(f.device)] for f in self.unread]
        self.count = None if self.count is None else self.count[rows]
        self.root = self.root[rows]
        self.indices = [self.indices[i] for i in rows.tolist()] if self.indices else []

    def _catch_up(self, sequences: Sequences) -> None:
        """Read what has been committed since, from the target's true features."""
        if self.count is None:
            return
        base, width = self.memory.cache.lengths, self.unread[0].shape[1]
        at = base[:, None] + 1 + self.memory.slots[:width]  # entry i holds token i+1
        tokens = sequences.tokens.gather(1, at.clamp(max=sequences.tokens.shape[1] - 1))
        self.root = self.memory.read(tokens, self.unread, self.count, self.longest)
        self.unread, self.count = [], None

    def _copies(self, depth: int) -> Copies | None:
        """What followed the last words the last time they occurred, if any row's occurred before."""
        found, matched = [], []
        for index in self.indices:
            at, size = index.match(LONGEST)
            found.append(index.text[at : at + min(self.config.ngram_gamma, depth)])
            matched.append(size)
        width = max(map(len, found))
        if width == 0:
            return None
        device = self.root.device
        tokens = torch.tensor([c + [0] * (width - len(c)) for c in found], device=device)
        size = torch.tensor(matched, device=device)[:, None] + self.memory.slots[:width]
        confidence = (size / (size + self.doubt)).log().cumsum(1)
        return Copies(tokens, torch.tensor([len(c) for c in found], device=device), confidence)

    def _paths(self) -> list[tuple[int, ...]]:
        config = self.config
        if config.mode == "chain":
            return chain_paths(config.depth)
        paths = [tuple(p) for p in config.tree] or built_in_paths(config.depth, self.top_k, self.nodes)
        vocab = self.model.architecture.draft_vocab_size
        return [p for p in paths if max(p) < vocab]


def build(config: Config, target: Model) -> EagleDrafter:
    return EagleDrafter(load_drafter(config, target), config, target)
