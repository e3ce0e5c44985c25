"""Train a drafter for a target from the target's own answers, in one command."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

import drafters
from drafters.training.loop import Loop, Schedule
from drafters.training.shards import Answer, ShardFolder
from drafters.training.teacher import FeatureStore, Teacher
from drafters.training.trainable import Trainable
from drafters.training.vocabulary import coverage, most_frequent
from experiments import distill
from experiments.card import training_card
from experiments.curves import learning_curves
from experiments.memory import keep_freed_memory
from experiments.store import Run
from specdec.checkpoints import cache_directory, resolve_device
from specdec.checkpoints.devices import cpu_multiplies_bfloat16
from specdec.config import Config, at_least, suggest
from specdec.errors import OptionError
from specdec.model import Model

VALIDATION = Path(__file__).parent / "data" / "validation.jsonl"
PRECISIONS = ("auto", "no", "bf16")


@dataclass
class Options:
    """Options of `task=train`."""

    name: str = "train"
    data: distill.Options = field(default_factory=distill.Options)
    draft_vocab: str = "8192"  # the most frequent tokens that the drafter may guess; full = all
    steps: int = 3000  # optimizer steps at most
    batch_positions: int = 4096  # places per step
    micro_positions: int = 2048  # places per forward; lower it if memory is short
    learning_rate: float = 1e-3
    warmup: int = 50  # steps
    validate_every: int = 250  # steps; each also saves a state from which resume=true goes on
    patience: int = 8  # validations without progress before stopping
    precision: str = "auto"  # auto | no | bf16 (mixed)
    cache_features: bool = True  # keep the target's hidden states on disk
    output: str | None = None  # where the checkpoint goes; null = <run directory>/checkpoint

    def __post_init__(self) -> None:
        at_least(
            "task",
            self,
            steps=1,
            batch_positions=1,
            micro_positions=1,
            warmup=0,
            validate_every=1,
            patience=1,
        )
        if self.learning_rate <= 0:
            raise OptionError("task.learning_rate", self.learning_rate, "must be > 0.")
        if self.precision not in PRECISIONS:
            raise OptionError("task.precision", self.precision, suggest(self.precision, PRECISIONS))
        if self.draft_vocab != "full" and not (self.draft_vocab.isdigit() and int(self.draft_vocab)):
            raise OptionError("task.draft_vocab", self.draft_vocab, "must be a number of tokens, or full.")


def run(config: Config, run_dir: Path) -> None:
    """Distil, train, tune, save; checkpoint, curves and summary in `run_dir`."""
    options: Options = config.task
    builder = trainer_of(config.drafter.name)
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    keep_freed_memory()
    accelerator = Accelerator(
        cpu=resolve_device(config.target.device).type == "cpu", mixed_precision=_precision(config)
    )
    if accelerator.num_processes > 1:
        config.target.device = str(accelerator.device)
    console = Console(stderr=True)
    target = Model.load(config.target)
    store = Run(run_dir, config, target=target.provenance)
    with accelerator.main_process_first():
        answers, held_out, data = _data(options, target, config, console)
    token_map = _token_map(options, answers, target)
    trainable: Trainable = builder(config.drafter, target, token_map)
    teacher = Teacher(target, trainable.layers, trainable.whole, trainable.token_map)
    with accelerator.main_process_first():
        learn, check = _features(options, teacher, answers, held_out, target, console)
    loop = Loop(
        trainable, teacher, learn, check, _schedule(options, config.seed), run_dir, accelerator, console.print
    )
    history = loop.run()
    tuned = trainable.adapt(loop.held_out_validation().ranks)
    if not accelerator.is_main_process:
        return
    summary = {
        "data": data,
        "draft_vocab": None if trainable.token_map is None else len(trainable.token_map),
        "coverage": coverage(answers, trainable.token_map, target.vocab_size),
        "steps": history.step,
        "positions": history.positions,
        "minutes": history.seconds / 60,
        "parameters": sum(p.numel() for p in loop.parameters),
        "best": next(v for v in history.validations if v["step"] == history.best_step),
        "validations": history.validations,
        "tuned": tuned,
    }
    output = Path(options.output).expanduser() if options.output else run_dir / "checkpoint"
    trainable.save(output, training_card(config, target, summary))
    learning_curves(history.losses, history.validations, run_dir / "curves")
    store.finish(summary)
    print(
        f"python run.py drafter={config.drafter.name} target={config.target.name} drafter.checkpoint={output}"
    )


def trainer_of(name: str) -> Any:
    """`build(config, target, token_map) -> Trainable` of `drafters/<name>/train.py`.

    Raises:
        OptionError: this drafter has nothing to train.
    """
    able = [n for n in drafters.names() if importlib.util.find_spec(f"drafters.{n}.train")]
    if name not in able:
        raise OptionError("drafter", name, f"has nothing to train; {suggest(name, able)}")
    return importlib.import_module(f"drafters.{name}.train").build


def _precision(config: Config) -> str:
    if config.task.precision != "auto":
        return config.task.precision
    fast = resolve_device(config.target.device).type == "cuda" or cpu_multiplies_bfloat16()
    return "bf16" if fast else "no"


def _data(
    options: Options, target: Model, config: Config, console: Console
) -> tuple[list[Answer], list[Answer], dict[str, Any]]:
    """Answers to learn from, greedy answers to held-out prompts, and the counts of the former."""
    folder = distill.folder_of(options.data, config.target.name)
    counts = distill.distil(options.data, target, folder, config.seed, console)
    held_out = distill.Options(
        source="chat",
        path=str(VALIDATION),
        tokens=10**9,
        temperatures=[0.0],
        max_new_tokens=options.data.max_new_tokens,
        longest_prompt=options.data.longest_prompt,
        round=1,
    )
    held_out_folder = ShardFolder(cache_directory() / "distilled" / f"{config.target.name}-validation")
    distill.distil(held_out, target, held_out_folder, 0, console)
    answers = [a for a in folder.answers() if len(a.answer) > 2]
    return (
        answers,
        [a for a in held_out_folder.answers() if len(a.answer) > 2],
        counts | {"folder": str(folder.path)},
    )


def _token_map(options: Options, answers: list[Answer], target: Model) -> torch.Tensor | None:
    if options.draft_vocab == "full" or int(options.draft_vocab) >= target.vocab_size:
        return None
    return most_frequent(answers, int(options.draft_vocab), target.vocab_size, target.eos_token_ids)


def _features(
    options: Options,
    teacher: Teacher,
    answers: list[Answer],
    held_out: list[Answer],
    target: Model,
    console: Console,
) -> tuple[FeatureStore, FeatureStore]:
    """Stores of hidden states: on disk beside the answers, or computed anew in every step."""
    layers = "-".join("final" if layer == Model.FINAL else str(layer) for layer in sorted(teacher.layers))
    kind = f"{layers}{'-whole' if teacher.whole else ''}"
    data = distill.folder_of(options.data, target.name).path
    folders = data / "features" / kind, data.with_name(f"{target.name}-validation") / "features" / kind
    if not options.cache_features:
        return FeatureStore(teacher, None, answers), FeatureStore(teacher, None, held_out)

    def progress(done: int, total: int) -> None:
        if done % 20 == 0 or done == total:
            console.print(f"hidden states: {done} of {total} files", highlight=False)

    stores = [
        FeatureStore(teacher, f, a, progress=progress)
        for f, a in zip(folders, (answers, held_out), strict=True)
    ]
    for store in stores:
        store.complete()
    return stores[0], stores[1]


def _schedule(options: Options, seed: int) -> Schedule:
    names = (
        "steps",
        "batch_positions",
        "micro_positions",
        "learning_rate",
        "warmup",
        "validate_every",
        "patience",
    )
    return Schedule(**{name: getattr(options, name) for name in names}, seed=seed)
