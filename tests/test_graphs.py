"""Recorded forwards: what is replayed blindly is what the layers compute, at any length, on any tree."""

import pytest
import torch
from reference import greedy, plain, random_parents
from tape import on_tape

import drafters
from drafters.eagle.growth import Memory
from specdec import verify
from specdec.config import EngineConfig, TargetConfig
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.graphs import PAGE, Graphs
from specdec.model import Model
from specdec.sampling import Sampling
from specdec.tree import Tree

PROMPTS = [[5, 9, 2, 7], [11, 3], [1, 2, 3, 4, 5, 6]]
TOKENS = 12


def recording(engine: Engine) -> Engine:
    """An engine on a CPU that records its forwards as it does with CUDA."""
    engine.record = on_tape
    return engine


def test_a_graph_reads_its_inputs_and_nothing_else_of_a_call():
    """The second call replays: the function, which counts its calls, is not called again."""
    calls = []

    def double(x):
        calls.append(len(x))
        return (2 * x,)

    graphs = Graphs(on_tape, most=3)
    for rows in ([[1.0]], [[7.0]]):
        assert graphs.run("double", double, torch.tensor(rows))[0].tolist() == [[2 * rows[0][0]]]
    assert calls == [1, 1] and len(graphs) == 1  # to set up, and to record
    assert graphs.run("double", double, torch.tensor([[1.0], [2.0]]))[0].tolist() == [[2.0], [4.0]]
    assert graphs.run("double", double, torch.tensor([[1.0], [2.0], [3.0]]))[0].tolist() == [
        [2.0],
        [4.0],
        [6.0],
    ]
    assert calls == [1, 1, 2, 2, 3, 3]  # three rows are all that there can be: no fourth is made up
    graphs.forget()
    assert len(graphs) == 0


def test_a_call_that_waits_for_the_device_is_not_recorded():
    with pytest.raises(OptionError, match="cannot be recorded .*waits for the device.*=off"):
        Graphs(on_tape, 1).run("", lambda x: (x[: int(x[0])],), torch.tensor([1]))


@pytest.mark.parametrize("shape", ["chain", "tree", "trees"])
def test_replayed_logits_and_features_are_the_forward_s(tiny64, shape):
    """Steps at growing lengths, over the end of a page, the last ones without a row; float64, 1e-9."""
    generator = torch.Generator().manual_seed(1)
    tiny64.features = (0, Model.FINAL)
    own, recorded = caches = [tiny64.new_cache(3, PAGE + 60, record) for record in (None, on_tape)]
    lengths = torch.tensor([PAGE - 20, PAGE - 40, 3])
    prompt = torch.randint(0, tiny64.vocab_size, (3, PAGE - 20), generator=generator)
    for cache in caches:
        tiny64.prefill(prompt, lengths, cache)
    for step in range(6):
        tree = Tree.chain(6)
        if shape != "chain":
            parents = torch.tensor([random_parents(generator, 6) for _ in range(own.batch)])
            tree = Tree(parents[0] if shape == "tree" else parents)
        tokens = torch.randint(0, tiny64.vocab_size, (own.batch, 7), generator=generator)
        expected, found = (tiny64.forward(tokens, tree, cache) for cache in caches)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-9, rtol=0)
        for layer in tiny64.features:
            torch.testing.assert_close(found.features[layer], expected.features[layer], atol=1e-9, rtol=0)
        path = tree.paths[:, -1].expand(own.batch, -1).clone()  # down to the last node
        path[1] = -1  # and one row that accepts nothing
        for cache in caches:
            cache.advance(tree, path, (path >= 0).sum(1))
            if step == 3:
                cache.select(torch.tensor([0, 2]))
            cache.settle(int(cache.lengths.max()))
    tiny64.features = ()
    assert own.longest == recorded.longest > PAGE
    assert 2 <= len(recorded.graphs) <= 4  # one per page and number of rows


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        ({"name": "none"}, "token"),
        ({"name": "ngram"}, "token"),
        ({"name": "small", "layers": 1}, "token"),
        ({"name": "small", "layers": 1, "tree": [2, 1]}, "recursive"),
        ({"name": "eagle", "weights": "random"}, "recursive"),
        ({"name": "eagle", "weights": "random", "mode": "static"}, "recursive"),
        ({"name": "medusa", "weights": "random"}, "recursive"),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_decoding_is_the_plain_models(tiny64, plain64, drafter, rule, batch):
    """Rows that end at different times, two batches with the same cache and graphs."""
    built = drafters.build(drafter, tiny64)
    config = EngineConfig(max_new_tokens=TOKENS, batch_size=batch, compile="off")
    engine = recording(Engine(tiny64, built, verify.build({"name": rule}), config=config))
    expected = [greedy(plain64, p, TOKENS, tiny64.eos_token_ids) for p in PROMPTS]
    assert [g.tokens for g in engine.generate(PROMPTS)] == expected
    recorded = len(engine._idle.graphs)
    assert recorded > 0
    assert [g.tokens for g in engine.generate(PROMPTS)] == expected
    assert len(engine._idle.graphs) == recorded


