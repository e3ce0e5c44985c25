"""The command line: what composes, what is refused and in which words, sweeps and resuming."""

import dataclasses
import importlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

import conf
import drafters
import experiments
from conf.command_line import command_line, tell, without_plus
from experiments import distill, train
from specdec.config import Config, EngineConfig, PromptsConfig, TargetConfig
from specdec.errors import CheckFailed, OptionError
from specdec.sampling import Sampling

ROOT = Path(__file__).parent.parent
CHOICES = [
    (path.parent.name, path.stem)
    for path in sorted(ROOT.glob("conf/*/*.yaml"))
    if path.parent.name != "experiment"
]


def composed(*overrides: str) -> Config:
    with initialize_config_module("conf", version_base="1.3"):
        return conf.resolve(compose("config", overrides=list(overrides)))


# ---------------------------------------------------------------- what composes


def test_defaults():
    config = composed()
    assert config.task["name"] == "measure" and config.verify["name"] == "recursive"
    assert config.target.name == "smollm2-135m" and config.drafter.name == "eagle"
    other = composed("target=tiny")  # no weights are shipped for it
    assert other.drafter.name == "ngram" and other.verify["name"] == "token"
    assert config.sampling == Sampling(temperature=0.0, processors=[]) and config.sampling.greedy
    assert config.prompts == PromptsConfig() and config.engine == EngineConfig()
    assert (config.seed, config.resume) == (0, False)


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes(group, choice):
    overrides = [f"{group}={choice}"]
    overrides += ["prompts.path=some.jsonl"] if choice in ("file", "spec_bench") else []
    with initialize_config_module("conf", version_base="1.3"):
        compose("config", overrides=overrides)
    if group != "drafter" or choice in drafters.names():
        composed(*overrides)


def test_values_reach_their_dataclasses():
    config = composed(
        "sampling=nucleus",
        "engine.stop=['\n\n',END]",
        "drafter=ngram",
        "drafter.gamma=3",
        "prompts.domains=[qa]",
    )
    assert (config.sampling.temperature, config.sampling.top_p) == (0.7, 0.9)
    assert config.engine.stop == ["\n\n", "END"] and config.prompts.domains == ["qa"]
    assert config.drafter.gamma == 3


def test_an_experiment_overrides_but_the_command_line_wins():
    assert (
        composed("experiment=quick").prompts.limit,
        composed("experiment=quick").engine.max_new_tokens,
    ) == (9, 16)
    assert composed("experiment=quick", "prompts.limit=2").prompts.limit == 2


def test_the_drafters_of_later_versions_compose_and_say_so():
    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose("config", overrides=["drafter=medusa", "target=llama3-8b"])
    assert cfg.target.path == "meta-llama/Meta-Llama-3-8B-Instruct"
    if "medusa" not in drafters.names():
        with pytest.raises(OptionError, match="^drafter=medusa: .*not part of this version; .*ngram, none"):
            conf.resolve(cfg)


@pytest.mark.parametrize("name", drafters.names())
def test_a_drafters_yaml_holds_its_options(name):
    """Otherwise an option could not be set without `+`, or its default would depend on who asks."""
    with initialize_config_module("conf", version_base="1.3"):
        options = compose("config", overrides=[f"drafter={name}"]).drafter
    assert options == vars(drafters.config_class(name)())


def test_a_drafter_of_trees_brings_a_rule_for_trees_and_the_command_line_wins():
    with initialize_config_module("conf", version_base="1.3"):
        rules = [
            compose("config", overrides=overrides).verify["name"]
            for overrides in (
                ["drafter=ngram"],
                ["drafter=eagle"],
                ["drafter=eagle", "verify=traversal"],
                ["verify=token", "drafter=eagle"],
            )
        ]
    assert rules == ["token", "recursive", "traversal", "token"]


@pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("conf/task/*.yaml")))
def test_a_tasks_yaml_holds_its_options(name):
    task = importlib.import_module(f"experiments.{name}")
    with initialize_config_module("conf", version_base="1.3"):
        options = compose("config", overrides=[f"task={name}"]).task
    assert options == vars(task.Options())


