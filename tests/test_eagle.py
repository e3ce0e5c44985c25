"""EAGLE against a slow reference: every node of every draft, published layouts, greedy text, exact laws."""

import itertools
from collections import Counter

import pytest
import torch
from eagle_reference import LAYER, Slow, eagle_1, eagle_3, fill, layer_shapes, write
from reference import greedy, tiny
from test_model import build as build_hf
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

import drafters
from drafters.eagle.certify import cases
from drafters.eagle.checkpoint import random_model
from drafters.eagle.config import Config
from drafters.eagle.drafter import EagleDrafter
from drafters.eagle.laws import Laws
from drafters.eagle.model import FEW, default_feature_layers, new_architecture
from specdec.config import EngineConfig
from specdec.distribution import distribution
from specdec.drafter import Draw
from specdec.engine import Engine
from specdec.exactness.engine_law import output_law
from specdec.model import Model
from specdec.products import thin_linear
from specdec.proposal import Kind, Proposal
from specdec.rng import PhiloxSource
from specdec.sampling import Sampling
from specdec.verify import build as build_rule

VOCAB, SIZE, INNER, LAYERS = 40, 16, 24, 8
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TARGETS = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied embeddings": LlamaConfig(**{**SIZES, "tie_word_embeddings": True}),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "mistral, sliding": MistralConfig(**SIZES, sliding_window=5),
}


@pytest.fixture(scope="module")
def hf():
    """A plain Llama of 8 layers, float64."""
    return build_hf(TARGETS["llama"])


@pytest.fixture(scope="module")
def target():
    return Model(build_hf(TARGETS["llama"]), name="llama")


def random_prompts(count: int, vocab: int = VOCAB, seed: int = 3) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=g).tolist()
    return [torch.randint(vocab, (n,), generator=g).tolist() for n in lengths]


def decode(target, drafter, prompts, rule="recursive", sampling=None, tokens=12, batch=None, **options):
    config = EngineConfig(max_new_tokens=tokens, batch_size=batch or len(prompts), **options)
    engine = Engine(target, drafter, build_rule({"name": rule}), sampling or Sampling(), config)
    return [g.tokens for g in engine.generate(prompts)], engine.ledger


def paths_of(proposal: Proposal, row: int) -> set[tuple[int, ...]]:
    """The token paths of a row's valid nodes, all different and each node after its parent."""
    parents = torch.atleast_2d(proposal.tree.parents).expand_as(proposal.tokens)[row].tolist()
    tokens, mask = proposal.tokens[row].tolist(), proposal.mask[row].tolist()
    paths = {-1: ()}
    for n, parent in enumerate(parents):
        assert parent < n
        if mask[n]:
            paths[n] = (*paths[parent], tokens[n])
    found = Counter(path for n, path in paths.items() if n >= 0)
    assert max(found.values(), default=1) == 1
    return set(found)


# ------------------------------------------------------------ every node against the slow reference


class Spy:
    """Notes, for every node whose law is asked for, its prefix, how much of that is committed, its logits."""

    def __init__(self, monkeypatch):
        self.seen: list[tuple[list[int], int, torch.Tensor]] = []
        law = Laws._law

        def spy(laws, growth, sampling):
            prefix, logits = growth.prefix(), growth.logits
            for b, p in itertools.product(range(logits.shape[0]), range(logits.shape[1])):
                tokens = prefix.tokens[b, p][prefix.tokens[b, p] >= 0].tolist()
                committed = int(growth.sequences.lengths[b])
                assert len(tokens) == int(prefix.length[b, p]) == committed + growth.depth
                self.seen.append((tokens, committed, logits[b, p].clone()))
            return law(laws, growth, sampling)

        monkeypatch.setattr(Laws, "_law", spy)


