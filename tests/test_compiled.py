"""Compiled layers against the same layers as they are: logits, features, whole decodes, refusals."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from reference import greedy, plain, random_parents, tiny
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

import drafters
from specdec import compiled, verify
from specdec.attention import grouped_attention
from specdec.compiled import alike
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.model import Model
from specdec.products import few_rows, lay_together, linear, turn_and_merge
from specdec.sampling import Sampling
from specdec.tree import Tree

needs_compiler = pytest.mark.skipif(
    compiled.obstacle(nn.ModuleList([nn.Module()]), True) == compiled.NO_COMPILER, reason="no C++ compiler"
)
PROMPTS = [[5, 9, 2, 7], [11, 3], [1, 2, 3, 4, 5, 6]]


@pytest.fixture(scope="module")
def target() -> Model:
    """The tiny model in float32, its layers compiled for batches of one row and of more."""
    model = tiny("float32")
    model.compile(2)
    return model


def a_tree(nodes: int) -> Tree:
    parents = random_parents(torch.Generator().manual_seed(nodes), nodes)
    return Tree(torch.tensor(parents, dtype=torch.int64))


def logits(model: Model, on: bool, batch: int, tree: Tree):
    """After a prompt: all logits and features of one forward."""
    generator = torch.Generator().manual_seed(batch)
    prompt = torch.randint(0, model.vocab_size, (batch, 7), generator=generator)
    drafted = torch.randint(0, model.vocab_size, (batch, tree.size + 1), generator=generator)
    lengths = torch.tensor([7, 4, 6, 7][:batch])
    model.compiled, model.features = on, (0, Model.FINAL)
    cache = model.new_cache(batch, 64)
    first = model.prefill(prompt, lengths, cache)
    cache.settle(7)
    second = model.forward(drafted, tree, cache)
    model.compiled, model.features = False, ()
    return first.logits, second.logits, *second.features.values()


@needs_compiler
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("nodes", [0, 4, 19])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_logits_are_the_layers_own(target, batch, nodes, shape):
    """Other order of sums, float32: 1e-5 of logits whose size is about 1."""
    tree = Tree.chain(nodes, target.device) if shape == "chain" else a_tree(nodes)
    for own, other in zip(logits(target, False, batch, tree), logits(target, True, batch, tree), strict=True):
        torch.testing.assert_close(other, own, atol=1e-5, rtol=1e-5)


@needs_compiler
def test_no_size_compiles_anew(target):
    """Once batches of one and of several rows have been compiled for, other sizes find them."""
    before = counters["stats"]["unique_graphs"]
    assert before >= 4  # it counts what was compiled
    for batch in (1, 3, 4):
        for nodes in (0, 1, 2, 7, 30):
            logits(target, True, batch, Tree.chain(nodes, target.device))
    assert counters["stats"]["unique_graphs"] == before


@needs_compiler
@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        ({"name": "none"}, "token"),
        ({"name": "ngram"}, "token"),
        ({"name": "small", "layers": 1}, "token"),
        pytest.param({"name": "eagle", "weights": "random"}, "recursive", marks=pytest.mark.slow),
        ({"name": "medusa", "weights": "random"}, "recursive"),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_decoding_is_the_plain_models(target, drafter, rule, batch):
    """Accepted tokens equal those of an untouched Hugging Face model, decoded one by one."""
    built = drafters.build(drafter, target)
    config = EngineConfig(max_new_tokens=24, ignore_eos=True, batch_size=batch, compile="on")
    engine = Engine(target, built, verify.build({"name": rule}), config=config)
    assert engine.compiled
    reference = plain({"dtype": "float32"})
    for prompt, generation in zip(PROMPTS, engine.generate(PROMPTS), strict=True):
        assert generation.tokens == greedy(reference, prompt, 24)


@needs_compiler
@pytest.mark.slow
def test_sampling_draws_the_same_tokens(target):
    """Same random numbers, laws equal up to rounding: at T = 1, compiled and not, batch 1 and 3."""
    outputs = []
    for mode, batch in (("off", 1), ("on", 1), ("on", 3)):
        config = EngineConfig(max_new_tokens=24, ignore_eos=True, batch_size=batch, compile=mode)
        small = drafters.build({"name": "small", "layers": 1}, target)
        sampling = Sampling(temperature=1.0)
        engine = Engine(target, small, verify.build({"name": "block"}), sampling, config, 3)
        outputs.append([g.tokens for g in engine.generate(PROMPTS)])
    assert outputs[0] == outputs[1] == outputs[2]


@needs_compiler
def test_a_copy_computes_with_its_own_weights(target):
    """A compiled function is shared by layers, weights are not: a changed copy of the model stands alone."""
    tree = Tree.chain(2, target.device)
    before = logits(target, True, 1, tree)
    other = Model(copy.deepcopy(target.hf), name="copy")
    with torch.no_grad():
        for parameter in other.hf.get_decoder().layers.parameters():
            parameter.mul_(1.5)
    expected = logits(other, False, 1, tree)
    other.compile(1)
    for own, found in zip(expected, logits(other, True, 1, tree), strict=True):
        torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-5)
    for own, found in zip(before, logits(target, True, 1, tree), strict=True):
        torch.testing.assert_close(found, own, atol=0, rtol=0)


@needs_compiler
def test_weights_may_move_between_engines():
    """Merged products read beyond the first matrix: where weights have moved since, they are laid anew."""
    model, tree = tiny("float32"), Tree.chain(2, torch.device("cpu"))
    model.compile(1)
    for layer in model.hf.get_decoder().layers:
        for parameter in layer.parameters():
            parameter.data = parameter.data * 0.5
    model.compile(1)
    for own, found in zip(logits(model, False, 1, tree), logits(model, True, 1, tree), strict=True):
        torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-5)


def test_places_of_moved_matrices_are_given_back(monkeypatch):
    """Once, and only if matrices moved: the process held half of a model more than it needed."""
    asked = []
    monkeypatch.setattr("specdec.products.return_freed_memory", lambda: asked.append(True))
    module = Gated(bias=False)
    for calls in (1, 1):
        lay_together(module)
        assert len(asked) == calls


def test_products_of_few_rows():
    """Against float64, within float32's rounding."""
    torch.manual_seed(0)
    layer = nn.Linear(96, 80)
    for function in (linear, few_rows):
        for shape in ((1, 1), (1, 7), (3, 1), (3, 30)):
            x = torch.randn(*shape, 96)
            expected = F.linear(x.double(), layer.weight.double(), layer.bias.double())
            found = function(x, layer.weight, layer.bias)
            assert found.shape == expected.shape
            torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_no_product_copies_its_matrix_for_each_row():
    """`F.linear` of a 3-d tensor with odd strides does: a step of 32 rows took 2.6 s instead of .06."""
    torch.manual_seed(0)
    layer = nn.Linear(96, 80).requires_grad_(False)
    for function in (linear, few_rows):
        for rows in (1, 2, 16, 17, 40):
            x = torch.randn(96, rows).mT[:, None]  # [B, 1, H], as a product turned round leaves it
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                found = function(x, layer.weight, layer.bias)
            assert not any(event.key == "aten::bmm" for event in seen.key_averages())
            torch.testing.assert_close(found, F.linear(x.contiguous(), layer.weight, layer.bias))


