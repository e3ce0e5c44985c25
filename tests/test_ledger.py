"""Counts by hand: what each convention makes of a few steps that were written down."""

import math

import pytest
import torch

from specdec.ledger import PHASES, Clock, Ledger, Row, position_counts


def row(depth, accepted, emitted, bonus=False, sequence=0, prefill=False, discarded=0, nodes=None) -> Row:
    return Row(sequence, nodes or depth, depth, accepted, emitted, discarded, bonus, prefill)


# Depth 3: all accepted + bonus; rejected at once; two accepted, third rejected. Depth 1: accepted + bonus.
# No draft: a plain step. Cut by an EOS, the first drafted token: depth counts as 1, nothing behind it.
STEPS = [
    row(0, 0, 1, prefill=True),
    row(3, 3, 4, bonus=True),
    row(3, 0, 1),
    row(3, 2, 3),
    row(1, 1, 2, bonus=True),
    row(0, 0, 1, bonus=True),
    row(1, 1, 1, discarded=3, nodes=4),
]


def test_conventions_by_hand():
    ledger = Ledger(rows=STEPS)
    offered, tried, accepted = ledger.position_counts()
    assert offered.tolist() == [5, 3, 3]  # drafts at least that deep
    assert tried.tolist() == [5, 2, 2]  # of these, all before accepted: both of the first two, and so on
    assert accepted.tolist() == [4, 2, 1]
    assert ledger.acceptance_rate == pytest.approx(7 / 9)
    assert ledger.emitted == 13 and len(ledger.decode_rows) == 6
    assert ledger.block_efficiency == pytest.approx(12 / 6)  # the prefill's token is none of a decode step
    assert ledger.mean_accepted == pytest.approx(7 / 6)


def test_position_counts_of_nothing():
    for depth in ([], [0, 0]):
        assert [x.tolist() for x in position_counts(depth, depth)] == [[], [], []]
    empty = Ledger()
    assert math.isnan(empty.acceptance_rate) and math.isnan(empty.block_efficiency)
    assert math.isnan(Ledger(rows=[row(0, 0, 1)]).acceptance_rate)


def test_position_counts_against_a_loop():
    g = torch.Generator().manual_seed(0)
    depth = torch.randint(0, 6, (200,), generator=g).tolist()
    taken = [int(torch.randint(0, d + 1, (1,), generator=g)) for d in depth]
    offered, tried, accepted = position_counts(depth, taken)
    for level in range(1, 6):
        steps = [(d, a) for d, a in zip(depth, taken, strict=True) if d >= level]
        assert offered[level - 1] == len(steps)
        assert tried[level - 1] == sum(a >= level - 1 for _, a in steps)
        assert accepted[level - 1] == sum(a >= level for _, a in steps)


def test_merging_adds_counts_and_times():
    a, b = Ledger(rows=STEPS[:2]), Ledger(rows=STEPS[2:])
    a.seconds |= {"prefill": 1.0, "target": 2.0}
    b.seconds |= {"draft": 0.5, "target": 1.0}
    b.step_seconds = [(1, 2, 3, 0.1, 0.2, 0.3, 0.4)]
    total = Ledger.merge([a, b])
    assert total.rows == STEPS and total.step_seconds == b.step_seconds
    assert total.seconds == {"prefill": 1.0, "draft": 0.5, "target": 3.0, "rule": 0.0, "other": 0.0}
    assert total.acceptance_rate == Ledger(rows=STEPS).acceptance_rate
    assert set(total.seconds) == {"prefill", *PHASES}


def test_rows_of_one_sequence():
    ledger = Ledger(rows=[row(1, 0, 1, sequence=4), row(2, 1, 2, sequence=7), row(3, 3, 4, sequence=4)])
    assert [r.depth for r in ledger.of(4)] == [1, 3] and ledger.of(5) == []


def test_laps_add_up_to_the_time_passed():
    clock = Clock(torch.device("cpu"))
    start = clock.last
    laps = clock.seconds({str(i): clock.lap() for i in range(5)}).values()
    assert min(laps) >= 0 and sum(laps) == pytest.approx(clock.last - start)


@pytest.mark.cuda
def test_laps_on_cuda_are_the_device_s():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    clock = Clock(torch.device("cuda"))
    torch.cuda._sleep(10**8)  # cycles, 50 ms or so
    laps = {"busy": clock.lap()} | {"idle": clock.lap()}
    seconds = clock.seconds(laps)
    assert seconds["busy"] > 0.01 > seconds["idle"] >= 0
