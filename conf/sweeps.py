"""What a sweep ends with: one table and one report of all its runs, whichever launcher ran them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from specdec.errors import SpecdecError


class Tables(Callback):
    """At a sweep's end: `runs.csv` (`.parquet` with pandas), `report.html` and `report.md` in its folder."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from experiments import sweep

        directory = Path(str(OmegaConf.select(config, "hydra.sweep.dir")))
        try:
            sweep.conclude(directory)
        except SpecdecError as error:  # nothing was measured: another task, or every run failed
            print(f"no table of this sweep: {error}", file=sys.stderr)
