"""The training loop of every drafter, resumable; device, precision and processes are accelerate's."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from drafters.training.batches import Batch, groups, read_ahead
from drafters.training.losses import LOSSES, head_loss
from drafters.training.optimizer import Optimizer
from drafters.training.teacher import FeatureStore, Teacher
from drafters.training.trainable import Trainable
from drafters.training.validation import Validation, validate
from specdec.errors import NumericalError
from specdec.model import Model


@dataclass
class Schedule:
    """How long and how fast.

    Arguments:
        steps: optimizer steps at most.
        batch_positions: places per step and process, padding included.
        micro_positions: places per forward; a step is several.
        loss: one of `losses.LOSSES`.
        optimizer: one of `optimizer.NAMES`.
        learning_rate: its peak, reached after `warmup` steps, then a cosine down to a tenth.
        validate_every: steps.
        patience: validations without progress before stopping.
        clip: gradient norm.
    """

    steps: int = 2000
    batch_positions: int = 4096
    micro_positions: int = 2048
    loss: str = "cross_entropy"
    optimizer: str = "muon"
    learning_rate: float = 1e-3
    warmup: int = 50
    validate_every: int = 200
    patience: int = 10
    clip: float = 1.0
    weight_decay: float = 0.0
    seed: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of a step (0 is the first)."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclass
class History:
    """What happened so far; part of every saved state."""

    step: int = 0
    positions: int = 0  # trained on, over all processes
    seconds: float = 0.0
    epoch: int = 0
    group: int = 0  # next group of the epoch
    losses: list[list[float]] = field(default_factory=list)  # [step, loss per depth …]
    validations: list[dict[str, Any]] = field(default_factory=list)
    best: float = 0.0  # figure of merit
    best_step: int = 0
    stale: int = 0  # validations since


class Loop:
    """Trains a drafter from a store of the teacher's hidden states.

    Arguments:
        trainable, teacher: see there.
        store: answers to learn from. held_out: answers to validate on.
        schedule: how long and how fast.
        folder: where states are kept.
        accelerator: device, precision and processes.
        report: told each line of progress.
    """

    def __init__(
        self,
        trainable: Trainable,
        teacher: Teacher,
        store: FeatureStore,
        held_out: FeatureStore,
        schedule: Schedule,
        folder: Path,
        accelerator: Accelerator,
        report: Callable[[str], None] = print,
    ):
        self.trainable, self.teacher, self.store, self.held_out = trainable, teacher, store, held_out
        self.schedule, self.folder, self.report = schedule, folder, report
        self.accelerator = accelerator
        self.parameters = [p for p in trainable.module.parameters() if p.requires_grad]
        self.optimizer = Optimizer(
            schedule.optimizer, self.parameters, schedule.learning_rate, schedule.weight_decay
        )
        self.history = History()
        self.best_state: dict[str, Tensor] = {}

    def run(self) -> History:
        """Train to the end, going on from a saved state; the module holds the best weights afterwards."""
        self._restore()
        started, before = time.perf_counter(), self.history.seconds
        if not self.history.validations:
            self._validate()
        batches = self._batches()
        while self.history.step < self.schedule.steps and self.history.stale < self.schedule.patience:
            losses = self._step(batches)
            self.history.seconds = before + time.perf_counter() - started
            self.history.losses.append([self.history.step, *losses])
            if (
                self.history.step % self.schedule.validate_every == 0
                or self.history.step == self.schedule.steps
            ):
                self._validate()
        self.trainable.module.load_state_dict(self.best_state)
        return self.history

    def held_out_validation(self) -> Validation:
        """Validate the module as it is."""
        lengths = [self.teacher.length(a) for a in self.held_out.answers]
        order = groups(lengths, self.schedule.micro_positions, 0, 0)
        return validate(self.trainable, self.teacher, (self._read(self.held_out, g) for g in order))

    def _step(self, batches: Iterator[Batch]) -> list[float]:
        """One optimizer step; the loss at each depth."""
        schedule, history = self.schedule, self.history
        micro = max(1, schedule.batch_positions // schedule.micro_positions)
        sums: list[float] = []
        counts: list[int] = []
        for _ in range(micro):
            batch = next(batches)
            with self.accelerator.autocast():
                loss = self._loss(batch, sums, counts)
            self.accelerator.backward(loss / micro)
            history.positions += int(batch.answer_mask.sum()) * self.accelerator.num_processes
        self._share_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, schedule.clip)
        if not torch.isfinite(norm):
            raise NumericalError(
                f"the gradient is NaN or infinite at step {history.step}; use a smaller task.learning_rate."
            )
        self.optimizer.step(schedule.rate(history.step))
        history.step += 1
        return [s / max(n, 1) for s, n in zip(sums, counts, strict=True)]

    def _loss(self, batch: Batch, sums: list[float], counts: list[int]) -> Tensor:
        """Σ over depths of discount^d × mean loss to the target's law; counts by depth."""
        total, weight = torch.zeros((), device=batch.tokens.device), 1.0
        laws, index = self._laws(batch)
        loss = LOSSES[self.schedule.loss]
        for depth, prediction in enumerate(self.trainable.predictions(batch)):
            if depth == len(sums):
                sums.append(0.0)
                counts.append(0)
            if not len(prediction.states):
                continue
            which = index[prediction.row, prediction.place]
            losses = head_loss(loss, prediction.states, *prediction.head, laws, which)
            sums[depth] += float(losses.detach().sum())
            counts[depth] += len(losses)
            if prediction.regression is not None:
                losses = losses + prediction.regression
            total = total + weight * losses.mean()
            weight *= self.trainable.discount
        return total

    def _laws(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The target's laws of all answers' tokens `[A, Vd]`, and `[B, T]` which of them is each token's."""
        row, place = batch.answer_mask.nonzero(as_tuple=True)
        index = torch.zeros_like(batch.tokens)
        index[row, place] = torch.arange(len(row), device=index.device)
        return self.teacher.draft_law(batch.features[Model.FINAL][row, place - 1]), index

    def _share_gradients(self) -> None:
        """The mean over processes."""
        if self.accelerator.num_processes > 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad = self.accelerator.reduce(parameter.grad, "mean")

    def _batches(self) -> Iterator[Batch]:
        """Endlessly, epoch after epoch. Advances the history's place.

        Kept states are read while the batch before is learnt from; those that are not, the target computes.
        """
        history, plan = self.history, self._plan()

        def read(planned: tuple[int, int, list[int]]) -> Batch:
            return self._read(self.store, planned[2])

        computed = self.store.folder is None
        batches = ((planned, read(planned)) for planned in plan) if computed else read_ahead(plan, read)
        for (history.epoch, history.group, _), batch in batches:
            yield batch

    def _plan(self) -> Iterator[tuple[int, int, list[int]]]:
        """From the history's place on: epoch and next group after a batch, and this process's answers."""
        epoch, start = self.history.epoch, self.history.group
        rank, count = self.accelerator.process_index, self.accelerator.num_processes
        lengths = [self.teacher.length(a) for a in self.store.answers]
        while True:
            order = groups(lengths, self.schedule.micro_positions, self.schedule.seed, epoch)
            order = order[: len(order) // count * count] or order
            for group in range(start, len(order), count):
                yield epoch, group + count, order[(group + rank) % len(order)]
            epoch, start = epoch + 1, 0

    def _read(self, store: FeatureStore, group: Sequence[int]) -> Batch:
        return store.read(group).to(self.teacher.target.device)

    def _validate(self) -> None:
        history = self.history
        result = self.held_out_validation()
        merit = result.expected_chain
        history.validations.append(
            {"step": history.step, "positions": history.positions, "merit": merit, "depths": result.report()}
        )
        if merit > history.best or not self.best_state:
            history.best, history.best_step, history.stale = merit, history.step, 0
            self.best_state = {k: v.detach().clone() for k, v in self.trainable.module.state_dict().items()}
        else:
            history.stale += 1
        self.report(self._line(result))
        if self.accelerator.is_main_process:
            self._save()
        self.accelerator.wait_for_everyone()

    def _line(self, result: Validation) -> str:
        history = self.history
        alphas = " ".join(f"{d['alpha']:.3f}" for d in result.report())
        agreed = " ".join(f"{d['agreement']:.3f}" for d in result.report())
        speed = history.positions / history.seconds if history.seconds else 0.0
        left = (self.schedule.steps - history.step) * history.seconds / max(history.step, 1) / 60
        return (
            f"step {history.step} of {self.schedule.steps}: α {alphas}, agreement {agreed}; "
            f"{history.positions:,} positions, {speed:.0f} a second, at most {left:.0f} min left"
        )

    @property
    def _state_file(self) -> Path:
        return self.folder / "state.pt"

    def _save(self) -> None:
        """Everything needed to go on, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "module": self.trainable.module.state_dict(),
            "best": self.best_state,
            "optimizer": self.optimizer.state_dict(),
            "history": vars(self.history),
        }
        partial = self._state_file.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._state_file)

    def _restore(self) -> None:
        if not self._state_file.exists():
            return
        state = torch.load(self._state_file, map_location=self.teacher.target.device, weights_only=True)
        self.trainable.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best_state, self.history = state["best"], History(**state["history"])
        self.report(f"going on at step {self.history.step}")
