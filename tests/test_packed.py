"""Packed copies of weights: products from them, when they are made, when they no longer hold."""

import copy

import pytest
import torch
from reference import greedy, plain, tiny
from test_compiled import PROMPTS, Gated, a_tree, logits, needs_compiler
from torch import nn
from torch.nn import functional as F

import drafters
from specdec import packed, verify
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.products import few_rows, from_copy, frozen, prepare, turn_and_merge

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a build without oneDNN")


@pytest.fixture
def always(monkeypatch):
    """Copies pay, whatever the machine and the dtype."""
    monkeypatch.setattr(packed, "pays", lambda matrices: True)


@pytest.mark.parametrize("bias", [False, True])
def test_products_from_copies(always, bias):
    """Against float64, within float32's rounding; two matrices that lie together have one copy."""
    torch.manual_seed(0)
    module, other = Gated(bias).requires_grad_(False), torch.randn(7, 6)
    prepare(module, other)
    gate, up, down = module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight
    both = torch.cat([gate, up])
    assert packed.copy_of(gate, 13) is not None and packed.copy_of(gate, 8) is None
    assert packed.copy_of(up, 5) is None
    for rows in (1, 2, 17):
        x, y = torch.randn(rows, 2, 6), torch.randn(rows, 1, 8)
        products = [
            (x, both, torch.ops.specdec.linear(x, gate, 13)),
            (x, other, few_rows(x, other)),
            (y, down, torch.ops.specdec.linear(y, down, 6)),
        ]
        for of, weight, found in products:
            torch.testing.assert_close(found, F.linear(of.double(), weight.double()).float())


def test_a_copy_of_what_a_weight_was_is_not_used(always):
    """Written to, or moved elsewhere: products are those of the weight as it is."""
    for change in (
        lambda w: w.mul_(2.0),
        lambda w: setattr(w, "data", w.data * 2.0),
    ):
        layer = nn.Linear(6, 8, bias=False).requires_grad_(False)
        x = torch.randn(3, 6)
        prepare(nn.Sequential(layer))
        assert packed.copy_of(layer.weight, 8) is not None
        change(layer.weight)
        assert packed.copy_of(layer.weight, 8) is None
        expected = F.linear(x, layer.weight)
        torch.testing.assert_close(few_rows(x, layer.weight), expected)
        torch.testing.assert_close(torch.ops.specdec.linear(x, layer.weight, 8), expected)
        prepare(nn.Sequential(layer))
        torch.testing.assert_close(few_rows(x, layer.weight), expected)


def test_a_copy_stays_behind_when_its_weight_is_copied_or_saved(always, tmp_path):
    """Opaque tensors can be neither; the weight's own copy multiplies as ever."""
    for weight in (torch.randn(8, 6), nn.Parameter(torch.randn(8, 6), requires_grad=False)):
        packed.pack([(weight, 8)])
        torch.save(weight, tmp_path / "weight.pt")
        for other in (copy.deepcopy(weight), torch.load(tmp_path / "weight.pt", weights_only=False)):
            assert packed.copy_of(other, 8) is None and torch.equal(other, weight)
        assert packed.copy_of(weight, 8) is not None


@pytest.mark.parametrize("bias", [False, True])
def test_graphs_multiply_from_copies(always, bias):
    """Those of the same rows as one; a single row is left alone."""
    torch.manual_seed(0)
    module, x, graphs = Gated(bias).requires_grad_(False), torch.randn(2, 3, 6), []
    expected = module(x)
    prepare(module)

    def backend(graph, inputs):
        turn_and_merge(graph, inputs)
        graphs.append(graph)
        return graph

    run = torch.compile(module, backend=backend, fullgraph=True)
    for own, other in zip(run(x), expected, strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-6)
    run(x[:1, :1])
    counts = [sum(node.target is from_copy for node in graph.graph.nodes) for graph in graphs]
    assert counts == [2, 0]


def test_copies_are_made_where_they_pay(monkeypatch):
    """Measured once, for bfloat16 alone, with enough matrices, and only where the memory is there."""
    ratios = iter([0.9, 0.5])
    monkeypatch.setattr(packed, "_pays", {})
    packed.pack([(few := torch.randn(8, 6, dtype=torch.bfloat16), 8)])
    assert packed.copy_of(few, 8) is None and torch.bfloat16 not in packed._pays
    monkeypatch.setattr(packed, "TRIED", 0)
    monkeypatch.setattr(packed, "_measured", lambda matrices: next(ratios))
    weight = torch.randn(8, 6, dtype=torch.bfloat16)
    for _ in range(2):
        packed.pack([(weight, 8)])
        assert packed.copy_of(weight, 8) is None
    packed.pack([(single := torch.randn(8, 6), 8)])
    assert packed.copy_of(single, 8) is None
    packed._pays.clear()
    monkeypatch.setattr(packed, "SHARE", 0.0)
    packed.pack([(weight, 8)])
    assert packed.copy_of(weight, 8) is None
    monkeypatch.setattr(packed, "SHARE", 0.25)
    packed.pack([(weight, 8)])
    assert packed.copy_of(weight, 8) is not None


@pytest.mark.parametrize("error", [AttributeError, NotImplementedError])  # no operator; none for this device
def test_a_build_without_the_operator_goes_on(monkeypatch, error):
    def refuse(matrix):
        raise error("mkldnn::_reorder_linear_weight")

    monkeypatch.setattr(packed, "_reordered", refuse)
    monkeypatch.setattr(packed, "_pays", {})
    monkeypatch.setattr(packed, "TRIED", 1)
    packed.pack([(weight := torch.randn(8, 6, dtype=torch.bfloat16), 8)])
    assert packed.copy_of(weight, 8) is None


def test_a_head_that_is_lent_brings_its_copy_along():
    """EAGLE's and Medusa's head over the whole vocabulary is the target's own: no second copy of it."""
    target = tiny("float32")
    weight = target.hf.get_output_embeddings().weight
    eagle = drafters.build({"name": "eagle", "weights": "random"}, target)
    medusa = drafters.build({"name": "medusa", "weights": "random"}, target)
    assert eagle.model.head[0] is weight and medusa.heads.lent[0] is weight
    assert frozen(nn.Parameter(torch.ones(2))).requires_grad is False  # nobody else trains it


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        ({"name": "small", "layers": 1}, "token"),
        ({"name": "eagle", "weights": "random"}, "recursive"),
        ({"name": "medusa", "weights": "random"}, "recursive"),
    ],
)
def test_decoding_from_copies_is_the_plain_models(always, drafter, rule):
    """Logits within float32's rounding of the layers as they are; greedy tokens are a plain model's."""
    target, reference = tiny("float32"), plain({"dtype": "float32"})
    built = drafters.build(drafter, target)
    for batch in (1, 3):
        config = EngineConfig(max_new_tokens=24, ignore_eos=True, batch_size=batch, compile="on")
        engine = Engine(target, built, verify.build({"name": rule}), config=config)
        for prompt, generation in zip(PROMPTS, engine.generate(PROMPTS), strict=True):
            assert generation.tokens == greedy(reference, prompt, 24)
    weights = [layer.mlp.down_proj.weight for layer in target.hf.get_decoder().layers]
    assert all(packed.copy_of(weight, len(weight)) is not None for weight in weights)
    own, found = (logits(target, on, 3, a_tree(5)) for on in (False, True))
    for expected, other in zip(own, found, strict=True):
        torch.testing.assert_close(other, expected, atol=1e-5, rtol=1e-5)
