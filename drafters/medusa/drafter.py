"""Medusa heads draft a tree in one go: every head looks at the same hidden state of the target."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from drafters import shipped
from drafters.medusa.choices import TYPICAL, Path, greedy_choices
from drafters.medusa.config import Config
from drafters.medusa.formats import load_heads
from drafters.medusa.heads import HeadsSpec, MedusaHeads
from specdec.distribution import distribution
from specdec.drafter import Drafter, Draw
from specdec.errors import OptionError
from specdec.graphs import Graphs
from specdec.model import Model, Output
from specdec.products import prepare
from specdec.proposal import Kind, Proposal
from specdec.sampling import Sampling
from specdec.sequences import Sequences
from specdec.tree import Tree

KINDS = {
    "top_k": Kind.DETERMINISTIC,
    "without_replacement": Kind.WITHOUT_REPLACEMENT,
    "with_replacement": Kind.WITH_REPLACEMENT,
}


class MedusaDrafter(Drafter):
    """A tree of fixed shape: the node with path (r₁, …, r_d) holds the guess of rank r_d of head d.

    With `siblings="top_k"` nothing is drawn. Else rank r stands for the r-th draw among siblings, and all
    nodes at depth d are drawn from the law of head d, which depends on the context, not on the tokens above.

    Arguments:
        heads: trained for this target.
        vocab_size: the target's V.
        choices: the tree as paths of ranks.
        siblings: `top_k`, `without_replacement` or `with_replacement`.
    """

    name = "medusa"
    features = (Model.FINAL,)

    def __init__(self, heads: MedusaHeads, vocab_size: int, choices: list[Path], siblings: str = "top_k"):
        self.heads, self.vocab_size, self.kind = heads, vocab_size, KINDS[siblings]
        widest = heads.spec.draft_vocab or vocab_size
        self.shape = TreeShape([p for p in choices if len(p) <= heads.depth and max(p) < widest])
        self.is_chain, self.max_nodes = self.shape.is_chain, len(self.shape.paths)
        self.graphs: Graphs | None = None

    def compile(self, batch: int) -> None:
        prepare(self.heads, *self.heads.lent)

    def begin(self, sequences: Sequences, output: Output, sampling: Sampling, capacity: int) -> None:
        self.sampling = replace(  # the heads' law may not depend on drafted tokens, so no penalties
            sampling,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            min_new_tokens=0,
            bad_words=[],
            processors=(),
        )
        batch, graphs = sequences.batch, self.graphs
        if graphs is None or graphs.record is not self.record or graphs.most < batch:
            self.graphs = Graphs(self.record, batch) if self.record else None
        rows = torch.arange(batch, device=sequences.ids.device)
        self.hidden = output.features[Model.FINAL][rows, sequences.prompt_length - 1]  # [B, H]

    def propose(self, sequences: Sequences, draw: Draw, depth: int) -> Proposal:
        shape = self.shape.up_to(depth)
        if not shape.paths:
            return Proposal.empty(sequences.batch, sequences.ids.device)
        best = self.kind is Kind.DETERMINISTIC
        guess = partial(best_tokens, shape.width) if best else logits_of
        guess = partial(guess, self.heads, shape.depth)
        inputs = self.hidden, sequences.root[:, 0]
        key = shape.depth, shape.width
        (found,) = guess(*inputs) if self.graphs is None else self.graphs.run(key, guess, *inputs)
        return self._best(found, shape) if best else self._drawn(found, shape, draw)

    def commit(self, sequences: Sequences, path: Tensor, accepted: Tensor, output: Output) -> None:
        rows = torch.arange(sequences.batch, device=sequences.ids.device)
        last = torch.zeros_like(accepted)  # 0 is the root
        if path.shape[1]:
            deepest = path.gather(1, (accepted[:, None] - 1).clamp(min=0))[:, 0]
            last = torch.where(accepted > 0, deepest + 1, last)
        self.hidden = output.features[Model.FINAL][rows, last]

    def select(self, rows: Tensor) -> None:
        self.hidden = self.hidden[rows]

    def _best(self, tokens: Tensor, shape: TreeShape) -> Proposal:
        """Every head's most probable tokens, of `[B, D, K]`."""
        tree, levels, ranks = shape.on(tokens.device)
        return Proposal(tokens[:, levels, ranks], tree)

    def _drawn(self, logits: Tensor, shape: TreeShape, draw: Draw) -> Proposal:
        """Every node drawn from the law of its head, logits `[B, D, Vd]`."""
        laws = distribution(self.heads.to_target(logits, self.vocab_size), self.sampling)  # [B, D, V]
        kind = Kind.COUPLED if draw.coupled else self.kind
        exists = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        left: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # parent → what its next child is drawn from, and where it can be
        tokens, valid = [], []
        for node, parent in enumerate(shape.parents):
            level = len(shape.paths[node]) - 1
            law, alive = left.get(parent) or (laws[:, level], exists if parent < 0 else valid[parent])
            x = draw(_certain_unless(alive, law), depth=level + 1, node=node)
            tokens.append(x)
            valid.append(alive)
            if kind is not Kind.WITH_REPLACEMENT:
                law = law.scatter(1, x[:, None], 0.0)
                mass = law.sum(1, keepdim=True)
                law, alive = law / torch.where(mass > 0, mass, 1.0), alive & (mass[:, 0] > 0)
            left[parent] = law, alive
        tree, levels, _ = shape.on(logits.device)
        return Proposal(torch.stack(tokens, 1), tree, kind, laws[:, levels], torch.stack(valid, 1))


