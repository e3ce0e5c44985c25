"""The weights that come with the package: small enough, with a card, and nothing in them but tensors."""

import pytest
import torch
from safetensors import safe_open

from drafters.shipped import PRETRAINED

LIMITS = {"medusa": 3_000_000, "eagle": 12_000_000, "small": 25_000_000}  # bytes
FOLDERS = sorted(path for path in PRETRAINED.glob("*/*") if path.is_dir())


def test_there_are_some():
    assert {"smollm2-135m/eagle", "smollm2-135m/medusa"} <= {str(f.relative_to(PRETRAINED)) for f in FOLDERS}


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
