"""The weights that come with the package: small enough, with a card, and nothing in them but tensors."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

import drafters
from drafters import shipped
from drafters.shipped import PRETRAINED
from experiments import measure
from specdec.config import Config, TargetConfig
from specdec.errors import OptionError
from specdec.model import Model

LIMITS = {"medusa": 3_000_000, "eagle": 12_000_000, "small": 25_000_000}  # bytes
FOLDERS = sorted(path for path in PRETRAINED.glob("*/*") if path.is_dir())


def test_there_are_some():
    assert {"smollm2-135m/eagle", "smollm2-135m/medusa"} <= {str(f.relative_to(PRETRAINED)) for f in FOLDERS}


def test_weights_that_are_not_shipped_are_missed_before_the_target_is_loaded(monkeypatch, tmp_path):
    """Loading a large target takes minutes."""
    embedded = TargetConfig(name="smollm2-135m", source="embedded")
    large = TargetConfig(name="llama3-8b", source="hf", path="meta-llama/Meta-Llama-3-8B-Instruct")
    given = {"eagle": {"checkpoint": "a/b"}, "medusa": {"weights": "random"}, "small": {"layers": 2}}
    monkeypatch.setattr(Model, "load", lambda *_: pytest.fail("the target was loaded"))
    for name, options in given.items():
        shipped.check(drafters.check({"name": name}), embedded)
        shipped.check(drafters.check({"name": name, **options}), large)
        missing = f"no {name} weights are shipped for target="
        for target in (large, replace(embedded, weights="random")):
            with pytest.raises(OptionError, match=missing):
                shipped.check(drafters.check({"name": name}), target)
        rule = {"name": "recursive" if name != "small" else "token"}
        config = Config(
            task=measure.Options(), target=large, drafter=drafters.check({"name": name}), verify=rule
        )
        with pytest.raises(OptionError, match=missing):
            measure.run(config, tmp_path / name)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: str(f.relative_to(PRETRAINED)))
def test_weights_and_card(folder):
    [file] = folder.glob("*.safetensors")
    assert file.stat().st_size <= LIMITS[folder.name]
    with safe_open(file, framework="pt") as tensors:
        kinds = {tensors.get_tensor(key).dtype for key in tensors.keys()}  # noqa: SIM118 - no mapping
    assert kinds <= {torch.bfloat16, torch.int32, torch.int64}
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith(f"# {folder.name} for {folder.parent.name}\n")
    for told in ("**data**", "**training**", "seed", "minutes", "| depth |", "| domain |", "curves.png"):
        assert told in card, told
    assert (folder / "curves.png").stat().st_size > 1000 and (folder / "config.json").is_file()
