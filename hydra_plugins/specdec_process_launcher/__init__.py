"""`hydra/launcher=process`: every run of a sweep in a fresh process (Hydra finds plugins by this folder)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, open_dict

from conf.command_line import note

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction


class ProcessLauncher(Launcher):
    """Runs a sweep's jobs one after the other, each in its own process of `run.py`.

    Hydra's basic launcher runs them all in this process, where memory, compile caches and warmed-up libraries
    of one job change the timings of the next.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return [self._run(initial_job_idx + i, list(o)) for i, o in enumerate(job_overrides)]

    def _run(self, number: int, overrides: list[str]) -> JobReturn:
        job = self.context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(job):
            job.hydra.job.id = job.hydra.job.num = number
        directory = Path(str(job.hydra.sweep.dir)) / str(job.hydra.sweep.subdir)
        print(f"[{number}] {' '.join(filter_overrides(overrides))}", file=sys.stderr, flush=True)
        command = [sys.executable, sys.argv[0], *overrides, f"hydra.run.dir={_quoted(directory)}"]
        status = subprocess.run([*command, "hydra.mode=RUN"], check=False).returncode
        if status < 0 or status == 130:  # Ctrl-C reaches every process of the terminal
            raise KeyboardInterrupt
        note(status)
        done = {"status": JobStatus.COMPLETED, "_return_value": None}  # else the next one would not run
        return JobReturn(overrides, job, working_dir=str(directory), **done)


def _quoted(path: Path) -> str:
    return "'" + path.as_posix().replace("\\", "\\\\").replace("'", "\\'") + "'"


ConfigStore.instance().store(
    group="hydra/launcher", name="process", node={"_target_": f"{__name__}.{ProcessLauncher.__name__}"}
)