def features_of(hf, tokens, indices):
    """`[T, n·H]` of `hidden_states[i]`, i in `indices`: published code's own numbering of features."""
    with torch.inference_mode():
        found = hf(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([found[i][0] for i in indices], -1).double()


def agree(hf, slow: Slow, indices, seen, every: int = 1):
    """Each noted node's logits are the slow reference's, from true features of what is committed."""
    assert len(seen) >= 20
    for tokens, committed, logits in seen[::every]:
        features = features_of(hf, tokens[:committed], indices)[:-1]
        expected = slow.logits(tokens, committed, features)
        torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


def slow(tensors, hf, prefix, **options) -> Slow:
    head, embeddings = hf.get_output_embeddings().weight, hf.get_input_embeddings().weight
    return Slow(tensors, embeddings.double(), head.double(), prefix, **options)


THIRD = (2, LAYERS // 2, LAYERS - 3)  # of `hidden_states`


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [{}, {"mode": "static"}, {"mode": "chain"}], ids=str)
def test_generation_1(target, hf, tmp_path, monkeypatch, bias, options):
    """The published file of EAGLE-1 and EAGLE-2, pickled, drafting after ragged commits."""
    tensors = eagle_1(SIZE, INNER, VOCAB, bias)
    tensors["embed_tokens.weight"] = hf.get_input_embeddings().weight.half()
    folder = write(
        tmp_path,
        tensors,
        {**LAYER, "hidden_size": SIZE, "intermediate_size": INNER, "vocab_size": VOCAB, "bias": bias},
        "pytorch_model.bin",
    )
    config = {"name": "eagle", "checkpoint": str(folder), "depth": 3, "top_k": 3, "nodes": 6, **options}
    drafter = drafters.build(config, target)
    assert drafter.model.embed_tokens is None  # it is the target's: shared, not copied
    spy = Spy(monkeypatch)
    decode(target, drafter, random_prompts(3), tokens=7)
    agree(hf, slow(tensors, hf, "layers.{}."), [-1], spy.seen, every=7)


@pytest.mark.parametrize(
    ("draft_vocab", "layout", "file"),
    [
        (15, "midlayer.", "model.safetensors"),
        (VOCAB, "midlayer.", "pytorch_model.bin"),
        (15, "layers.0.", "model.safetensors"),
    ],
)
def test_generation_3(target, hf, tmp_path, monkeypatch, draft_vocab, layout, file):
    """EAGLE's own file, with a reduced and a full vocabulary, and the speculators' layout."""
    tensors = eagle_3(SIZE, INNER, VOCAB, draft_vocab, layout)
    layer = {**LAYER, "hidden_size": SIZE, "intermediate_size": INNER}
    config = {**layer, "draft_vocab_size": draft_vocab}
    indices = THIRD
    if layout == "layers.0.":
        indices = (1, 5, LAYERS - 1)
        config = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "draft_vocab_size": draft_vocab,
            "eagle_aux_hidden_state_layer_ids": list(indices),
        }
        tensors["embed_tokens.weight"] = hf.get_input_embeddings().weight.clone()
    write(tmp_path, tensors, config, file)
    options = {"depth": 3, "top_k": 3, "nodes": 8}
    drafter = drafters.build({"name": "eagle", "checkpoint": str(tmp_path), **options}, target)
    spy = Spy(monkeypatch)
    decode(target, drafter, random_prompts(3), tokens=7)
    agree(hf, slow(tensors, hf, layout), indices, spy.seen, every=7)
    if draft_vocab < VOCAB:
        can = set(tensors["t2d"].nonzero()[:, 0].tolist())
        assert {x for tokens, n, _ in spy.seen for x in tokens[n:]} <= can


def test_several_layers_with_all_options(target, hf, tmp_path, monkeypatch):
    """Speculators: a second, plain layer, query and key norms, residual behind the norm, own embeddings."""
    tensors = eagle_3(SIZE, INNER, VOCAB, 15, "layers.0.") | fill(
        {
            **layer_shapes("layers.1.", SIZE, INNER),
            "layers.1.input_layernorm.weight": (SIZE,),
            **{f"layers.{i}.self_attn.{x}_norm.weight": (8,) for i in (0, 1) for x in "qk"},
            "embed_tokens.weight": (VOCAB, SIZE),
        },
        seed=9,
    )
    layer = {**LAYER, "hidden_size": SIZE, "intermediate_size": INNER}
    write(tmp_path, tensors, {"transformer_layer_config": layer, "norm_before_residual": True})
    options = {"depth": 3, "top_k": 3, "nodes": 8}
    drafter = drafters.build({"name": "eagle", "checkpoint": str(tmp_path), **options}, target)
    reference = slow(tensors, hf, "layers.{}.", layers=2, norm_before_residual=True)
    reference.embeddings = tensors["embed_tokens.weight"]
    spy = Spy(monkeypatch)
    decode(target, drafter, random_prompts(2), tokens=7)
    agree(hf, reference, THIRD, spy.seen, every=7)


