"""The optimal-transport bound: the best acceptance any exact rule can have, given the law of its candidates.

An exact rule is a coupling of the target's token y with the candidate set; it accepts when y is a candidate
(Sun et al., SpecTr 2310.15141).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, combinations

import numpy as np
from scipy.optimize import linprog


def transport_bound(p: Sequence[float], candidates: Mapping[tuple[int, ...], float]) -> float:
    """Maximal P(y ∈ candidates) by linear programming.

    Arguments:
        p: the target's law over V tokens.
        candidates: probability of each tuple of drafted tokens (order and repetition do not matter).
    """
    sets: dict[frozenset[int], float] = defaultdict(float)
    for tokens, weight in candidates.items():
        sets[frozenset(tokens)] += weight
    flows = [
        (i, y) for i, tokens in enumerate(sets) for y in sorted(tokens)
    ]  # mass of set i matched to token y
    if not flows:
        return 0.0
    caps = np.zeros((len(sets) + len(p), len(flows)))
    for column, (i, y) in enumerate(flows):
        caps[i, column] = caps[len(sets) + y, column] = 1.0
    solved = linprog(-np.ones(len(flows)), A_ub=caps, b_ub=[*sets.values(), *p], method="highs")
    return -float(solved.fun)


def iid_transport_bound(p: Sequence[float], q: Sequence[float], drafts: int) -> float:
    """The same for i.i.d. candidates from q: min over H ⊆ V of 1 + p(H) − q(H)^drafts (2^V subsets)."""
    tokens = range(len(p))
    subsets = chain.from_iterable(combinations(tokens, size) for size in range(len(p) + 1))
    return min(1.0 + sum(p[t] for t in h) - sum(q[t] for t in h) ** drafts for h in subsets)
