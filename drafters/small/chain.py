"""A small causal language model drafts a chain; its own cache rolls back with the target's."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.cache import SlotCache
from specdec.distribution import Prefix, distribution
from specdec.drafter import Drafter, Draw
from specdec.model import Model, Output
from specdec.proposal import Kind, Proposal
from specdec.sampling import Sampling
from specdec.sequences import Sequences
from specdec.tokenization import PaddedVocabulary
from specdec.tree import Tree


class SmallDrafter(Drafter):
    """Draws γ tokens one after the other from a small model, with the sampling parameters of the target.

    Arguments:
        model: shares the target's token ids; its vocabulary may be padded differently.
        vocab_size: the target's V, to which q is cut or padded.
        gamma: draft length.
        confidence: a row stops drafting after a token whose draft probability (greedily: that at temperature
            1) is below this (0 = never).
        eos_token_ids: the target's, for `sampling.min_new_tokens`.
    """

    name = "small"
    kind = Kind.WITH_REPLACEMENT
    is_chain = True

    def __init__(
        self,
        model: Model,
        vocab_size: int,
        gamma: int,
        confidence: float = 0.0,
        eos_token_ids: tuple[int, ...] = (),
    ):
        self.model, self.confidence = model, confidence
        self.vocabulary = PaddedVocabulary(vocab_size, model.vocab_size)
        self.eos_token_ids = eos_token_ids
        self.gamma = self.max_nodes = gamma
        self.drafted = 0  # length of the last proposal
        self._last: SlotCache | None = None

    def compile(self, batch: int) -> None:
        self.model.compile(batch)

    def begin(self, sequences: Sequences, output: Output, sampling: Sampling, capacity: int) -> None:
        self.sampling, self.model.compiled = sampling, self.compiled
        self.cache = self._last = self.model.new_cache(sequences.batch, capacity, self.record, self._last)
        longest = int(sequences.prompt_length.max())
        prompts = self.vocabulary.to_drafter(sequences.tokens[:, :longest])
        self.model.prefill(prompts, sequences.prompt_length, self.cache)
        self.unread = [1] * sequences.batch  # committed tokens of each row that the cache does not hold yet

    def propose(self, sequences: Sequences, draw: Draw, depth: int) -> Proposal:
        gamma = self.drafted = min(self.gamma, depth)
        if gamma == 0:
            return Proposal.empty(sequences.batch, sequences.ids.device)
        logits = self._catch_up(sequences)  # [B, 1, V] after the last committed token
        tokens, laws, alive = [], [], []
        going = torch.ones_like(sequences.ids, dtype=torch.bool)
        for i in range(gamma):
            drafted = torch.stack(tokens, 1) if tokens else sequences.tokens[:, :0]
            q = self._law(logits, sequences, drafted)  # [B, V]
            x = draw(only_where(going, q) if self.confidence else q, depth=i + 1, node=i)
            tokens.append(x)
            laws.append(q)
            alive.append(going)
            if self.confidence:
                going = going & (self._chance(logits, q, x) >= self.confidence)
                if not going.any():
                    break
            if i + 1 < gamma:
                logits = self.model.forward(x[:, None], Tree.chain(0, x.device), self.cache).logits
                self.cache.lengths = self.cache.lengths + 1
                self.cache.settle(self.cache.longest + 1)
        self.drafted = len(tokens)
        lengths = torch.stack(alive, 1).sum(1) if self.confidence else None
        kind = Kind.COUPLED if draw.coupled else Kind.WITH_REPLACEMENT
        return Proposal.chain(torch.stack(tokens, 1), torch.stack(laws, 1), kind, lengths)

    def commit(self, sequences: Sequences, path: Tensor, accepted: Tensor, output: Output) -> None:
        emitted = [len(block) for block in sequences.last_block]
        if (
            self.drafted
        ):  # all drafted tokens but the last were fed back: accepted ones among them have been read
            self.unread = [n - min(n - 1, self.drafted - 1) for n in emitted]
        else:
            self.unread = [unread + n for unread, n in zip(self.unread, emitted, strict=True)]

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)
        self.unread = [self.unread[i] for i in rows.tolist()]

    def _catch_up(self, sequences: Sequences) -> Tensor:
        """Read the committed tokens not read yet; logits `[B, 1, V]` after the last of them."""
        cache, most = self.cache, max(self.unread)
        unread = torch.tensor(self.unread, device=sequences.ids.device)
        cache.lengths = sequences.lengths - unread
        cache.settle(sequences.longest - min(self.unread))
        at = cache.lengths[:, None] + torch.arange(most, device=unread.device)
        tokens = sequences.tokens.gather(1, at.clamp(max=sequences.tokens.shape[1] - 1))
        tokens = self.vocabulary.to_drafter(tokens)
        logits = self.model.forward(tokens, Tree.chain(most - 1, unread.device), cache).logits
        cache.lengths = sequences.lengths
        cache.settle(sequences.longest)
        return logits.gather(1, (unread - 1)[:, None, None].expand(-1, 1, logits.shape[-1]))

    def _law(self, logits: Tensor, sequences: Sequences, drafted: Tensor) -> Tensor:
        """q `[B, V]` over the target's vocabulary, processed as the target's law is."""
        logits = self.vocabulary.to_target(logits)
        prefix = None
        if self.sampling.needs_prefix:
            prefix = sequences.prefix(Tree.chain(drafted.shape[1], drafted.device), drafted).last()
        return self._processed(logits, prefix)[:, 0]

    def _chance(self, logits: Tensor, q: Tensor, x: Tensor) -> Tensor:
        """`[B]`: how probable the drawn token was; greedily, as q knows certainties only, by the logits."""
        if self.sampling.greedy:
            q = self.vocabulary.to_target(logits)[:, 0].softmax(-1, dtype=q.dtype)
        return q.gather(1, x[:, None])[:, 0]

    def _processed(self, logits: Tensor, prefix: Prefix | None) -> Tensor:
        """q `[B, T, V]`; where every token is banned token 0 for certain, which the target bans as well."""
        q = distribution(logits, self.sampling, prefix, self.eos_token_ids)
        if prefix is None:
            return q
        certain = torch.zeros_like(q)
        certain[..., 0] = 1.0
        return torch.where(q.isnan().any(-1, keepdim=True), certain, q)


def only_where(wanted: Tensor, q: Tensor) -> Tensor:
    """q `[B, V]`, but a certainty in rows where no token is `wanted` `[B]`: drawing decides nothing."""
    certain = torch.nn.functional.one_hot(torch.zeros_like(wanted, dtype=torch.int64), q.shape[1]).to(q.dtype)
    return torch.where(wanted[:, None], q, certain)
