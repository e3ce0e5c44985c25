"""The decode loop: draft → verify → commit. Autoregressive decoding is the same loop with an empty draft."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import count

import torch

from specdec.batch import Batch, Generation, TokenCallback
from specdec.cache import SlotCache
from specdec.config import EngineConfig
from specdec.contract import check_proposal
from specdec.distribution import distribution
from specdec.drafter import Drafter, Draw, NoDrafter
from specdec.errors import NumericalError, OptionError
from specdec.graphs import Record, on_cuda
from specdec.ledger import Clock, Ledger
from specdec.model import Model
from specdec.proposal import Kind, Proposal
from specdec.rng import PhiloxSource, RandomSource
from specdec.sampling import Sampling
from specdec.verify import Rule


class Engine:
    """Decodes batches of prompts with one target, drafter and rule.

    Arguments:
        target: the target model.
        drafter: what proposes; `None` decodes autoregressively.
        rule: the verification rule.
        sampling: the law to sample from.
        config: lengths, stop strings and so on.
        source: the random source, or a seed for the shipping one.
        on_tokens: called with (sequence, tokens) as soon as the host has read them (`config.read_every`).
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None,
        rule: Rule,
        sampling: Sampling | None = None,
        config: EngineConfig | None = None,
        source: RandomSource | int = 0,
        on_tokens: TokenCallback | None = None,
    ):
        self.target, self.drafter, self.rule = target, drafter or NoDrafter(), rule
        self.sampling, self.config = sampling or Sampling(), config or EngineConfig()
        self.source: RandomSource = PhiloxSource(source) if isinstance(source, int) else source
        self.on_tokens = on_tokens
        self.ledger = Ledger()
        self.coupled = rule.coupled and self.drafter.kind is not Kind.DETERMINISTIC
        rule.check(self.drafter.name, self.drafter.kind, self.drafter.is_chain)
        if self.config.stop and target.tokenizer is None:
            raise OptionError("engine.stop", self.config.stop, "stop strings need a target with a tokenizer.")
        width, needed = self.config.fixed_width, self.drafter.max_nodes + 1
        if width is not None and width < needed:
            remedy = f"is too narrow: the root and the draft of drafter={self.drafter.name} need {needed}."
            raise OptionError("engine.fixed_width", width, remedy)
        for words in self.sampling.bad_words:
            self._refuse_unknown_tokens("sampling.bad_words", words)
        if isinstance(source, int) and not 0 <= source < 2**64:  # from Python; run.py has seen to it
            raise OptionError("seed", source, "must lie between 0 and 2^64 − 1.")
        self.eos_token_ids = () if self.config.ignore_eos else target.eos_token_ids
        mode = self.config.compile
        self.compiled = mode == "on" or (mode == "auto" and target.gains_by_compiling)
        self.record = self._recording(mode)
        self.read_every = 1
        if isinstance(self.drafter, NoDrafter):
            self.read_every = self.config.read_every or (1 if target.device.type == "cpu" else 4)
        self._idle: SlotCache | None = None  # a cache with recorded forwards, for the next batch
        batch = self.config.batch_size
        self.compiled = self.compiled and self._compile(target, batch)
        self.drafts_compiled = self.compiled and self._compile(self.drafter, batch)
        on_cpu = target.device.type == "cpu"
        if self.compiled and on_cpu and rule.coupled and isinstance(self.source, PhiloxSource):
            self._compile(self.source, target.vocab_size)

    def _recording(self, mode: str) -> Record | None:
        """How forwards are recorded: as CUDA graphs with `graphs`, and where there is CUDA with `on`.

        Raises:
            OptionError: `graphs`, and they cannot be.
        """
        device = self.target.device
        if mode == "graphs" and device.type != "cuda":
            raise OptionError("engine.compile", mode, f"needs CUDA, the target is on {device}; use auto.")
        if mode not in ("graphs", "on") or device.type != "cuda":
            return None
        if self.target.is_spread:
            raise OptionError("engine.compile", mode, "the target is spread over devices; use off.")
        return on_cuda(device)

    def _compile(self, part: Model | Drafter | PhiloxSource, size: int) -> bool:
        """Compile a part for batches of up to `size` rows, the noise for `size` tokens; whether it runs so.

        Raises:
            OptionError: `compile="on"`, and it cannot.
        """
        try:
            part.compile(size)
        except OptionError as error:
            if self.config.compile == "on":
                raise
            warnings.warn(f"{part.name or 'the target'} is not compiled: {error.remedy}", stacklevel=3)
            return False
        return True

    def room(self, prompt: list[int]) -> int:
        """How many new tokens `prompt` may get.

        Raises:
            OptionError: the prompt is empty, fills the context or holds a token that the target has not.
        """
        if not prompt:
            raise OptionError("prompts", "[]", "a prompt is empty; give it at least one token.")
        left = self.target.context_length - len(prompt)
        if left < 1:
            raise OptionError(
                "prompts",
                f"<{len(prompt)} tokens>",
                f"fills the target's context of {self.target.context_length} tokens; shorten it.",
            )
        self._refuse_unknown_tokens("prompts", prompt)
        return min(self.config.max_new_tokens, left)

    def generate(self, prompts: list[list[int]], ids: list[int] | None = None) -> list[Generation]:
        """Decode all prompts, `batch_size` at a time; results in the order of the prompts.

        Arguments:
            prompts: token ids.
            ids: each prompt's identity in the random source, all different; its number if not given.

        Raises:
            NumericalError: there is nothing to draw from; its `finished` holds what was complete by then.
        """
        ids = list(range(len(prompts))) if ids is None else ids
        if len(set(ids)) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many different ids, not {ids}")
        for prompt in prompts:
            self.room(prompt)
        done: dict[int, Generation] = {}
        size = self.config.batch_size
        try:
            for start in range(0, len(prompts), size):
                for generation in self.decode(prompts[start : start + size], ids[start : start + size]):
                    done[generation.sequence] = generation
        except NumericalError as error:
            error.finished = list(done.values())
            raise
        return [done[i] for i in ids]

    def _refuse_unknown_tokens(self, option: str, tokens: list[int]) -> None:
        vocab = self.target.vocab_size
        if unknown := [x for x in tokens if not 0 <= x < vocab]:
            raise OptionError(option, unknown[0], f"is no token of the target; it has ids 0 … {vocab - 1}.")

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], ids: list[int]) -> Iterator[Generation]:
        """Decode one batch, yielding each sequence as it finishes.

        Raises:
            NumericalError: NaN or infinite logits; what had finished has been yielded.
        """
        target, drafter, config = self.target, self.drafter, self.config
        target.features, target.fixed_width = drafter.features, config.fixed_width
        target.compiled, drafter.compiled = self.compiled, self.drafts_compiled
        drafter.record = self.record
        room = [self.room(p) for p in prompts]
        batch = Batch(prompts, ids, room, target, config, self.eos_token_ids, self.ledger, self.read_every)
        sequences, clock = batch.sequences, Clock(target.device)
        capacity = sequences.tokens.shape[1] + max(drafter.max_nodes + 1, config.fixed_width or 0)
        cache, self._idle = target.new_cache(len(prompts), capacity, self.record, self._idle), None

        prompt_tokens = sequences.tokens[:, : sequences.longest]
        output = target.prefill(prompt_tokens, sequences.lengths, cache, config.prefill_chunk)
        proposal = Proposal.empty(len(prompts), target.device)
        draws = self.source.at(sequences.ids, sequences.lengths, batch.whereabouts)
        lap, laps = {"prefill": clock.lap()}, []

        for step in count():
            # verify: which of the drafted tokens does the target's law accept, and what follows them?
            prefix = sequences.prefix(proposal.tree, proposal.tokens) if self.sampling.needs_prefix else None
            p = distribution(output.logits, self.sampling, prefix, self.eos_token_ids)  # [B, N+1, V]
            verdict = self.rule(proposal, p, draws)

            # commit: append what stays, end what has ended
            read = batch.commit(proposal, verdict, output.logits, p, step)
            lap["rule"] = clock.lap()
            if step == 0 and batch.going_on:
                drafter.begin(sequences, output, self.sampling, capacity)
            elif batch.going_on:
                cache.advance(proposal.tree, verdict.path, verdict.accepted)
                drafter.commit(sequences, verdict.path, verdict.accepted, output)
            if read:
                yield from batch.finished(self.on_tokens)
            if batch.going_on and len(batch.going_on) < sequences.batch:
                rows = torch.tensor(batch.going_on, device=target.device)
                batch.select(rows)
                cache.select(rows)
                drafter.select(rows)
            cache.settle(sequences.longest - 1)  # the last token is the root, not read yet
            lap["other"] = clock.lap()
            laps.append(lap)
            while read and laps:
                batch.close_step(clock.seconds(laps.pop(0)))
            if not batch.going_on:
                self._idle = cache if self.record else None
                return

            # draft, and read the draft with the target
            draws = self.source.at(sequences.ids, sequences.lengths, batch.whereabouts)
            draw = Draw(draws, self.coupled)
            proposal = drafter.propose(sequences, draw, batch.most_room - 1)
            if config.check_contract:
                check_proposal(drafter, proposal, sequences, draw, batch.most_room - 1, step)
            if proposal.size and batch.least_room <= proposal.tree.max_depth:
                proposal = proposal.trimmed(sequences.room - 1)  # each row as if it were alone
            lap = {"draft": clock.lap()}
            output = target.forward(torch.cat([sequences.root, proposal.tokens], 1), proposal.tree, cache)
            lap["target"] = clock.lap()
