"""Differences of greedy outputs: near-ties of the arithmetic are told from bugs."""

import pytest
import torch
from reference import next_logits, plain, tiny

from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.exactness.triage import triage
from specdec.model import Model
from specdec.sampling import Sampling
from specdec.verify.token import TokenRule

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def said() -> list[int]:
    return (
        Engine(tiny("float64"), None, TokenRule(), config=EngineConfig(max_new_tokens=8))
        .generate([PROMPT])[0]
        .tokens
    )


def test_equal_outputs(said):
    assert triage(tiny("float64"), PROMPT, said, list(said)) == {"verdict": "equal"}


def test_a_wrong_token_is_a_bug(said):
    """The gap is the log-probability by which the worse of the two tokens misses the best one."""
    wrong = [*said[:5], (said[5] + 1) % 256, *said[6:]]
    log_p = next_logits(plain({"dtype": "float64"}), [*PROMPT, *said[:5]]).log_softmax(-1)
    for expected, actual in ((said, wrong), (wrong, said)):
        found = triage(tiny("float64"), PROMPT, expected, actual)
        assert (found["verdict"], found["position"]) == ("logic bug", 5)
        assert found["tokens"] == [expected[5], actual[5]]
        assert found["gap"] == pytest.approx(float(log_p.max() - log_p[wrong[5]]), abs=1e-9)


def test_the_first_difference_counts(said):
    wrong = [said[0], (said[1] + 1) % 256, *said[2:7], 0]
    assert triage(tiny("float64"), PROMPT, said, wrong)["position"] == 1


def test_stopping_early_is_a_bug(said):
    for expected, actual in ((said, said[:4]), (said[:4], said)):
        found = triage(tiny("float64"), PROMPT, expected, actual)
        assert (found["verdict"], found["position"]) == ("logic bug", 4)


def tied(gap: float, dtype: str) -> tuple[Model, list[int], list[int]]:
    """A model whose two best tokens of one context are `gap` apart: the runner-up's logit is moved."""
    model, reference = tiny(dtype), plain({"dtype": "float64"})
    logits = next_logits(reference, PROMPT)
    first, second = logits.topk(2).indices.tolist()
    head = model.hf.get_output_embeddings()
    handle = {}

    def add(module, args, out):
        out[..., second] += (logits[first] - logits[second] - gap).to(out.dtype)
        return out

    handle["hook"] = head.register_forward_hook(add)
    return model, [first], [second]


@pytest.mark.parametrize(
    ("gap", "dtype", "verdict"),
    [
        (1e-7, "float32", "numeric tie"),
        (0.01, "float32", "logic bug"),
        (0.01, "bfloat16", "numeric tie"),
        (1.5, "bfloat16", "logic bug"),
        (1e-15, "float64", "numeric tie"),
        (1e-7, "float64", "logic bug"),
    ],
)
def test_ties_depend_on_the_precision(gap, dtype, verdict):
    model, expected, actual = tied(gap, dtype)
    found = triage(model, PROMPT, expected, actual)
    assert found["verdict"] == verdict, found


def test_penalties_are_applied_before_comparing(said):
    """A banned token cannot be as good as the best one, however large its logit; the prefix decides."""
    model = tiny("float64")
    sampling = Sampling(bad_words=[[said[2]]])
    banned = (
        Engine(model, None, TokenRule(), sampling, EngineConfig(max_new_tokens=8))
        .generate([PROMPT])[0]
        .tokens
    )
    assert banned != said
    found = triage(model, PROMPT, banned, said, sampling)
    assert found["verdict"] == "logic bug" and found["gap"] == float("inf")


def test_features_asked_for_by_a_drafter_stay_asked_for(said):
    model = tiny("float64")
    model.features = (0,)
    triage(model, PROMPT, said, [*said[:3], 0, *said[4:]])
    assert model.features == (0,)


def test_min_new_tokens_counts_from_the_prompt(said):
    """EOS is banned at the first differing position only while too few tokens have been generated."""
    model, eos = tiny("float64"), 7
    sampling = Sampling(min_new_tokens=3)
    early = triage(model, PROMPT, said[:3], [*said[:2], eos], sampling, (eos,))
    late = triage(model, PROMPT, said[:4], [*said[:3], eos], sampling, (eos,))
    assert torch.tensor(early["gap"]).isinf() and torch.tensor(late["gap"]).isfinite()
