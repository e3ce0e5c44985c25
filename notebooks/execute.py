"""Executes the notebooks in place (`make notebooks`); what is written holds no times and no paths.

python notebooks/execute.py [notebooks/01_speculative_sampling.ipynb ...]     # all by default
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent.resolve()
ROOT = FOLDER.parent
LONGEST = 900  # seconds a cell may take
PNG = "image/png"
IGNORED = "ignore:IProgress not found"  # tqdm without ipywidgets


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run all cells, in this Python and with this checkout, `folder` being where the notebook works.

    Raises:
        CellExecutionError: a cell failed.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "JUPYTER_PREFER_ENV_PATH": "1", "PYTHONWARNINGS": IGNORED}
    client = NotebookClient(
        notebook,
        extra_arguments=["--log-level=ERROR"],  # it warns of its own local port
        timeout=LONGEST,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute(env=environment)


def clean(notebook: NotebookNode) -> NotebookNode:
    """Without what differs from machine to machine but says nothing: versions, kernels, times, progress."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.get("outputs", ()):
            if "metadata" in output:
                output.metadata = {}
    return notebook


def foreign(notebook: NotebookNode, *places: Path) -> list[str]:
    """What outputs must not hold: paths of this machine and `places`."""
    found = []
    paths = {str(p) for p in (ROOT, Path.home(), Path(tempfile.gettempdir()), *places)} - {"/"}
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            said = output.get("text", "") + str({k: v for k, v in output.get("data", {}).items() if k != PNG})
            found += [f"{cell.id}: the path {path}" for path in sorted(paths) if path in said]
    return found


def main(arguments: list[str]) -> int:
    """Execute and rewrite the notebooks; the exit status."""
    for path in map(Path, arguments or sorted(map(str, FOLDER.glob("*.ipynb")))):
        started = time.monotonic()
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            notebook = clean(execute(notebook, Path(folder)))
            problems = foreign(notebook, Path(folder))
        if problems:
            print(f"{path.name} is not written:", *problems, sep="\n  ", file=sys.stderr)
            return 1
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
