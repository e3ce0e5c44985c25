"""Self-distillation data: the target's own answers, in shards that every trained drafter reads."""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.table import Table

from drafters.training.shards import Answer, ShardFolder
from experiments import sources
from experiments.store import Run
from specdec import verify
from specdec.checkpoints import cache_directory
from specdec.config import Config, EngineConfig, TargetConfig, at_least, suggest
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.heap import keep_freed_memory
from specdec.model import Model
from specdec.sampling import Sampling

SOURCES = ("templates", "text", "chat")
QUOTED = ("chat", "qa")  # domains whose answers later prompts may quote as texts
TEXT_CHARACTERS = (250, 1100)


@dataclass
class Options:
    """Options of `task=distill`."""

    GROUP: ClassVar[str] = "task"  # where they stand

    name: str = "distill"
    source: str = (
        "templates"  # templates (built in) | text (continued by the target) | chat (JSONL conversations)
    )
    path: str | None = None  # the file of source=text or chat
    tokens: int = 2_000_000  # answer tokens wanted
    temperatures: list[float] = field(
        default_factory=lambda: [0.0, 0.7, 1.0]
    )  # answers take turns between these
    max_new_tokens: int = 192  # longest answer
    prompt_tokens: int = 64  # source=text: tokens given of each stretch
    longest_prompt: int = 512  # prompts with more tokens are left out
    batch_size: int = 96  # prompts decoded together, one shard
    round: int = (
        8  # shards per round: a round is sorted by length, and its prompts may quote answers of earlier ones
    )
    folder: str | None = None  # null = <cache>/distilled/<target>[-<source>]

    def __post_init__(self) -> None:
        least = dict.fromkeys(
            ("tokens", "max_new_tokens", "prompt_tokens", "longest_prompt", "batch_size", "round"), 1
        )
        at_least(self.GROUP, self, **least)
        if self.source not in SOURCES:
            remedy = f"no such source; {suggest(self.source, SOURCES)}"
            raise OptionError(f"{self.GROUP}.source", self.source, remedy)
        if self.source != "templates" and not self.path:
            remedy = f"must name the file that {self.GROUP}.source={self.source} reads."
            raise OptionError(f"{self.GROUP}.path", "null", remedy)
        if self.source == "templates" and self.path:
            remedy = f"is not read by {self.GROUP}.source=templates; use text or chat."
            raise OptionError(f"{self.GROUP}.path", self.path, remedy)
        if not self.temperatures or min(self.temperatures) < 0:
            raise OptionError(
                f"{self.GROUP}.temperatures", self.temperatures, "must be a list of numbers ≥ 0."
            )


def run(config: Config, run_dir: Path) -> None:
    """Distil until there are enough tokens; the answers go to the cache directory, a summary to `run_dir`."""
    options: Options = config.task
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    keep_freed_memory()
    target = Model.load(config.target)
    folder = folder_of(options, config.target)
    store = Run(run_dir, config, target=target.provenance, folder=str(folder.path))
    summary = distil(options, target, folder, config.seed)
    store.finish(summary)
    Console(width=None if sys.stdout.isatty() else 100).print(_table(summary))
    print(folder.path)


def label(target: TargetConfig) -> str:
    """What a target's folders are called."""
    return Path(target.path).name if target.name == "hf" and target.path else target.name


def folder_of(options: Options, target: TargetConfig) -> ShardFolder:
    """Where the answers lie."""
    if options.folder:
        return ShardFolder(Path(options.folder).expanduser())
    suffix = "" if options.source == "templates" else f"-{options.source}-{Path(options.path or '').stem}"
    return ShardFolder(cache_directory() / "distilled" / f"{label(target)}{suffix}")


