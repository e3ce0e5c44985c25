"""The speed model against known truths: recovered costs, a simulated decode loop, brute force, published
tables.
"""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import stored_runs
import torch
from scipy.optimize import nnls
from scipy.stats import spearmanr

from drafters import budget
from drafters.eagle.config import Config as EagleConfig
from experiments import speed_model
from experiments.report import stored
from specdec.config import Config
from specdec.speed_model import (
    CAUSES,
    Acceptance,
    Cost,
    SpeedModel,
    Steps,
    Workload,
    best_tree,
    block_efficiency_iid,
    expected_accepted,
    explain,
    fit_draft,
    fit_overhead,
    fit_target,
    textbook_speedup,
)

MS = 1e-3


def synthetic(target, widths, seed, draft=lambda n, s: 0.2 * MS + 1.5 * MS * n, noise=0.03, interrupted=0.1):
    """Steps of known cost: 3 % noise, and every tenth step interrupted for up to five times its length."""
    rng = np.random.default_rng(seed)
    nodes = np.repeat(np.array(widths) - 1, 60)
    batch = rng.choice([1, 4], len(nodes), p=[0.7, 0.3]).astype(float)
    context = rng.integers(50, 2000, len(nodes)).astype(float)

    def measured(seconds):
        late = np.where(rng.random(len(nodes)) < interrupted, 1 + 4 * rng.random(len(nodes)), 1.0)
        return seconds * np.exp(noise * rng.standard_normal(len(nodes))) * late

    rows = np.stack(
        [
            batch,
            nodes,
            context,
            measured(draft(nodes, context)),
            measured(target(batch, nodes + 1, context)),
            measured(0.5 * MS + 0.1 * MS * batch * (nodes + 1)),
            measured(np.full(len(nodes), 0.1 * MS)),
        ],
        1,
    )
    return Steps.from_rows(rows)


# ---------------------------------------------------------------- costs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "truth",
    [
        lambda b, t, s: 30 * MS + 4 * MS * (b * t > 1) + 0.25 * MS * b * t + 2e-6 * b * s,  # concave: a CPU
        lambda b, t, s: (
            np.maximum(10 * MS, 0.2 * MS * b * t) + 1e-6 * b * s
        ),  # a roofline with its ridge at 50
        lambda b, t, s: 20 * MS + 1e-6 * b * s + 2e-7 * b * t * s,  # attention computes
    ],
    ids=["step", "roofline", "attention"],
)
def test_a_known_cost_is_recovered_in_spite_of_interruptions(truth, seed):
    """Widths 3 and 12 were never measured; 3 % noise on 540 steps leaves a median well below 2 % off."""
    steps = synthetic(truth, [1, 2, 5, 9, 17, 33, 49, 65, 97], seed)
    cost = fit_target(steps)
    for batch, width, context in itertools.product([1, 4], [1, 3, 5, 12, 17, 80], [100, 1000]):
        predicted = cost(batch=batch, nodes=width - 1, context=context)
        assert predicted == pytest.approx(truth(batch, width, context), rel=0.05)


def test_least_squares_would_fail_that_test():
    """The mutant: without the robust loss the interruptions (mean +20 %) drag the fit up."""
    truth = lambda b, t, s: 30 * MS + 4 * MS * (b * t > 1) + 0.25 * MS * b * t + 2e-6 * b * s  # noqa: E731
    steps = synthetic(truth, [1, 2, 5, 9, 17, 33], 0)
    tokens = steps.batch * (steps.nodes + 1)
    x = np.stack([np.ones(len(steps)), tokens > 1, tokens, steps.batch * steps.context], 1)
    plain = nnls(x, steps.target)[0] @ [1, 1, 9, 500]
    assert abs(plain / truth(1, 9, 500) - 1) > 0.1
    assert fit_target(steps)(nodes=8, context=500) == pytest.approx(truth(1, 9, 500), rel=0.03)


