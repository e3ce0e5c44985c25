"""The frozen target as a teacher: its hidden states, kept on disk where wanted, and their laws."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from drafters.training.batches import Batch, pad
from drafters.training.shards import Answer
from specdec.model import Model


class Teacher:
    """What the target thinks while it reads its own answers.

    Arguments:
        target: frozen.
        layers: whose outputs are wanted, as in `Model.features`; the final one always is.
        prompts: what a batch holds of them. "none": each sequence begins one token before its answer;
            "tokens": sequences are whole, states before that place may be zero; "states": all is there.
        token_map: `[Vd]` the draft vocabulary; `None` = all.
    """

    def __init__(
        self,
        target: Model,
        layers: Sequence[int] = (),
        prompts: str = "none",
        token_map: Tensor | None = None,
    ):
        self.target, self.prompts = target, prompts
        self.layers = tuple(dict.fromkeys((*layers, Model.FINAL)))
        output = target.hf.get_output_embeddings()
        weight, bias = output.weight.detach(), getattr(output, "bias", None)
        if token_map is not None:
            token_map = token_map.to(weight.device)
            weight, bias = weight[token_map], None if bias is None else bias[token_map]
        self._full = (output.weight.detach(), getattr(output, "bias", None))
        self._head = (weight, bias)

    def length(self, answer: Answer) -> int:
        """How many places of a batch an answer takes."""
        return len(answer.answer) + 1 if self.prompts == "none" else len(answer.tokens)

    def batch(self, answers: Sequence[Answer], features: Sequence[dict[int, Tensor]]) -> Batch:
        """The answers with what `features` gave for each of them."""
        if self.prompts == "none":
            answers = [Answer(a.tokens[a.prompt_length - 1 :], 1, a.temperature, a.domain) for a in answers]
        batch = pad(answers).to(features[0][Model.FINAL].device)
        states = {}
        for layer in self.layers:
            width = features[0][layer].shape[-1]
            states[layer] = features[0][layer].new_zeros(*batch.tokens.shape, width)
            for row, (answer, found) in enumerate(zip(answers, features, strict=True)):
                end = len(answer.tokens)
                last = found[layer][-end:]
                states[layer][row, end - len(last) : end] = last
        return replace(batch, features=states)

    def features(self, answers: Sequence[Answer]) -> list[dict[int, Tensor]]:
        """Per answer, layer → `[n, H]` of its last n places, in the target's dtype; computed now."""
        batch = pad(answers).to(self.target.device)
        self.target.features = self.layers
        cache = self.target.new_cache(*batch.tokens.shape)
        read = self.target.prefill(batch.tokens, batch.lengths, cache).features
        found = []
        for row, answer in enumerate(answers):
            start = 0 if self.prompts == "states" else answer.prompt_length - 1
            span = slice(start, len(answer.tokens))
            found.append({layer: read[layer][row, span].clone() for layer in self.layers})
        return found

    @torch.no_grad()
    def law(self, final: Tensor) -> Tensor:
        """`[..., V]`: the target's law, float32, at final hidden states `[..., H]`."""
        return _logits(final, *self._full).softmax(-1)

    @torch.no_grad()
    def draft_law(self, final: Tensor) -> Tensor:
        """`[..., Vd]`: the target's law given that the token is one of the draft vocabulary."""
        return _logits(final, *self._head).softmax(-1)


def _logits(final: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(final.to(weight.dtype), weight, bias).float()


class FeatureStore:
    """Answers with a teacher's hidden states, computed once and kept on disk, or whenever they are read.

    Arguments:
        teacher: computes what is not there.
        folder: where they are kept, one file per group of answers; `None` keeps nothing.
        answers: all of them. A kept file belongs to the very answers it was computed for.
        per_file: answers per file.
    """

    def __init__(
        self,
        teacher: Teacher,
        folder: Path | None,
        answers: Sequence[Answer],
        per_file: int = 96,
    ):
        self.teacher, self.folder, self.answers, self.per_file = teacher, folder, answers, per_file
        self._open: dict[int, safe_open] = {}

    def read(self, indices: Sequence[int]) -> Batch:
        """The batch of these answers."""
        some = [self.answers[i] for i in indices]
        found = self.teacher.features(some) if self.folder is None else [self._features(i) for i in indices]
        return self.teacher.batch(some, found)

    @property
    def is_complete(self) -> bool:
        """Whether all files are there."""
        return all(self._file(number).exists() for number in range(self._files))

    def complete(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compute what is missing; `progress` is told how many files of how many are there."""
        for number in range(self._files):
            if not self._file(number).exists():
                self._compute(number)
            progress(number + 1, self._files)

    @property
    def _files(self) -> int:
        return -(-len(self.answers) // self.per_file)

    def _file(self, number: int) -> Path:
        count = len(self.answers[number * self.per_file : (number + 1) * self.per_file])
        return self.folder / f"features-{number:05d}-of-{count}-answers.safetensors"

    def _features(self, index: int) -> dict[int, Tensor]:
        number = index // self.per_file
        if number not in self._open:
            if not self._file(number).exists():
                self._compute(number)
            self._open[number] = safe_open(self._file(number), framework="pt")
        return {layer: self._open[number].get_tensor(f"{index}/{layer}") for layer in self.teacher.layers}

    def _compute(self, number: int) -> None:
        start = number * self.per_file
        some = self.answers[start : start + self.per_file]
        tensors = {}
        order = sorted(range(len(some)), key=lambda i: len(some[i].tokens))
        for first in range(0, len(order), 16):
            rows = order[first : first + 16]
            for row, found in zip(rows, self.teacher.features([some[i] for i in rows]), strict=True):
                tensors |= {f"{start + row}/{layer}": f.cpu().contiguous() for layer, f in found.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self._file(number).with_suffix(f".{os.getpid()}.partial")
        save_file(tensors, partial)
        os.replace(partial, self._file(number))
