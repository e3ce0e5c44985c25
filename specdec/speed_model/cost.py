"""Seconds of a part of a step as a function of the step's shape, fitted robustly to measured steps.

Every cost is a sum of features with coefficients ≥ 0, so that it never falls with the width, the batch or
the context. The target's is

    t(B, T, S) = weights + wide·[BT > 1] + token·BT + hinge·max(0, BT − knot) + cache·BS + scores·BTS

`weights` is the read of all weights that one token pays as well as many; `wide` the step from matrix-vector
to matrix-matrix kernels; `token` what each further token costs below the roofline's ridge, `hinge` what it
costs more above it (max(memory, compute) is `weights` with a hinge); `cache` reads keys and values;
`scores` computes attention. A roofline alone is convex in T; measured forwards are often concave at small T
(33, 38, 42, 45 ms at 1, 5, 16, 32 tokens of a 135M model on a CPU), which is what `wide` is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scipy import optimize

from specdec.speed_model.steps import Steps

LEAST_SECONDS = 1e-9
LEAST_SHARE = 0.005  # a width seen in fewer of the steps says too little to be counted as a width
CONTEXT_SPREAD = 1.3  # contexts must differ by this factor before their cost can be told

Feature = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]

FEATURES: dict[str, Feature] = {  # of (B rows, N nodes, D depth, S context, drafting 0/1)
    "weights": lambda b, n, d, s, on: np.ones_like(b),
    "wide": lambda b, n, d, s, on: (b * (n + 1) > 1).astype(float),
    "token": lambda b, n, d, s, on: b * (n + 1),
    "cache": lambda b, n, d, s, on: b * s,
    "scores": lambda b, n, d, s, on: b * (n + 1) * s,
    "call": lambda b, n, d, s, on: on,
    "draft": lambda b, n, d, s, on: (n > 0).astype(float),
    "pass": lambda b, n, d, s, on: d,
    "node": lambda b, n, d, s, on: b * n,
    "pass_cache": lambda b, n, d, s, on: d * b * s,
    "row": lambda b, n, d, s, on: b,
}


@dataclass(frozen=True)
class Cost:
    """Seconds = Σ coefficient · feature.

    Arguments:
        coefficients: seconds per unit of each feature (see the module's docstring).
        hinge: seconds per token beyond `knot` tokens in the forward.
        noise: median absolute deviation of a single step from this cost, as a share.
    """

    coefficients: dict[str, float] = field(default_factory=dict)
    hinge: float = 0.0
    knot: float = 0.0
    noise: float = 0.0

    def __call__(self, batch=1.0, nodes=0.0, depth=None, context=0.0, drafting=1.0) -> np.ndarray:
        """Seconds; all arguments are numbers or arrays that broadcast."""
        depth = nodes if depth is None else depth
        shape = np.broadcast_arrays(
            *(np.asarray(x, dtype=np.float64) for x in (batch, nodes, depth, context, drafting))
        )
        total = np.zeros(shape[0].shape)
        for name, coefficient in self.coefficients.items():
            total = total + coefficient * FEATURES[name](*shape)
        return total + self.hinge * np.maximum(shape[0] * (shape[1] + 1) - self.knot, 0.0)


def fit_target(steps: Steps) -> Cost:
    """The target's forward. Only what the steps' widths and contexts can tell apart is fitted."""
    tokens = steps.batch * (steps.nodes + 1)
    widths = _levels(tokens)
    names = ["weights"]
    names += ["token"] if len(widths) > 1 else []
    names += ["wide"] if len(widths) > 2 and widths[0] == 1 else []
    if _spread(steps.batch * steps.context) > CONTEXT_SPREAD:
        names += ["cache", "scores"] if len(widths) > 1 else ["cache"]
    return _best_hinge(names, steps, steps.target, _knots(widths) if len(widths) > 4 else [])


def fit_draft(steps: Steps) -> Cost:
    """Drafting: a call, what any draft adds, each pass of a sequential drafter, each node, its own cache."""
    steps = steps.where(steps.drafting > 0)
    if not len(steps):
        return Cost()
    depths = _levels(steps.depth)
    positive = [d for d in depths if d > 0]
    names = ["call"] if len(depths) > 1 or not positive else []
    names += ["pass"] if positive else []
    names += ["draft"] if len(positive) > 1 and len(positive) < len(depths) else []
    names += ["node"] if _independent(steps.batch * steps.nodes, steps.depth) else []
    names += ["pass_cache"] if positive and _spread(steps.batch * steps.context) > CONTEXT_SPREAD else []
    return _robust(names, steps, steps.draft)[0]


def fit_overhead(steps: Steps) -> Cost:
    """Verification rule, commit, cache, bookkeeping; the baseline's too."""
    names = ["weights"]
    names += ["call"] if len(set(steps.drafting)) > 1 else []
    names += ["token"] if len(_levels(steps.batch * (steps.nodes + 1))) > 1 else []
    names += ["row"] if len(_levels(steps.batch)) > 1 else []
    return _robust(names, steps, steps.overhead)[0]


def _best_hinge(names: list[str], steps: Steps, seconds: np.ndarray, knots: list[float]) -> Cost:
    """With a hinge where it pays for its two parameters (Bayesian information criterion)."""
    best, _ = _robust(names, steps, seconds)
    scale = best.noise
    loss = _robust(names, steps, seconds, None, scale)[1] - np.log(max(len(steps), 2))
    for knot in knots:
        cost, other = _robust(names, steps, seconds, knot, scale)
        if other < loss:
            best, loss = cost, other
    return _robust(names, steps, seconds, best.knot)[0] if best.hinge else best


def _robust(
    names: list[str], steps: Steps, seconds: np.ndarray, knot: float | None = None, scale: float | None = None
) -> tuple[Cost, float]:
    """Coefficients ≥ 0 that minimise a Cauchy loss of log(fitted/measured): interruptions hardly count.

    Returns:
        the cost and its loss in units of `scale` (by default its own noise).
    """
    shape = (steps.batch, steps.nodes, steps.depth, steps.context, steps.drafting)
    columns = [FEATURES[name](*shape) for name in names]
    if knot is not None:
        columns.append(np.maximum(steps.batch * (steps.nodes + 1) - knot, 0.0))
    y = np.maximum(seconds, LEAST_SECONDS)
    unit = np.array([c.max() or 1.0 for c in columns])
    x = np.stack(columns, 1) / unit
    scale_given = scale
    start = np.maximum(optimize.nnls(x / y[:, None], np.ones(len(y)))[0], 1e-6 * np.median(y))
    scale = scale or max(_mad(_log_ratio(start, x, y)), 0.003)
    for _ in range(2 if scale_given is None else 1):  # once with the first noise estimate, once with its own
        found = optimize.least_squares(
            _log_ratio,
            start,
            jac=lambda beta, x, y: x / np.maximum(x @ beta, LEAST_SECONDS / 10)[:, None],
            bounds=(0, np.inf),
            loss="cauchy",
            f_scale=2 * scale,
            x_scale=np.full(x.shape[1], np.median(y)),
            args=(x, y),
            max_nfev=300,
        )
        start = np.maximum(found.x, 1e-9 * np.median(y))
        if scale_given is None:
            scale = max(_mad(_log_ratio(found.x, x, y)), 0.003)
    beta = np.where(found.x < 1e-5 * np.median(y), 0.0, found.x) / unit
    noise = _mad(_log_ratio(found.x, x, y))
    coefficients = {name: float(b) for name, b in zip(names, beta, strict=False)}
    cost = Cost(coefficients, float(beta[-1]) if knot is not None else 0.0, float(knot or 0.0), noise)
    return cost, float(np.log1p((_log_ratio(found.x, x, y) / (2 * scale)) ** 2).sum())


def _log_ratio(beta: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """log(fitted / measured) of every step."""
    return np.log(np.maximum(x @ beta, LEAST_SECONDS / 10)) - np.log(y)


def _mad(residuals: np.ndarray) -> float:
    return float(1.4826 * np.median(np.abs(residuals - np.median(residuals))))


def _levels(values: np.ndarray) -> list[float]:
    """Distinct values that occur often enough to be told apart."""
    found, count = np.unique(values, return_counts=True)
    return found[count >= max(2, LEAST_SHARE * len(values))].tolist() or found[:1].tolist()


def _knots(widths: list[float]) -> list[float]:
    """Where the slope may change: at the measured widths and half-way between them, the ends left out."""
    inner = widths[2:-1]
    return sorted({*inner, *((a + b) / 2 for a, b in zip(inner, inner[1:], strict=False))})


def _spread(values: np.ndarray) -> float:
    low, high = np.percentile(values, [2, 98]) if len(values) else (1.0, 1.0)
    return float(high / max(low, 1.0))


def _independent(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether `a` is more than a linear function of `b`."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return bool(np.ptp(a) > 0)
    return abs(np.corrcoef(a, b)[0, 1]) < 0.99