def test_the_measured_widths_of_the_embedded_target():
    """33, 38, 42, 45 ms at 1, 5, 16, 32 tokens: a roofline cannot (it is convex), the step to wide
    kernels can.
    """
    measured = {1: 33.0, 5: 38.0, 16: 42.0, 32: 45.0}
    rows = [(1, w - 1, 100, 1e-4, ms * MS, 1e-4, 1e-4) for w, ms in measured.items() for _ in range(20)]
    cost = fit_target(Steps.from_rows(rows))
    assert [float(cost(nodes=w - 1, context=100)) for w in measured] == pytest.approx(
        [ms * MS for ms in measured.values()], rel=0.03
    )
    assert cost.coefficients["wide"] > 2 * MS and cost.hinge == 0


@pytest.mark.parametrize("seed", range(20))
def test_costs_never_fall(seed):
    """Whatever was measured, here pure noise: more tokens, rows or context never cost less."""
    rng = np.random.default_rng(seed)
    rows = [
        (rng.integers(1, 5), rng.integers(0, 9), rng.integers(10, 900), *rng.random(4)) for _ in range(80)
    ]
    model = SpeedModel.fit(Steps.from_rows(rows))
    grid = np.arange(0, 40)
    for cost in (model.target, model.draft, model.overhead):
        assert (np.diff(cost(nodes=grid, context=50)) >= 0).all()
        assert (np.diff(cost(batch=grid + 1)) >= 0).all()
        assert (np.diff(cost(nodes=3, context=100 * grid)) >= 0).all()
        assert (cost(nodes=grid) >= 0).all()


def test_one_width_only_says_nothing_about_others():
    rows = [(1, 0, 100, 1e-6, 0.03, 1e-4, 1e-4)] * 20
    cost = fit_target(Steps.from_rows(rows, drafting=False))
    assert set(cost.coefficients) == {"weights"} and cost(nodes=7) == pytest.approx(0.03)


def test_draft_costs_of_a_sequential_drafter_a_lookup_and_a_tree():
    constant = lambda b, t, s: 0.01 + 0 * t  # noqa: E731
    passes = fit_draft(synthetic(constant, [2, 5, 9], 0))
    assert passes(nodes=6) == pytest.approx(0.2 * MS + 9 * MS, rel=0.03)
    lookup = fit_draft(synthetic(constant, [1, 5, 9], 0, draft=lambda n, s: 0.1 * MS + 0 * n))
    assert lookup(nodes=12) == pytest.approx(0.1 * MS, rel=0.05)
    rng = np.random.default_rng(0)
    nodes, depth = rng.choice([8, 16, 32, 64], 400), rng.choice([2, 4, 6], 400)
    rows = [
        (1, n, 100, (2.0 * d + 0.05 * n) * MS, 0.02, 1e-4, 1e-4) for n, d in zip(nodes, depth, strict=True)
    ]
    tree = fit_draft(Steps.from_rows(rows, depth))
    assert tree(nodes=48, depth=5) == pytest.approx(12.4 * MS, rel=0.02)


def test_overhead_tells_the_baseline_from_drafting():
    plain = Steps.from_rows([(1, 0, 100, 1e-6, 0.02, 1.0 * MS, 0.1 * MS)] * 30, drafting=False)
    wide = [(1, n, 100, 1e-3, 0.02, (1.4 + 0.1 * n) * MS, 0.1 * MS) for n in (2, 4, 8) for _ in range(20)]
    cost = fit_overhead(Steps.concatenate([plain, Steps.from_rows(wide)]))
    assert cost(drafting=0) == pytest.approx(1.1 * MS, rel=0.02)
    assert cost(nodes=6, drafting=1) == pytest.approx(2.1 * MS, rel=0.02)


# ---------------------------------------------------------------- acceptance


def test_textbook_formulas():
    """Leviathan et al.: τ as a sum of powers; α = 0.8, γ = 4 gives 3.3616; at c = 0.1 that is 2.40 ×."""
    assert (
        block_efficiency_iid(0.8, 4) == pytest.approx(3.3616) == pytest.approx(sum(0.8**i for i in range(5)))
    )
    assert block_efficiency_iid(1.0, 4) == 5 and block_efficiency_iid(0.0, 4) == 1
    assert textbook_speedup(0.8, 4, 0.1) == pytest.approx(3.3616 / 1.4)


