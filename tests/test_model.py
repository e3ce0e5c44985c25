"""Every node's logits against a plain forward along its path: architectures, prefills, rollbacks, widths."""

import pytest
import torch
from reference import (
    all_logits,
    greedy,
    next_logits,
    pad,
    path_to,
    plain,
    random_parents,
    tiny,
    tree_reference,
)
from scripted import Scripted, oracle
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gpt2 import GPT2Config
from transformers.models.lfm2 import Lfm2Config
from transformers.models.llama import LlamaConfig
from transformers.models.mamba import MambaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.opt import OPTConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

from specdec.compat import quiet_transformers
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.model import Model
from specdec.tree import Tree
from specdec.verify.token import TokenRule

VOCAB, WINDOW = 50, 5
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HEADS = {"head_dim": 8}
GEMMA = {**SIZES, **HEADS, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}
MIXED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
# name → (configuration, tolerance in float64; eager attention takes its softmax in float32)
ARCHITECTURES = {
    "llama": (LlamaConfig(**SIZES, **HEADS), 1e-10),
    "llama with 1 kv head": (LlamaConfig(**{**SIZES, "num_key_value_heads": 1}), 1e-10),
    "llama with tied embeddings": (LlamaConfig(**{**SIZES, "tie_word_embeddings": True}), 1e-10),
    "qwen2": (Qwen2Config(**SIZES), 1e-10),
    "qwen2, last layers sliding": (Qwen2Config(**SIZES, **MIXED), 1e-10),
    "qwen3": (Qwen3Config(**SIZES, **HEADS), 1e-10),
    "mistral, sliding": (MistralConfig(**SIZES, sliding_window=WINDOW), 1e-10),
    "gemma2, alternating": (Gemma2Config(**GEMMA), 1e-5),
    "gemma3, 5 of 6 sliding": (Gemma3TextConfig(**{**GEMMA, "num_hidden_layers": 7}), 1e-10),
}


def build(config, dtype=torch.float64) -> torch.nn.Module:
    """Random weights of such size that attention matters."""
    torch.manual_seed(1)
    with quiet_transformers():
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in hf.requires_grad_(False).parameters():
        if parameter.ndim > 1:
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return hf.eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name):
    """Prefill in chunks, a tree, a commit of a path per row, a second tree: logits as in plain forwards."""
    config, tolerance = ARCHITECTURES[name]
    reference, model = build(config), Model(build(config))
    g = torch.Generator().manual_seed(5)
    prefixes = [torch.randint(VOCAB, (n,), generator=g).tolist() for n in (11, 1, 6)]
    cache = model.new_cache(3, 64)
    out = model.prefill(*pad(prefixes), cache, chunk=4)
    expected = torch.stack([next_logits(reference, p) for p in prefixes])
    torch.testing.assert_close(out.logits[:, 0], expected, rtol=0, atol=tolerance)

    for _ in range(2):
        parents = random_parents(g, 7)
        tree = Tree(torch.tensor(parents))
        tokens = torch.randint(VOCAB, (3, 8), generator=g)
        logits = model.forward(tokens, tree, cache).logits
        expected = tree_reference(reference, prefixes, tokens, tree)
        torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)
        nodes = [-1, 6, 3]  # each row accepts another path
        cache.advance(tree, *accept(tree, nodes))
        for b, node in enumerate(nodes):
            prefixes[b] += [int(tokens[b, n + 1]) for n in [-1, *path_to(parents, node)]]
        cache.settle(max(map(len, prefixes)))
        assert cache.lengths.tolist() == [len(p) for p in prefixes]


