"""A report from stored runs alone: `report.html`, one file that needs nothing else, and `report.md`.

`python run.py task=report runs=outputs/2026-11-30` (a run, a sweep, a pattern, or a list of them).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import jinja2

from experiments import spec_bench
from experiments.report import stored
from experiments.report.page import content
from experiments.store import Run
from specdec.config import Config
from specdec.errors import OptionError


@dataclass
class Options:
    """Options of `task=report`."""

    name: str = "report"
    title: str | None = None  # of the page; by default drafter and target
    sample: str | None = None  # id of the prompt whose decode is shown step by step; by default a typical one
    spec_bench: bool = False  # also write every run's answers in Spec-Bench's format


def run(config: Config, run_dir: Path) -> None:
    """Report on the runs that `config.runs` names; `report.html`, `report.md` and `runs.csv` in `run_dir`."""
    if not config.runs:
        raise OptionError("runs", "null", "must name folders of runs, e.g. runs=outputs/2026-11-30.")
    runs = stored.find(config.runs)
    store = Run(run_dir, config)
    written = write(runs, run_dir, config.task.title, config.task.sample)
    if config.task.spec_bench:
        for stored_run in runs:
            model_id = re.sub(r"[^\w.=-]+", "_", f"{stored_run.config['target']['name']}-{stored_run.label}")
            written += spec_bench.write(stored_run.records, run_dir, model_id)
    store.finish({"runs": [r.directory for r in runs], "files": [p.name for p in written]})
    for path in written:
        if path.suffix != ".png":
            print(path)


def write(
    runs: list[stored.StoredRun], directory: Path, title: str | None = None, sample: str | None = None
) -> list[Path]:
    """Write the report and the table of the runs into `directory`; the paths written."""
    page = content(runs, title, sample)
    figures = directory / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    paths = []
    for chart in page["charts"]:
        paths.append(figures / f"{chart.name}.png")
        paths[-1].write_bytes(chart.png)
    for name in ("report.html", "report.md"):
        paths.append(directory / name)
        paths[-1].write_text(_templates().get_template(f"{name}.j2").render(page), encoding="utf-8")
    from experiments import sweep

    return [*paths, *sweep.write(sweep.rows(runs, domains=True), directory / "runs")]


def _templates() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    return jinja2.Environment(
        loader=loader,
        autoescape=jinja2.select_autoescape(["html.j2"], default_for_string=False, default=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