def test_counted_acceptance_by_hand():
    """Four steps: γ = 3, 3, 3 and no draft; accepted 3, 1, 0, 0; the last emits nothing beyond (a stop)."""
    a = Acceptance.counted([3, 3, 3, 0], [3, 1, 0, 0], [4, 2, 1, 0], [3, 3, 3, 0])
    assert a.offered == pytest.approx([0.75, 0.75, 0.75])
    assert a.tried == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert a.accepted == pytest.approx([2 / 4, 1 / 4, 1 / 4])
    assert a.conditional == pytest.approx([2 / 3, 1 / 2, 1])
    assert a.rate == pytest.approx(4 / 6)
    assert a.block_efficiency == pytest.approx(7 / 4)
    assert a.at(1).block_efficiency == pytest.approx(0.75 + 2 / 4)
    longer = a.at(5)  # the deeper half is depths 2 and 3: 2 of 3 tried are accepted
    assert longer.accepted == pytest.approx([1 / 2, 1 / 4, 1 / 4, 1 / 6, 1 / 9])
    lengths, share = a.drafts()
    assert dict(zip(lengths.tolist(), share.tolist(), strict=True)) == pytest.approx(
        {0: 0.25, 1: 0, 2: 0, 3: 0.75}
    )


def test_pooling_takes_each_depth_from_the_runs_that_drafted_it():
    short = Acceptance.counted([1, 1], [1, 1])
    long = Acceptance.counted([2, 2, 2, 2], [2, 0, 0, 0])
    both = Acceptance.pool([short, long])
    assert both.accepted == pytest.approx([3 / 6, 1 / 4]) and both.steps == 6
    assert Acceptance.pool([long]).accepted == pytest.approx(long.accepted)


def test_no_drafts_at_all():
    nothing = Acceptance.counted([0, 0], [0, 0], [1, 1], [0, 0])
    assert nothing.block_efficiency == 1 and nothing.at(4).gamma == 0 and nothing.rate == 0
    assert Acceptance.counted([], []).block_efficiency == 1


# ---------------------------------------------------------------- prediction

CPU = SpeedModel(
    Cost({"weights": 30 * MS, "wide": 4 * MS, "token": 0.25 * MS, "cache": 2e-6}),
    Cost({"call": 0.2 * MS, "pass": 3 * MS}),
    Cost({"weights": 1 * MS, "call": 0.3 * MS, "token": 0.05 * MS}),
)
FALLING = [0.85, 0.75, 0.6, 0.5, 0.35, 0.3, 0.2, 0.1]


def simulate(model, conditional, work: Workload, sequences=400, seed=0, noise=0.02):
    """The decode loop with known costs, step by step: (seconds of both methods, records of every step)."""
    rng = np.random.default_rng(seed)
    plain = speculative = 0.0
    rows, depth, accepted, emitted = [], [], [], []
    costs = (model.draft, model.target, model.overhead)
    cost = [[float(c(nodes=n, context=work.context)) for c in costs] for n in range(len(conditional) + 1)]
    for _ in range(sequences):
        plain += work.prefill
        speculative += work.prefill + work.drafter_prefill
        decodes = int(work.tokens) - 1
        plain += model.baseline(work) * np.exp(noise * rng.standard_normal(decodes)).sum()
        left = int(work.tokens) - 1
        while left:
            n = min(len(conditional), left - 1)
            taken = next((i for i in range(n) if rng.random() >= conditional[i]), n)
            draft, target, rest = cost[n] * np.exp(noise * rng.standard_normal(3))
            speculative += draft + target + rest
            rows.append((1, n, work.context, draft, target, rest / 2, rest / 2))
            depth.append(n), accepted.append(taken), emitted.append(taken + 1)
            left -= taken + 1
    return plain, speculative, (rows, depth, accepted, emitted)


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_the_prediction_is_what_a_simulated_loop_measures(gamma):
    """400 sequences: the simulated speedup's standard error is below 0.5 %; the end of the room adds 1 %."""
    work = Workload(tokens=129, context=300, prefill=0.2, drafter_prefill=0.02)
    plain, speculative, _ = simulate(CPU, FALLING[:gamma], work)
    predicted = CPU.predict(Acceptance.given(FALLING[:gamma]), work)
    assert predicted.speedup == pytest.approx(plain / speculative, rel=0.02)
    assert predicted.decode_speedup != pytest.approx(predicted.speedup, rel=0.005)


