"""A small model cut out of the target and distilled by the target's soft laws (Hinton et al. 1503.02531)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor, nn

from drafters.small.config import Config
from drafters.small.importance import block_influence, head_importance, leave_one_out, unit_importance
from drafters.small.prune import Cut, MappedHead, best, carve
from drafters.small.pruned import is_pruned, load_pruned, save_pruned
from drafters.training.batches import Batch, pad
from drafters.training.shards import Answer
from drafters.training.trainable import Prediction, Trainable
from specdec.errors import OptionError
from specdec.model import Model

CALIBRATION = 24  # answers on which importance is measured


class SmallTraining(Trainable):
    """A small model in training; embeddings and head stay frozen.

    Arguments:
        small: from `carve` or `load_pruned`.
        target: whose answers it reads.
        token_map: the draft vocabulary.
        report: how it was cut.
    """

    prompts = "tokens"

    def __init__(self, small: Model, target: Model, token_map: Tensor | None, report: dict | None = None):
        self.small, self.target, self.token_map, self.report = small, target, token_map, report or {}
        self.decoder = small.hf.get_decoder()
        self.module = nn.ModuleDict({"layers": self.decoder.layers, "norm": self.decoder.norm})
        self.module.float().requires_grad_(True)

    def predictions(self, batch: Batch) -> Iterator[Prediction]:
        """One depth: after every token before an answer's token, what comes next?"""
        embedded = self.small.hf.get_input_embeddings()(batch.tokens).float()
        states = self.decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state
        row, place = batch.answer_mask.nonzero(as_tuple=True)
        yield Prediction(states[row, place - 1], self._head, row, place, place)

    def save(self, folder: Path, card: str) -> Path:
        config, layers = self.small.config, len(self.decoder.layers)
        whole = self.target.config
        shape = {
            "layers": layers,
            "units": _changed(config.intermediate_size, whole.intermediate_size),
            "groups": _changed(config.num_key_value_heads, whole.num_key_value_heads),
        }
        base = self.target.provenance.get("source") or self.target.name
        return save_pruned(self.small, shape, folder, base, card)

    @property
    def relative_cost(self) -> float:
        """Weights read per drafted token over those read per target step."""
        own = sum(p.numel() for p in self.module.parameters())
        vocab, hidden = self.target.hf.get_output_embeddings().weight.shape
        layers = sum(p.numel() for p in self.target.hf.get_decoder().layers.parameters())
        drafted = vocab if self.token_map is None else len(self.token_map)
        return (own + drafted * hidden) / (layers + vocab * hidden)

    @property
    def _head(self) -> tuple[Tensor, Tensor | None]:
        head = self.small.hf.get_output_embeddings()
        if isinstance(head, MappedHead):
            return head.lent[0], None
        return head.weight.detach(), getattr(head, "bias", None)


def check(config: Config) -> None:
    """Refuse options that cannot be trained, before anything slow.

    Raises:
        OptionError: no number of layers, or a checkpoint that training did not make.
    """
    if config.path is None and config.layers is None:
        raise OptionError("drafter.layers", "null", "give the number of the target's layers to keep, e.g. 4.")
    if config.path is not None and not is_pruned(config.path):
        raise OptionError(
            "drafter.path", config.path, "training goes on only with checkpoints of task=train."
        )


def build(
    config: Config, target: Model, token_map: Tensor | None, answers: Sequence[Answer] = ()
) -> SmallTraining:
    """The model to be trained: cut out of the target, or `drafter.path`'s to go on with.

    Arguments:
        answers: of the target; importance is measured on the first ones.

    Raises:
        OptionError: more is to be kept than there is.
    """
    if config.path is not None:
        small = load_pruned(config.path, target)
        head = small.hf.get_output_embeddings()
        return SmallTraining(small, target, head.token_map if isinstance(head, MappedHead) else None)
    check(config)
    assert config.layers is not None
    _at_most("layers", config.layers, target.config.num_hidden_layers)
    batch = pad(answers[:CALIBRATION]).to(target.device)
    influence, loss = block_influence(target, batch), leave_one_out(target, batch)
    kept = best(loss if config.importance == "loss" else influence, config.layers)
    cut = Cut(kept)
    if config.units is not None:
        _at_most("units", config.units, target.config.intermediate_size)
        cut.units = [best(row, config.units) for row in unit_importance(target, batch)[kept]]
    if config.groups is not None:
        _at_most("groups", config.groups, target.config.num_key_value_heads)
        cut.groups = [best(row, config.groups) for row in head_importance(target, batch)[kept]]
    report = {"layers_kept": kept, "influence": influence.tolist(), "leave_one_out": loss.tolist()}
    return SmallTraining(carve(target, cut, token_map), target, token_map, report)


def _at_most(option: str, value: int, most: int) -> None:
    if value > most:
        raise OptionError(f"drafter.{option}", value, f"the target has only {most}.")


def _changed(now: int, before: int) -> int | None:
    return now if now != before else None
