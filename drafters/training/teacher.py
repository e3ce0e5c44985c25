"""The frozen target as a teacher: its hidden states, kept on disk where wanted, and their laws."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
        whole: those of prompts are wanted, too. Else each sequence begins one token before its answer.
        token_map: `[Vd]` the draft vocabulary; `None` = all.
    """

    def __init__(
        self, target: Model, layers: Sequence[int] = (), whole: bool = False, token_map: Tensor | None = None
    ):
        self.target, self.whole = target, whole
        self.layers = tuple(dict.fromkeys((*layers, Model.FINAL)))
        output = target.hf.get_output_embeddings()
        weight, bias = output.weight.detach(), getattr(output, "bias", None)
        if token_map is not None:
            token_map = token_map.to(weight.device)
            weight, bias = weight[token_map], None if bias is None else bias[token_map]
        self._full = (output.weight.detach(), getattr(output, "bias", None))
        self._head = (weight, bias)

    def length(self, answer: Answer) -> int:
        """How many places an answer takes."""
        return len(answer.tokens) if self.whole else len(answer.answer) + 1

    def read(self, answers: Sequence[Answer]) -> Batch:
        """The answers with their hidden states, computed now."""
        return collate([self._cut(answer) for answer in answers], self.features(answers))

    def features(self, answers: Sequence[Answer]) -> list[dict[int, Tensor]]:
        """Per answer, layer → `[length, H]` in the target's dtype."""
        batch = pad(answers).to(self.target.device)
        self.target.features = self.layers
        cache = self.target.new_cache(*batch.tokens.shape)
        read = self.target.prefill(batch.tokens, batch.lengths, cache).features
        found = []
        for row, answer in enumerate(answers):
            end = len(answer.tokens)
            span = slice(end - self.length(answer), end)
            found.append({layer: read[layer][row, span].clone() for layer in self.layers})
        return found

    @torch.no_grad()
    def law(self, final: Tensor, support: str = "draft") -> Tensor:
        """The target's probabilities, float32.

        Arguments:
            final: `[..., H]` final hidden states.
            support: "draft" for those of the draft vocabulary, `[..., Vd]`, at most 1 in sum; or "all".
        """
        weight, bias = self._full
        logits = F.linear(final.to(weight.dtype), weight, bias).float()
        if support == "all" or self._head[0] is weight:
            return logits.softmax(-1)
        weight, bias = self._head
        return (
            F.linear(final.to(weight.dtype), weight, bias).float() - logits.logsumexp(-1, keepdim=True)
        ).exp()

    def _cut(self, answer: Answer) -> Answer:
        if self.whole:
            return answer
        tokens = answer.tokens[answer.prompt_length - 1 :]
        return Answer(tokens, 1, answer.temperature, answer.domain)


def collate(answers: Sequence[Answer], features: Sequence[dict[int, Tensor]]) -> Batch:
    """A padded batch from sequences and their hidden states."""
    batch = pad(answers)
    layers = {
        layer: torch.nn.utils.rnn.pad_sequence([f[layer] for f in features], batch_first=True)
        for layer in features[0]
    }
    device = next(iter(layers.values())).device
    return Batch(batch.tokens.to(device), batch.lengths.to(device), batch.starts.to(device), layers)


class FeatureStore:
    """Answers with a teacher's hidden states, computed once and kept on disk, or whenever they are read.

    Arguments:
        teacher: computes what is not there.
        folder: where they are kept, one file per group of answers; `None` keeps nothing.
        answers: all of them. A kept file belongs to the very answers it was computed for.
        per_file: answers per file.
        progress: told how many files of how many exist.
    """

    def __init__(
        self,
        teacher: Teacher,
        folder: Path | None,
        answers: Sequence[Answer],
        per_file: int = 96,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ):
        self.teacher, self.folder, self.answers, self.per_file = teacher, folder, answers, per_file
        self.progress = progress
        self._open: dict[int, safe_open] = {}

    def read(self, indices: Sequence[int]) -> Batch:
        """The batch of these answers."""
        if self.folder is None:
            return self.teacher.read([self.answers[i] for i in indices])
        cut = [self.teacher._cut(self.answers[i]) for i in indices]
        return collate(cut, [self._features(i) for i in indices])

    def complete(self) -> None:
        """Compute what is missing."""
        total = -(-len(self.answers) // self.per_file)
        for number in range(total):
            if not self._file(number).exists():
                self._compute(number)
            self.progress(number + 1, total)

    def _file(self, number: int) -> Path:
        return self.folder / f"features-{number:05d}.safetensors"

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
