"""The bookkeeping of one batch: what was emitted, what stays of it, who has finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.config import EngineConfig
from specdec.errors import NumericalError
from specdec.ledger import PHASES, Draft, Ledger, Row
from specdec.model import Model
from specdec.proposal import Proposal
from specdec.sequences import Sequences
from specdec.stopping import StopStrings, keep
from specdec.verify import Verdict
from specdec.verify.rule import children, law_at

TokenCallback = Callable[[int, list[int]], None]


@dataclass
class Generation:
    """One finished sequence.

    Arguments:
        sequence: its identity in the random source.
        prompt: token ids. tokens: new token ids, an end-of-sequence token included.
        text: the decoded new tokens, cut before a stop string (`None` without a tokenizer).
        finish_reason: `eos`, `stop` (a stop string), `length` (max_new_tokens) or `context` (context full).
        seconds_to_first_token: wall time from the start of its batch to its first token.
        seconds: wall time from the start of its batch to its last token.
    """

    sequence: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    finish_reason: str = ""
    seconds_to_first_token: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Step:
    """What a step emitted, on the device: a line of numbers per row, and the drafts if they are traced."""

    number: int
    table: Tensor
    drafts: list[Draft] | list[None]


class Batch:
    """Host and device state of the sequences decoded together.

    Arguments:
        prompts, ids, room: token ids, identity and room for new tokens of each sequence.
        target: for its tokenizer and device.
        config: stop strings, limits.
        eos_token_ids: what ends a sequence.
        ledger: where the counts go.
        read_every: steps until the host reads what was emitted. More than one only without a draft, where a
            step emits one token per row; what comes after a sequence's end is thrown away.
    """

    def __init__(
        self,
        prompts: list[list[int]],
        ids: list[int],
        room: list[int],
        target: Model,
        config: EngineConfig,
        eos_token_ids: tuple[int, ...],
        ledger: Ledger,
        read_every: int = 1,
    ):
        device = target.device
        self.sequences = Sequences(
            prompts, torch.tensor(ids, device=device), torch.tensor(room, device=device)
        )
        self.active = [Generation(i, p) for i, p in zip(ids, prompts, strict=True)]
        self.tokenizer, self.eos_token_ids, self.ledger = target.tokenizer, eos_token_ids, ledger
        self.max_new_tokens = config.max_new_tokens
        self.stops = None
        if config.stop and target.tokenizer is not None:
            self.stops = [StopStrings(target.tokenizer, config.stop) for _ in ids]
        self.going_on = list(range(len(ids)))  # rows that have not finished, in the order they are to have
        self.room = dict(zip(ids, room, strict=True))
        self.least_room, self.most_room = min(room), max(room)
        self.read_every = read_every
        self.unread: list[_Step] = []
        # (batch, nodes, longest context) of the steps whose time is not known yet
        self.forwarded: list[tuple[int, int, int]] = []
        self.started = time.perf_counter()

    def whereabouts(self) -> list[tuple[int, int]]:
        """(Absolute position of the next token, sequence) of each row, on the host."""
        ahead = len(self.unread)
        return [(len(g.prompt) + len(g.tokens) + ahead, g.sequence) for g in self.active]

    def commit(self, proposal: Proposal, verdict: Verdict, logits: Tensor, p: Tensor, step: int) -> bool:
        """Append what the rule emitted, cut at the first stop; whether the host has read it, too.

        Arguments:
            proposal, verdict: what was drafted and what the rule decided.
            logits, p: `[B, N+1, V]` the target's logits, and its law after all processing.
            step: for error messages.

        Raises:
            NumericalError: NaN or infinite logits, or no token left to draw, in a row.
        """
        sequences, tree = self.sequences, proposal.tree
        self.forwarded.append((sequences.batch, proposal.size, sequences.longest))
        block = emitted_block(proposal, verdict)  # [B, D+1]
        kept, finished, by_eos = keep(block, verdict.accepted + 1, sequences.room, self.eos_token_ids)
        sequences.append(block, kept)
        mask = proposal.mask
        nodes = mask.sum(1)
        depth = (tree.depth[:, 1:] * mask).amax(1) if proposal.size else nodes
        sound = logits.amax(-1).isfinite().all(1)  # NaN spreads through a maximum
        lawful = law_at(p, last_node(verdict)).amax(-1).isfinite()
        leaf = at_leaf(proposal, verdict)
        columns = (kept, finished, by_eos, verdict.accepted, nodes, depth, leaf, sound, lawful)
        table = torch.cat([torch.stack([c.long() for c in columns], 1), block], 1)
        drafts = drafted(proposal, verdict) if self.ledger.trace else [None] * len(table)
        self.unread.append(_Step(step, table, drafts))

        if step > 0 and len(self.unread) < min(self.read_every, self.least_room):
            sequences.settle([[]] * sequences.batch, sequences.longest + 1)
            return False
        self.read()
        return True

    def read(self) -> None:
        """Take in what the steps since the last reading emitted; the one place where the host waits."""
        steps, self.unread = self.unread, []
        tables = torch.stack([step.table for step in steps]).tolist()
        blocks: list[list[int]] = [[] for _ in self.active]
        going_on = list(range(len(self.active)))
        for step, table in zip(steps, tables, strict=True):
            ended = {row for row in going_on if self._take(row, step, table[row], blocks[row])}
            going_on = [row for row in going_on if row not in ended]
        self.going_on = closed_up(going_on)
        generations = [self.active[row] for row in self.going_on]
        if generations:
            rooms = [self.room[g.sequence] - len(g.tokens) for g in generations]
            self.least_room, self.most_room = min(rooms), max(rooms)
        lengths = [len(g.prompt) + len(g.tokens) for g in generations]
        self.sequences.settle(blocks, max(lengths, default=self.sequences.longest))

    def _take(self, row: int, step: _Step, line: list[int], block: list[int]) -> bool:
        """Book a row of a step and add its tokens to the sequence and to `block`; whether that ends it."""
        kept, finished, by_eos, accepted, nodes, depth, leaf, sound, lawful, *emitted = line
        generation = self.active[row]
        if not (sound and lawful):
            raise no_law(bool(sound), step.number, row, generation.sequence)
        tokens = emitted[:kept]
        stop = self.stops[row].feed(tokens) if self.stops else None
        if stop is not None:
            tokens, finished, by_eos = tokens[:stop], True, False
        count = len(tokens)
        self.ledger.rows.append(
            Row(
                sequence=generation.sequence,
                nodes=nodes,
                depth=depth if count > accepted else min(depth, count),
                accepted=min(accepted, count),
                emitted=count,
                discarded=accepted + 1 - count,
                bonus=bool(leaf) and count > accepted,
                prefill=step.number == 0,
                draft=step.drafts[row],
            )
        )
        generation.tokens += tokens
        block += tokens
        if step.number == 0:
            generation.seconds_to_first_token = time.perf_counter() - self.started
        if finished:
            limit = "context" if len(generation.tokens) < self.max_new_tokens else "length"
            generation.finish_reason = "stop" if stop else "eos" if by_eos else limit
        return bool(finished)

    def finished(self, on_tokens: TokenCallback | None) -> Iterator[Generation]:
        """Report the committed tokens; yield the sequences that ended with this step."""
        going_on = set(self.going_on)
        for row, generation in enumerate(self.active):
            if on_tokens is not None:
                on_tokens(generation.sequence, self.sequences.last_block[row])
            if row not in going_on:
                generation.seconds = time.perf_counter() - self.started
                if self.tokenizer is not None:
                    text = str(self.tokenizer.decode(generation.tokens, skip_special_tokens=True))
                    generation.text = self.stops[row].cut(text) if self.stops else text
                yield generation

    def select(self, rows: Tensor) -> None:
        """Only these rows go on."""
        self.sequences.select(rows)
        self.active = [self.active[i] for i in self.going_on]
        if self.stops:
            self.stops = [self.stops[i] for i in self.going_on]

    def close_step(self, lap: dict[str, float]) -> None:
        """Book the time of the first step whose time is not booked yet."""
        forwarded = self.forwarded.pop(0)
        for phase, seconds in lap.items():
            self.ledger.seconds["prefill" if "prefill" in lap else phase] += seconds
        if "prefill" not in lap:
            draft, target, rule, other = (lap[phase] for phase in PHASES)
            self.ledger.step_seconds.append((*forwarded, draft, target, rule, other))


def closed_up(rows: list[int]) -> list[int]:
    """Ascending `rows` in such an order that as many as possible keep their place: the last fill the gaps."""
    kept, late = set(rows), [r for r in rows if r >= len(rows)]
    return [place if place in kept else late.pop() for place in range(len(rows))]


def drafted(proposal: Proposal, verdict: Verdict) -> list[Draft]:
    """Each row's draft, without the nodes that it does not have."""
    tree, size = proposal.tree, proposal.size
    parents = torch.atleast_2d(tree.parents).expand(len(proposal.tokens), -1)
    columns = (proposal.tokens, parents, proposal.mask, verdict.accepted[:, None], verdict.path)
    drafts = []
    for row in torch.cat(columns, 1).tolist():  # one wait for the device
        tokens, above, exists = row[:size], row[size : 2 * size], row[2 * size : 3 * size]
        accepted, *path = row[3 * size :]
        number = {n: i for i, n in enumerate(n for n, here in enumerate(exists) if here)} | {-1: -1}
        kept = [n for n in number if n >= 0]
        drafts.append(
            Draft(
                tokens=[tokens[n] for n in kept],
                parents=None if tree.is_chain else [number[above[n]] for n in kept],
                path=[number[n] for n in path[:accepted]],
            )
        )
    return drafts


