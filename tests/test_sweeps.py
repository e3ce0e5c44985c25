"""Sweeps: a fresh process per run and one table at the end; rules on identical drafts against the bound."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import stored_runs
import torch
from stored_runs import write_run

from experiments import compare_rules, sweep
from experiments.report import stored
from experiments.root_law import distance, threshold_bound, transport_bound_at_root
from specdec import verify
from specdec.exactness.transport import iid_transport_bound
from specdec.proposal import Kind, Proposal
from specdec.rng import PhiloxSource
from specdec.tree import Tree
from specdec.verify import Rule, Verdict

ROOT = Path(__file__).parent.parent


def laws(count: int, vocab: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(count, vocab, generator=generator, dtype=torch.float64)).softmax(-1)


# ---------------------------------------------------------------- tables


def test_one_row_per_run_and_domain(tmp_path):
    for gamma in (2, 4):
        write_run(tmp_path / "runs" / str(gamma), config={"drafter": {"name": "ngram", "gamma": gamma}})
    table = sweep.rows(stored.find(str(tmp_path / "runs")), domains=True)
    assert [(r["drafter.gamma"], r["domain"]) for r in table] == [
        (2, "all"), (2, "chat"), (2, "maths"), (4, "all"), (4, "chat"), (4, "maths"),
    ]  # fmt: skip
    paths = sweep.write(table, tmp_path / "runs")
    with open(paths[0], newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert len(read) == 6 and float(read[0]["acceptance_rate"]) == 0.75
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(paths[1])
    assert frame["drafter.gamma"].tolist() == [2, 2, 2, 4, 4, 4]
    assert frame["block_efficiency"].tolist() == [2.0] * 6


def test_the_total_is_not_lost_to_a_domain_of_its_name(tmp_path):
    records = [
        stored_runs.record(m, u, domain="all" if u else "chat")
        for u in range(3)
        for m in ("autoregressive", "speculative")
    ]
    runs = stored.find(str(write_run(tmp_path / "a", records=records)))
    assert [(r["domain"], r["prompts"]) for r in sweep.rows(runs, domains=True)] == [("all", 3), ("chat", 1)]


def test_columns_of_mixed_types_are_written(tmp_path):
    pytest.importorskip("pyarrow")
    rows = [{"tree": [3, 2], "x": 1}, {"tree": "none", "x": 2.5}, {"tree": None, "x": None}]
    assert [p.suffix for p in sweep.write(rows, tmp_path / "t")] == [".csv", ".parquet"]


@pytest.mark.slow
def test_a_sweep_runs_each_job_in_its_own_process_and_ends_with_a_report(tmp_path):
    """One of the three jobs is refused: the others run, the status says so, the table has the other two."""
    command = [
        sys.executable,
        str(ROOT / "run.py"),
        "-m",
        "drafter.gamma=1,0,2",
        "target=tiny",
        "prompts.limit=3",
    ]
    command += ["engine.max_new_tokens=8", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=500)
    assert ended.returncode == 2 and "drafter.gamma=0: must be ≥ 1" in ended.stderr
    assert [r.label for r in stored.find(str(tmp_path / "sweep"))] == ["γ=1", "γ=2"]
    for name in ("report.html", "report.md", "runs.csv"):
        assert (tmp_path / "sweep" / name).stat().st_size > 0


# ---------------------------------------------------------------- the bound


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_the_threshold_bound_is_the_minimum_over_all_subsets(drafts):
    for seed in range(20):
        p, q = laws(2, 6, seed)
        if seed % 3 == 0:
            q = torch.where(q < q.median(), 0.0, q)
            q = q / q.sum()
        assert threshold_bound(p, q, drafts) == pytest.approx(
            iid_transport_bound(p.tolist(), q.tolist(), drafts)
        )
    assert threshold_bound(p, q, 1) == pytest.approx(float(torch.minimum(p, q).sum()))


def test_bounds_at_the_root():
    p = laws(3, 5)[None]  # [1, 3, 5]
    q = laws(2, 5, seed=1)[None]
    tokens = torch.tensor([[1, 3]])
    fork = Tree(torch.tensor([-1, -1]))
    chain = transport_bound_at_root(Proposal.chain(tokens, q), p)
    assert chain == pytest.approx([float(torch.minimum(p[0, 0], q[0, 0]).sum())])
    assert transport_bound_at_root(Proposal(tokens, fork), p) == pytest.approx([float(p[0, 0, [1, 3]].sum())])
    shared = q[:, :1].expand(1, 2, 5)
    expected = iid_transport_bound(p[0, 0].tolist(), q[0, 0].tolist(), 2)
    assert transport_bound_at_root(Proposal(tokens, fork, Kind.WITH_REPLACEMENT, shared), p) == pytest.approx(
        [expected]
    )
    assert transport_bound_at_root(Proposal(tokens, fork, Kind.WITHOUT_REPLACEMENT, shared), p) == [None]


# ---------------------------------------------------------------- distance of a rule from the target


class Gullible(Rule):
    """The mutant: accepts whatever was drafted."""

    name, paper, exact, trees, kinds = "gullible", "", True, True, frozenset(Kind)

    def __call__(self, proposal, p, draws):
        node = torch.full((len(p),), proposal.size - 1)
        return Verdict.at(proposal.tree, node, draws.categorical(p[:, -1], 3))


@pytest.mark.parametrize("name", ["token", "block", "recursive", "traversal", "kseq"])
def test_exact_rules_are_at_distance_0(name):
    p, q = laws(2, 7)[None], laws(1, 7, seed=1)[None]
    drafted = Proposal.chain(torch.tensor([[2]]), q)
    assert distance(verify.build({"name": name}), drafted, p) == pytest.approx([0.0], abs=1e-12)


def test_a_rule_that_draws_first_and_decides_by_it_is_not_told():
    drafted = Proposal.chain(torch.tensor([[2]]), laws(1, 7, seed=1)[None])
    assert distance(verify.build({"name": "naive"}), drafted, laws(2, 7)[None]) == []


def test_a_lossy_rule_is_at_its_distance():
    """Who accepts everything emits q, so is at TV(p, q); of a deterministic draft x, at 1 − p(x)."""
    p, q = laws(2, 7)[None], laws(1, 7, seed=1)[None]
    drafted = Proposal.chain(torch.tensor([[2]]), q)
    apart = 0.5 * float((p[0, 0] - q[0, 0]).abs().sum())
    assert distance(Gullible(), drafted, p) == pytest.approx([apart]) and apart > 0.1
    certain = Proposal.chain(torch.tensor([[2]]))
    assert distance(Gullible(), certain, p) == pytest.approx([1 - float(p[0, 0, 2])])


def test_typical_acceptance_by_hand():
    """p = (.6, .4): min(ε, δ e^{−H}) accepts both, so a token 0 that is drafted for certain is kept."""
    p = torch.tensor([[[0.6, 0.4], [0.5, 0.5]]], dtype=torch.float64)
    typical = verify.build({"name": "typical"})
    assert distance(typical, Proposal.chain(torch.tensor([[0]])), p) == pytest.approx([0.4])


def test_undecided_siblings_weigh_one_in_all():
    """Two deterministic siblings and an exact rule that may stop at the first: still the target's law."""
    p = laws(3, 6)[None]
    fork = Proposal(torch.tensor([[1, 4]]), Tree(torch.tensor([-1, -1])))
    for rule in ("recursive", "traversal"):
        found = distance(verify.build({"name": rule}), fork, p)
        assert found == pytest.approx([0.0] * len(found), abs=1e-12)
    assert len(found) == 1


