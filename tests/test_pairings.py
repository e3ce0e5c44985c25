"""A biased pairing of drafter and rule is refused from the options alone, before anything is loaded."""

import pytest
from hydra import compose, initialize_config_module

import conf
import drafters
from experiments import run
from specdec import verify
from specdec.config import TargetConfig
from specdec.errors import OptionError
from specdec.model import Model

OPTIONS = [
    {"name": "none"},
    {"name": "ngram"},
    {"name": "small", "layers": 1},
    {"name": "small", "layers": 1, "tree": [1, 1]},
    {"name": "small", "layers": 1, "tree": [2, 1], "siblings": "with_replacement"},
    {"name": "small", "layers": 1, "tree": [2, 1], "siblings": "without_replacement"},
    {"name": "small", "layers": 1, "tree": [2, 1], "siblings": "top_k"},
    {"name": "medusa", "weights": "random"},
    {"name": "medusa", "weights": "random", "siblings": "with_replacement"},
    {"name": "eagle", "weights": "random"},
    {"name": "eagle", "weights": "random", "top_k": 1},
    {"name": "eagle", "weights": "random", "mode": "chain"},
    {"name": "eagle", "weights": "random", "mode": "chain", "ngram": True},
    {"name": "eagle", "weights": "random", "mode": "static", "siblings": "without_replacement"},
]


@pytest.fixture(scope="module")
def target() -> Model:
    return Model.load(TargetConfig(name="tiny", source="tiny", vocab_size=16, layers=4, device="cpu"))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_tell_what_the_built_drafter_proposes(target, options):
    drafter = drafters.build(options, target)
    kind, is_chain = drafters.check(options).proposes()
    assert kind == drafter.kind
    assert is_chain in (drafter.is_chain, None)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["drafter=small", "drafter.layers=1", "drafter.tree=[2]", "verify=token"],
            "takes chains, but drafter=small",
        ),
        (
            ["drafter=ngram", "verify=kseq"],
            "would be biased for drafter=ngram, whose proposals are deterministic",
        ),
        (["drafter=eagle", "verify=block"], "takes chains, but drafter=eagle"),
        (["drafter=medusa", "verify=kseq"], "would be biased for drafter=medusa"),
    ],
)
def test_refused_before_anything_is_loaded(monkeypatch, tmp_path, overrides, told):
    monkeypatch.setattr(Model, "load", lambda *arguments: pytest.fail("the target was loaded"))
    with initialize_config_module(config_module="conf", version_base="1.3"):
        config = conf.resolve(compose("config", overrides=[*overrides, "target=llama3-8b"]))
    with pytest.raises(OptionError, match=told):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_coupled_rule_takes_sampling_drafters():
    """It makes them draw with its own noise, so that their kind does not matter."""
    gumbel = verify.build({"name": "gumbel"})
    for kind in ("deterministic", "with_replacement", "without_replacement"):
        gumbel.check("x", kind, is_chain=False)
