"""Train a drafter for a target from the target's own answers, in one command."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from rich.console import Console

import drafters
from drafters.training import optimizer
from drafters.training.loop import Loop, Schedule
from drafters.training.losses import LOSSES
from drafters.training.shards import Answer, ShardFolder
from drafters.training.teacher import FeatureStore, Teacher
from drafters.training.trainable import Trainable
from drafters.training.vocabulary import coverage, most_frequent
from experiments import distill
from experiments.card import LOSS_NAMES, training_card
from experiments.comparison import comparison, comparison_table
from experiments.curves import learning_curves
from experiments.store import Run
from specdec.checkpoints import resolve_device
from specdec.checkpoints.devices import cpu_multiplies_bfloat16
from specdec.config import Config, at_least, suggest
from specdec.errors import OptionError
from specdec.heap import keep_freed_memory
from specdec.model import Model

VALIDATION = Path(__file__).parent / "data" / "validation.jsonl"
PRECISIONS = ("auto", "no", "bf16")


@dataclass
class Data(distill.Options):
    """Options of `task=distill`, as part of those of `task=train`."""

    GROUP: ClassVar[str] = "task.data"


@dataclass
class Options:
    """Options of `task=train`."""

    name: str = "train"
    data: Data = field(default_factory=Data)
    draft_vocab: str = "8192"  # the most frequent tokens that the drafter may guess; full = all
    steps: int = 3000  # optimizer steps at most
    batch_positions: int = 4096  # places per step
    micro_positions: int = 2048  # places per forward; lower it if memory is short
    loss: str = "cross_entropy"  # cross_entropy | log_acceptance | hybrid
    optimizer: str = "muon"  # muon (for matrices; adamw for the rest) | adamw
    learning_rate: float = 1e-3
    warmup: int = 50  # steps
    validate_every: int = 250  # steps; each also saves a state from which resume=true goes on
    patience: int = 8  # validations without progress before stopping
    precision: str = "auto"  # auto | no | bf16 (mixed)
    cache_features: bool = True  # keep the target's hidden states on disk
    compare: list[int] = field(default_factory=list)  # drafter=small: also try so many layers, briefly
    compare_steps: int = 200  # optimizer steps of each
    output: str | None = None  # where the checkpoint goes; null = <run directory>/checkpoint

    def __post_init__(self) -> None:
        at_least(
            "task",
            self,
            compare_steps=1,
            steps=1,
            batch_positions=1,
            micro_positions=1,
            warmup=0,
            validate_every=1,
            patience=1,
        )
        if self.learning_rate <= 0:
            raise OptionError("task.learning_rate", self.learning_rate, "must be > 0.")
        if self.loss not in LOSSES:
            remedy = f"no such choice; {suggest(self.loss, LOSSES)}"
            raise OptionError("task.loss", self.loss, remedy)
        if self.optimizer not in optimizer.NAMES:
            remedy = f"no such choice; {suggest(self.optimizer, optimizer.NAMES)}"
            raise OptionError("task.optimizer", self.optimizer, remedy)
        if self.precision not in PRECISIONS:
            remedy = f"no such choice; {suggest(self.precision, PRECISIONS)}"
            raise OptionError("task.precision", self.precision, remedy)
        if self.draft_vocab != "full" and not (self.draft_vocab.isdigit() and int(self.draft_vocab)):
            raise OptionError("task.draft_vocab", self.draft_vocab, "must be a number of tokens, or full.")


@dataclass(frozen=True)
class Distilled:
    """What there is to learn from and to validate on, counts of the former, and their folders."""

    answers: list[Answer]
    held_out: list[Answer]
    counts: dict[str, Any]
    folders: tuple[Path, Path]


def run(config: Config, run_dir: Path) -> None:
    """Distil, train, tune, save; checkpoint, curves and summary in `run_dir`."""
    options: Options = config.task
    trainer = trainer_of(config.drafter.name)
    trainer.check(config.drafter)
    if options.compare and not hasattr(config.drafter, "layers"):
        raise OptionError("task.compare", options.compare, "is only for drafter=small.")
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    keep_freed_memory()
    accelerator = Accelerator(
        cpu=resolve_device(config.target.device).type == "cpu", mixed_precision=_precision(config)
    )
    if accelerator.num_processes > 1:
        config.target.device = str(accelerator.device)
    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    target = Model.load(config.target)
    (run_dir,) = broadcast_object_list([run_dir])
    store = Run(run_dir, config, target=target.provenance) if accelerator.is_main_process else None
    with accelerator.main_process_first():
        data = distilled(options, target, config, console)
    token_map = _token_map(options, data.answers, target)
    trainable: Trainable = trainer.build(config.drafter, target, token_map, data.answers)
    teacher = Teacher(target, trainable.layers, trainable.prompts, trainable.token_map)
    with accelerator.main_process_first():
        learn, check = _features(options, teacher, data, console)

    def loop_for(some: Trainable, steps: int, folder: Path) -> Loop:
        schedule = _schedule(options, config.seed, steps)
        return Loop(some, teacher, learn, check, schedule, folder, accelerator, say)

    compared = []
    for layers in options.compare:
        say(f"comparing: {layers} layers")
        other = trainer.build(replace(config.drafter, layers=layers), target, token_map, data.answers)
        tried = loop_for(other, options.compare_steps, run_dir / f"compare-{layers}").run()
        compared.append(comparison(layers, other, tried))
    loop = loop_for(trainable, options.steps, run_dir)
    history = loop.run()
    tuned = trainable.adapt(loop.held_out_validation().ranks)
    if store is None:
        return
    summary = {
        "data": data.counts | {"folder": str(data.folders[0])},
        "draft_vocab": None if trainable.token_map is None else len(trainable.token_map),
        "coverage": coverage(data.answers, trainable.token_map, target.vocab_size),
        "steps": history.step,
        "positions": history.positions,
        "minutes": history.seconds / 60,
        "parameters": sum(p.numel() for p in loop.parameters),
        "best": next(v for v in history.validations if v["step"] == history.best_step),
        "validations": history.validations,
        "tuned": tuned,
        "relative_cost": trainable.relative_cost,
        "made": trainable.report,
        "compared": compared,
    }
    output = Path(options.output).expanduser() if options.output else run_dir / "checkpoint"
    trainable.save(output, training_card(config, target, summary))
    picture, *_ = learning_curves(
        LOSS_NAMES[options.loss], history.losses, history.validations, run_dir / "curves"
    )
    shutil.copy(picture, output)
    store.finish(summary)
    if compared:
        Console(width=None if sys.stdout.isatty() else 110).print(comparison_table(compared))
    option = "path" if config.drafter.name == "small" else "checkpoint"
    print(
        f"python run.py drafter={config.drafter.name} target={config.target.name} drafter.{option}={output}"
    )


def trainer_of(name: str) -> Any:
    """`drafters/<name>/train.py`: `check(config)`, `build(config, target, token_map, answers) -> Trainable`.

    Raises:
        OptionError: this drafter has nothing to train.
    """
    able = [n for n in drafters.names() if importlib.util.find_spec(f"drafters.{n}.train")]
    if name not in able:
        raise OptionError("drafter", name, f"has nothing to train; {suggest(name, able)}")
    return importlib.import_module(f"drafters.{name}.train")


def _precision(config: Config) -> str:
    if config.task.precision != "auto":
        return config.task.precision
    fast = resolve_device(config.target.device).type == "cuda" or cpu_multiplies_bfloat16()
    return "bf16" if fast else "no"


def distilled(options: Options, target: Model, config: Config, console: Console) -> Distilled:
    """Answers to learn from and greedy answers to held-out prompts, made where they are missing."""
    folder = distill.folder_of(options.data, config.target)
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
    held_out_folder = ShardFolder(folder.path.with_name(f"{distill.label(config.target)}-validation"))
    distill.distil(held_out, target, held_out_folder, 0, console)
    answers, check = ([a for a in f.answers() if len(a.answer) > 2] for f in (folder, held_out_folder))
    for what, found in (("training", answers), ("validation", check)):
        if not found:
            remedy = f"no {what} answer is longer than two tokens; raise it, or give other prompts."
            raise OptionError("task.data.max_new_tokens", options.data.max_new_tokens, remedy)
    return Distilled(answers, check, counts, (folder.path, held_out_folder.path))


def _token_map(options: Options, answers: list[Answer], target: Model) -> torch.Tensor | None:
    if options.draft_vocab == "full" or int(options.draft_vocab) >= target.vocab_size:
        return None
    return most_frequent(answers, int(options.draft_vocab), target.vocab_size, target.eos_token_ids)


def _features(
    options: Options, teacher: Teacher, data: Distilled, console: Console
) -> tuple[FeatureStore, FeatureStore]:
    """Stores of hidden states: on disk beside the answers, or computed anew in every step."""
    if not options.cache_features:
        return FeatureStore(teacher, None, data.answers), FeatureStore(teacher, None, data.held_out)

    def progress(done: int, total: int) -> None:
        if done % 20 == 0 or done == total:
            console.print(f"hidden states: {done} of {total} files", highlight=False)

    answers = data.answers, data.held_out
    stores = [_store(path / "features", teacher, a) for path, a in zip(data.folders, answers, strict=True)]
    for store in stores:
        store.complete(progress)
    return stores[0], stores[1]


def _store(parent: Path, teacher: Teacher, answers: list[Answer]) -> FeatureStore:
    """A folder in `parent` whose name tells its layers; one that another drafter filled with more will do."""
    layers = sorted("final" if layer == Model.FINAL else str(layer) for layer in teacher.layers)
    extent = "states" if teacher.prompts == "states" else "answers"
    for folder in sorted(parent.glob("*-*")):
        *there, reaches = folder.name.split("-")
        store = FeatureStore(teacher, folder, answers)
        if set(layers) <= set(there) and reaches in (extent, "states") and store.is_complete:
            return store
    return FeatureStore(teacher, parent / "-".join([*layers, extent]), answers)


def _schedule(options: Options, seed: int, steps: int) -> Schedule:
    names = ("batch_positions", "micro_positions", "loss", "optimizer", "learning_rate", "warmup")
    names += ("validate_every", "patience")
    return Schedule(steps=steps, seed=seed, **{name: getattr(options, name) for name in names})