def test_held_out_draft_lengths_are_predicted_from_measured_runs():
    """Everything estimated: costs from the runs at γ = 1, 4, 8, acceptance from their counts; γ = 2 and 6
    held out.
    """
    work = Workload(tokens=129, context=300, prefill=0.2, drafter_prefill=0.02)
    steps, acceptance, truth = [], [], {}
    for gamma in (1, 2, 4, 6, 8):
        plain, speculative, (rows, depth, accepted, emitted) = simulate(
            CPU, FALLING[:gamma], work, sequences=60, seed=gamma
        )
        truth[gamma] = plain / speculative
        if gamma in (1, 4, 8):
            steps.append(Steps.from_rows(rows))
            acceptance.append(Acceptance.counted(depth, accepted, emitted, depth))
    base = CPU.target(context=300), CPU.overhead(drafting=0) / 2
    steps.append(Steps.from_rows([(1, 0, 300, 1e-9, base[0], base[1], base[1])] * 500, drafting=False))
    model = SpeedModel.fit(Steps.concatenate(steps))
    pooled = Acceptance.pool(acceptance)
    for gamma in (2, 6):
        assert model.predict(pooled.at(gamma), work).speedup == pytest.approx(truth[gamma], rel=0.04)


def test_in_the_textbooks_world_it_is_the_textbooks_formula():
    """i.i.d. acceptance, verify as cheap as decode, no overhead, no prefill."""
    model = SpeedModel(Cost({"weights": 1.0}), Cost({"pass": 0.1}), Cost())
    for alpha, gamma in itertools.product([0.3, 0.8], [1, 4, 7]):
        p = model.predict(Acceptance.given([alpha] * gamma), Workload(tokens=1000, context=1))
        assert p.speedup == pytest.approx(textbook_speedup(alpha, gamma, 0.1))


def test_the_best_gamma():
    """Among all, and it depends on more than α: front-loaded acceptance wants a shorter draft than its
    mean says.
    """
    work = Workload(tokens=10_000, context=300)
    acceptance = Acceptance.given(FALLING)
    best = CPU.best_gamma(acceptance, work, longest=8)
    assert best.speedup == max(CPU.predict(acceptance.at(g), work).speedup for g in range(9))
    iid = Acceptance.given([acceptance.rate] * 8)
    assert 0 < best.gamma < CPU.best_gamma(iid, work, longest=8).gamma
    hopeless = CPU.best_gamma(Acceptance.given([0.02] * 8), work)
    assert hopeless.gamma == 0 and hopeless.speedup <= 1


def test_the_best_gamma_falls_with_the_batch():
    """Compute-bound verification: what SPEED-Bench finds."""
    gpu = SpeedModel(Cost({"weights": 10 * MS}, hinge=0.1 * MS, knot=100), Cost({"pass": 0.3 * MS}), Cost())
    acceptance = Acceptance.given([0.8] * 16)
    best = [gpu.best_gamma(acceptance, Workload(1000, 300, batch=b), 16).gamma for b in (1, 8, 32, 128)]
    assert best == sorted(best, reverse=True) and best[0] > best[-1]


# ---------------------------------------------------------------- trees


