"""Errors a user can act on: each names the option, the value it was given and the remedy."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class SpecdecError(Exception):
    """Base of all errors that `run.py` prints as one line instead of a traceback."""


class OptionError(SpecdecError, ValueError):
    """An option has a value that cannot work.

    Arguments:
        option: the option as the user writes it, e.g. ``drafter.gamma``.
        value: the offending value.
        remedy: what is wrong and what to do instead, one sentence or two.
    """

    def __init__(self, option: str, value: object, remedy: str):
        self.option, self.value, self.remedy = option, value, remedy
        super().__init__(f"{option}={value}: {remedy}")

    def renamed(self, old: str, new: str) -> "OptionError":
        """The same of an option that stands elsewhere, in the remedy as well."""
        return OptionError(self.option.replace(old, new), self.value, self.remedy.replace(old, new))


class NumericalError(SpecdecError):
    """Nothing to draw from: NaN or infinite logits, or every token banned; names the step and the row.

    Attributes:
        finished: the sequences that were complete by then (from `Engine.generate` and `specdec.generate`).
    """

    def __init__(self, message: str):
        super().__init__(message)
        self.finished: list = []


class ContractViolation(SpecdecError):
    """A drafter broke its own declaration (`engine.check_contract=true`)."""


class CheckFailed(SpecdecError):
    """A check ran to its end and its verdict is no: exit status 1, not an error of the user."""


@contextmanager
def compiling() -> Iterator[None]:
    """What goes wrong in this block becomes an error of `engine.compile`; warnings are the compiler's own."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        reason = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
        remedy = f"torch.compile: {reason}; use engine.compile=off."
        raise OptionError("engine.compile", "on", remedy) from error