# ---------------------------------------------------------------- what is refused

REFUSED = [
    ("drafter.nods=4", "drafter.nods=4: no such option; did you mean nodes? choices: name, checkpoint, "),
    ("engine.max_tokens=4", "engine.max_tokens=4: no such option; did you mean max_new_tokens? choices: "),
    ("verify.x=1", "verify.x=1: no such option; choices: name"),
    ("nodes=4", "nodes: no such option; did you mean drafter.nodes?"),
    ("drafters=ngram", "drafters=ngram: no such option; did you mean drafter? choices: task, target, "),
    (
        "drafter=meduza",
        "drafter=meduza: there is no such drafter; did you mean medusa? choices: all, eagle, ",
    ),
    ("experiment=x", "experiment=x: there is no such experiment; choices: batch_sweep, drafter_comparison, "),
    ("engine.max_new_tokens=many", "engine.max_new_tokens=many: must be a whole number."),
    ("engine.batch_size=1.5", "engine.batch_size=1.5: must be a whole number."),
    ("engine.batch_size=null", "engine.batch_size=null: must be a whole number."),
    ("engine.threads=x", "engine.threads=x: must be a whole number or null."),
    ("engine.ignore_eos=maybe", "engine.ignore_eos=maybe: must be true or false."),
    ("engine.stop=END", "engine.stop=END: must be a list [..., ...] of text."),
    ("sampling.top_p=high", "sampling.top_p=high: must be a number."),
    ("drafter.depth=x", "drafter.depth=x: must be a whole number."),
    ("drafter.depth=0", "drafter.depth=0: must be ≥ 1"),
    ("engine.max_new_tokens=0", "engine.max_new_tokens=0: must be ≥ 1."),
    ("prompts.limit=0", "prompts.limit=0: must be ≥ 1."),
    ("sampling.temperature=-1", "sampling.temperature=-1.0: must be ≥ 0"),
    ("sampling.top_p=0", "sampling.top_p=0.0: must lie in (0, 1]"),
    ("sampling.top_p=1.1", "sampling.top_p=1.1: must lie in (0, 1]"),
    (
        "target.dtype=float17",
        "target.dtype=float17: no such choice; did you mean float16? choices: auto, ",
    ),
    ("target.weights=rnd", "target.weights=rnd: no such choice; did you mean random? choices: pretrained, "),
    ("target.device=gpu", "target.device=gpu: no such device; choose auto, cpu, cuda"),
    ("prompts=file", "prompts.path=null: must name the file that prompts=file reads."),
    ("drafter", "drafter: not understood; write name=value"),
    ("target.path=/tmp", "target.path=/tmp: is not read by target=smollm2-135m; use target=hf."),
    ("prompts.path=x.jsonl", "prompts.path=x.jsonl: is not read by prompts=builtin; use prompts=file."),
    ("seed=-1", "seed=-1: must lie between 0 and 2^64 − 1."),
    ("drafter.tree=[3,2]", "drafter.tree=[3, 2]: must be a list [..., ...] of a list [..., ...] of a whole"),
]


def test_runs_are_refused_by_tasks_that_read_none(tmp_path):
    with pytest.raises(OptionError, match="^runs=x: is not read by task=measure, but by report"):
        experiments.run(composed("runs=x"), tmp_path)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("task.repeats=x", "task.repeats=x: must be a whole number."),  # beside lists of anything
        ("task.contexts=[a,1]", r"task.contexts\[0\]=a: .* could not be converted to Integer"),
        ("task.contexts=4", "task.contexts=4: must be a list .* of a whole number"),
    ],
)
def test_refused_by_a_task_with_lists(option, line, tmp_path):
    with pytest.raises(OptionError, match=f"^{line}"):
        experiments.run(composed("task=benchmark", option), tmp_path)


