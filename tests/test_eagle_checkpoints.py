"""EAGLE's own checkpoints, and those that do not fit."""

import json

import pytest
import torch
from eagle_reference import LAYER, eagle_1, eagle_3, write
from test_eagle import INNER, SIZE, TARGETS, VOCAB
from test_model import build as build_hf

import drafters
from drafters.eagle.checkpoint import random_model, save_pretrained
from drafters.eagle.model import new_architecture
from specdec.errors import OptionError
from specdec.model import Model


@pytest.fixture(scope="module")
def target():
    return Model(build_hf(TARGETS["llama"]), name="llama")


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
