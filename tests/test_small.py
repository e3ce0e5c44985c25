"""The small-model drafter: its q is the model's own law at every step, rollback and padding."""

import json

import pytest
import torch
from reference import next_logits, plain, tiny
from safetensors.torch import load_file, save_file

import drafters
from drafters.small.chain import SmallDrafter
from drafters.small.load import first_layers
from drafters.small.prune import Cut, carve
from drafters.small.pruned import save_pruned
from drafters.small.tree import SmallTreeDrafter
from specdec.checkpoints.tiny import save_tiny
from specdec.compat import quiet_transformers
from specdec.config import EngineConfig, TargetConfig
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.model import Model
from specdec.proposal import Kind
from specdec.sampling import Sampling
from specdec.tokenization import byte_tokenizer
from specdec.verify import build as build_rule

STRANGER = {"dtype": "float64", "layers": 1, "hidden_size": 8, "seed": 1}
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 5]]
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_k=20)}


def path(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path(parents, parents[node]), node]


def watched(base, record: list):
    """The drafter class, which notes each row's text, drafted tokens, q and mask."""

    class Watched(base):
        def propose(self, sequences, draw, depth):
            proposal = super().propose(sequences, draw, depth)
            texts = [sequences.tokens[b, :n].tolist() for b, n in enumerate(sequences.lengths.tolist())]
            record.append((texts, proposal))
            return proposal

    return Watched


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_declared_q_is_the_law_of_a_plain_forward(gamma, sampling):
    """So the cache, rolled back step after step in a ragged batch, equals one that is computed afresh."""
    record: list = []
    drafter = watched(SmallDrafter, record)(tiny(**STRANGER), 260, gamma)
    run(tiny("float64"), drafter, SAMPLINGS[sampling])
    check(record, plain(STRANGER), SAMPLINGS[sampling], least=30)


@pytest.mark.parametrize("siblings", ["with_replacement", "without_replacement"])
def test_declared_q_of_trees(siblings):
    record: list = []
    drafter = watched(SmallTreeDrafter, record)(tiny(**STRANGER), 260, [2, 1, 2], siblings)
    run(tiny("float64"), drafter, SAMPLINGS["sampled"], rule="recursive")
    check(record, plain(STRANGER), SAMPLINGS["sampled"], least=100)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_k=1)])
def test_trees_of_the_most_probable_tokens_are_as_wide_as_asked(sampling):
    """Nothing is drawn, so that the draft may rank what a greedy or truncated law calls impossible."""
    record: list = []
    drafter = watched(SmallTreeDrafter, record)(tiny(**STRANGER), 260, [3, 2], "top_k")
    run(tiny("float64"), drafter, sampling, rule="recursive")
    hf, checked = plain(STRANGER), 0
    for texts, proposal in record:
        if proposal.size < 9:
            continue
        assert bool(proposal.mask.all())
        parents = proposal.tree.parents.tolist()
        for text, tokens in zip(texts, proposal.tokens.tolist(), strict=True):
            for parent, width in ((-1, 3), *((n, 2) for n in range(3))):
                above = [tokens[n] for n in path(parents, parent)]
                best = next_logits(hf, [*text, *above]).topk(width).indices.tolist()
                assert [tokens[n] for n, p in enumerate(parents) if p == parent] == best
                checked += 1
    assert checked >= 40


def run(target: Model, drafter, sampling: Sampling, rule="token", count=14, **options) -> Engine:
    config = EngineConfig(max_new_tokens=count, batch_size=3, **options)
    engine = Engine(target, drafter, build_rule({"name": rule}), sampling, config, source=4)
    engine.results = engine.generate(PROMPTS)
    return engine


def check(record: list, hf: torch.nn.Module, sampling: Sampling, least: int) -> None:
    nodes = 0
    for texts, proposal in record:
        for b, text in enumerate(texts):
            parents = torch.atleast_2d(proposal.tree.parents).expand(len(texts), -1)[b].tolist()
            for node in range(proposal.size):
                if not proposal.mask[b, node]:
                    continue
                above = [int(proposal.tokens[b, n]) for n in path(parents, parents[node])]
                logits = next_logits(hf, [*text, *above])
                if sampling.greedy:
                    expected = torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
                else:
                    scores = logits / sampling.temperature
                    scores[scores < scores.topk(sampling.top_k).values[-1]] = -torch.inf
                    expected = scores.softmax(-1)
                torch.testing.assert_close(proposal.q[b, node], expected, rtol=0, atol=1e-10)
                assert proposal.q[b, node, proposal.tokens[b, node]] > 0
                nodes += 1
    assert nodes > least