def distil(
    options: Options, target: Model, folder: ShardFolder, seed: int, console: Console | None = None
) -> dict[str, Any]:
    """Fill `folder` up to `options.tokens` answer tokens, going on where it stopped; counts of all of it."""
    console = console or Console(stderr=True)
    source = _source(options, target, seed)
    folder.begin(provenance(options, target, seed))
    tally, state = Tally(options.tokens), _Past(target, options.round)
    for number in folder.numbers:
        tally.add(state.add(number, folder.read(number)))
    if folder.numbers:
        console.print(f"{tally.tokens:,} answer tokens are there already", highlight=False)
    tally.start()
    first_missing = next(number for number in count() if number not in folder.numbers)
    for round_number in count(first_missing // options.round):
        if tally.tokens >= options.tokens:
            break
        asked = _asked(options, target, source, state, round_number)
        if not asked:
            console.print("no prompts are left", highlight=False)
            break
        for number, batch in asked:
            if number in folder.numbers:
                continue
            answers = _answers(options, target, batch, number, seed)
            folder.write(number, answers)
            tally.add(state.add(number, answers))
            console.print(tally.line(number), highlight=False, soft_wrap=True)
            if tally.tokens >= options.tokens:
                break
    return tally.summary()


def provenance(options: Options, target: Model, seed: int) -> dict[str, Any]:
    """What the answers depend on: two folders with equal provenance hold equal answers."""
    known = ("name", "source", "weights", "commit", "seed", "dtype")
    settings = (
        "source",
        "temperatures",
        "max_new_tokens",
        "prompt_tokens",
        "longest_prompt",
        "batch_size",
        "round",
    )
    return {
        "target": {
            **{k: target.provenance[k] for k in known if k in target.provenance},
            "layers": target.config.num_hidden_layers,
            "vocab_size": target.vocab_size,
        },
        "seed": seed,
        "content": _digest(options.path),
        **{name: getattr(options, name) for name in settings},
    }


def _digest(path: str | None) -> str | None:
    """The SHA-256 of the user's file."""
    file = Path(path).expanduser() if path else None
    return hashlib.sha256(file.read_bytes()).hexdigest() if file and file.is_file() else None


def _source(options: Options, target: Model, seed: int) -> sources.Source:
    if options.source == "templates":
        return sources.Templates(target, seed)
    path = Path(options.path or "").expanduser()
    try:
        asked = (
            sources.text(path, target, options.prompt_tokens)
            if options.source == "text"
            else sources.chat(path, target)
        )
    except OptionError as error:
        raise error.renamed("task.", f"{options.GROUP}.") from error
    return sources.Finite(asked, options.batch_size * options.round, seed)


class _Past:
    """What later rounds must know of the answers so far: prompts not to repeat, texts to quote."""

    def __init__(self, target: Model, shards_per_round: int):
        self.target, self.per_round = target, shards_per_round
        self.prompts: dict[int, set[tuple[int, ...]]] = {}  # by round
        self.texts: dict[int, list[str]] = {}

    def add(self, shard: int, answers: list[Answer]) -> list[Answer]:
        this = shard // self.per_round
        self.prompts.setdefault(this, set()).update(tuple(a.tokens[: a.prompt_length]) for a in answers)
        self.texts.setdefault(this, []).extend(filter(None, map(self._text, answers)))
        return answers

    def before(self, number: int) -> tuple[set[tuple[int, ...]], list[str]]:
        """Prompts and texts of the rounds before `number`."""
        prompts = {p for this, found in self.prompts.items() if this < number for p in found}
        return prompts, [t for this, found in sorted(self.texts.items()) if this < number for t in found]

    def _text(self, answer: Answer) -> str | None:
        """An answer that can be read as a text by itself: complete, plain and of moderate length."""
        ended = answer.tokens[-1] in self.target.eos_token_ids
        if not ended or answer.domain not in QUOTED or self.target.tokenizer is None:
            return None
        text = self.target.tokenizer.decode(answer.answer, skip_special_tokens=True).strip()
        low, high = TEXT_CHARACTERS
        return text if low <= len(text) <= high and "```" not in text else None


def _asked(
    options: Options, target: Model, source: sources.Source, state: _Past, round_number: int
) -> list[tuple[int, list[sources.Asked]]]:
    """The batches of a round with the numbers of their shards, prompts of like length together."""
    seen, texts = state.before(round_number)
    longest = min(options.longest_prompt, target.context_length - 1)
    chosen: list[sources.Asked] = []
    for tries, (domain, ids) in enumerate(source.round(round_number, texts), start=1):
        if len(ids) <= longest and tuple(ids) not in seen:
            seen.add(tuple(ids))
            chosen.append((domain, ids))
        if (
            len(chosen) == options.batch_size * options.round
            or tries > 50 * options.batch_size * options.round
        ):
            break
    chosen.sort(key=lambda asked: len(asked[1]))
    starts = range(0, len(chosen), options.batch_size)
    return [
        (round_number * options.round + i, chosen[s : s + options.batch_size]) for i, s in enumerate(starts)
    ]


def _answers(
    options: Options, target: Model, batch: list[sources.Asked], shard: int, seed: int
) -> list[Answer]:
    """What the target says to one batch. Temperatures take turns; each meets prompts of every length."""
    turn = shard % options.round + shard // options.round
    temperature = options.temperatures[turn % len(options.temperatures)]
    config = EngineConfig(max_new_tokens=options.max_new_tokens, batch_size=len(batch))
    engine = Engine(
        target, None, verify.build({"name": "token"}), Sampling(temperature=temperature), config, seed
    )
    first = shard * options.batch_size
    answered = engine.generate([ids for _, ids in batch], list(range(first, first + len(batch))))
    return [
        Answer(ids + generation.tokens, len(ids), temperature, domain)
        for (domain, ids), generation in zip(batch, answered, strict=True)
    ]


class Tally:
    """Counts, speed and a time estimate."""

    def __init__(self, wanted: int):
        self.wanted, self.tokens, self.prompts = wanted, 0, 0
        self.by_domain: dict[str, list[int]] = {}  # answers, answer tokens
        self.by_temperature: dict[float, int] = {}
        self.start()

    def start(self) -> None:
        self.began, self.tokens_then = time.perf_counter(), self.tokens

    def add(self, answers: list[Answer]) -> None:
        for answer in answers:
            size = len(answer.answer)
            self.prompts += 1
            self.tokens += size
            entry = self.by_domain.setdefault(answer.domain, [0, 0])
            entry[0] += 1
            entry[1] += size
            self.by_temperature[answer.temperature] = self.by_temperature.get(answer.temperature, 0) + size

    @property
    def tokens_per_second(self) -> float:
        return (self.tokens - self.tokens_then) / max(time.perf_counter() - self.began, 1e-9)

    def line(self, shard: int) -> str:
        speed = self.tokens_per_second
        left = max(self.wanted - self.tokens, 0) / max(speed, 1e-9)
        return (
            f"shard {shard}: {self.tokens:,} of {self.wanted:,} answer tokens, {speed:.0f} tok/s, "
            f"about {_duration(left)} left"
        )

    def summary(self) -> dict[str, Any]:
        return {
            "answers": self.prompts,
            "answer_tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second if self.tokens > self.tokens_then else None,
            "domains": {
                d: {"answers": a, "answer_tokens": t} for d, (a, t) in sorted(self.by_domain.items())
            },
            "temperatures": {str(t): n for t, n in sorted(self.by_temperature.items())},
        }


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _table(summary: dict[str, Any]) -> Table:
    table = Table(title=f"{summary['answer_tokens']:,} answer tokens in {summary['answers']:,} answers")
    for name in ("domain", "answers", "answer tokens"):
        table.add_column(name, justify="left" if name == "domain" else "right")
    for domain, numbers in summary["domains"].items():
        table.add_row(domain, f"{numbers['answers']:,}", f"{numbers['answer_tokens']:,}")
    return table