# ---------------------------------------------------------------- the witness


def test_all_rules_see_the_same_drafts_and_random_numbers():
    base, other = verify.build({"name": "token"}), verify.build({"name": "recursive"})
    witness = compare_rules.Witness(base, [other])
    p, q = laws(4, 6)[None].expand(50, 4, 6), laws(3, 6, seed=1)[None].expand(50, 3, 6)
    tokens = torch.randint(6, (50, 3), generator=torch.Generator().manual_seed(0))
    drafted = Proposal.chain(tokens, q)
    draws = PhiloxSource(0).at(torch.arange(50), torch.zeros(50, dtype=torch.int64))
    verdict = witness(drafted, p, draws)
    alone = PhiloxSource(0).at(torch.arange(50), torch.zeros(50, dtype=torch.int64))
    assert torch.equal(verdict.accepted, base(drafted, p, alone).accepted)
    assert (
        witness.answers["recursive"].accepted == witness.answers["token"].accepted
    )  # the same rule on chains
    assert len(witness.bound) == 50


def test_summary_of_a_comparison():
    def answers(accepted):
        return {"accepted": accepted, "expected": [], "distance": []}

    records = [
        {"rules": {"token": answers([1, 0]), "block": answers([2, 1])}, "bound": [0.5, 0.7]},
        {"rules": {"token": answers([3]), "block": answers([3])}, "bound": [0.9]},
    ]
    found = compare_rules.summarise(records, lossy=[])
    assert found["rules"]["token"]["mean_accepted"]["value"] == 4 / 3
    assert found["rules"]["block"]["relative"]["value"] == 6 / 4
    assert found["rules"]["token"]["first_position"]["value"] == 2 / 3
    assert found["transport_bound"]["value"] == pytest.approx(0.7)
