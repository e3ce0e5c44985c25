"""Medusa: the three published layouts against a slow reference, trees, sampled laws, and its errors."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chi2

import drafters
from drafters.medusa.certify import cases
from drafters.medusa.choices import accepted_by_tree, expected_accepted, greedy_choices, rank_rates
from drafters.medusa.config import Config
from drafters.medusa.drafter import MedusaDrafter, TreeShape, random_heads
from drafters.medusa.formats import load_heads, save_heads
from specdec import verify
from specdec.config import EngineConfig, TargetConfig
from specdec.drafter import Draw
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.model import Model
from specdec.rng import PhiloxSource
from specdec.sampling import Sampling
from specdec.tree import Tree

VOCAB, HIDDEN, HEADS = 40, 16, 3
PROMPTS = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11, 12], [13]]


@pytest.fixture(scope="module")
def target():
    return Model.load(TargetConfig(name="tiny", source="tiny", vocab_size=VOCAB, hidden_size=HIDDEN))


def numbers(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


# ---------------------------------------------------------------- published layouts


def blocks_and_matrices(layers=1, bias=True):
    """(W, b or None) per head and layer, and a matrix per head."""
    blocks = [
        [
            (
                numbers(HIDDEN, HIDDEN, seed=10 * h + layer),
                numbers(HIDDEN, seed=100 + 10 * h + layer) if bias else None,
            )
            for layer in range(layers)
        ]
        for h in range(HEADS)
    ]
    return blocks, [numbers(VOCAB, HIDDEN, seed=200 + h) for h in range(HEADS)]


def reference(blocks, matrices, feature):
    """`[D, V]`: x + SiLU(Wx + b), layer after layer, then the matrix; one number at a time."""
    logits = []
    for layers, matrix in zip(blocks, matrices, strict=True):
        x = feature
        for w, b in layers:
            z = torch.tensor(
                [sum(float(w[i, j]) * float(x[j]) for j in range(HIDDEN)) for i in range(HIDDEN)]
            )
            z = z if b is None else z + b
            x = x + z / (1 + torch.exp(-z))
        logits.append(matrix @ x)
    return torch.stack(logits)


def original(blocks, matrices):
    tensors = {}
    for h, layers in enumerate(blocks):
        for layer, (w, b) in enumerate(layers):
            tensors |= {f"{h}.{layer}.linear.weight": w, f"{h}.{layer}.linear.bias": b}
        tensors[f"{h}.{len(layers)}.weight"] = matrices[h]
    return tensors


def vllm(blocks, matrices):
    tensors = {f"lm_heads.{h}.weight": matrix for h, matrix in enumerate(matrices)}
    for h, layers in enumerate(blocks):
        for layer, (w, b) in enumerate(layers):
            tensors[f"blocks.{h}.layers.{layer}.weight"] = w
            if b is not None:
                tensors[f"blocks.{h}.layers.{layer}.bias"] = b
    return tensors


def check(heads, blocks, matrices, ids=None):
    feature, root = numbers(HIDDEN, seed=7), torch.tensor(3)
    expected = reference(blocks, matrices, feature)
    if ids is not None:
        expected = expected[:, ids] if expected.shape[1] == VOCAB else expected
    torch.testing.assert_close(heads(feature, root), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_original_layout_from_a_pickle_file_whose_config_miscounts(target, tmp_path, layers):
    blocks, matrices = blocks_and_matrices(layers)
    torch.save(original(blocks, matrices), tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    heads = load_heads(str(tmp_path), target)
    assert (heads.spec.heads, heads.spec.resblocks, heads.spec.own_head) == (HEADS, layers, True)
    check(heads, blocks, matrices)
    check(load_heads(str(tmp_path / "medusa_lm_head.pt"), target), blocks, matrices)


def test_the_second_version_has_no_matrices_and_uses_the_targets(target, tmp_path):
    blocks, matrices = blocks_and_matrices()
    tensors = {k: v for k, v in original(blocks, matrices).items() if "linear" in k}
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"version": "2", "medusa_num_heads": HEADS}))
    heads = load_heads(str(tmp_path), target)
    assert not heads.spec.own_head
    check(heads, blocks, [target.hf.get_output_embeddings().weight] * HEADS)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("bias", [True, False])
def test_the_vllm_layout(target, tmp_path, prefix, bias):
    blocks, matrices = blocks_and_matrices(bias=bias)
    save_file({prefix + k: v for k, v in vllm(blocks, matrices).items()}, tmp_path / "model.safetensors")
    config = {"num_heads": HEADS, "num_hidden_layers": 1, "original_lm_head": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(load_heads(str(tmp_path), target), blocks, matrices)


def test_the_vllm_layout_with_a_truncated_vocabulary(target, tmp_path):
    ids = torch.tensor([30, 2, 17, 5])  # in no order
    blocks, matrices = blocks_and_matrices()
    few = [matrix[ids] for matrix in matrices]
    save_file(vllm(blocks, few) | {"token_map": ids}, tmp_path / "model.safetensors")
    heads = load_heads(str(tmp_path), target)
    check(heads, blocks, few)
    full = heads.to_target(heads(numbers(HIDDEN, seed=7), torch.tensor(3)), VOCAB)
    torch.testing.assert_close(
        full[:, ids], reference(blocks, few, numbers(HIDDEN, seed=7)), rtol=1e-4, atol=1e-5
    )
    rest = [i for i in range(VOCAB) if i not in ids.tolist()]
    assert bool((full[:, rest] == -torch.inf).all())


def test_one_vllm_matrix_serves_all_heads(target, tmp_path):
    blocks, matrices = blocks_and_matrices()
    tensors = {k: v for k, v in vllm(blocks, matrices).items() if k.startswith("blocks")}
    save_file(tensors | {"lm_head.weight": matrices[0]}, tmp_path / "model.safetensors")
    check(load_heads(str(tmp_path), target), blocks, [matrices[0]] * HEADS)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop("1.0.linear.weight"), r"blocks\.1\.0\.linear\.weight is missing"),
        (
            lambda t: t.update({"0.1.weight": numbers(VOCAB + 2, HIDDEN, seed=1)}),
            r"heads\.0\.weight is \[42, 16\].*\[40, 16\]",
        ),
        (lambda t: t.update({"0.0.linear.weight": numbers(8, 8, seed=1)}), r"is \[8, 8\].*needs \[16, 16\]"),
        (lambda t: t.update({"midlayer.fc": numbers(2, 2, seed=1)}), r"midlayer\.fc is no tensor of Medusa"),
        (
            lambda t: t.update({"token_map": torch.tensor([1, 99])}),
            r"ids beyond this target's vocabulary of 40",
        ),
        (lambda t: t.update({"token_map": torch.tensor([1, 1])}), r"names a token twice"),
    ],
)
def test_errors_name_the_tensor_and_the_shapes(target, tmp_path, spoil, message):
    tensors = original(*blocks_and_matrices())
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(OptionError, match=f"^drafter.checkpoint={tmp_path}: .*{message}"):
        load_heads(str(tmp_path), target)


def test_a_pickle_with_code_in_it_is_not_run(target, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("pickled code was run",))

    torch.save({"0.0.linear.weight": Bomb()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(OptionError, match="cannot be read as tensors only"):
        load_heads(str(tmp_path), target)


@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.parametrize("draft_vocab", [None, 9])
def test_what_is_saved_is_what_is_loaded(target, tmp_path, own_head, draft_vocab):
    config = Config(heads=2, resblocks=2, own_head=own_head, sees_root=True, draft_vocab=draft_vocab)
    heads = random_heads(config, target)
    heads.load_state_dict(  # what bfloat16 can hold, so that the round trip is exact
        {k: v if v.dtype == torch.int64 else v.bfloat16().float() for k, v in heads.state_dict().items()}
    )
    heads.spec.choices = [[0], [1], [0, 0]]
    save_heads(heads, tmp_path, "tiny", "# A card\n")
    again = load_heads(str(tmp_path), target)
    assert again.spec == heads.spec and (tmp_path / "README.md").read_text() == "# A card\n"
    feature, root = numbers(5, HIDDEN, seed=1), torch.arange(5)
    assert torch.equal(heads(feature, root), again(feature, root))
    assert all(
        t.dtype in (torch.bfloat16, torch.int32)
        for t in load_file(tmp_path / "medusa_lm_head.safetensors").values()
    )


# ---------------------------------------------------------------- trees


def test_the_greedy_tree_is_the_best_of_all_trees():
    rates, nodes = [[0.5, 0.3, 0.1], [0.6, 0.2, 0.1], [0.4, 0.3, 0.2]], 5

    def all_trees(tree):
        if len(tree) == nodes:
            yield tree
            return
        parents = [(), *tree]
        grown = {(*p, r) for p in parents if len(p) < 3 for r in range(3)} - set(tree)
        for path in grown:
            if not tree or path > min(tree):  # any order reaches every tree; duplicates do no harm
                yield from all_trees((*tree, path))

    best = max(expected_accepted(rates, tree) for tree in all_trees(()))
    greedy = greedy_choices(rates, nodes)
    assert expected_accepted(rates, greedy) == pytest.approx(best, abs=1e-12)
    Tree.from_paths(greedy)  # closed under parents
    assert [expected_accepted(rates, [path]) for path in greedy] == sorted(
        (expected_accepted(rates, [path]) for path in greedy), reverse=True
    )


def test_rates_and_accepted_lengths_from_ranks():
    ranks = torch.tensor([[0, 1, 0], [0, 0, 5], [2, 0, 0], [9, 0, 0]])
    rates = rank_rates(ranks, 3)
    assert rates[0] == [0.5, 0.0, 0.25]  # of four positions
    assert rates[1] == pytest.approx([2 / 3, 1 / 3, 0])  # of the three whose first rank is below 3
    assert rates[2] == pytest.approx([2 / 3, 0, 0])
    choices = [(0,), (2,), (0, 1), (0, 1, 0), (2, 0)]
    assert accepted_by_tree(ranks, choices).tolist() == [3, 1, 2, 0]


def test_a_published_tree_keeps_its_shape():
    choices = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 0, 1], [0, 0, 0, 0]]
    shape = TreeShape([tuple(c) for c in choices])
    assert (len(shape.paths), shape.depth, shape.width, shape.is_chain) == (9, 4, 3, False)
    assert Tree.from_paths(choices).parents.tolist() == shape.parents
    assert [len(p) for p in shape.up_to(2).paths] == [1, 1, 1, 2, 2, 2]
    assert TreeShape([(0,), (0, 0)]).is_chain


# ---------------------------------------------------------------- drafting


class Spy(MedusaDrafter):
    """Notes what it reads and proposes."""

    def begin(self, *args):
        super().begin(*args)
        self.seen = [
            (self.hidden.clone(), args[0].root[:, 0].clone(), args[0].lengths.clone(), args[0].ids.clone())
        ]

    def commit(self, sequences, path, accepted, output):
        super().commit(sequences, path, accepted, output)
        self.seen.append(
            (
                self.hidden.clone(),
                sequences.root[:, 0].clone(),
                sequences.lengths.clone(),
                sequences.ids.clone(),
            )
        )


def plain_features(target, tokens):
    """Final hidden states of a plain forward without cache or tree."""
    with torch.no_grad():
        return target.hf.get_decoder()(torch.tensor([tokens])).last_hidden_state[0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)])
def test_heads_read_the_state_before_the_root_whatever_was_accepted(target, sampling):
    heads = random_heads(Config(heads=2), target)
    spy = Spy(heads, VOCAB, [(0,), (1,), (2,), (0, 0), (1, 0), (0, 1)])
    engine = Engine(
        target,
        spy,
        verify.build({"name": "recursive"}),
        sampling,
        EngineConfig(max_new_tokens=12, batch_size=4),
    )
    outputs = {g.sequence: g.prompt + g.tokens for g in engine.generate(PROMPTS)}
    assert any(row.accepted > 0 for row in engine.ledger.rows)
    for hidden, root, lengths, ids in spy.seen:
        for row, sequence in enumerate(ids.tolist()):
            length = int(lengths[row])
            tokens = outputs[sequence][:length]
            if len(tokens) < length:
                continue  # finished in this step: its state is not used any more
            assert tokens[-1] == int(root[row])
            torch.testing.assert_close(hidden[row], plain_features(target, tokens)[-2], rtol=1e-4, atol=1e-4)


def test_top_k_nodes_hold_the_guesses_of_their_heads(target):
    heads = random_heads(Config(heads=2), target)
    seen = []

    class Watched(MedusaDrafter):
        def propose(self, sequences, draw, depth):
            proposal = super().propose(sequences, draw, depth)
            seen.append((self.hidden[0], sequences.root[0, 0], proposal))
            return proposal

    drafter = Watched(heads, VOCAB, [(2, 0), (0, 1), (2,), (0,)])
    engine = Engine(
        target, drafter, verify.build({"name": "naive"}), Sampling(), EngineConfig(max_new_tokens=6)
    )
    list(engine.decode([[1, 2, 3]], [0]))
    hidden, root, proposal = seen[0]
    first, second = (logits.argsort(descending=True).tolist() for logits in heads(hidden, root))
    assert drafter.shape.paths == [(0,), (2,), (0, 1), (2, 0)]
    assert proposal.tree.parents.tolist() == [-1, -1, 0, 1]
    assert proposal.tokens[0].tolist() == [first[0], first[2], second[1], second[0]]


@pytest.mark.parametrize("siblings", ["without_replacement", "with_replacement"])
def test_drawn_nodes_follow_the_law_of_their_head(target, siblings):
    """20,000 draws of two siblings against their exact joint law by chi-square at 1e-4: a false
    alarm has that chance; seeds are fixed. The mutant is the other kind of siblings, seen with power .999."""
    rows, vocab = 20_000, 6
    tiny = Model.load(TargetConfig(name="tiny", source="tiny", vocab_size=vocab, hidden_size=8))
    heads = random_heads(Config(heads=2), tiny, scale=2.0)
    drafter = MedusaDrafter(heads, vocab, [(0,), (1,), (0, 0)], siblings)
    drafter.sampling = Sampling(1.0)
    drafter.hidden = numbers(1, 8, seed=3).expand(rows, -1) * 3

    class Rows:
        batch, ids = rows, torch.arange(rows)
        root = torch.full((rows, 1), 2)

    draws = PhiloxSource(1).at(torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    proposal = drafter.propose(Rows(), Draw(draws), 5)
    q = heads(drafter.hidden[:1], torch.tensor([2]))[0].double().softmax(-1)
    first, second, deep = proposal.tokens.T
    free = q[0][:, None] * q[0]
    distinct = q[0][:, None] * q[0] / (1 - q[0])[:, None]
    distinct.fill_diagonal_(0)
    right, wrong = (free, distinct) if siblings == "with_replacement" else (distinct, free)
    pairs = torch.bincount(first * vocab + second, minlength=vocab * vocab)
    assert fit(pairs, right.flatten()) > 1e-4 and fit(pairs, wrong.flatten()) < 1e-9
    assert fit(torch.bincount(deep, minlength=vocab), q[1]) > 1e-4
    torch.testing.assert_close(proposal.q[0].double(), q[[0, 0, 1]], rtol=1e-5, atol=1e-6)


def fit(counts, law):
    """p-value of Pearson's chi-square; 0 where something impossible was seen."""
    possible = law > 0
    if counts[~possible].sum():
        return 0.0
    expected = law[possible] / law.sum() * counts.sum()
    return float(
        chi2.sf(float(((counts[possible] - expected) ** 2 / expected).sum()), int(possible.sum()) - 1)
    )


