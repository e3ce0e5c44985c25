"""What the certificate runs: chains and trees, drawn in every way, from models unlike the target."""

from drafters.small.chain import SmallDrafter
from drafters.small.load import first_layers
from drafters.small.tree import SIBLINGS, SmallTreeDrafter
from specdec.config import TargetConfig
from specdec.model import Model

TREE = (2, 1)


def cases(target: Model) -> dict[str, SmallDrafter]:
    """The drafters to certify on this enumerable target."""
    other, vocab, eos = stranger(target), target.vocab_size, target.eos_token_ids
    chains = {
        "chain": SmallDrafter(first_layers(target, 1), vocab, 2, eos_token_ids=eos),
        "chain that stops": SmallDrafter(other, vocab, 2, confidence=0.3, eos_token_ids=eos),
    }
    trees = {
        f"tree {kind.value.replace('_', ' ')}": SmallTreeDrafter(other, vocab, TREE, siblings, eos)
        for siblings, kind in SIBLINGS.items()
    }
    return chains | trees


def stranger(target: Model, seed: int = 12) -> Model:
    """A small random model of the target's vocabulary, device and dtype, whose law is its own.

    With this seed it disagrees with the target in such a way that every known mistake shows in 30,000
    sequences.
    """
    config = TargetConfig(
        name="stranger",
        source="tiny",
        vocab_size=target.vocab_size,
        hidden_size=8,
        layers=1,
        seed=seed,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
    )
    return Model.load(config)
