"""What the certificate runs: autoregressive decoding itself."""

from specdec.drafter import NoDrafter
from specdec.model import Model


def cases(target: Model) -> dict[str, NoDrafter]:
    """The one and only."""
    return {"": NoDrafter()}