def test_features_one_layer_off_would_be_noticed(target, hf, tmp_path, monkeypatch):
    tensors = eagle_3(SIZE, INNER, VOCAB, VOCAB)
    write(tmp_path, tensors, {**LAYER, "hidden_size": SIZE, "intermediate_size": INNER})
    drafter = drafters.build({"name": "eagle", "checkpoint": str(tmp_path), "depth": 2}, target)
    assert drafter.features == (1, 3, 4)  # outputs of these = hidden_states[2, 4, 5]
    spy = Spy(monkeypatch)
    decode(target, drafter, random_prompts(2), tokens=4)
    for wrong in ((1, 3, 4), (3, 5, 6)):
        with pytest.raises(AssertionError):
            agree(hf, slow(tensors, hf, "midlayer."), wrong, spy.seen[:25])


@pytest.mark.parametrize(
    ("layers", "expected"), [(32, (1, 15, 28)), (30, (1, 14, 26)), (40, (1, 19, 36)), (2, (0, 0, 1))]
)
def test_default_feature_layers(layers, expected):
    """Outputs of layers 1, L//2 − 1, L − 4."""
    assert default_feature_layers(layers) == expected


@pytest.mark.parametrize("generation", [1, 3])
def test_long_prompts_are_read_in_pieces(target, monkeypatch, generation):
    monkeypatch.setattr("drafters.eagle.growth.CHUNK", 4)
    architecture = new_architecture(target, generation, 1, None)
    whole, pieces = (EagleDrafter(random_model(architecture, target), Config(depth=2), target) for _ in "ab")
    spy = Spy(monkeypatch)
    decode(target, pieces, random_prompts(4), tokens=4)
    seen, spy.seen = spy.seen, []
    monkeypatch.setattr("drafters.eagle.growth.CHUNK", 512)
    decode(target, whole, random_prompts(4), tokens=4)
    for (a, _, x), (b, _, y) in zip(seen, spy.seen, strict=True):
        assert a == b
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


# ------------------------------------------------------------ greedy text

SHAPES = [
    {"mode": "chain", "depth": 3},
    {"mode": "chain", "depth": 2, "siblings": "with_replacement"},
    {"mode": "static", "tree": [[0], [1], [0, 0], [1, 0], [0, 0, 0]]},
    {"mode": "static", "depth": 3, "top_k": 4, "nodes": 10, "siblings": "without_replacement"},
    {"mode": "static", "depth": 3, "top_k": 4, "nodes": 10, "siblings": "with_replacement"},
    {"depth": 1, "top_k": 5, "nodes": 3},
    {"depth": 4, "top_k": 8, "nodes": 24},
    {"depth": 6, "top_k": 3, "nodes": 30},
    {"depth": 3, "top_k": 3, "nodes": 8, "ngram": True, "ngram_min": 1},
    {"mode": "chain", "depth": 2, "ngram": True, "ngram_min": 1},
]


@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("generation", [1, 3])
def test_greedy_text_is_the_targets(tiny64, plain64, options, generation):
    """Whatever the tree: token for token what Hugging Face generates; the contract is checked on the way."""
    prompts = [p + p for p in random_prompts(4, vocab=256)]  # repetitive: something to copy
    model = random_model(new_architecture(tiny64, generation, 1, 100 if generation == 3 else None), tiny64)
    drafter = EagleDrafter(model, Config(**options), tiny64)
    expected = [greedy(plain64, p, 20) for p in prompts]
    found, _ = decode(tiny64, drafter, prompts, tokens=20, ignore_eos=True, check_contract=True)
    assert found == expected


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("generation", [1, 3])
def test_greedy_text_of_other_targets(name, generation):
    plain, target = build_hf(TARGETS[name]), Model(build_hf(TARGETS[name]), name=name)
    drafter = EagleDrafter(
        random_model(new_architecture(target, generation, 2, 30), target), Config(), target
    )
    prompts = random_prompts(3)
    found, _ = decode(target, drafter, prompts, tokens=16, check_contract=True)
    assert found == [greedy(plain, p, 16) for p in prompts]


