"""EAGLE against a slow reference: every node of every draft, published layouts, greedy text, exact laws."""

import itertools
import json
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
from drafters.eagle.checkpoint import random_model, save_pretrained
from drafters.eagle.config import Config
from drafters.eagle.drafter import EagleDrafter
from drafters.eagle.laws import Laws
from drafters.eagle.model import default_feature_layers, linear, new_architecture
from drafters.eagle.shape import built_in_paths, chain_paths, check_paths, levels_of
from drafters.eagle.trees import with_branch
from specdec.config import EngineConfig
from specdec.drafter import Draw
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.exactness.engine_law import output_law
from specdec.model import Model
from specdec.proposal import Kind, Proposal
from specdec.rng import PhiloxSource
from specdec.sampling import Sampling
from specdec.tree import Tree
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
def test_long_prompts_are_read_in_pieces(target, hf, monkeypatch, generation):
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


# ------------------------------------------------------------ checkpoints


def test_our_own_files_give_the_same_network(target, tmp_path):
    architecture = new_architecture(target, 3, 2, 15)
    model = random_model(architecture, target)
    save_pretrained(model, tmp_path, "# A card")
    loaded = drafters.build({"name": "eagle", "checkpoint": str(tmp_path)}, target).model
    assert {k: v.tolist() for k, v in model.state_dict().items()} == {
        k: v.tolist() for k, v in loaded.state_dict().items()
    }
    assert loaded.architecture.feature_layers == architecture.feature_layers
    assert loaded.architecture.parts == architecture.parts
    assert torch.equal(loaded.draft_ids, model.draft_ids)
    assert json.loads((tmp_path / "config.json").read_text())["generation"] == 3
    assert (tmp_path / "README.md").read_text() == "# A card"