def test_first_layers_are_the_targets_own():
    """The same tensors, not copies; cutting none away makes the target its own perfect drafter."""
    target = tiny("float64", layers=3)
    small = first_layers(target, 2)
    shared = {p.data_ptr() for p in target.hf.parameters()}
    assert all(p.data_ptr() in shared for p in small.hf.parameters())
    assert small.config.num_hidden_layers == 2 and target.config.num_hidden_layers == 3
    assert len(target.hf.model.layers) == 3
    assert small._groups == target._groups == 2  # the mask is repeated once per forward, not in every layer
    engine = run(target, SmallDrafter(first_layers(target, 3), 260, 4), Sampling(temperature=1.0))
    assert engine.ledger.acceptance_rate == 1.0
    with pytest.raises(OptionError, match="drafter.layers=4: the target has only 3 layers"):
        first_layers(target, 4)


def test_the_drafter_does_not_disturb_the_targets_features():
    """The cut copy carries the target's hooks along; the features of the target must come from the target."""
    target = tiny("float64")
    small = first_layers(target, 1)
    target.features = (0, Model.FINAL)
    cache = small.new_cache(1, 8)
    small.prefill(torch.tensor([[1, 2, 3]]), torch.tensor([3]), cache)
    assert target._captured == {}


def test_the_target_keeps_the_features_of_the_layers_cut_off():
    target = tiny("float64")
    first_layers(target, 1)
    target.features = (0, 1)
    output = target.prefill(torch.tensor([[1, 2, 3]]), torch.tensor([3]), target.new_cache(1, 8))
    assert set(output.features) == {0, 1}


# ---------------------------------------------------------------- stopping by confidence


def test_confidence_stops_a_row_after_its_first_unsure_token():
    record: list = []
    threshold = 0.1
    drafter = watched(SmallDrafter, record)(tiny(**STRANGER), 260, 5, threshold)
    engine = run(tiny("float64"), drafter, Sampling(temperature=1.0), check_contract=True)
    lengths = set()
    for _, proposal in record:
        for b in range(len(proposal.tokens)):
            sure = (proposal.q_of_tokens(torch.float64)[b] >= threshold).tolist()
            length = int(proposal.mask[b].sum())
            lengths.add(length)
            assert all(sure[: length - 1])  # every token but the last was sure …
            assert length == proposal.size or not sure[length - 1]  # … and the last was not, or γ was reached
    assert len(lengths) > 1 and engine.ledger.decode_rows


def test_confidence_of_greedy_drafts_is_that_at_temperature_1():
    """Lengths are those that the model's softmax, read afresh, asks for: q knows certainties only."""
    record: list = []
    threshold, hf = 0.02, plain(STRANGER)
    drafter = watched(SmallDrafter, record)(tiny(**STRANGER), 260, 5, threshold)
    run(tiny("float64"), drafter, Sampling())
    lengths = set()
    for texts, proposal in record:
        for b, text in enumerate(texts):
            length = int(proposal.mask[b].sum())
            drafted = proposal.tokens[b, :length].tolist()
            laws = [next_logits(hf, [*text, *drafted[:i]]).softmax(-1) for i in range(length)]
            sure = [float(law[x]) >= threshold for law, x in zip(laws, drafted, strict=True)]
            assert all(sure[:-1]) and (length == proposal.size or not sure[-1])
            lengths.add(length)
    assert len(lengths) > 1


def test_confidence_is_off_by_default():
    record: list = []
    drafter = watched(SmallDrafter, record)(tiny(**STRANGER), 260, 3)
    run(tiny("float64"), drafter, Sampling(temperature=1.0))
    assert all(bool(proposal.mask.all()) for _, proposal in record)


# ---------------------------------------------------------------- vocabularies


def padded(model: Model, rows: int) -> Model:
    """The model with a vocabulary padded (or cut) to `rows`; the padding has large logits, to tempt."""
    with quiet_transformers():
        hf = model.hf
        hf.resize_token_embeddings(rows, mean_resizing=False)
    head = hf.get_output_embeddings()
    with torch.no_grad():
        head.weight[260:] = head.weight[:1].abs() * 9
    return Model(hf.requires_grad_(False), model.tokenizer)