def accept(tree: Tree, nodes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(path `[B, D]`, accepted `[B]`) for the last accepted node of each row."""
    index = torch.tensor(nodes) + 1
    row = torch.arange(len(nodes)).clamp(max=len(tree.depth) - 1)
    return tree.paths[row, index], tree.depth[row, index]


def test_the_reference_would_notice():
    """Wrong positions, a sibling in sight or a parent out of sight change logits by far more than 1e-10."""
    model, reference = Model(build(LlamaConfig(**SIZES))), build(LlamaConfig(**SIZES))
    tokens, right = torch.tensor([[3, 7, 9]]), Tree(torch.tensor([-1, -1]))
    expected = tree_reference(reference, [[4, 5]], tokens, right)
    cache = model.new_cache(1, 16)
    model.prefill(torch.tensor([[4, 5]]), torch.tensor([2]), cache)
    assert (model.forward(tokens, right, cache).logits - expected).abs().max() < 1e-10
    assert (model.forward(tokens, Tree.chain(2), cache).logits - expected).abs().max() > 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_shape_per_row(attention):
    model, reference = tiny("float64", attention=attention), plain({"dtype": "float64"})
    g = torch.Generator().manual_seed(2)
    prefixes = [torch.randint(260, (n,), generator=g).tolist() for n in (2, 9)]
    tree = Tree(torch.tensor([[-1, 0, 0, 2], [-1, -1, 1, 2]]))
    tokens = torch.randint(260, (2, 5), generator=g)
    cache = model.new_cache(2, 32)
    model.prefill(*pad(prefixes), cache)
    expected = tree_reference(reference, prefixes, tokens, tree)
    logits = model.forward(tokens, tree, cache).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10 if attention == "sdpa" else 1e-5)


def test_a_long_run_of_random_trees_and_commits(tiny64, plain64, generator):
    """60 steps; rows accept different lengths, one row leaves midway. Errors of rollback would pile up."""
    model, g = tiny64, generator
    prefixes = [torch.randint(260, (n,), generator=g).tolist() for n in (3, 1, 8)]
    cache = model.new_cache(3, 320)
    model.prefill(*pad(prefixes), cache)
    for step in range(60):
        batch, size = len(prefixes), step % 6
        shape = [random_parents(g, size) for _ in range(batch)]
        tree = Tree(torch.tensor(shape, dtype=torch.int64)) if step % 3 else Tree.chain(size)
        shape = torch.atleast_2d(tree.parents).expand(batch, -1).tolist()
        tokens = torch.randint(260, (batch, size + 1), generator=g)
        logits = model.forward(tokens, tree, cache).logits
        nodes = torch.randint(-1, size, (batch,), generator=g).tolist()
        cache.advance(tree, *accept(tree, nodes))
        for b, node in enumerate(nodes):
            prefixes[b] += [int(tokens[b, n + 1]) for n in [-1, *path_to(shape[b], node)]]
        cache.settle(max(map(len, prefixes)))
        if step % 10 == 9:
            expected = torch.stack([next_logits(plain64, p) for p in prefixes])
            found = logits[torch.arange(batch), torch.tensor(nodes) + 1]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        if step == 30:
            keep = torch.tensor([2, 0])
            cache.select(keep)
            prefixes = [prefixes[i] for i in keep]
            cache.settle(max(map(len, prefixes)))


@pytest.mark.parametrize("chunk", [1, 2, 5, 7, 100])
def test_prefill_chunks(tiny64, plain64, chunk):
    prompts = [list(range(10, 24)), [7], list(range(30, 37)), list(range(5))]
    cache = tiny64.new_cache(4, 20)
    logits = tiny64.prefill(*pad(prompts), cache, chunk).logits
    expected = torch.stack([next_logits(plain64, p) for p in prompts])
    assert logits.shape == (4, 1, 260)
    torch.testing.assert_close(logits[:, 0], expected, rtol=0, atol=1e-10)
    assert cache.lengths.tolist() == [14, 1, 7, 5] and cache.longest == 14


def test_padding_of_prompts_is_never_seen(tiny64):
    tokens, lengths = pad([[5, 6, 7, 8, 9, 10], [5, 6]])
    other = tokens.clone()
    other[1, 2:] = torch.tensor([99, 98, 97, 96])
    results = []
    for t in (tokens, other):
        cache = tiny64.new_cache(2, 12)
        first = tiny64.prefill(t, lengths, cache).logits
        results.append((first, tiny64.forward(torch.tensor([[1], [2]]), Tree.chain(0), cache).logits))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_features_are_the_hidden_states(tiny64, plain64):
    """Layer i's feature is `hidden_states[i+1]`, the final one is after the norm; ragged prefill, tree."""
    prompts = [list(range(20, 29)), [3, 4]]
    tree = Tree(torch.tensor([-1, -1, 0]))
    tokens = torch.tensor([[9, 8, 7, 6], [1, 2, 3, 4]])
    tiny64.features = (0, tiny64.FINAL)
    try:
        cache = tiny64.new_cache(2, 20)
        prefill = tiny64.prefill(*pad(prompts), cache, chunk=4)
        step = tiny64.forward(tokens, tree, cache)
    finally:
        tiny64.features = ()
    assert set(prefill.features) == set(step.features) == {0, tiny64.FINAL}
    assert prefill.features[0].shape == (2, 9, 32) and step.features[0].shape == (2, 4, 32)
    for b, prompt in enumerate(prompts):
        for layer, index in ((0, 1), (tiny64.FINAL, -1)):
            expected = hidden(plain64, prompt)[index]
            torch.testing.assert_close(
                prefill.features[layer][b, : len(prompt)], expected, rtol=0, atol=1e-10
            )
            for node, path in enumerate(([0], [0, 1], [0, 2], [0, 1, 3])):
                expected = hidden(plain64, [*prompt, *tokens[b, path].tolist()])[index][-1]
                torch.testing.assert_close(step.features[layer][b, node], expected, rtol=0, atol=1e-10)


@torch.inference_mode()
def hidden(hf: torch.nn.Module, tokens: list[int]) -> list[torch.Tensor]:
    return [
        h[0] for h in hf(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    ]


def test_no_features_are_kept_unasked(tiny64):
    cache = tiny64.new_cache(1, 8)
    assert tiny64.prefill(torch.tensor([[1, 2, 3]]), torch.tensor([3]), cache).features == {}
    assert tiny64._captured == {}


@pytest.mark.parametrize("width", [1, 3, 8])
def test_a_fixed_width_changes_nothing(tiny64, plain64, width):
    prefixes = [[5, 6, 7, 8], [9]]
    tree, tokens = Tree(torch.tensor([-1, -1, 0])), torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    cache = tiny64.new_cache(2, 32)
    tiny64.prefill(*pad(prefixes), cache)
    expected = tree_reference(plain64, prefixes, tokens, tree)
    tiny64.fixed_width = width
    try:
        logits = tiny64.forward(tokens, tree, cache).logits
    finally:
        tiny64.fixed_width = None
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_a_fixed_width_rounds_alike_in_bfloat16():
    """At one width a token gets the same bits, whether its successors are drafted along with it or not."""
    model = tiny("bfloat16", hidden_size=64, layers=3)
    prompt, drafted = torch.tensor([list(range(40, 60))]), torch.tensor([[7, 8, 9, 10, 11, 12]])
    model.fixed_width = 8
    cache = model.new_cache(1, 64)
    model.prefill(prompt, torch.tensor([20]), cache)
    together = model.forward(drafted, Tree.chain(5), cache).logits
    for i in range(6):  # one after the other, as without a draft
        alone = model.forward(drafted[:, i : i + 1], Tree.chain(0), cache).logits
        assert torch.equal(alone[:, 0], together[:, i])
        cache.lengths = cache.lengths + 1
        cache.settle(cache.longest + 1)


def test_too_many_tokens_for_the_cache(tiny64):
    cache = tiny64.new_cache(1, 4)
    tiny64.prefill(torch.tensor([[1, 2, 3]]), torch.tensor([3]), cache)
    with pytest.raises(RuntimeError, match="2 tokens after 3 do not fit into 4 slots"):
        tiny64.forward(torch.tensor([[1, 2]]), Tree.chain(1), cache)


def test_the_model_still_works_by_itself(tiny64, plain64):
    """`Model` leaves the Hugging Face model usable: its own cache, mask and `generate`."""
    tokens = list(range(12))
    expected = all_logits(plain64, tokens)
    torch.testing.assert_close(all_logits(tiny64.hf, tokens), expected, rtol=0, atol=1e-10)


LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4}
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
        DeepseekV3Config(**{**SIZES, "num_key_value_heads": 4}, **LATENT, **EXPERTS, num_experts_per_tok=2),
    ],
    ids=lambda config: config.model_type,
)
def test_experts_and_latent_attention(config):
    """float32, as these run in no other precision on a CPU; keys and values may differ in width."""
    reference, model = build(config, torch.float32), Model(build(config, torch.float32))
    tree, tokens = Tree(torch.tensor([-1, 0, 0])), torch.tensor([[1, 2, 3, 4]])
    cache = model.new_cache(1, 16)
    model.prefill(torch.tensor([[5, 6, 7]]), torch.tensor([3]), cache)
    expected = tree_reference(reference, [[5, 6, 7]], tokens, tree)
    torch.testing.assert_close(model.forward(tokens, tree, cache).logits, expected, rtol=1e-4, atol=1e-4)


def test_learned_positions_end_with_the_context():
    """A row's draft reaches over the position table's end while another has room; nobody looks there."""
    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 1}
    config = OPTConfig(vocab_size=VOCAB, word_embed_proj_dim=16, max_position_embeddings=16, **sizes, **ids)
    reference, prompts = build(config), [list(range(2, 15)), [5]]
    expected = [greedy(reference, p, min(16 - len(p), 10)) for p in prompts]
    script = oracle(dict(enumerate(expected)), dict(enumerate(prompts)))
    options = EngineConfig(max_new_tokens=10, batch_size=2)
    engine = Engine(Model(build(config)), Scripted(script, 6), TokenRule(), config=options)
    assert [g.tokens for g in engine.generate(prompts)] == expected


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4),
        Lfm2Config(**SIZES, full_attn_idxs=[1, 3]),
        GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2),
    ],
    ids=lambda config: config.model_type,
)
def test_what_cannot_be_rewound_is_refused(config):
    """A state-space or convolution state has no slots; other layouts are not known. Said before decoding."""
    with pytest.raises(OptionError, match=f"target={config.model_type}.*only .*attention"):
        Model(build(config, torch.float32), name=config.model_type)
