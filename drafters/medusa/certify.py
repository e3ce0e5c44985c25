"""What the certificate runs: every kind of sibling, a chain and trees, a reduced vocabulary."""

from drafters.medusa.config import Config
from drafters.medusa.drafter import MedusaDrafter, random_heads
from specdec.model import Model

TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
CHAIN = [(0,), (0, 0)]


def cases(target: Model) -> dict[str, MedusaDrafter]:
    """The drafters to certify on this enumerable target, with random heads."""
    few = max(2, target.vocab_size - 2)
    shared = random_heads(Config(heads=2), target)
    own = random_heads(Config(heads=2, own_head=True, sees_root=False, draft_vocab=few), target, seed=1)
    vocab = target.vocab_size
    return {
        "tree top k": MedusaDrafter(shared, vocab, TREE),
        "tree without replacement": MedusaDrafter(shared, vocab, TREE, "without_replacement"),
        "tree with replacement": MedusaDrafter(own, vocab, TREE, "with_replacement"),
        "chain sampled, fewer tokens": MedusaDrafter(own, vocab, CHAIN, "without_replacement"),
    }