# ------------------------------------------------------------ laws, batches, cost


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
@pytest.mark.parametrize(
    "name", ["static with replacement", "static without replacement", "dynamic", "chain sampled"]
)
def test_exact_law_through_the_engine(name, rule):
    """Every branch of draft and rule walked, three tokens of a vocabulary of three: the target's law."""
    target = tiny("float64", vocab_size=3, hidden_size=8, layers=2)
    drafter = cases(target)[name]
    config = {"ignore_eos": True, "batch_size": 1 << 12}

    def engine(source, tokens):
        settings = EngineConfig(max_new_tokens=tokens, **config)
        return Engine(
            target, drafter, build_rule({"name": rule}), Sampling(temperature=0.8), settings, source
        )

    law = output_law(engine, [0, 2, 1], 3)
    hf = tiny("float64", vocab_size=3, hidden_size=8, layers=2).hf
    for outcome in itertools.product(range(3), repeat=3):
        context, expected = [0, 2, 1], 1.0
        for x in outcome:
            with torch.inference_mode():
                logits = hf(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]
            expected *= float((logits / 0.8).softmax(0)[x])
            context = [*context, x]
        assert law.get(outcome, 0.0) == pytest.approx(expected, abs=1e-9)


SAMPLINGS = {
    "T=0": Sampling(),
    "T=1": Sampling(temperature=1.0),
    "top-p, penalties": Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.3, no_repeat_ngram_size=2),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("rule", ["recursive", "traversal", "gumbel"])
def test_a_sequence_is_the_same_whoever_shares_its_batch(tiny64, sampling, rule):
    """Ragged rows at once and some one by one; the contract is checked on the way."""
    prompts = random_prompts(64 if rule == "recursive" and sampling != "T=0" else 8, vocab=256)
    for name, drafter in cases(tiny64).items():
        if name == "static with replacement" or (drafter.kind is Kind.COUPLED and rule != "gumbel"):
            continue  # a part of others; refused
        together, _ = decode(tiny64, drafter, prompts, rule, SAMPLINGS[sampling], 6, check_contract=True)
        alone, _ = decode(tiny64, drafter, prompts[:3], rule, SAMPLINGS[sampling], 6, batch=1)
        assert together[:3] == alone, name


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_coupled_tree_changes_no_token(tiny64, plain64, sampling):
    """Ranked by the target's own noise, its output is that without a drafter, greedy and sampled."""
    drafter = cases(tiny64)["dynamic coupled"]
    prompts = [p + p for p in random_prompts(40, vocab=256)]
    found, _ = decode(tiny64, drafter, prompts, "gumbel", SAMPLINGS[sampling], 8, check_contract=True)
    assert found == decode(tiny64, None, prompts, "gumbel", SAMPLINGS[sampling], 8)[0]
    if sampling == "T=0":
        options = {"tokens": 8, "ignore_eos": True}
        found, _ = decode(tiny64, drafter, prompts[:4], "gumbel", **options)
        assert found == [greedy(plain64, p, 8) for p in prompts[:4]]


def test_a_perfect_law_finds_the_winner_at_once(tiny64, monkeypatch):
    """If q is p the likeliest winner is the winner: with one child per node every drafted token is accepted.

    Ranked by probability alone about Σ p² of them would be, which here is below a tenth.
    """
    model = random_model(new_architecture(tiny64, 3, 1, None), tiny64)

    def of_the_target(laws, growth, sampling):
        prefix = growth.prefix()
        rows = [tokens[tokens >= 0] for tokens in prefix.tokens.flatten(0, 1)]
        logits = torch.stack([tiny64.hf(input_ids=r[None], use_cache=False).logits[0, -1] for r in rows])
        return distribution(logits.view(*prefix.length.shape, -1), sampling), None

    monkeypatch.setattr(Laws, "_law", of_the_target)
    shares = {}
    for siblings in ("coupled", "top_k"):
        config = Config(depth=3, top_k=1, nodes=3, siblings=siblings, ngram=False)
        drafter = EagleDrafter(model, config, tiny64)
        sampling = Sampling(temperature=1.0)
        _, ledger = decode(tiny64, drafter, random_prompts(3, vocab=256), "gumbel", sampling, ignore_eos=True)
        rows = [r for r in ledger.rows if not r.prefill]
        shares[siblings] = sum(r.accepted for r in rows) / sum(r.depth for r in rows)
    assert shares["coupled"] == 1.0 and shares["top_k"] < 0.1