def test_the_best_tree_is_the_best_of_all_trees():
    """Brute force over every tree whose siblings come in order of rank (3 depths, 2 ranks, N ≤ 6)."""
    rng = np.random.default_rng(1)
    paths = [p for d in (1, 2, 3) for p in itertools.product(range(2), repeat=d)]
    for _ in range(5):
        ranks = -np.sort(-rng.dirichlet([1, 1, 1], 3)[:, :2], axis=1)
        for size in range(1, 7):
            value = {p: math.prod(ranks[d][r] for d, r in enumerate(p)) for p in paths}
            legal = (
                set(c)
                for c in itertools.combinations(paths, size)
                if all((len(p) == 1 or p[:-1] in c) and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in c) for p in c)
            )
            best = max(sum(value[p] for p in tree) for tree in legal)
            parents, depth, reached = best_tree(ranks.tolist(), size)
            assert expected_accepted(parents, ranks.tolist()) == pytest.approx(best)
            assert sum(reached) == pytest.approx(best) and len(parents) == len(depth) == size


def test_the_node_budget_is_where_verification_starts_to_cost():
    """On a roofline nodes are free up to the ridge; the best budget reaches it and goes little beyond."""
    gpu = SpeedModel(Cost({"weights": 10 * MS}, hinge=1 * MS, knot=20), Cost({"call": 1 * MS}), Cost())
    ranks = [[0.6, 0.15, 0.06, 0.03, 0.02]] * 6
    prediction, parents = gpu.best_budget(ranks, Workload(1000, 100))
    assert len(parents) == 19
    assert prediction.block_efficiency == pytest.approx(1 + expected_accepted(parents, ranks))


def test_the_best_budget_of_measured_trees():
    """Nodes are free up to 19, then 1 ms each; τ between budgets is interpolated over log(nodes)."""
    gpu = SpeedModel(Cost({"weights": 10 * MS}, hinge=1 * MS, knot=20), Cost({"call": 1 * MS}), Cost())
    found = gpu.over_budgets({4: 1.5, 16: 2.0, 64: 2.3}, 4, Workload(10**9, 100))
    assert sorted(found) == list(range(4, 65))
    assert found[16].decode_speedup == pytest.approx(2.0 * 10 / 11)
    assert found[8].block_efficiency == pytest.approx(1.75)  # half way between 4 and 16
    assert found[64].decode_speedup == pytest.approx(2.3 * 10 / (11 + 45))
    assert max(found, key=lambda n: found[n].speedup) == 19


def write_budget(directory, nodes: int, accepted: list[int], **config) -> None:
    """A run of trees of `nodes` nodes, of whose steps each accepts so many; a node costs 0.02 of a step."""
    records = []
    for unit in range(6):
        for method, n in (("autoregressive", 0), ("speculative", nodes)):
            counts = accepted if n else [0] * 8
            steps = {
                "nodes": [n] * 8,
                "depth": [min(n, 2)] * 8,
                "accepted": counts,
                "emitted": [c + 1 for c in counts],
                "discarded": [0] * 8,
                "bonus": [0] * 8,
            }
            seconds = [[1, n, 10, 0.1 * bool(n), 1 + 0.02 * n, 0.0, 0.0] for _ in range(8)]
            own = {"drafts": [[[1] * n, [-1] + [0] * (n - 1), [0]]] * 8} if n else {}
            own["tokens"] = [1] * (1 + sum(steps["emitted"]))
            own["unit_seconds"] = sum(map(sum, (s[3:] for s in seconds)))
            records.append(stored_runs.record(method, unit, steps=steps, step_seconds=seconds, **own))
    stored_runs.write_run(
        directory,
        records=records,
        config={"drafter": vars(EagleConfig(nodes=nodes)), **config},
        meta={"max_nodes": nodes + 8},  # with room for a copied branch: not the budget
    )


