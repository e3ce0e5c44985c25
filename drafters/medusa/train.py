"""Medusa-1: the heads are trained, the target is frozen (section 2.2.1), by the target's own soft laws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.medusa.choices import accepted_by_tree, greedy_choices, rank_rates
from drafters.medusa.config import Config
from drafters.medusa.formats import load_heads, save_heads
from drafters.medusa.heads import HeadsSpec, MedusaHeads
from drafters.training.batches import Batch
from drafters.training.shards import Answer
from drafters.training.trainable import Prediction, Trainable
from specdec.errors import OptionError
from specdec.model import Model

RANKS = 16  # of each head that a tuned tree may use
LARGEST_TREE = 64  # nodes of a tuned tree; users cut it


class MedusaTraining(Trainable):
    """Heads in training.

    Arguments:
        config: the heads' shape.
        target: frozen.
        token_map: the draft vocabulary.
    """

    layers = (Model.FINAL,)
    prompts = "none"

    def __init__(self, config: Config, target: Model, token_map: Tensor | None):
        self.target, self.nodes, self.token_map = target, config.nodes, token_map
        draft_vocab = None if token_map is None else len(token_map)
        spec = HeadsSpec(config.heads, config.resblocks, config.own_head, config.sees_root, draft_vocab)
        device_map = None if token_map is None else token_map.to(target.device)
        self.module = MedusaHeads(spec, target, device_map).to(target.device).float()

    def predictions(self, batch: Batch) -> Iterator[Prediction]:
        """At place t, whose state is the heads' input, token t+1 is the root; head d guesses token t+2+d."""
        states, tokens = batch.features[Model.FINAL], batch.tokens
        answered = batch.answer_mask
        guessable = answered[:, 1:-1] & answered[:, 2:]  # [B, T−2]: root, first guess
        row, t = guessable.nonzero(as_tuple=True)
        x = self.module.enter(states[row, t].float(), tokens[row, t + 1])  # [P, H]
        end = batch.lengths[row]
        for d in range(self.module.depth):
            here = (t + 2 + d < end).nonzero()[:, 0]
            states = self.module.blocks[d](x[here])
            yield Prediction(states, self.module.head(d), row[here], t[here] + 2 + d, t[here])

    def adapt(self, ranks: Tensor) -> dict[str, Any]:
        """Tune the tree to the measured ranks and tell what it would accept."""
        choices = greedy_choices(rank_rates(ranks, RANKS), LARGEST_TREE)
        self.module.spec.choices = [list(path) for path in choices]
        sizes = [n for n in (1, 4, 8, 16, 24, 32, 48, 64) if n <= len(choices)]
        accepted = {str(n): 1 + float(accepted_by_tree(ranks, choices[:n]).double().mean()) for n in sizes}
        return {"tree": self.module.spec.choices, "block_efficiency_by_nodes": accepted}

    @property
    def relative_cost(self) -> float:
        """Weights read per draft over those read per target step."""
        own = sum(p.numel() for p in self.module.parameters())
        vocab, hidden = self.target.hf.get_output_embeddings().weight.shape
        layers = sum(p.numel() for p in self.target.hf.get_decoder().layers.parameters())
        shared = 0 if self.module.spec.own_head else (self.module.spec.draft_vocab or vocab) * hidden
        return (own + shared) / (layers + vocab * hidden)

    def save(self, folder: Path, card: str) -> Path:
        return save_heads(self.module, folder, self.target.provenance.get("source") or self.target.name, card)


def check(config: Config) -> None:
    """Refuse options that cannot be trained, before anything slow."""
    if config.draft_vocab is not None:
        remedy = "is for random weights; training takes task.draft_vocab."
        raise OptionError("drafter.draft_vocab", config.draft_vocab, remedy)


def build(
    config: Config, target: Model, token_map: Tensor | None, answers: Sequence[Answer] = ()
) -> MedusaTraining:
    """Heads to be trained: fresh ones, or `drafter.checkpoint`'s to go on with."""
    training = MedusaTraining(config, target, token_map)
    if config.checkpoint is not None:
        loaded = load_heads(config.checkpoint, target, config.revision)
        training.module, training.token_map = loaded.float().requires_grad_(True), loaded.token_map
    return training
