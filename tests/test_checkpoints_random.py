"""Targets with random weights: the tiny one and the shipped architectures."""

import math
from pathlib import Path

import pytest
import torch
import yaml

import conf
from specdec.checkpoints import context_length, eos_token_ids, load
from specdec.checkpoints.random_weights import build_random, fill_, shipped_architectures
from specdec.checkpoints.tiny import LOGIT_STD
from specdec.config import TargetConfig, from_mapping
from specdec.errors import OptionError
from specdec.progress import silent

TARGETS = sorted((Path(conf.__file__).parent / "target").glob("*.yaml"))
PARAMETERS = {  # as published with the models
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "vicuna-7b": 6_738_415_616,
    "smollm2-135m": 134_515_008,
}
CONTEXTS = {
    "llama3-8b": 8192,
    "llama3.1-8b": 131072,
    "qwen2.5-7b": 32768,
    "qwen3-8b": 40960,
    "vicuna-7b": 2048,
    "smollm2-135m": 8192,
}
END_OF_TEXT = {
    "llama3-8b": {128001, 128009},
    "llama3.1-8b": {128001, 128008, 128009},
    "qwen2.5-7b": {151643, 151645},
    "qwen3-8b": {151643, 151645},
    "vicuna-7b": {2},
    "smollm2-135m": {2},
}


def tiny(**fields):
    return load(TargetConfig(name="tiny", source="tiny", device="cpu", **fields), silent)


def test_tiny_is_reproducible_from_its_seed():
    first, again, other = tiny(seed=3), tiny(seed=3), tiny(seed=4)
    for a, b, c in zip(*(loaded.model.parameters() for loaded in (first, again, other)), strict=True):
        assert torch.equal(a, b)
        assert a.ndim == 1 or not torch.equal(a, c)
    assert first.provenance["weights"] == "random" and first.provenance["seed"] == 3


def test_tiny_does_not_touch_the_global_generator():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    tiny(seed=5)
    assert torch.equal(torch.rand(1), expected)


def test_tiny_in_float64_is_the_same_model():
    single, double = tiny(), tiny(dtype="float64")
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    ids = torch.arange(12)[None]
    assert torch.allclose(single.model(ids).logits.double(), double.model(ids).logits, atol=1e-4)


def test_tiny_entropy_is_that_of_normal_logits():
    """Logits of n independent N(0, s²) have a softmax of entropy → log n − s²/2 (s = LOGIT_STD, n = 1000)."""
    model = tiny(vocab_size=1000).model
    ids = torch.randint(0, 1000, (64, 6), generator=torch.Generator().manual_seed(0))
    p = model(ids).logits[:, -1].double().softmax(-1)
    entropy = -(p * p.log()).sum(-1).mean()
    assert abs(entropy - (math.log(1000) - LOGIT_STD**2 / 2)) < 0.15


@pytest.mark.parametrize("vocab_size", [5, 260])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tiny_law_depends_on_far_tokens_and_their_order(vocab_size, seed):
    """Through the attention: the last of six tokens stays the same, an earlier one changes."""
    model = tiny(vocab_size=vocab_size, seed=seed).model
    ids = torch.randint(0, vocab_size, (64, 6), generator=torch.Generator().manual_seed(0))
    far, order = ids.clone(), ids[:, [1, 0, 2, 3, 4, 5]]
    far[:, 0] = (far[:, 0] + 1) % vocab_size
    p, q, r = (model(x).logits[:, -1].double().softmax(-1) for x in (ids, far, order))
    assert (p - q).abs().sum(-1).mean() / 2 > 0.1
    assert (p - r).abs().sum(-1).mean() / 2 > 0.05


def test_tiny_is_ready_for_inference():
    loaded = tiny()
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "sdpa"
    assert tiny(attention="eager").model.config._attn_implementation == "eager"


def test_tiny_special_tokens_agree_with_its_tokenizer():
    loaded = tiny()
    assert loaded.model.config.vocab_size == len(loaded.tokenizer) == 260
    assert eos_token_ids(loaded.model, loaded.tokenizer) == {loaded.tokenizer.eos_token_id} == {257}
    assert loaded.tokenizer.bos_token_id == loaded.model.config.bos_token_id == 256