def test_options_of_the_data_are_called_what_they_are_in_training(tmp_path):
    """`task.data.…` in the error and its remedy."""
    for options, line in (
        ({"source": "text"}, r"^task\.data\.path=null: .* task\.data\.source=text reads"),
        ({"path": "x"}, r"^task\.data\.path=x: is not read by task\.data\.source=templates"),
        ({"tokens": 0}, r"^task\.data\.tokens=0: must be ≥ 1"),
    ):
        with pytest.raises(OptionError, match=line):
            train.Data(**options)
    missing = train.Data(source="chat", path=str(tmp_path / "none.jsonl"))
    with pytest.raises(OptionError, match=r"^task\.data\.path=.*none.jsonl: cannot be read"):
        distill._source(missing, None, 0)


@pytest.mark.parametrize(("override", "line"), REFUSED)
def test_refused_in_one_line(override, line):
    with pytest.raises(Exception) as caught:  # noqa: B017, PT011
        composed(override)
    told = tell(caught.value)
    assert told.startswith(line) and "\n" not in told


def test_plus_cannot_bypass_the_schema():
    assert without_plus(["+x=1", "++drafter.y=2", "+hydra.verbose=true", "-m", "a=+1"]) == [
        "x=1", "drafter.y=2", "+hydra.verbose=true", "-m", "a=+1",
    ]  # fmt: skip


def test_drafter_options_are_checked_for_the_python_interface_too():
    assert drafters.check({"name": "ngram", "gamma": 2}).gamma == 2
    for config, line in [
        ({"name": "ngram", "gama": 2}, "drafter.gama=null: no such option; did you mean gamma?"),
        ({"name": "ngram", "gamma": "two"}, "drafter.gamma=two: must be a whole number."),
        ({"name": "engram"}, "drafter=engram: this drafter is not part of this version; did you mean ngram?"),
        ({}, "drafter={}: must be chosen; choices: "),
    ]:
        with pytest.raises(OptionError) as caught:
            drafters.check(config)
        assert str(caught.value).startswith(line)


def test_a_target_needs_no_hydra():
    with pytest.raises(OptionError, match=r"target\.source=disk"):
        TargetConfig(name="x", source="disk")


# ---------------------------------------------------------------- the whole command, its task replaced


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `run.py` in this process; `command.runs` what the task was given, `command.act` may raise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # so that it is restored
    logging_before = logging.root.manager.disable
    main = importlib.import_module("run").main

    def task(config, run_dir):
        run.runs.append((config, run_dir.relative_to(tmp_path)))
        (run_dir / "meta.json").touch()
        run.act(config)
        (run_dir / "summary.json").touch()

    def run(*arguments: str) -> int:
        run.runs = []
        quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra/launcher=basic"]
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments, *quiet])
        return command_line(main)

    run.act = lambda config: None
    monkeypatch.setattr(experiments, "run", task)
    yield run
    logging.disable(logging_before)


def interrupt(config):
    raise KeyboardInterrupt


def test_a_run_ends_with_status_0_in_its_own_directory(command):
    assert command("drafter=none", "target=tiny") == 0
    [(config, directory)] = command.runs
    assert config.drafter.name == "none"
    assert directory.parts[0] == "outputs" and directory.name.endswith("-measure-tiny-none")


@pytest.mark.parametrize(
    "override", ["+x=1", "++drafter.y=2", "drafter=null", "engine=3", "~drafter", "drafter=eagel"]
)
def test_user_errors_end_with_status_2_and_one_line(command, capsys, override):
    assert command(override) == 2 and command.runs == []
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1


def test_a_failed_check_ends_with_status_1(command, capsys):
    def act(config):
        raise CheckFailed("the certificate is refused")

    command.act = act
    assert command() == 1
    assert capsys.readouterr().err == "error: the certificate is refused\n"


def test_debug_shows_the_traceback(command, monkeypatch):
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    with pytest.raises(OptionError):
        command("drafter.depth=0")


