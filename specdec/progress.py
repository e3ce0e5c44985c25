"""Saying what is going on while something slow happens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

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