def test_prompts_are_not_recorded(tiny64, monkeypatch):
    """Nor by the drafter: every length would be a graph of its own. Prompts are wider than a level."""
    widths = []
    replayed = Memory._replayed
    monkeypatch.setattr(
        Memory, "_replayed", lambda self, x, *rest: widths.append(x.shape[1]) or replayed(self, x, *rest)
    )
    eagle = drafters.build({"name": "eagle", "weights": "random"}, tiny64)
    config = EngineConfig(max_new_tokens=TOKENS, compile="off")
    engine = recording(Engine(tiny64, eagle, verify.build({"name": "recursive"}), config=config))
    for length in (40, 50, 45):  # the first batch makes the buffers that the others find
        list(engine.decode([[3] * length], [0]))
    assert widths and max(widths) < 40


MEDUSA = {"name": "medusa", "weights": "random", "choices": [[0], [1], [0, 0], [0, 1]]}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        ({"name": "small", "layers": 1}, "block"),
        (MEDUSA, "recursive"),
        (MEDUSA | {"draft_vocab": 200}, "recursive"),
        (MEDUSA | {"siblings": "without_replacement"}, "recursive"),
    ],
)
def test_the_same_drafts_and_tokens_recorded_and_not(tiny64, drafter, rule, temperature):
    """Same random numbers, two batches; also the drafts, of which greedy tokens tell nothing."""
    outputs = []
    for engine_of in (lambda e: e, recording):
        built = drafters.build(drafter, tiny64)
        config = EngineConfig(max_new_tokens=TOKENS, ignore_eos=True, batch_size=3, compile="off")
        sampling = Sampling(temperature)
        engine = engine_of(Engine(tiny64, built, verify.build({"name": rule}), sampling, config, 3))
        engine.ledger.trace = True
        outputs.append([[g.tokens for g in engine.generate(PROMPTS)], engine.ledger.rows])
        if engine_of is recording and drafter["name"] == "medusa":
            assert 0 < len(built.graphs) <= 4  # by the draft's depth, which the room limits, and the rows
    assert outputs[0] == outputs[1]


def test_graphs_need_cuda(tiny64):
    with pytest.raises(OptionError, match=r"engine.compile=graphs: needs CUDA, the target is on cpu"):
        Engine(tiny64, None, verify.build({"name": "token"}), config=EngineConfig(compile="graphs"))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["none", "small", "eagle", "medusa"])
def test_cuda_graphs_decode_as_the_plain_model(name):
    target = Model.load(TargetConfig(name="tiny", source="tiny", device="cuda", dtype="float64"))
    reference = plain({"dtype": "float64"})
    options = {"none": {}, "small": {"layers": 1}}.get(name, {"weights": "random"})
    built = drafters.build({"name": name, **options}, target)
    rule = verify.build({"name": "token" if built.is_chain else "recursive"})
    config = EngineConfig(max_new_tokens=TOKENS, batch_size=3, compile="graphs")
    engine = Engine(target, built, rule, config=config)
    expected = [greedy(reference, p, TOKENS, target.eos_token_ids) for p in PROMPTS]
    for _ in range(2):
        assert [g.tokens for g in engine.generate(PROMPTS)] == expected
