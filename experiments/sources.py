"""Where the prompts come from that the target answers: our templates, plain text, or conversations."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError

from experiments import prompts
from experiments.instructions import Overlap, instructions
from specdec.config import PromptsConfig
from specdec.errors import OptionError
from specdec.model import Model

Asked = tuple[str, list[int]]  # domain, token ids


class Source(Protocol):
    """Prompts in rounds."""

    def round(self, number: int, written: Sequence[str]) -> Iterator[Asked]:
        """The prompts of one round, a function of its number and of texts that the target wrote before it."""
        ...


class Templates:
    """Endlessly many instructions of every domain, disjoint from the evaluation's prompts."""

    def __init__(self, target: Model, seed: int):
        self.target, self.seed = target, seed
        self.forbidden = Overlap([prompt.text for prompt in prompts.load(PromptsConfig())])

    def round(self, number: int, written: Sequence[str]) -> Iterator[Asked]:
        rng = random.Random(f"{self.seed}/{number}")
        for prompt in instructions(rng, self.forbidden, written):
            yield prompt.domain, self.target.encode([prompt.text])[0]


class Finite:
    """A list of prompts, shuffled once; a round is a stretch of it."""

    def __init__(self, asked: list[Asked], size: int, seed: int):
        random.Random(seed).shuffle(asked)
        self.asked, self.size = asked, size

    def round(self, number: int, written: Sequence[str]) -> Iterator[Asked]:
        yield from self.asked[number * self.size : (number + 1) * self.size]


def text(path: Path, target: Model, length: int) -> list[Asked]:
    """Stretches of `length` tokens of a plain text, for the target to continue (no chat template).

    Raises:
        OptionError: the file cannot be read, or is too short.
    """
    if target.tokenizer is None:
        raise OptionError("task.source", "text", "this target has no tokenizer.")
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("task.path", path, f"cannot be read as UTF-8 text ({error}).") from error
    ids = target.tokenizer(content)["input_ids"]
    pieces = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    if not pieces:
        raise OptionError("task.path", path, f"holds fewer than {length} tokens; use a longer text.")
    return [("text", piece) for piece in pieces]


def chat(path: Path, target: Model) -> list[Asked]:
    """Conversations, one JSON object a line: `messages` with roles, or a field that `prompts=file` takes.

    Every user's turn is a prompt; the turns before it stand in front of it.

    Raises:
        OptionError: a line cannot be read (named).
    """
    asked: list[Asked] = []
    plain: list[tuple[str, str]] = []  # domain, text
    roles: dict[str, None] = {}
    for place, line in prompts.lines(path, "task.path"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise OptionError("task.path", place, f"is no JSON ({error}).") from error
        if not isinstance(record, dict):
            raise OptionError("task.path", place, 'is no JSON object, e.g. {"text": "Hello"}.')
        messages = record.get("messages")
        if messages is None:
            plain.append((str(record.get("domain", "chat")), _plain(record, place)))
        else:
            asked += [("chat", ids) for ids in _turns(messages, target, place)]
            roles |= dict.fromkeys(m["role"] for m in messages)
    if not asked and not plain:
        found = f"its roles are {', '.join(roles)}; rename them" if roles else "it is empty"
        raise OptionError("task.path", path, f"holds no message of the role user: {found}.")
    encoded = target.encode([words for _, words in plain]) if plain else []
    return asked + [(domain, ids) for (domain, _), ids in zip(plain, encoded, strict=True)]


def _plain(record: dict[str, Any], place: str) -> str:
    found = next((record[n] for n in prompts.TEXTS if record.get(n)), None)
    found = found[0] if isinstance(found, list) and found else found
    if not isinstance(found, str) or not found.strip():
        fields = ", ".join(("messages", *prompts.TEXTS))
        raise OptionError("task.path", place, f"has none of the fields {fields}, or it is empty.")
    if not prompts.encodable(found):
        raise OptionError("task.path", place, prompts.HALF)
    return found


def _turns(messages: Any, target: Model, place: str) -> Iterator[list[int]]:
    valid = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    )
    if not valid:
        raise OptionError("task.path", place, '`messages` is no list of {"role": …, "content": …}.')
    if not all(prompts.encodable(m["content"]) for m in messages):
        raise OptionError("task.path", place, prompts.HALF)
    if not target.chat:
        raise OptionError("task.path", place, "this target has no chat template; use task.source=text.")
    for end, message in enumerate(messages, start=1):
        if message["role"] == "user":
            try:
                encoding: Any = target.tokenizer.apply_chat_template(  # type: ignore[union-attr]
                    messages[:end], add_generation_prompt=True, return_dict=True
                )
            except TemplateError as error:
                remedy = f"the target's chat template refuses the conversation ({error})."
                raise OptionError("task.path", place, remedy) from error
            yield list(encoding["input_ids"])