@needs_compiler
@pytest.mark.parametrize("batch", [1, 4])
def test_attention_gets_rows(target, batch, monkeypatch):
    """Queries with gaps between a head's numbers would leave the fast path (keys come from the cache)."""
    seen = []

    def note(query, key, value, mask, scaling):
        seen.extend([query, key, value])
        return grouped_attention(query, key, value, mask, scaling)

    monkeypatch.setattr(compiled, "grouped_attention", note)
    for nodes in (0, 5):
        logits(target, True, batch, a_tree(nodes))
    assert seen and all(x.stride(-1) == 1 for x in seen)


class Gated(nn.Module):
    """Two products of the same rows, one of others."""

    def __init__(self, bias: bool):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(6, 8, bias), nn.Linear(6, 5, bias)
        self.down_proj = nn.Linear(8, 6, bias)

    def forward(self, x):
        return self.down_proj(self.gate_proj(x)), self.up_proj(x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_products_of_the_same_rows_are_one(bias, together):
    """Where their matrices lie together; results are those of the layers as they were (float32 rounding)."""
    torch.manual_seed(0)
    module = Gated(bias)
    weights = [module.gate_proj.weight, module.up_proj.weight]
    before, x = [w.clone() for w in weights], torch.randn(2, 3, 6)
    expected = module(x)
    if together:
        lay_together(module)
        where = [w.data_ptr() for w in weights]
        assert where[1] == where[0] + 4 * weights[0].numel()
        lay_together(module)  # nothing left to do
        assert where == [w.data_ptr() for w in weights]
    else:  # one behind the other by chance, but not from the beginning of a storage
        file = torch.cat([torch.zeros(1, 6), *weights]).detach()
        module.gate_proj.weight.data, module.up_proj.weight.data = file[1:9], file[9:]
    assert all(torch.equal(w, b) for w, b in zip(weights, before, strict=True))
    graphs = []

    def backend(graph, inputs):
        turn_and_merge(graph, inputs)
        graphs.append(graph)
        return graph

    found = torch.compile(module, backend=backend, fullgraph=True)(x)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-6)
    [graph] = graphs
    assert sum(node.target is linear for node in graph.graph.nodes) == (2 if together else 3)
    torch.compile(module, backend=backend, fullgraph=True)(x[:1, :1])
    assert sum(node.target is linear for node in graphs[-1].graph.nodes) == 3  # a single row


