"""The baseline: an empty draft."""

from drafters.none.config import Config
from specdec.drafter import NoDrafter
from specdec.model import Model


def build(config: Config, target: Model) -> NoDrafter:
    return NoDrafter()