def test_the_task_finds_and_remembers_the_best_budget(tmp_path, monkeypatch):
    """Two measured budgets, 3 nodes at τ = 2 and 12 at τ = 2.5, where a drafted node costs 0.02 of a step.

    The prediction is τ(n) / (1.1 + 0.02 n) with τ(n) = 2 + ln(n/3) / ln 16: best at 10 nodes, 1.872.
    """
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    for nodes, accepted in ((3, [1] * 8), (12, [2, 1] * 4)):
        write_budget(tmp_path / f"run-{nodes}", nodes, accepted)
    runs = stored.find([str(tmp_path / "run-*")])
    [group] = speed_model.analyse(runs, 4)["groups"]
    decode = {n: p["decode_speedup"] for n, p in group["budgets"].items()}
    assert decode[3] == pytest.approx(2 / 1.16, rel=0.02) and decode[12] == pytest.approx(
        2.5 / 1.34, rel=0.02
    )
    assert (
        group["best_nodes"]
        == max(range(3, 13), key=lambda n: (2 + math.log(n / 3, 16)) / (1.1 + 0.02 * n))
        == 10
    )
    speed_model.run(Config(task=speed_model.Options(runs=[str(tmp_path / "run-*")])), tmp_path / "out")
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    toy = {"name": "toy", "dtype": "float32"}  # as `stored_runs` tells

    def nodes(device=cpu, provenance=toy, **options):
        return budget.nodes(EagleConfig(**options), SimpleNamespace(provenance=provenance, device=device))

    assert nodes() == 10 and nodes(nodes=5) == 5
    for matrix_unit, number in ((True, 15), (False, 9)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has=matrix_unit: has)
        for other in ({"name": "other"}, {"source": "a/b"}, {"dtype": "bfloat16"}, {"device": "cuda"}):
            assert nodes(provenance=toy | other) == number
        assert nodes(mode="static") == nodes(checkpoint="a/b") == number
        assert nodes(cuda, {"name": "other"}) == 15


