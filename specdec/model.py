"""A causal language model that reads token trees: prefill, tree forward, features.

Serves the target and any drafter that is a language model. Knows nothing of sampling, rules or drafters.
"""

from __future__ import annotations

import inspect
import time
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec import attention, checkpoints, compiled
from specdec.cache import SlotCache, emptied
from specdec.compat import cache_argument
from specdec.config import TargetConfig
from specdec.errors import OptionError
from specdec.graphs import WIDEST, Record, pages
from specdec.heap import return_freed_memory
from specdec.products import prepare
from specdec.progress import Progress
from specdec.tokenization import encode_prompts
from specdec.tree import Tree


@dataclass(frozen=True)
class Output:
    """What a forward gives.

    Arguments:
        logits: `[B, T, V]` after every forwarded token (a prefill: `[B, 1, V]`, after the last prompt token).
        features: layer → `[B, T, H]` for every forwarded token, as asked for by `Model.features`.
    """

    logits: Tensor
    features: dict[int, Tensor]


class Model:
    """A Hugging Face causal language model behind the slots-and-trees interface.

    Arguments:
        hf: the model, in eval mode, on its device(s).
        tokenizer: its tokenizer, or `None` where prompts come as token ids.
        name: what reports call it.
        eos_token_ids: tokens that end a sequence.
        context_length: the largest number of tokens the model can see.
        chat: whether prompts are wrapped in the chat template.
        provenance: where the weights came from, for the run's metadata.

    Raises:
        OptionError: the model keeps more than keys and values, so that no token can be taken back.
    """

    FINAL = -1  # the feature "hidden state after the final norm", i.e. what enters the language-model head

    def __init__(
        self,
        hf: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
        eos_token_ids: tuple[int, ...] = (),
        context_length: int | None = None,
        chat: bool = False,
        provenance: dict[str, Any] | None = None,
    ):
        _refuse_what_cannot_be_rewound(hf, name)
        self.hf, self.tokenizer, self.name, self.chat = hf, tokenizer, name, chat
        self.eos_token_ids = tuple(eos_token_ids)
        self.config = hf.config.get_text_config()
        self.context_length = context_length or int(getattr(self.config, "max_position_embeddings", 2**31))
        self.provenance = provenance or {}
        self.vocab_size: int = hf.get_output_embeddings().weight.shape[0]
        self.features: tuple[int, ...] = ()  # layers whose output the drafter wants, or FINAL
        self.fixed_width: int | None = None  # pad every tree forward to this many tokens
        self._cache_argument = cache_argument(hf)
        self._captured: dict[int, Tensor] = {}
        self._last: Tensor | None = None  # during prefill: the only position per row whose logits are wanted
        self._install_hooks()
        self._groups = 1  # query heads of a key/value head, for which masks are repeated
        if self.config._attn_implementation in ("sdpa", attention.NAME):  # a copy of a model has ours
            hf.set_attn_implementation(attention.NAME)
            heads = self.config.num_attention_heads
            self._groups = heads // (getattr(self.config, "num_key_value_heads", None) or heads)
        layer_types = set(getattr(self.config, "layer_types", None) or ())
        self._window: int | None = getattr(self.config, "sliding_window", None)
        if not getattr(self.config, "use_sliding_window", True) or (
            layer_types and "sliding_attention" not in layer_types
        ):
            self._window = None
        self._mixed_masks = self._window is not None and "full_attention" in layer_types
        forms = {tuple((p.shape, p.device) for p in layer.parameters()) for layer in hf.get_decoder().layers}
        self._layers_alike = len(forms) == 1  # as their keys and values are
        if self.device.type == "cuda":  # cuDNN plans an attention for every new shape; here each step has one
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.compiled = False  # whether forwards run compiled; may be set once `compile` has been called
        self._layers: compiled.CompiledLayers | None = None
        self._ready: set[int] = set()  # batch sizes whose forwards have been compiled
        self.compile_seconds = 0.0

    @classmethod
    def load(cls, config: TargetConfig, progress: Progress | None = None) -> Model:
        """The model that `config` describes (see `specdec.checkpoints.load`)."""
        loaded = checkpoints.load(config, progress)
        return_freed_memory()
        return cls(
            loaded.model,
            loaded.tokenizer,
            config.name,
            tuple(sorted(checkpoints.eos_token_ids(loaded.model, loaded.tokenizer))),
            checkpoints.context_length(loaded.model),
            loaded.chat,
            loaded.provenance,
        )

    @property
    def device(self) -> torch.device:
        device = self.hf.get_input_embeddings().weight.device
        assert isinstance(device, torch.device)
        return device

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    @property
    def gains_by_compiling(self) -> bool:
        """Whether compiling is known to pay: a large model in bfloat16 on a CPU, and nothing in the way."""
        return (
            self.device.type == "cpu"
            and self.dtype == torch.bfloat16
            and sum(p.numel() for p in self.hf.parameters()) >= compiled.LARGE
            and self.obstacle is None
        )

    @property
    def is_random(self) -> bool:
        """Whether its weights are random numbers, so that nothing trained fits it."""
        return self.provenance.get("weights") == "random"

    @property
    def is_spread(self) -> bool:
        """Whether its layers are on several devices."""
        return compiled.spread(self.hf.get_decoder().layers)

    @property
    def obstacle(self) -> str | None:
        """Why the layers cannot be compiled, if they cannot."""
        ours = self.config._attn_implementation == attention.NAME
        return compiled.obstacle(self.hf.get_decoder().layers, ours)

    @torch.inference_mode()
    def compile(self, batch: int = 1) -> None:
        """Compile the layers and run once whatever batches of up to `batch` rows will need.

        Raises:
            OptionError: these layers, or this machine, cannot.
        """
        if reason := self.obstacle:
            raise OptionError("engine.compile", "on", f"{reason}; use engine.compile=off.")
        if self._layers is None:
            head = self.hf.get_output_embeddings()
            self._layers = compiled.CompiledLayers(self.hf.get_decoder().layers, head, self._cache_argument)
        start = time.perf_counter()
        head = self.hf.get_output_embeddings()
        prepare(self.hf.get_decoder().layers, *getattr(head, "lent", (head.weight,)))
        compiled.try_sizes(self._run_compiled, batch, self._ready)
        self.compile_seconds += time.perf_counter() - start

    def _run_compiled(self, rows: int) -> None:
        """Forwards of several tokens and of one, no two sizes alike, so that each compiles for all sizes."""
        was = self.compiled, self.features, self.fixed_width
        self.compiled, self.features, self.fixed_width = True, (), None
        try:
            for count in (3, 1):
                cache = self.new_cache(rows, 12)
                cache.lengths, cache.longest = cache.lengths + 4, 4
                tokens = torch.zeros(rows, count, dtype=torch.int64, device=self.device)
                self.forward(tokens, Tree.chain(count - 1, self.device), cache)
        finally:
            self.compiled, self.features, self.fixed_width = was

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of prompts, in the chat template where the model has one.

        Raises:
            OptionError: a prompt is empty.
        """
        return encode_prompts(self.tokenizer, texts, self.chat)

    def new_cache(
        self, batch: int, capacity: int, record: Record | None = None, old: SlotCache | None = None
    ) -> SlotCache:
        """An empty cache; a forward of T tokens needs T free slots per row.

        Arguments:
            record: how its forwards are recorded, if they are to be; what one gives holds until the next.
            old: a cache that nobody needs; if its recorded forwards serve on, it is emptied and used again.
        """
        if (again := emptied(old, batch, capacity, record)) is not None:
            return again
        layers = self.config.num_hidden_layers
        return SlotCache(layers, batch, capacity, self.device, self._layers_alike, record)

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, lengths: Tensor, cache: SlotCache, chunk: int = 512) -> Output:
        """Read prompts into an empty cache.

        Arguments:
            tokens: `[B, L]` int64, right-padded with any token.
            lengths: `[B]` int64, the prompts' lengths; their maximum is L.
            cache: an empty cache.
            chunk: at most this many tokens per forward.

        Returns:
            Logits `[B, 1, V]` after each row's last token; features `[B, L, H]`.
        """
        pieces: list[dict[int, Tensor]] = []
        logits = None
        for start in range(0, tokens.shape[1], chunk):
            piece = tokens[:, start : start + chunk]
            self._last = (lengths - 1 - start).clamp(0, piece.shape[1] - 1)
            try:
                out = self._forward(piece, Tree.chain(piece.shape[1] - 1, self.device), cache)
            finally:
                self._last = None
            ends_here = (lengths > start)[:, None, None]
            logits = out.logits if logits is None else torch.where(ends_here, out.logits, logits)
            pieces.append(out.features)
            cache.lengths = cache.lengths + piece.shape[1]
            cache.longest += piece.shape[1]
        cache.lengths = lengths.clone()
        cache.settle(tokens.shape[1])
        assert logits is not None
        return Output(logits, {k: torch.cat([p[k] for p in pieces], 1) for k in self.features})

    @torch.inference_mode()
    def forward(self, tokens: Tensor, tree: Tree, cache: SlotCache) -> Output:
        """One forward over the last committed token and a tree hanging off it.

        Arguments:
            tokens: `[B, N+1]` int64, the root first.
            tree: N nodes.
            cache: holds everything before the root; its lengths do not change.

        Returns:
            Logits `[B, N+1, V]`; every node's equal those of a plain forward along its path.
        """
        count, used = tokens.shape[1], None
        if self.fixed_width is not None and count < self.fixed_width:
            padding = (0, self.fixed_width - count)  # extra leaves of the root that nobody looks at
            tree = Tree(torch.nn.functional.pad(tree.parents, padding, value=-1))
            tokens, used = torch.nn.functional.pad(tokens, padding), cache.capacity
        replayed = cache.graphs is not None and cache.blocks and tokens.shape[1] <= WIDEST
        out = (self._replayed if replayed else self._forward)(tokens, tree, cache, used)
        return Output(out.logits[:, :count], {k: f[:, :count] for k, f in out.features.items()})

    def _replayed(self, tokens: Tensor, tree: Tree, cache: SlotCache, used: int | None) -> Output:
        """`_forward`, recorded once for every shape."""
        chain = tree if tree.is_chain else None  # else each row brings its own
        used = used or pages(cache.longest + tokens.shape[1])
        graphs, cache = cache.graphs, weakref.proxy(cache)  # which the cache owns, so no circle

        def forward(tokens: Tensor, lengths: Tensor, parents: Tensor) -> tuple[Tensor, ...]:
            with cache.standing_at(lengths):
                output = self._forward(tokens, chain or Tree(parents), cache, used)
            return output.logits, *(output.features[layer] for layer in self.features)

        assert graphs is not None
        key = (used, chain is None, self.features, self.compiled)
        parents = torch.atleast_2d(tree.parents).expand(len(tokens), -1)
        logits, *features = graphs.run(key, forward, tokens, cache.lengths, parents)
        return Output(logits, dict(zip(self.features, features, strict=True)))

    def _forward(self, tokens: Tensor, tree: Tree, cache: SlotCache, used: int | None = None) -> Output:
        cache.begin(tokens.shape[1], used)
        positions = cache.lengths[:, None] + tree.depth  # [B, T]
        with self._layers.running(cache) if self.compiled and self._layers else nullcontext():
            output = self.hf(
                input_ids=tokens,
                attention_mask=self._masks(tree, cache, positions),
                # what lies behind the context is never accepted
                position_ids=positions.clamp(max=self.context_length - 1),
                use_cache=True,
                **{self._cache_argument: cache},
            )
        captured, self._captured = self._captured, {}
        return Output(output.logits, captured)

    def _masks(self, tree: Tree, cache: SlotCache, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive masks `[B, 1, T, S]`: committed slots, ancestors and oneself are seen, nothing else."""
        slots = torch.arange(cache.used, device=positions.device)
        relative = slots - cache.lengths[:, None]  # [B, S] index into the forwarded tokens, < 0 if committed
        count = tree.size + 1
        if tree.is_chain:
            visible = relative[:, None, :] <= torch.arange(count, device=slots.device)[:, None]
        else:
            index = relative.clamp(0, count - 1)[:, None, :].expand(-1, count, -1)
            sees = tree.ancestors.expand(len(relative), -1, -1).gather(2, index)
            visible = (relative < 0)[:, None, :] | (sees & (relative < count)[:, None, :])
        full = self._additive(visible)
        if self._window is None:
            return full
        depth = positions.gather(1, relative.clamp(0, count - 1))
        slot_position = torch.where(relative < 0, slots, depth)
        sliding = self._additive(visible & (positions[:, :, None] - slot_position[:, None, :] < self._window))
        return {"full_attention": full, "sliding_attention": sliding} if self._mixed_masks else sliding

    def _additive(self, visible: Tensor) -> Tensor:
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
        mask = mask.masked_fill_(~visible, torch.finfo(self.dtype).min)[:, None]
        return mask.repeat(1, 1, self._groups, 1) if self._groups > 1 and mask.shape[2] > 1 else mask

    def _install_hooks(self) -> None:
        """Capture features on their way, and spare the head the positions nobody asked for."""

        def before_head(module: torch.nn.Module, args: tuple) -> tuple | None:
            hidden = args[0]
            if self.FINAL in self.features:
                self._captured[self.FINAL] = hidden
            if self._last is None:
                return None
            rows = torch.arange(len(hidden), device=hidden.device)
            return (hidden[rows, self._last.to(hidden.device)][:, None], *args[1:])

        def after_layer(index: int):
            def hook(module: torch.nn.Module, args: tuple, output: Any) -> None:
                if index in self.features:
                    self._captured[index] = output[0] if isinstance(output, tuple) else output

            return hook

        self.hf.get_output_embeddings().register_forward_pre_hook(before_head)
        for index, layer in enumerate(self.hf.get_decoder().layers):
            layer.register_forward_hook(after_layer(index))


def _refuse_what_cannot_be_rewound(hf: PreTrainedModel, name: str) -> None:
    """State-space, convolution and recurrent layers have no slots to go back to; ALiBi takes no positions."""
    kinds = set(getattr(hf.config.get_text_config(), "layer_types", None) or ())
    if (
        getattr(hf, "_is_stateful", False)
        or not kinds <= {"full_attention", "sliding_attention"}
        or not hasattr(hf.get_decoder(), "layers")
        or "position_ids" not in inspect.signature(type(hf).forward).parameters
    ):
        remedy = (
            f"{hf.config.model_type} is not supported; only decoders of full or sliding-window attention, "
            "called with positions, can take tokens back (Llama, Qwen2, Qwen3, Mistral, Gemma, …)."
        )
        raise OptionError("target", name or hf.config.model_type, remedy)