def test_a_sweep_runs_once_per_value(command):
    assert command("-m", "drafter=ngram", "drafter.gamma=1,2,4,8", "seed=3") == 0
    assert [(config.drafter.gamma, config.seed) for config, _ in command.runs] == [
        (1, 3),
        (2, 3),
        (4, 3),
        (8, 3),
    ]
    assert len({directory for _, directory in command.runs}) == 4


def test_a_sweep_as_an_experiment(command):
    assert command("experiment=gamma_sweep") == 0
    assert [config.drafter.gamma for config, _ in command.runs] == [1, 2, 4, 8]


def test_one_bad_value_does_not_stop_the_sweep(command, capsys):
    assert command("-m", "drafter=ngram", "drafter.gamma=1,0,2") == 2
    assert [config.drafter.gamma for config, _ in command.runs] == [1, 2]
    assert "drafter.gamma=0: must be ≥ 1" in capsys.readouterr().err


def test_an_interrupted_run_is_resumed_in_its_directory(command, capsys):
    command.act = interrupt
    assert command("seed=1") == 130
    assert "resume=true" in capsys.readouterr().err
    [(_, directory)] = command.runs

    command.act = lambda config: None
    assert command("seed=2", "resume=true") == 0  # other options: another run
    assert command.runs[0][1] != directory
    assert "no unfinished run" in capsys.readouterr().err
    assert command("resume=true", "seed=1") == 0  # the order does not matter
    assert command.runs[0][1] == directory and command.runs[0][0].resume
    assert str(directory) in capsys.readouterr().err
    assert command("resume=true", "seed=1") == 0  # finished by now
    assert command.runs[0][1] != directory


def test_the_newest_interrupted_run_is_resumed(command):
    command.act = interrupt
    for time in ("2026-01-02/10-00-00-x", "2026-01-03/09-00-00-x", "2026-01-01/11-00-00-x"):
        command("seed=1", f"hydra.run.dir=outputs/{time}")
    command.act = lambda config: None
    command("seed=1", "resume=true")
    assert command.runs[0][1] == Path("outputs/2026-01-03/09-00-00-x")


def test_an_interrupted_sweep_is_resumed(command):
    def act(config):
        if config.drafter.gamma == 2:
            raise KeyboardInterrupt

    command.act = act
    assert command("-m", "drafter=ngram", "drafter.gamma=1,2,4") == 130
    before = [directory for _, directory in command.runs]
    command.act = lambda config: None
    assert command("-m", "drafter=ngram", "drafter.gamma=1,2,4", "resume=true") == 0
    assert [directory for _, directory in command.runs][:2] == before


def test_a_finished_run_is_not_run_again(tmp_path, capsys):
    (tmp_path / "summary.json").touch()
    experiments.run(dataclasses.replace(composed(), task={"name": "no such task"}, resume=True), tmp_path)
    assert "finished already" in capsys.readouterr().err


# ---------------------------------------------------------------- the real process

WITHOUT_TORCH = """
import runpy, sys
sys.argv = ["run.py", *sys.argv[1:]]
try:
    runpy.run_path("run.py", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
assert not {"torch", "transformers", "scipy", "matplotlib"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--help"],
            ["drafter: all, eagle, medusa, ngram, none", "-m drafter=ngram drafter.gamma=1,2,4,8"],
        ),
        (["--cfg", "job"], ["depth: 4", "max_new_tokens: 32", "resume: false"]),
        (
            ["drafter=medusa", "target=llama3-8b", "--cfg", "job"],
            ["path: meta-llama/Meta-Llama-3-8B-Instruct"],
        ),
    ],
)
def test_help_and_configuration_need_no_torch(arguments, expected):
    """What makes them answer in less than 2 s."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert ended.returncode == 0 and ended.stderr == ""
    assert all(text in ended.stdout for text in expected)


def test_an_error_of_the_real_process(tmp_path):
    command = [sys.executable, str(ROOT / "run.py"), "sampling.top_p=2"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "error: sampling.top_p=2.0: must lie in (0, 1]; 1 switches it off.\n"
