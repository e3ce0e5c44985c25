"""The heads: residual blocks on the target's feature, then a vocabulary matrix, the target's or their own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.model import Model
from specdec.products import frozen, thin_linear


@dataclass
class HeadsSpec:
    """What the heads look like; `config.json` of a checkpoint of ours.

    Arguments:
        heads: D, tokens guessed ahead; head d guesses the token d+1 places after the root (d = 0, …).
        resblocks: residual blocks per head.
        own_head: vocabulary matrices of their own.
        sees_root: the last committed token enters, too.
        draft_vocab: size of the draft vocabulary; `None` = the target's.
        choices: the tree these heads were tuned for, best nodes first.
    """

    heads: int = 3
    resblocks: int = 1
    own_head: bool = False
    sees_root: bool = False
    draft_vocab: int | None = None
    choices: list[list[int]] = field(default_factory=list)


class ResBlock(nn.Module):
    """x + SiLU(Wx + b); the identity when W and b are zero (section 2.1.1 of the paper)."""

    def __init__(self, hidden: int, bias: bool = True):
        super().__init__()
        self.linear = nn.Linear(hidden, hidden, bias=bias)
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(thin_linear(x, self.linear.weight, self.linear.bias))


class MedusaHeads(nn.Module):
    """D heads for one target.

    Arguments:
        spec: their shape.
        target: whose matrices they share (never trained, never saved).
        token_map: `[Vd]` int64, the target's ids of the draft vocabulary; `None` = all, in order.
        bias: whether the residual blocks have one.
    """

    token_map: Tensor | None

    def __init__(self, spec: HeadsSpec, target: Model, token_map: Tensor | None = None, bias: bool = True):
        super().__init__()
        self.spec = spec
        output, embedding = target.hf.get_output_embeddings(), target.hf.get_input_embeddings()
        hidden = output.weight.shape[1]
        self.register_buffer("token_map", token_map)
        blocks = (
            nn.Sequential(*(ResBlock(hidden, bias) for _ in range(spec.resblocks))) for _ in range(spec.heads)
        )
        self.blocks = nn.ModuleList(blocks)
        if spec.sees_root:
            self.root = nn.Linear(embedding.weight.shape[1], hidden, bias=False)
            nn.init.zeros_(self.root.weight)
        weight, offset = frozen(output.weight), getattr(output, "bias", None)
        if token_map is not None:
            weight, offset = weight[token_map], None if offset is None else offset[token_map]
        self._embedding = (
            embedding.weight.detach(),
        )  # in tuples: the target's, not parameters of this module
        self._shared = (weight, offset)
        if spec.own_head:
            self.heads = nn.ModuleList(nn.Linear(hidden, len(weight), bias=False) for _ in range(spec.heads))
            for head in self.heads:
                head.weight.data.copy_(weight)

    @property
    def depth(self) -> int:
        """D."""
        return self.spec.heads

    def forward(self, features: Tensor, root: Tensor, count: int | None = None) -> Tensor:
        """Logits `[..., D, Vd]` over the draft vocabulary.

        Arguments:
            features: `[..., H]` the target's final hidden state (after its norm) before the root.
            root: `[...]` the last committed token, which follows that state.
            count: only the first so many heads.
        """
        heads = range(self.depth if count is None else count)
        x = self.enter(features, root)
        hidden = [self.blocks[d](x) for d in heads]
        if self.spec.own_head:
            return torch.stack([self.logits(h, d) for d, h in enumerate(hidden)], -2)
        return self.logits(torch.stack(hidden, -2), 0)  # one product reads the matrix once

    def enter(self, features: Tensor, root: Tensor) -> Tensor:
        """`[..., H]`: what all heads read."""
        if not self.spec.sees_root:
            return features
        embedded = F.embedding(root, self._embedding[0]).to(features.dtype)
        normed = F.rms_norm(embedded, embedded.shape[-1:])  # features have unit scale, too
        return features + thin_linear(normed, self.root.weight)

    @property
    def lent(self) -> list[Tensor]:
        """The target's weights that a forward reads whole."""
        return [] if self.spec.own_head else [self._shared[0]]

    def head(self, d: int) -> tuple[Tensor, Tensor | None]:
        """Matrix `[Vd, H]` and bias `[Vd]`, if any, of head d."""
        return (self.heads[d].weight, None) if self.spec.own_head else self._shared

    def logits(self, hidden: Tensor, d: int) -> Tensor:
        """`[..., Vd]` of head d from what its blocks gave, `[..., H]`."""
        weight, bias = self.head(d)
        return thin_linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))

    def to_target(self, logits: Tensor, vocab: int) -> Tensor:
        """Logits `[..., Vd]` over the target's vocabulary `[..., V]`; what cannot be guessed gets −inf."""
        if self.token_map is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], vocab), -torch.inf)
        return full.index_copy_(-1, self.token_map, logits)