@pytest.mark.parametrize("rows", [300, 200])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_vocabulary_padded_differently(rows, temperature):
    """Larger: no padding is ever drafted. Smaller: what it lacks has q = 0; the output stays exact."""
    sampling = Sampling(temperature=temperature)
    small = padded(tiny("float64"), rows)
    record: list = []
    drafter = watched(SmallDrafter, record)(small, 260, 3)
    found = run(tiny("float64"), drafter, sampling, check_contract=True).results
    for _, proposal in (r for r in record if r[1].size):
        assert proposal.q.shape[-1] == 260 and bool((proposal.tokens < min(rows, 260)).all())
        torch.testing.assert_close(proposal.q.sum(-1), torch.ones_like(proposal.q[..., 0]))
    if not temperature:
        alone = Engine(
            tiny("float64"), None, build_rule({"name": "token"}), config=EngineConfig(max_new_tokens=14)
        )
        assert [g.tokens for g in found] == [g.tokens for g in alone.generate(PROMPTS)]


def test_another_tokenizer_is_refused(tmp_path):
    folder = save_tiny(TargetConfig(name="tiny", source="tiny"), tmp_path / "small")
    target = tiny("float32")
    assert drafters.build({"name": "small", "path": str(folder)}, target).kind is Kind.WITH_REPLACEMENT
    other = byte_tokenizer()
    other.add_tokens(["<extra>"])
    stranger = Model(target.hf, other)
    with pytest.raises(OptionError, match="drafter.path=.*tokenizer is not the target's.*<extra>"):
        drafters.build({"name": "small", "path": str(folder)}, stranger)


def test_a_checkpoint_drafts_like_the_model_it_was(tmp_path):
    folder = save_tiny(TargetConfig(name="tiny", source="tiny"), tmp_path / "small")
    target = tiny("float32")
    engine = run(target, drafters.build({"name": "small", "path": str(folder)}, target), Sampling())
    assert engine.ledger.acceptance_rate == 1.0


def test_a_path_or_layers_must_be_given():
    with pytest.raises(OptionError, match="drafter.path=.*or drafter.layers=N"):
        drafters.build({"name": "small"}, tiny("float32"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "a/b", "dtype": "fp16"}, "drafter.dtype=fp16: no such choice"),
        (
            {"layers": 1, "dtype": "float32"},
            "drafter.dtype=float32: is only for a model of its own",
        ),
        ({"revision": "main"}, "drafter.revision=main: is only for a model of its own"),
    ],
)
def test_options_that_nothing_reads_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        drafters.check({"name": "small", **options})


def test_what_does_not_fit_a_pruned_checkpoint_is_named(tmp_path):
    target, cut, ids = tiny("float32"), Cut([0]), torch.arange(0, 260, 2)
    for change, ids_, message in (
        ({"units": 10**6}, ids, "drafter.path=.*keeps 1000000 units, but this target has"),
        ({"layers": 50}, ids, "drafter.path=.*keeps 50 layers, but this target has 2"),
        ({}, torch.arange(0, 600, 2), "drafter.path=.*beyond this target's vocabulary of 260"),
    ):
        folder = save_pruned(carve(target, cut, ids), cut.shape, tmp_path / "small", "tiny")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {"token_map": ids_.int()}, folder / "model.safetensors")
        with pytest.raises(OptionError, match=message):
            drafters.build({"name": "small", "path": str(folder)}, target)
    with pytest.raises(OptionError, match="drafter.dtype=float32: is only for a model of its own"):
        drafters.build({"name": "small", "path": str(folder), "dtype": "float32"}, target)


@pytest.mark.parametrize("gamma", [7, 50])
def test_gamma_larger_than_the_room(gamma):
    for count in (1, 2, 4):
        engine = run(tiny("float64"), SmallDrafter(tiny(**STRANGER), 260, gamma), Sampling(), count=count)
        assert [len(g.tokens) for g in engine.results] == [count] * 3
        assert all(row.depth <= count - 2 for row in engine.ledger.decode_rows)


def test_gumbel_draws_with_the_targets_noise():
    """The output of the coupled rule does not depend on the drafter at all."""
    target, sampling = tiny("float64"), Sampling(temperature=1.0)
    runs = [
        run(target, SmallDrafter(tiny(**STRANGER), 260, 3), sampling, rule="gumbel"),
        run(target, SmallDrafter(first_layers(target, 1), 260, 5), sampling, rule="gumbel"),
        run(target, None, sampling, rule="gumbel"),
    ]
    assert len({tuple(tuple(g.tokens) for g in r.results) for r in runs}) == 1
