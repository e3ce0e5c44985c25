"""Training: the draft is unrolled as it will run, on the target's states and laws (2503.01840, section 3.2).

An *anchor* is an entry with the target's true state. Step 0 reads all of them; step d continues every anchor
with the network's own state and the d-th true token after it. It sees the anchors up to its own and its own
steps: exactly what a drafted node sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.eagle.checkpoint import load_drafter, random_model, save_pretrained
from drafters.eagle.config import Config
from drafters.eagle.model import EagleModel, new_architecture
from drafters.training.batches import Batch
from drafters.training.shards import Answer
from drafters.training.trainable import Prediction, Trainable
from specdec.errors import OptionError
from specdec.model import Model

NOISE = 0.1  # generation 1: uniform noise on the features, ± this (2401.15077, section 4.3)
REGRESSION = 10.0  # generation 1: weight of the regression to the target's feature beside the cross-entropy


class EagleTraining(Trainable):
    """An EAGLE network in training.

    Arguments:
        config: its shape; `depth` is how far the draft is unrolled.
        target: frozen.
        token_map: the draft vocabulary.
    """

    prompts = "states"

    def __init__(self, config: Config, target: Model, token_map: Tensor | None):
        self.target, self.depth = target, config.depth
        if config.checkpoint is not None:
            self.module = load_drafter(config, target)
        else:
            self.module = fresh(config, target, token_map)
        self.token_map = self.module.draft_ids
        self.layers = self.module.architecture.feature_layers
        self.module.float()
        for parameter in self.module.parameters():
            parameter.requires_grad_(True)

    def predictions(self, batch: Batch) -> Iterator[Prediction]:
        """Step d of the anchor at place t, after the tokens up to t+1+d, guesses token t+2+d.

        The target's law of that token is the one its state at t+1+d stands for. Anchors count where the token
        after them, the root of a draft, is one of the answer.
        """
        model, tokens, final = self.module, batch.tokens, batch.features[Model.FINAL]
        width = tokens.shape[1]
        first = int(batch.starts.min()) - 1  # no anchor before it counts
        unroll = Unroll(first)
        places = torch.arange(width, device=tokens.device)
        cos, sin = model.rope(width + self.depth)
        state = self._noisy(model.states(batch.features[layer] for layer in self.layers)[:, :-1])
        for d in range(self.depth):
            anchors = places[first:-1] if d else places[:-1]
            here = tokens[:, (anchors + 1 + d).clamp(max=width - 1)]
            state = model(here, state, (cos[anchors + d][None], sin[anchors + d][None]), unroll.attend)
            if d == 0:
                state, anchors = state[:, first:], places[first:-1]
            unroll.steps += 1
            counts = (anchors + 1 >= batch.starts[:, None]) & (anchors + 2 + d < batch.lengths[:, None])
            row, column = counts.nonzero(as_tuple=True)
            origin, own = column + first, state[row, column]
            regression = None
            if model.architecture.generation == 1:  # its states continue the target's, so are to be like them
                distance = F.smooth_l1_loss(own.float(), final[row, origin + 1 + d].float(), reduction="none")
                regression = REGRESSION * distance.mean(-1)
            yield Prediction(model.norm(own), model.head, row, origin + 2 + d, origin, regression)

    @property
    def relative_cost(self) -> float:
        """Weights read per draft step over those read per target step."""
        architecture = self.module.architecture
        vocab, hidden = self.target.hf.get_output_embeddings().weight.shape
        layers = sum(p.numel() for p in self.target.hf.get_decoder().layers.parameters())
        own = sum(p.numel() for p in self.module.parameters())
        shared = 0 if self.module.lm_head is not None else architecture.draft_vocab_size * hidden
        return (own + shared) / (layers + vocab * hidden)

    def save(self, folder: Path, card: str) -> Path:
        return save_pretrained(self.module, folder, card, self.target.dtype)

    def _noisy(self, states: Tensor) -> Tensor:
        states = states.to(self.module.fc.weight.dtype)
        if self.module.training and self.module.architecture.generation == 1:
            states = states + (torch.rand_like(states) * 2 - 1) * NOISE
        return states


class Unroll:
    """Attention of all anchors' drafts at once.

    Arguments:
        first: the first anchor that is continued.

    Attributes:
        steps: how many have been taken.
    """

    def __init__(self, first: int):
        self.first, self.steps = first, 0
        self.anchors: dict[int, tuple[Tensor, Tensor]] = {}  # layer → k, v `[B, H_kv, T, D]` of step 0
        self.drafted: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # layer → k, v `[B, H_kv, A, d, D]` of the later ones

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `Attend`: step 0 causally; later, anchor a sees anchors ≤ a and its own steps."""
        q, k = q.to(v.dtype), k.to(v.dtype)
        if self.steps == 0:
            self.anchors[layer] = k, v
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] > k.shape[1])
            return out.transpose(1, 2).flatten(2)
        k, v = k[:, :, :, None], v[:, :, :, None]
        if self.steps > 1:
            before = self.drafted[layer]
            k, v = torch.cat([before[0], k], 3), torch.cat([before[1], v], 3)
        self.drafted[layer] = k, v
        keys, values = self.anchors[layer]
        batch, heads, count, dim = q.shape
        q = q.view(batch, k.shape[1], -1, count, dim) * dim**-0.5  # [B, H_kv, G, A, D]
        place = torch.arange(keys.shape[2], device=q.device)
        later = place > (place[self.first :])[:, None]  # [A, T]
        above = (q @ keys[:, :, None].mT).masked_fill(later, -torch.inf)  # [B, H_kv, G, A, T]
        own = (q[..., None, :] * k[:, :, None]).sum(-1)  # [B, H_kv, G, A, d]
        weights = torch.cat([above, own], -1).float().softmax(-1).to(v.dtype)
        out = weights[..., : len(place)] @ values[:, :, None]
        out = out + (weights[..., len(place) :, None] * v[:, :, None]).sum(-2)
        return out.view(batch, heads, count, dim).transpose(1, 2).flatten(2)


@torch.no_grad()
def fresh(config: Config, target: Model, token_map: Tensor | None) -> EagleModel:
    """Random weights; the scales are those of the target's head, embeddings and features."""
    size = target.vocab_size if token_map is None else len(token_map)
    model = random_model(new_architecture(target, config.generation, config.layers, size), target)
    if token_map is not None and model.is_reduced:
        ids = token_map.to(target.device)
        model.d2t.copy_(ids - torch.arange(size, device=ids.device))
        model.attach(target)
    last = getattr(target.hf.get_decoder(), "norm", None)
    scale = 1.0 if last is None else float(last.weight.float().square().mean().sqrt())
    if config.generation == 3:
        if last is not None and isinstance(model.norm, nn.RMSNorm):
            model.norm.weight.copy_(last.weight)
    else:  # embeddings and features enter with equal weight and leave at the features' scale
        hidden = target.config.hidden_size
        embeddings = target.hf.get_input_embeddings().weight
        model.fc.weight[:, :hidden] *= scale / float(embeddings.float().square().mean().sqrt())
    return model


def check(config: Config) -> None:
    """Refuse options that cannot be trained, before anything slow."""
    if config.draft_vocab is not None:
        remedy = "is for random weights; training takes task.draft_vocab."
        raise OptionError("drafter.draft_vocab", config.draft_vocab, remedy)


def build(
    config: Config, target: Model, token_map: Tensor | None, answers: Sequence[Answer] = ()
) -> EagleTraining:
    """A fresh network, or `drafter.checkpoint`'s to go on with."""
    return EagleTraining(config, target, token_map)