@pytest.mark.parametrize("batch", [1, 2])
def test_a_budget_is_remembered_for_one_sequence_and_one_law(tmp_path, monkeypatch, batch):
    """Not from batches of two, and not where two sweeps recommend something for the same options."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    for temperature in (0.0, 1.0):
        config = {
            "engine": {"max_new_tokens": 6, "batch_size": batch},
            "sampling": {"temperature": temperature},
        }
        for nodes, accepted in ((3, [1] * 8), (12, [2, 1] * 4)):
            write_budget(tmp_path / f"run-{temperature}-{nodes}", nodes, accepted, **config)
    for pattern, kept in (("run-*", [False, False]), ("run-0.0-*", [batch == 1])):
        groups = speed_model.analyse(stored.find([str(tmp_path / pattern)]), 4)["groups"]
        assert all(g["budgets"] for g in groups)
        assert [g["kept_in"] is not None for g in groups] == kept


# ---------------------------------------------------------------- explanation


def world(wide=0.0, overhead=0.0):
    return SpeedModel(Cost({"weights": 1.0, "wide": wide}), Cost({"pass": 0.1}), Cost({"weights": overhead}))


@pytest.mark.parametrize(
    ("cause", "model", "conditional", "work"),
    [
        ("acceptance", world(), [0.9, 0.5, 0.2, 0.1], Workload(1000, 1)),
        ("verify width", world(wide=0.3), [0.7] * 4, Workload(1000, 1)),
        ("overhead", world(overhead=0.2), [0.7] * 4, Workload(1000, 1)),
        ("prefill", world(), [0.7] * 4, Workload(1000, 1, prefill=500.0)),
    ],
)
def test_each_cause_is_told_alone(cause, model, conditional, work):
    """A world that leaves the textbook in one respect has one factor that is not 1."""
    acceptance = Acceptance.given(conditional)
    e = explain(model, acceptance, work, measured=model.predict(acceptance, work).speedup)
    assert abs(e.factors.pop(cause) - 1) > 0.02
    assert list(e.factors.values()) == pytest.approx([1.0] * len(e.factors))


def test_the_factors_multiply_to_the_measured_speedup():
    acceptance, work = Acceptance.given(FALLING), Workload(100, 300, prefill=0.3, drafter_prefill=0.05)
    forecast = CPU.predict(Acceptance.given([0.7] * 8), work)
    for expected in (None, forecast):
        e = explain(CPU, acceptance, work, measured=1.234, forecast=expected)
        assert e.textbook * math.prod(e.factors.values()) == pytest.approx(1.234)
        assert set(e.factors) <= set(CAUSES)
        known = math.prod(v for k, v in e.factors.items() if k not in ("timing", "prediction"))
        assert e.textbook * known == pytest.approx(e.predicted)


# ---------------------------------------------------------------- why rankings flip between GPUs

# The worked example of docs/speed_model.md.

# method: (tokens in the verify forward, sequential draft passes); Spec-Bench's settings
SHAPES = {
    "EAGLE-2": (60, 6),
    "EAGLE": (26, 5),
    "Hydra": (64, 4),
    "Medusa": (64, 0),
    "prompt lookup": (11, 0),
    "small 68M": (6, 5),
    "Lookahead": (57, 0),
}
# (speedup, mean accepted tokens with the bonus), Spec-Bench, Vicuna-7B, greedy, fp16
A100 = {
    "EAGLE-2": (2.36, 4.34),
    "EAGLE": (2.10, 3.58),
    "Hydra": (2.07, 3.26),
    "Medusa": (1.71, 2.31),
    "prompt lookup": (1.66, 1.75),
    "small 68M": (1.52, 2.28),
    "Lookahead": (1.34, 1.64),
}
RTX3090 = {
    "EAGLE-2": (2.25, 4.36),
    "EAGLE": (2.16, 3.57),
    "Hydra": (1.80, 3.26),
    "Medusa": (1.44, 2.32),
    "prompt lookup": (1.55, 1.74),
    "small 68M": (1.83, 2.29),
    "Lookahead": (1.08, 1.65),
}


def fitted(published):
    """Two numbers per GPU: what a token of width and what a draft pass cost, in decode steps."""
    step = {m: tau / speedup for m, (speedup, tau) in published.items()}  # seconds of a step per decode step
    shape = np.array([[SHAPES[m][0] - 1, SHAPES[m][1]] for m in step], dtype=float)
    token, passes = nnls(shape, np.array(list(step.values())) - 1)[0]
    return SpeedModel(Cost({"weights": 1 - token, "token": token}), Cost({"pass": passes}), Cost())


def predicted(model, tau):
    """Speedups of all methods from their block efficiency alone."""
    speedups = {}
    for method, (width, passes) in SHAPES.items():
        acceptance = Acceptance.given([tau[method] - 1])
        speedups[method] = model.predict(
            acceptance, Workload(1e9, 0), ([width - 1], [passes], [1.0])
        ).decode_speedup
    return speedups


def test_rankings_flip_between_gpus_because_width_and_passes_cost_differently():
    tau = {m: A100[m][1] for m in A100}  # the same acceptance on both: what differs is only the GPU
    assert all(RTX3090[m][1] == pytest.approx(tau[m], rel=0.01) for m in tau)
    a100, rtx3090 = fitted(A100), fitted(RTX3090)
    assert rtx3090.target.coefficients["token"] > 1.5 * a100.target.coefficients["token"]  # width costs more
    assert (
        rtx3090.draft.coefficients["pass"] < 0.8 * a100.draft.coefficients["pass"]
    )  # sequential passes less
    for model, published in ((a100, A100), (rtx3090, RTX3090)):
        told = predicted(model, tau)
        error = [abs(told[m] / published[m][0] - 1) for m in told]
        assert np.median(error) < 0.06 and max(error) < 0.15
        assert spearmanr(list(told.values()), [published[m][0] for m in told]).statistic > 0.9
    for wide in ("Medusa", "Hydra"):  # both lose to the small drafter when the GPU changes
        assert A100[wide][0] > A100["small 68M"][0] and RTX3090[wide][0] < RTX3090["small 68M"][0] + 0.01
        assert predicted(a100, tau)[wide] > predicted(a100, tau)["small 68M"]
    assert predicted(rtx3090, tau)["Medusa"] < predicted(rtx3090, tau)["small 68M"]


def test_one_gpu_for_both_would_not_explain_it():
    """The mutant: the A100's costs with the 3090's acceptance keep the A100's order."""
    told = predicted(fitted(A100), {m: tau for m, (_, tau) in RTX3090.items()})
    assert told["Medusa"] > told["small 68M"]