MISFITS = {
    "width": (
        lambda t: t | {"fc.weight": t["fc.weight"][:, :-1]},
        r"fc.weight is \[16, 47\].*\[16, 48\]",
    ),
    "map's size": (
        lambda t: t | {"lm_head.weight": t["lm_head.weight"][:-1]},
        r"lm_head.weight is \[14, 16\].*\[15, 16\]",
    ),
    "map": (lambda t: t | {"d2t": t["d2t"] + 30}, "d2t does not map to distinct tokens below 40"),
    "more": (
        lambda t: t | {"norm.bias": t["norm.weight"] + 0},
        "beyond an EAGLE network's tensors, norm.bias",
    ),
    "less": (
        lambda t: {k: v for k, v in t.items() if "mlp.up" not in k},
        r"lacks layers.0.mlp.up_proj.weight \(1",
    ),
    "something else": (
        lambda t: {"0.linear.weight": t["fc.weight"]},
        "holds no EAGLE network.*0.linear.weight",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named(target, tmp_path, name):
    change, message = MISFITS[name]
    tensors = change(eagle_3(SIZE, INNER, VOCAB, 15))
    tensors = {k: v.contiguous() for k, v in tensors.items()}
    write(tmp_path, tensors, {**LAYER, "hidden_size": SIZE, "intermediate_size": INNER})
    with pytest.raises(OptionError, match=rf"drafter\.checkpoint=.*{message}"):
        drafters.build({"name": "eagle", "checkpoint": str(tmp_path)}, target)


def test_another_targets_checkpoint_is_refused(tmp_path, target):
    write(tmp_path, eagle_1(32, 48, VOCAB), {**LAYER, "hidden_size": 32, "intermediate_size": 48})
    with pytest.raises(OptionError, match=r"fc.weight is \[32, 64\], but this target needs \[16, 32\]"):
        drafters.build({"name": "eagle", "checkpoint": str(tmp_path)}, target)


def test_without_weights_it_says_what_to_do(target):
    with pytest.raises(
        OptionError, match=r"no eagle weights are shipped.*drafter\.checkpoint=.*drafter\.weights=random"
    ):
        drafters.build({"name": "eagle"}, target)


def test_pickled_code_is_not_run(tmp_path, target):
    class Evil:
        def __reduce__(self):
            return print, ("run",)

    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(OptionError, match="cannot be read as tensors only"):
        drafters.build({"name": "eagle", "checkpoint": str(tmp_path)}, target)


# ------------------------------------------------------------ trees

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


def slow_dynamic_tree(law, depth: int, top_k: int, nodes: int) -> set[tuple[int, ...]]:
    """EAGLE-2 by its description; `law(path)` is the draft's law of what follows."""
    best = lambda scored: sorted(scored, key=lambda path: -scored[path])  # noqa: E731
    scored: dict[tuple[int, ...], float] = {}
    level = {(): 0.0}
    for _ in range(depth):
        candidates = {}
        for path, score in level.items():
            probability, token = law(path).topk(top_k)
            for p, x in zip(probability.log().tolist(), token.tolist(), strict=True):
                candidates[*path, x] = score + p
        scored |= candidates
        level = {path: candidates[path] for path in best(candidates)[:top_k]}
    return set(best(scored)[:nodes])


def test_dynamic_tree_is_eagle_2s(target, monkeypatch):
    """Against the slow description, from the laws that the drafter itself saw (ties do not occur)."""
    model = random_model(new_architecture(target, 3, 1, None), target)
    drafter = EagleDrafter(model, Config(depth=4, top_k=3, nodes=9), target)
    spy = Spy(monkeypatch)
    proposals = []
    propose = drafter.propose

    def note(sequences, draw, depth):
        before = len(spy.seen)
        proposal = propose(sequences, draw, depth)
        proposals.append((sequences.lengths.tolist(), sequences.tokens.clone(), proposal, spy.seen[before:]))
        return proposal

    drafter.propose = note
    decode(target, drafter, random_prompts(3), tokens=8)
    checked = 0
    for lengths, tokens, proposal, seen in proposals[:3]:
        logits = {tuple(t): x for t, _, x in seen}
        for b, n in enumerate(lengths):
            prefix = tuple(tokens[b, :n].tolist())
            expected = slow_dynamic_tree(lambda path, p=prefix, x=logits: x[p + path].softmax(0), 4, 3, 9)
            assert paths_of(proposal, b) == expected
            checked += 1
    assert checked == 9


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


def test_equally_good_nodes_keep_their_parents():
    """Where a child is certain it scores as high as its parent: the parent stays all the same."""
    from drafters.eagle.trees import dynamic_tree

    class Certain:
        def best(self, growth, count):
            shape = (1, growth.states.shape[1], count)
            return torch.arange(count).expand(shape), torch.tensor([1.0, 0.0]).expand(shape)

    class NoGrowth:
        states = torch.zeros(1, 1, 1)

        def grow(self, tokens, parent):
            self.states = torch.zeros(1, tokens.shape[1], 1)

    for nodes in range(1, 6):
        proposal = dynamic_tree(NoGrowth(), Certain(), 3, 2, nodes, torch.tensor([9]))
        assert paths_of(proposal, 0) == set([(0,), (0, 0), (0, 0, 0)][:nodes])


def test_a_copied_branch_is_merged():
    """Its nodes are the tree's own as far as it runs along them; the rest hangs off the last of these."""
    g = torch.Generator().manual_seed(0)
    for _ in range(40):
        parents = torch.tensor(
            [[int(torch.randint(-1, n, (1,), generator=g)) for n in range(6)] for _ in range(2)]
        )
        tokens = torch.arange(6)[None].expand(2, -1) % 5  # some tokens repeat
        kept = [_distinct(parents[b].tolist(), tokens[b].tolist()) for b in range(2)]
        tree = Proposal(tokens, Tree(parents), Kind.DETERMINISTIC, valid=torch.tensor(kept))
        branch = torch.randint(5, (2, 4), generator=g)
        length = torch.tensor([4, 2])
        grown = with_branch(tree, branch, length, first=8)
        assert grown.size == 12
        for b in range(2):
            copies = {tuple(branch[b, : i + 1].tolist()) for i in range(int(length[b]))}
            assert paths_of(grown, b) == paths_of(tree, b) | copies


def _distinct(parents, tokens):
    """Which nodes exist if no two siblings may carry one token."""
    kept, seen = [], set()
    for parent, token in zip(parents, tokens, strict=True):
        kept.append((parent, token) not in seen and (parent < 0 or kept[parent]))
        seen.add((parent, token))
    return kept


def test_built_in_shape():
    paths = built_in_paths(4, 8, 24)
    assert len(set(paths)) == 24 and max(map(len, paths)) == 4 and not check_paths(paths, drawn=True)
    worth = lambda path: 0.6 ** len(path) * 0.4 ** sum(path)  # noqa: E731
    everything = [p for d in range(1, 5) for p in itertools.product(range(8), repeat=d)]
    assert min(map(worth, paths)) >= sorted(map(worth, everything))[-24] - 1e-12


def test_levels():
    """Elder siblings of all parents first."""
    a, b = levels_of([[0], [1], [0, 0], [0, 1], [1, 0]])
    assert (a.parents, a.rank, a.expanded) == ((-1, -1), (0, 1), (0, 1))
    assert (b.first, b.parents, b.parent, b.rank, b.expanded) == (2, (0, 1, 0), (0, 1, 0), (0, 0, 1), ())
    assert [level.parents for level in levels_of(chain_paths(3))] == [(-1,), (0,), (1,)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"siblings": "with_replacement"}, "drafter.siblings=with_replacement: would be biased"),
        ({"mode": "tree"}, "drafter.mode=tree: choices: dynamic, static, chain"),
        ({"tree": [[0]]}, "is for drafter.mode=static"),
        ({"mode": "static", "tree": [[0, 0]]}, r"has no parent \[0\]"),
        ({"mode": "static", "tree": [[1]], "siblings": "without_replacement"}, "no elder sibling"),
        ({"mode": "static", "tree": [[0], [0]]}, "given twice"),
        ({"generation": 2}, "is 1 .* or 3"),
        ({"depth": 0}, "drafter.depth=0: must be"),
        ({"mode": "chain", "siblings": "with_replacement", "ngram": True}, "drafter.ngram"),
    ],
)
def test_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Config(**options)


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
        if name == "static with replacement":  # a part of others
            continue
        together, _ = decode(tiny64, drafter, prompts, rule, SAMPLINGS[sampling], 6, check_contract=True)
        alone, _ = decode(tiny64, drafter, prompts[:3], rule, SAMPLINGS[sampling], 6, batch=1)
        assert together[:3] == alone, name


def test_the_draft_follows_the_penalties(tiny64, monkeypatch):
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
            torch.testing.assert_close(linear(x, weight, b), torch.nn.functional.linear(x, weight, b))


def test_drafting_waits_for_nothing_and_takes_few_operators(target, monkeypatch):
    """Depth 4, 24 nodes, one layer: no operator that makes a GPU wait, and a bounded number of kernels."""
    monkeypatch.setattr("drafters.eagle.model.FEW", 0)  # as on a GPU
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