class TreeShape:
    """A tree given by paths of ranks, in the order in which a proposal lists its nodes."""

    def __init__(self, paths: list[Path]):
        self.paths = sorted(paths, key=lambda path: (len(path), path))
        index = {path: i for i, path in enumerate(self.paths)}
        self.parents = [index.get(path[:-1], -1) for path in self.paths]
        self.depth = max(map(len, self.paths), default=0)
        self.width = 1 + max((path[-1] for path in self.paths), default=0)
        self.is_chain = self.parents == list(range(-1, len(self.paths) - 1))
        self._cut: dict[int, TreeShape] = {}
        self._on: dict[torch.device, tuple[Tree, Tensor, Tensor]] = {}

    def up_to(self, depth: int) -> TreeShape:
        """The nodes at most `depth` deep."""
        if depth >= self.depth:
            return self
        if depth not in self._cut:
            self._cut[depth] = TreeShape([path for path in self.paths if len(path) <= depth])
        return self._cut[depth]

    def on(self, device: torch.device) -> tuple[Tree, Tensor, Tensor]:
        """Who hangs off whom, and `[N]` each node's head and rank."""
        if device not in self._on:
            levels = [len(path) - 1 for path in self.paths]
            ranks = [path[-1] for path in self.paths]
            parents, levels_, ranks_ = (
                torch.tensor(x, dtype=torch.int64, device=device) for x in (self.parents, levels, ranks)
            )
            self._on[device] = Tree(parents), levels_, ranks_
        return self._on[device]


def logits_of(heads: MedusaHeads, depth: int, hidden: Tensor, root: Tensor) -> tuple[Tensor]:
    """`[B, D, Vd]` of the first `depth` heads."""
    return (heads(hidden, root, depth),)


def best_tokens(width: int, heads: MedusaHeads, depth: int, hidden: Tensor, root: Tensor) -> tuple[Tensor]:
    """`[B, D, K]`: the `width` most probable tokens of each of the first `depth` heads."""
    best = heads(hidden, root, depth).topk(width, -1).indices
    return (best if heads.token_map is None else heads.token_map[best],)


def _certain_unless(alive: Tensor, law: Tensor) -> Tensor:
    """`law` `[B, V]`, but a certainty in rows that are not `alive` `[B]`, so that drawing decides nothing."""
    if bool(alive.all()):
        return law
    certain = torch.zeros_like(law)
    certain[:, 0] = 1.0
    return torch.where(alive[:, None], law, certain)


def build(config: Config, target: Model) -> MedusaDrafter:
    """The drafter of these options.

    Raises:
        OptionError: there are no heads for this target, or they do not fit.
    """
    heads = random_heads(config, target) if config.weights == "random" else _trained(config, target)
    if config.choices is not None:
        choices = [tuple(path) for path in config.choices]
        _refuse_what_heads_cannot_guess(choices, heads.depth, heads.spec.draft_vocab or target.vocab_size)
    elif heads.spec.choices:
        choices = [tuple(path) for path in heads.spec.choices[: config.nodes]]
    else:
        choices = greedy_choices(TYPICAL[: heads.depth], config.nodes)
    return MedusaDrafter(heads, target.vocab_size, choices, config.siblings)


def _refuse_what_heads_cannot_guess(choices: list[Path], depth: int, widest: int) -> None:
    for path in choices:
        if len(path) > depth:
            remedy = f"is {len(path)} deep, but there are {depth} heads; leave it out."
            raise OptionError("drafter.choices", list(path), remedy)
        if max(path) >= widest:
            remedy = f"asks for rank {max(path)}, but a head knows {widest} tokens; leave it out."
            raise OptionError("drafter.choices", list(path), remedy)


def _trained(config: Config, target: Model) -> MedusaHeads:
    checkpoint = config.checkpoint or shipped.checkpoint("medusa", target.name, target.is_random)
    return load_heads(checkpoint, target, config.revision)


def random_heads(config: Config, target: Model, seed: int = 0, scale: float = 1.0) -> MedusaHeads:
    """Untrained heads of the options' shape, their blocks filled with normal numbers of `scale`/√H."""
    count = min(config.draft_vocab or target.vocab_size, target.vocab_size)
    token_map = None if config.draft_vocab is None else torch.arange(count)
    spec = HeadsSpec(
        config.heads, config.resblocks, config.own_head, config.sees_root, config.draft_vocab and count
    )
    heads = MedusaHeads(spec, target, token_map)
    generator = torch.Generator().manual_seed(seed)
    for parameter in heads.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * scale / parameter.shape[-1] ** 0.5
        parameter.data.add_(noise.to(parameter.device, parameter.dtype))
    return heads.to(target.device, target.dtype).eval().requires_grad_(False)