def test_siblings_run_out_with_the_support(target):
    heads = random_heads(Config(heads=1, draft_vocab=2), target)
    drafter = MedusaDrafter(heads, VOCAB, [(0,), (1,), (2,)], "without_replacement")
    assert drafter.max_nodes == 2  # two tokens give no third sibling
    wide = MedusaDrafter(random_heads(Config(heads=1), target), VOCAB, [(0,), (1,)], "without_replacement")
    engine = Engine(
        target, wide, verify.build({"name": "recursive"}), Sampling(), EngineConfig(max_new_tokens=4)
    )
    list(engine.decode([[1, 2]], [0]))
    assert {row.nodes for row in engine.ledger.rows if not row.prefill} <= {
        0,
        1,
    }  # a greedy law has one token


@pytest.mark.parametrize("rule", ["recursive", "gumbel"])
def test_every_kind_of_draft_leaves_greedy_output_unchanged_and_keeps_the_contract(target, rule):
    config = EngineConfig(max_new_tokens=9, batch_size=4, check_contract=True)
    for sampling in (
        Sampling(),
        Sampling(1.0),
        Sampling(1.0, top_p=0.8),
        Sampling(1.0, repetition_penalty=1.3),
    ):
        plain = Engine(target, None, verify.build({"name": "token"}), sampling, config).generate(PROMPTS)
        for drafter in cases(target).values():
            found = Engine(target, drafter, verify.build({"name": rule}), sampling, config).generate(PROMPTS)
            if sampling.greedy:
                assert [g.tokens for g in found] == [g.tokens for g in plain]


