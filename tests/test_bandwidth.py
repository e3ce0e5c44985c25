"""Bytes that a drafter reads: its weights once a forward, however that forward is run."""

import pytest
from tape import on_tape

import drafters
from drafters.eagle.growth import Growth
from experiments.bandwidth import DraftMeter, weight_bytes
from specdec import verify
from specdec.config import EngineConfig, TargetConfig
from specdec.engine import Engine
from specdec.model import Model

VOCAB, HIDDEN = 64, 16


@pytest.fixture(scope="module")
def target():
    return Model.load(
        TargetConfig(name="tiny", source="tiny", vocab_size=VOCAB, hidden_size=HIDDEN, layers=2)
    )


def read_by(target, drafter, recorded=False):
    """Bytes read while one prompt is decoded, and how many drafts there were."""
    engine = Engine(
        target, drafter, verify.build({"name": "recursive"}), config=EngineConfig(max_new_tokens=6)
    )
    engine.record = on_tape if recorded else None
    meter = DraftMeter(drafter, target)
    list(engine.decode([[1, 2, 3]], [0]))
    found = meter.take()
    assert meter.take() == 0
    return found, sum(row.nodes > 0 for row in engine.ledger.rows)


def test_what_a_forward_of_the_target_reads(target):
    """All but the table of embeddings, of which it reads rows; the head, if it is a matrix of its own."""
    parameters = sum(p.nbytes for p in target.hf.parameters())
    table = target.hf.get_input_embeddings().weight
    tied = target.hf.get_output_embeddings().weight is table
    assert weight_bytes(target.hf) == parameters - (0 if tied else table.nbytes)


def test_medusa_reads_its_heads_and_the_rows_it_drafts_from(target):
    few = 20
    options = {"name": "medusa", "weights": "random", "heads": 2, "draft_vocab": few, "nodes": 4}
    drafter = drafters.build(options, target)
    found, drafts = read_by(target, drafter)
    own = sum(p.numel() for p in drafter.heads.parameters())
    assert drafts > 1 and found == drafts * 4 * (own + few * HIDDEN)


@pytest.mark.parametrize("recorded", [False, True])
def test_eagle_reads_a_layer_per_level_however_it_runs(recorded, target, monkeypatch):
    """Fc and layer for true entries, the layer for every level of nodes, the head after each of them."""
    options = {"name": "eagle", "weights": "random", "depth": 2, "top_k": 2, "nodes": 4}
    drafter = drafters.build(options | {"stop_below": 0.0, "ngram": False}, target)
    levels = []
    grow = Growth.grow
    monkeypatch.setattr(Growth, "grow", lambda self, *level: levels.append(1) or grow(self, *level))
    found, drafts = read_by(target, drafter, recorded)
    layer = sum(p.numel() for p in drafter.model.layers.parameters())
    fc, head = drafter.model.fc.weight.numel(), VOCAB * HIDDEN
    reads = drafts + 1  # the last token allows no draft, what was committed before it is read all the same
    assert levels and found == 4 * (reads * (fc + layer) + drafts * head + len(levels) * (layer + head))
