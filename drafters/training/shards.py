"""The target's answers on disk: a folder of safetensors shards and `provenance.json`, for all drafters."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specdec.errors import OptionError

PROVENANCE = "provenance.json"


@dataclass(frozen=True)
class Answer:
    """One prompt and what the target said.

    Arguments:
        tokens: prompt and answer; an end-of-sequence token included where the answer ended with one.
        prompt_length: how many of them are the prompt.
        temperature: at which the answer was sampled.
        domain: what the prompt is about.
    """

    tokens: list[int]
    prompt_length: int
    temperature: float
    domain: str

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_length :]


class ShardFolder:
    """Numbered shards, each written whole or not at all.

    Arguments:
        path: the folder, created when the first shard is written.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)

    @property
    def provenance(self) -> dict[str, Any] | None:
        """How the answers came about; `None` where nothing was begun."""
        file = self.path / PROVENANCE
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def begin(self, provenance: Mapping[str, Any]) -> None:
        """Declare how the answers come about.

        Raises:
            OptionError: the folder holds answers that came about otherwise.
        """
        then, now = self.provenance, json.loads(json.dumps(provenance))
        if then is None:
            self.path.mkdir(parents=True, exist_ok=True)
            partial = self.path / f"{PROVENANCE}.partial"
            partial.write_text(json.dumps(now, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(partial, self.path / PROVENANCE)
            return
        for name in sorted(then.keys() | now.keys()):
            if then.get(name) != now.get(name):
                remedy = (
                    f"{self.path} holds answers with {name}={then.get(name)}; choose another task.folder, "
                    f"or delete it."
                )
                raise OptionError(f"task.{name}", now.get(name), remedy)

    def file(self, number: int) -> Path:
        return self.path / f"shard-{number:05d}.safetensors"

    @property
    def numbers(self) -> list[int]:
        """The shards that are there."""
        return sorted(int(file.stem.removeprefix("shard-")) for file in self.path.glob("shard-*.safetensors"))

    def write(self, number: int, answers: Sequence[Answer]) -> None:
        """Store shard `number`."""
        flat = [token for answer in answers for token in answer.tokens]
        tensors = {
            "tokens": torch.tensor(flat, dtype=torch.int32),
            "lengths": torch.tensor([len(a.tokens) for a in answers], dtype=torch.int32),
            "prompt_lengths": torch.tensor([a.prompt_length for a in answers], dtype=torch.int32),
            "temperatures": torch.tensor([a.temperature for a in answers], dtype=torch.float32),
        }
        partial = self.file(number).with_suffix(".partial")
        save_file(tensors, partial, metadata={"domains": json.dumps([a.domain for a in answers])})
        os.replace(partial, self.file(number))

    def read(self, number: int) -> list[Answer]:
        """The answers of shard `number`.

        Raises:
            OptionError: the file is damaged.
        """
        try:
            with safe_open(self.file(number), framework="pt") as file:
                lengths = file.get_tensor("lengths").tolist()
                pieces = file.get_tensor("tokens").long().split(lengths)
                prompts = file.get_tensor("prompt_lengths").tolist()
                temperatures = file.get_tensor("temperatures").tolist()
                domains = json.loads(file.metadata()["domains"])
        except (SafetensorError, OSError, KeyError) as error:
            remedy = f"{self.file(number)} cannot be read ({error}); delete it and distil it again."
            raise OptionError("task.folder", self.path, remedy) from error
        rows = zip(pieces, prompts, temperatures, domains, strict=True)
        return [Answer(tokens.tolist(), p, round(t, 6), d) for tokens, p, t, d in rows]

    def answers(self) -> Iterator[Answer]:
        """All answers in order."""
        for number in self.numbers:
            yield from self.read(number)