def test_the_draft_follows_the_penalties(tiny64):
    """A banned token is not proposed: each node's own prefix decides."""
    model = random_model(new_architecture(tiny64, 1, 1, None), tiny64)
    drafter = EagleDrafter(model, Config(depth=3, top_k=4, nodes=12), tiny64)
    sampling = Sampling(temperature=1.0, no_repeat_ngram_size=1)
    seen = []
    propose = drafter.propose

    def note(sequences, draw, depth):
        seen.append((sequences.tokens.clone(), sequences.lengths.clone(), propose(sequences, draw, depth)))
        return seen[-1][2]

    drafter.propose = note
    decode(tiny64, drafter, random_prompts(3, vocab=256), sampling=sampling, tokens=8)
    for tokens, lengths, proposal in seen:
        for b, n in enumerate(lengths.tolist()):
            for path in paths_of(proposal, b):
                text = [*tokens[b, :n].tolist(), path[-1], *path[:-1]]
                assert text.count(path[-1]) == 1


class Count(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


VIEWS = {
    "view",
    "_unsafe_view",
    "expand",
    "expand_as",
    "transpose",
    "unsqueeze",
    "slice",
    "select",
    "t",
    "detach",
}
VIEWS |= {"alias", "flatten", "reshape", "to"}


@pytest.mark.parametrize("rows", [(1, 1), (3, 5), (70, 2)])
def test_both_ways_to_multiply_agree(rows):
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=g).double() for shape in ((*rows, 6), (7, 6), (7,)))
    with torch.no_grad():
        for b in (None, bias):
            found = thin_linear(x, weight, b, FEW)
            torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, b))


def test_drafting_waits_for_nothing_and_takes_few_operators(target, monkeypatch):
    """Depth 4, 24 nodes, one layer: no operator that makes a GPU wait, and a bounded number of kernels."""
    monkeypatch.setattr("drafters.eagle.model.FEW", 0)  # as on a GPU
    monkeypatch.setattr("drafters.eagle.trees.ANSWERS_AT_ONCE", ())
    model = random_model(new_architecture(target, 3, 1, 30), target)
    drafter = EagleDrafter(model, Config(depth=4, top_k=8, nodes=24), target)
    counts = []
    propose = drafter.propose

    def count(sequences, draw, depth):
        with Count() as counter:
            proposal = propose(sequences, draw, depth)
        counts.append(counter.ops)
        return proposal

    drafter.propose = count
    decode(target, drafter, random_prompts(1), tokens=12)
    for ops in counts[:2]:
        assert not {"aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten.is_nonzero"} & set(ops)
    kernels = [sum(n for op, n in ops.items() if op.split(".")[1] not in VIEWS) for ops in counts[:2]]
    assert max(kernels) <= 280, counts[1].most_common()


def test_depth_is_what_is_left(target):
    """No proposal is deeper than asked; at depth 0 there is none."""
    model = random_model(new_architecture(target, 1, 1, None), target)
    for options in ({}, {"mode": "static"}, {"mode": "chain"}):
        drafter = EagleDrafter(model, Config(depth=4, **options), target)
        deepest = []
        propose = drafter.propose

        def note(sequences, draw, depth, propose=propose, deepest=deepest):
            proposal = propose(sequences, draw, depth)
            deepest.append((depth, proposal.tree.max_depth))
            return proposal

        drafter.propose = note
        decode(target, drafter, random_prompts(2), tokens=7)
        assert all(deep <= depth for depth, deep in deepest) and deepest[-1][1] == deepest[-1][0]


def test_proposing_twice_changes_nothing(target):
    model = random_model(new_architecture(target, 3, 1, None), target)
    drafter = EagleDrafter(model, Config(), target)
    propose = drafter.propose
    draw = Draw(PhiloxSource(1).at(torch.tensor([0]), torch.tensor([0])))

    def twice(sequences, _, depth):
        propose(sequences, draw, depth)
        return propose(sequences, draw, depth)

    plain, _ = decode(target, EagleDrafter(model, Config(), target), random_prompts(1), tokens=10)
    drafter.propose = twice
    assert decode(target, drafter, random_prompts(1), tokens=10)[0] == plain
