"""What the certificate runs: short matches, so that a short prompt has some."""

from drafters.ngram.config import Config
from drafters.ngram.drafter import NgramDrafter
from specdec.model import Model


def cases(target: Model) -> dict[str, NgramDrafter]:
    """One chain of γ = 2."""
    return {"": NgramDrafter(Config(gamma=2, max_ngram=2))}