# ---------------------------------------------------------------- options


def test_without_weights_it_says_what_to_do(target):
    remedy = "drafter.weights=random target.weights=random; .* task=train drafter=medusa target=tiny"
    with pytest.raises(OptionError, match=f"drafter.checkpoint=null: .*{remedy}"):
        drafters.build({"name": "medusa"}, target)
    drafter = drafters.build({"name": "medusa", "weights": "random", "nodes": 7}, target)
    assert drafter.max_nodes == 7


def test_a_checkpoints_own_tree_is_cut_to_its_best_nodes(target, tmp_path):
    heads = random_heads(Config(heads=2), target)
    heads.spec.choices = [[0], [1], [0, 0], [2]]
    save_heads(heads, tmp_path, "tiny")
    drafter = drafters.build({"name": "medusa", "checkpoint": str(tmp_path), "nodes": 3}, target)
    assert drafter.shape.paths == [(0,), (1,), (0, 0)]


def test_paths_that_no_head_can_guess_are_refused(target):
    for choices, message in (
        ([[0], [0, 0], [0, 0, 0]], r"drafter.choices=\[0, 0, 0\]: is 3 deep, but there are 2 heads"),
        ([[0], [7]], r"drafter.choices=\[7\]: asks for rank 7, but a head knows 7 tokens"),
    ):
        options = {"name": "medusa", "weights": "random", "heads": 2, "draft_vocab": 7, "choices": choices}
        with pytest.raises(OptionError, match=message):
            drafters.build(options, target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"siblings": "topk"}, "drafter.siblings=topk: no such choice; did you mean top_k"),
        ({"choices": [[0], [1, 0]]}, r"its parent \[1\] is not in the tree"),
        ({"choices": [[0], [0]]}, "must be distinct"),
        ({"choices": [[0], [-1]]}, "ranks begin with 0"),
        ({"heads": 0}, "drafter.heads=0: must be ≥ 1"),
        ({"weights": "random", "checkpoint": "x"}, "drafter.checkpoint=x: is only for"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        drafters.check({"name": "medusa", **options})