def test_layers_that_differ_are_not_compiled():
    """One function serves all layers only where nothing but weights and index tells them apart."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    layers = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes)).model.layers
    assert alike(layers)
    layers[1].self_attn.scaling *= 2
    assert not alike(layers)
    layers[1].self_attn.scaling = layers[0].self_attn.scaling
    layers[1].mlp.down_proj = nn.Linear(48, 16, bias=False)
    assert not alike(layers)


def engine(model: Model, mode: str) -> Engine:
    return Engine(model, None, verify.build({"name": "token"}), config=EngineConfig(compile=mode))


def test_what_cannot_be_compiled_is_refused_when_asked_for(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(OptionError, match=r"engine\.compile=on: .*no C\+\+ compiler.*engine\.compile=off"):
        engine(tiny("float32"), "on")


def test_a_compiler_that_fails_leaves_the_layers_as_they_were(monkeypatch):
    """`auto` goes on without, and says so once; `on` refuses."""
    model = tiny("float32")

    def broken(*args, **kwargs):
        raise RuntimeError("no Python.h\nmore")

    monkeypatch.setattr(compiled, "_inductor", broken)
    monkeypatch.setattr(Model, "gains_by_compiling", property(lambda self: True))
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/" + name)
    with pytest.warns(UserWarning, match="tiny is not compiled: torch.compile"):
        automatic = engine(model, "auto")
    assert not automatic.compiled
    assert automatic.generate(PROMPTS[:1])[0].tokens == engine(model, "off").generate(PROMPTS[:1])[0].tokens
    with pytest.raises(OptionError, match=r"engine\.compile=on: torch\.compile"):
        engine(model, "on")


def test_a_drafter_that_cannot_be_compiled_leaves_the_target_compiled(monkeypatch):
    """The baseline is compiled, so the speculative run must not lose that by its drafter."""
    model, drafter = tiny("float32"), drafters.build({"name": "ngram"}, tiny("float32"))

    def refuse(batch):
        raise OptionError("engine.compile", "on", "odd layers")

    monkeypatch.setattr(drafter, "compile", refuse)
    monkeypatch.setattr(Model, "gains_by_compiling", property(lambda self: True))
    monkeypatch.setattr(Model, "compile", lambda self, batch: None)
    with pytest.warns(UserWarning, match="ngram is not compiled: odd layers"):
        made = Engine(model, drafter, verify.build({"name": "token"}), config=EngineConfig(compile="auto"))
    assert made.compiled and not made.drafts_compiled
    with pytest.raises(OptionError, match="odd layers"):
        Engine(model, drafter, verify.build({"name": "token"}), config=EngineConfig(compile="on"))


def test_compile_seconds_are_counted_once(monkeypatch):
    """Five seconds for one row and five for several are ten, and nothing is compiled twice."""
    model, clock = tiny("float32"), [0.0]
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr("specdec.model.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(model, "_run_compiled", lambda rows: clock.__setitem__(0, clock[0] + 5))
    for batch, seconds in ((1, 5), (1, 5), (8, 10), (2, 10)):
        model.compile(batch)
        assert model.compile_seconds == seconds


def test_small_models_and_float32_are_not_compiled_by_themselves():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not engine(tiny("float32"), "auto").compiled
        assert not engine(tiny("bfloat16"), "auto").compiled


def test_unknown_mode():
    with pytest.raises(OptionError, match=r"engine\.compile=onn: .*did you mean on\?"):
        EngineConfig(compile="onn")


@needs_compiler
@pytest.mark.slow
def test_a_fixed_width_of_one_engine_is_not_compiled_for_the_next():
    """Batches of several rows are compiled for after an engine of one row has run at a fixed width."""
    target, rule = tiny("float32"), verify.build({"name": "token"})
    first = EngineConfig(max_new_tokens=4, ignore_eos=True, fixed_width=16, compile="on")
    Engine(target, None, rule, config=first).generate(PROMPTS)
    second = Engine(target, None, rule, config=replace(first, fixed_width=None, batch_size=3))
    reference = plain({"dtype": "float32"})
    for prompt, generation in zip(PROMPTS, second.generate(PROMPTS), strict=True):
        assert generation.tokens == greedy(reference, prompt, 4)


def test_layers_of_one_call_are_given_the_same():
    """One call runs several layers, so each must be called on the one before, with nothing else changed."""
    called = []

    def run(layers, x, *args, **kwargs):
        called.append(x)
        return x + 1, x + 2

    group = compiled._Group(run, [nn.Module(), nn.Module()])
    x, mask, other = torch.zeros(2), torch.ones(2), torch.ones(2)
    first = group(0, x, attention_mask=mask)
    assert torch.equal(group(1, first, attention_mask=mask), x + 2) and len(called) == 1
    for state, given in ((first, other), (first + 0, mask)):
        with pytest.raises(ValueError, match="different arguments"):
            group(1, state, attention_mask=given)
    assert [compiled.together(n) for n in (1, 2, 28, 30, 32, 31)] == [1, 2, 4, 3, 4, 1]
