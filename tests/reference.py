"""Slow, plain references: forwards without a cache, walks instead of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.checkpoints import load
from specdec.config import TargetConfig
from specdec.model import Model
from specdec.progress import silent
from specdec.tree import Tree


def tiny(dtype: str = "float64", **options) -> Model:
    """A random Llama on the CPU; `vocab_size`, `hidden_size`, `layers`, `seed` as in `TargetConfig`."""
    return Model.load(TargetConfig(name="tiny", source="tiny", device="cpu", dtype=dtype, **options), silent)


def plain(options: dict) -> torch.nn.Module:
    """The same weights in a model of its own, which no `Model` has touched."""
    return load(TargetConfig(name="tiny", source="tiny", device="cpu", **options), silent).model


@torch.inference_mode()
def next_logits(hf: torch.nn.Module, tokens: list[int]) -> Tensor:
    """`[V]`: a forward over the whole sequence, without cache, mask or positions."""
    return hf(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


@torch.inference_mode()
def all_logits(hf: torch.nn.Module, tokens: list[int]) -> Tensor:
    """`[T, V]`: after every token of the sequence."""
    return hf(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def greedy(hf: torch.nn.Module, prompt: list[int], count: int, eos: tuple[int, ...] = ()) -> list[int]:
    """Greedy decoding by Hugging Face `generate`."""
    out = hf.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=list(eos) or None,
        pad_token_id=eos[0] if eos else 0,
    )
    return out[0, len(prompt) :].tolist()


def greedy_together(
    hf: torch.nn.Module, prompts: list[list[int]], count: int, eos: tuple[int, ...], batch_size: int = 32
) -> list[list[int]]:
    """Greedy decoding of many prompts by Hugging Face `generate`, padded on the left."""
    said: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        longest = max(map(len, batch))
        out = hf.generate(
            torch.tensor([[eos[0]] * (longest - len(p)) + p for p in batch]),
            attention_mask=torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch]),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=list(eos),
            pad_token_id=eos[0],
        )
        for tokens in out[:, longest:].tolist():
            end = next((i + 1 for i, token in enumerate(tokens) if token in eos), count)
            said.append(tokens[:end])
    return said


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from depth 1 down to `node`, by walking up."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def random_parents(generator: torch.Generator, size: int) -> list[int]:
    """A random tree: each node hangs off the root or any earlier node."""
    return [int(torch.randint(-1, n, (1,), generator=generator)) for n in range(size)]


def pad(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """(tokens `[B, L]`, lengths `[B]`), right-padded with zeros."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([p + [0] * (longest - len(p)) for p in prompts])
    return tokens, torch.tensor([len(p) for p in prompts])


def tree_reference(hf: torch.nn.Module, prefixes: list[list[int]], tokens: Tensor, tree: Tree) -> Tensor:
    """`[B, N+1, V]`: one plain forward per row and node, along its path."""
    parents = torch.atleast_2d(tree.parents).expand(len(prefixes), -1).tolist()
    rows = []
    for b, prefix in enumerate(prefixes):
        paths = [[], *(path_to(parents[b], n) for n in range(tree.size))]
        rows.append(
            torch.stack(
                [next_logits(hf, [*prefix, *(int(tokens[b, n + 1]) for n in [-1, *path])]) for path in paths]
            )
        )
    return torch.stack(rows)
