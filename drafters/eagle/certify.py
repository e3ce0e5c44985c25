"""What the certificate runs: both networks, every kind of tree, chains, fewer tokens, copied branches."""

from drafters.eagle.checkpoint import random_model
from drafters.eagle.config import Config
from drafters.eagle.drafter import EagleDrafter
from drafters.eagle.model import new_architecture
from specdec.model import Model

SMALL = {"depth": 2, "top_k": 2, "nodes": 3, "weights": "random"}
TREE = [[0], [1], [0, 0]]
OPTIONS = {
    "chain sampled": {"mode": "chain", "siblings": "with_replacement"},
    "static": {"mode": "static", "tree": TREE},
    "static with replacement": {"mode": "static", "tree": TREE, "siblings": "with_replacement"},
    "static without replacement": {"mode": "static", "tree": TREE, "siblings": "without_replacement"},
    "dynamic": {"ngram": False, "stop_below": 0.7},  # some drafts end after the first level
    "dynamic coupled": {"siblings": "coupled", "nodes": 4, "ngram_gamma": 2, "ngram_min": 1},
    "dynamic with copies": {"nodes": 4, "ngram_gamma": 2, "ngram_min": 1},
}


def cases(target: Model) -> dict[str, EagleDrafter]:
    """The drafters to certify on this enumerable target: EAGLE-1 and EAGLE-3 in turn, random weights."""
    fewer = max(2, target.vocab_size - 1)
    networks = [
        random_model(new_architecture(target, 1, 1, None), target),
        random_model(new_architecture(target, 3, 2, fewer), target, seed=1),
    ]
    return {
        name: EagleDrafter(networks[i % 2], Config(**SMALL | options), target)
        for i, (name, options) in enumerate(OPTIONS.items())
    }
