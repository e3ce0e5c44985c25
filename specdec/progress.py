"""Saying what is going on while something slow happens."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text
from tqdm import tqdm

Progress = Callable[[str], None]


def silent(message: str) -> None:
    """A `Progress` that says nothing."""


@contextmanager
def status() -> Iterator[Progress]:
    """A `Progress` on standard error: a spinner with the latest message on a terminal, else one line each."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda message: console.print(message, highlight=False, markup=False, soft_wrap=True)
        return
    with console.status("") as spinner:
        yield lambda message: spinner.update(Text(message))


def spoken_bar(progress: Progress, what: str, seconds: float = 2.0) -> type[tqdm]:
    """A tqdm class for a library that shows downloads with one: reports bytes to `progress` now and then."""

    class SpokenBar(tqdm):
        last = time.monotonic()

        def __init__(self, *args, **options):
            super().__init__(*args, **options | {"file": io.StringIO()})

        def display(self, *_, **__) -> None:
            now = time.monotonic()
            if self.unit == "B" and self.total and now - SpokenBar.last >= seconds:
                SpokenBar.last = now
                progress(f"{what}: {self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB")

    return SpokenBar