def test_a_small_vocabulary_has_no_tokenizer_and_no_end():
    loaded = tiny(vocab_size=5)
    assert loaded.tokenizer is None and not loaded.chat
    assert eos_token_ids(loaded.model, None) == frozenset()


@pytest.mark.parametrize("field, value", [("vocab_size", 1), ("layers", 0), ("hidden_size", 6)])
def test_tiny_impossible_sizes(field, value):
    with pytest.raises(OptionError) as caught:
        tiny(**{field: value})
    assert (caught.value.option, caught.value.value) == (f"target.{field}", value)


def test_every_shipped_architecture_is_known_here():
    assert set(shipped_architectures()) == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_shipped_architectures(name):
    """Built on the meta device: shapes without memory."""
    config = TargetConfig(name=name, weights="random", architecture=name)
    model, tokenizer = build_random(config, torch.device("meta"), torch.bfloat16)
    assert model.num_parameters() == PARAMETERS[name]
    assert context_length(model) == CONTEXTS[name]
    assert eos_token_ids(model, tokenizer) == END_OF_TEXT[name]
    assert max(tokenizer("ÿ∀ any text")["input_ids"]) < model.config.vocab_size
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_random_weights_are_filled_in():
    config = TargetConfig(name="smollm2-135m", weights="random", architecture="smollm2-135m", device="cpu")
    loaded = load(config, silent)
    assert loaded.provenance["weights"] == "random" and loaded.provenance["source"] == "smollm2-135m"
    layers = loaded.model.model.layers
    q = layers[0].self_attn.q_proj.weight.float()
    assert abs(q.mean()) < 1e-3 and abs(q.std() - 0.02) < 1e-3
    assert torch.equal(layers[0].input_layernorm.weight.float(), torch.ones(576))
    assert not torch.equal(q, layers[1].self_attn.q_proj.weight.float())
    assert q.unique(dim=0).shape == q.shape
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.model(torch.arange(8)[None]).logits.isfinite().all()


def test_random_weights_are_the_same_in_every_run():
    def filled(seed):
        module = torch.nn.Linear(2000, 1500)
        fill_(module, seed)
        return module

    assert torch.equal(filled(1).weight, filled(1).weight)
    assert not torch.equal(filled(1).weight, filled(2).weight)
    assert torch.equal(filled(1).bias, torch.zeros(1500))


def test_random_weights_of_a_folder(tmp_path):
    """`target=hf target.path=FOLDER target.weights=random` reads only its config.json."""
    source = tiny(vocab_size=300, hidden_size=16).model
    source.config.save_pretrained(tmp_path)
    config = TargetConfig(name="hf", path=str(tmp_path), weights="random", device="cpu", dtype="float32")
    model = load(config, silent).model
    assert [p.shape for p in model.parameters()] == [p.shape for p in source.parameters()]


@pytest.mark.parametrize("path", TARGETS, ids=lambda path: path.stem)
def test_shipped_targets(path):
    """Every `conf/target/*.yaml` fits the schema, bears its file's name and knows its architecture."""
    options = yaml.safe_load(path.read_text())
    options.pop("defaults", None)  # Hydra's: the drafter that the target brings
    config = from_mapping(TargetConfig, options, "target")
    assert config.name == path.stem
    assert config.architecture in (*PARAMETERS, None)
    assert path.read_text().startswith("# ")


def test_unknown_architecture_lists_the_choices():
    config = TargetConfig(name="hf", weights="random", architecture="llama4", device="cpu")
    with pytest.raises(OptionError, match="llama3-8b, llama3.1-8b") as caught:
        load(config, silent)
    assert caught.value.option == "target.architecture"


def test_random_weights_refuse_a_device_map():
    config = TargetConfig(name="x", weights="random", architecture="smollm2-135m", device_map="auto")
    for refused in (config, TargetConfig(name="tiny", source="tiny", device_map="auto")):
        with pytest.raises(OptionError, match="target.device_map"):
            load(refused, silent)
