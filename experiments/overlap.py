"""Overlap between what a drafter was trained on and what it is evaluated on, by n-grams.

A drafter that has seen the evaluation prompts is measured too well. A prompt's overlap is the share of its
distinct n-grams that occur anywhere in the training data; its pair is the training text that shares most.

`python run.py task=overlap task.training=<folder of shards, JSONL or text>`
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments import prompts
from experiments.store import Run
from specdec.config import Config
from specdec.errors import OptionError

WORDS, TOKENS = 8, 13  # length of an n-gram of words; of tokens, as in Brown et al. 2005.14165, Appendix C
WARN = 0.1  # share of a prompt's n-grams

Text = str | Sequence[int]


@dataclass
class Options:
    """Options of `task=overlap`."""

    name: str = "overlap"
    training: str | None = None  # a folder of `task=distill`, a JSONL or a text file
    threshold: float = WARN  # warn of prompts that share this much

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise OptionError("task.threshold", self.threshold, "must lie in (0, 1].")


def run(config: Config, run_dir: Path) -> None:
    """Compare the prompts of `config.prompts` with the training data; `summary.json` lists every pair."""
    path = Path(config.task.training or "").expanduser()
    if not config.task.training or not path.exists():
        remedy = "must name a folder of task=distill, a JSONL or a text file that is there."
        raise OptionError("task.training", config.task.training or "null", remedy)
    asked = prompts.load(config.prompts)
    texts: list[Text] = [prompt.text for prompt in asked]
    training: Iterable[Text] = lines(path)
    if path.is_dir():
        from specdec.model import Model

        target = Model.load(config.target)
        if target.tokenizer is None:
            raise OptionError("target", config.target.name, "has no tokenizer to compare token ids with.")
        # without the chat template, which every prompt and every training text share
        texts = [target.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        training = shards(path)
    store = Run(run_dir, config)
    found = overlaps(texts, training)
    names = [prompt.id for prompt in asked]
    warned = warn(found, names, config.task.threshold)
    if not warned:
        worst = f"{100 * found[0].share:.0f} % at most ({names[found[0].prompt]})" if found else "none at all"
        print(f"no prompt overlaps by {100 * config.task.threshold:.0f} %: {worst}")
    pairs = [{"id": names[o.prompt], **vars(o)} for o in found]
    store.finish({"prompts": len(asked), "training": str(path), "pairs": pairs})


@dataclass(frozen=True)
class Overlap:
    """A prompt and the training text that shares most with it.

    Arguments:
        prompt: its number. text: the training text's number.
        share: of the prompt's n-grams, those found in any training text. shared: those found in this one.
        example: one n-gram of both.
    """

    prompt: int
    text: int
    share: float
    shared: int
    example: str


def overlaps(asked: Sequence[Text], training: Iterable[Text], n: int | None = None) -> list[Overlap]:
    """The prompts that overlap with the training data, worst first.

    Arguments:
        asked: texts (compared by words, without case and punctuation) or token ids.
        training: texts or token ids, whatever the prompts are; read once, never held in memory.
        n: length of the n-grams, by default `WORDS` or `TOKENS`. A prompt shorter than n is one n-gram.
    """
    n = n or (WORDS if not asked or isinstance(asked[0], str) else TOKENS)
    grams = [_grams(prompt, n) for prompt in asked]
    where: dict[tuple[Hashable, ...], list[int]] = defaultdict(list)
    for number, of_prompt in enumerate(grams):
        for gram in of_prompt:
            where[gram].append(number)
    lengths = sorted({len(gram) for gram in where})

    found: list[set[tuple[Hashable, ...]]] = [set() for _ in asked]
    most: dict[int, tuple[int, int, tuple[Hashable, ...]]] = {}  # prompt → (shared, text, example)
    for number, text in enumerate(training):
        units = _units(text)
        shared: dict[int, set[tuple[Hashable, ...]]] = defaultdict(set)
        for length in lengths:
            for start in range(len(units) - length + 1):
                for prompt in where.get(gram := tuple(units[start : start + length]), ()):
                    shared[prompt].add(gram)
        for prompt, common in shared.items():
            found[prompt] |= common
            if len(common) > most.get(prompt, (0,))[0]:
                most[prompt] = (len(common), number, min(common, key=str))
    result = [
        Overlap(p, text, len(found[p]) / len(grams[p]), shared_count, " ".join(str(unit) for unit in example))
        for p, (shared_count, text, example) in most.items()
    ]
    return sorted(result, key=lambda o: (-o.share, o.prompt))


def warn(found: list[Overlap], names: Sequence[str], threshold: float = WARN, worst: int = 5) -> list[str]:
    """Say on standard error which prompts overlap by more than `threshold`; the lines said."""
    bad = [o for o in found if o.share >= threshold]
    if not bad:
        return []
    lines = [f"warning: {len(bad)} evaluation prompts overlap with the drafter's training data"]
    lines += [
        f"  {names[o.prompt]}: {100 * o.share:.0f} % of its n-grams; training text {o.text}: {o.example!r}"
        for o in bad[:worst]
    ]
    for line in lines:
        print(line, file=sys.stderr)
    return lines


def shards(directory: Path) -> Iterator[list[int]]:
    """The training texts of stored shards, as token ids, in the order of their files.

    Arguments:
        directory: of `task=distill`: safetensors files with int tensors `tokens` (all texts, one after the
            other) and `lengths` (of each text).
    """
    from safetensors.numpy import load_file

    for path in sorted(directory.glob("*.safetensors")):
        tensors = load_file(path)
        tokens, start = tensors["tokens"], 0
        for length in tensors["lengths"].tolist():
            yield tokens[start : start + length].tolist()
            start += length


def lines(path: Path) -> Iterator[str]:
    """The texts of a JSONL file (`text`, `prompt` or chat `messages`) or of a text file, one a line."""
    with open(path, encoding="utf-8") as file:
        for line in filter(str.strip, file):
            if path.suffix not in (".jsonl", ".ndjson"):
                yield line
                continue
            record = json.loads(line)
            said = record.get("text") or record.get("prompt")
            yield said or "\n".join(m["content"] for m in record.get("messages", ()))


def _grams(text: Text, n: int) -> set[tuple[Hashable, ...]]:
    units = _units(text)
    length = min(n, len(units))
    return {tuple(units[i : i + length]) for i in range(len(units) - length + 1)} if units else set()


def _units(text: Text) -> Sequence[Hashable]:
    return re.findall(r"\w+", text.lower()) if isinstance(text, str) else list(text)