def no_law(sound: bool, step: int, row: int, sequence: int) -> NumericalError:
    """What to say when there is nothing to draw from."""
    what, remedy = "the target's logits hold NaN or infinity", "try target.dtype=float32"
    if sound:
        what, remedy = "sampling leaves no token possible", "relax sampling.bad_words, no_repeat_ngram_size …"
    where = f"at step {step}, row {row} (sequence {sequence})"
    return NumericalError(f"{what} {where}; {remedy}. Sequences that had finished are kept.")


def emitted_block(proposal: Proposal, verdict: Verdict) -> Tensor:
    """`[B, D+1]`: the accepted tokens, then the rule's token, then anything."""
    path = verdict.path
    drafted = proposal.tokens.gather(1, path.clamp(min=0)) if proposal.size else path[:, :0]
    block = torch.cat([drafted, verdict.token[:, None]], 1)
    return block.scatter_(1, verdict.accepted[:, None], verdict.token[:, None])


def last_node(verdict: Verdict) -> Tensor:
    """`[B]`: the last accepted node, −1 if none is."""
    if not verdict.path.shape[1]:
        return verdict.accepted - 1
    last = verdict.path.gather(1, (verdict.accepted[:, None] - 1).clamp(min=0))[:, 0]
    return torch.where(verdict.accepted > 0, last, -1)


def at_leaf(proposal: Proposal, verdict: Verdict) -> Tensor:
    """`[B]` bool: the accepted path ended where the draft did: the rule's token is a bonus, no correction."""
    if not proposal.size:
        return torch.ones_like(verdict.accepted, dtype=torch.bool)
    return ~children(proposal, last_node(verdict)).any(1)
