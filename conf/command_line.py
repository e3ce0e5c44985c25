"""What surrounds Hydra: options before it reads them, and errors as one line with an exit status."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from conf.resume import resumed
from specdec.config import explain, suggest
from specdec.errors import CheckFailed, OptionError, SpecdecError

GROUPS = ("task", "target", "drafter", "verify", "sampling", "prompts", "engine", "experiment")
DONE, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130

_statuses: list[int] = []  # of this process's jobs: a sweep has several


def command_line(main: Callable[[], None]) -> int:
    """Run Hydra's `main` with this process's arguments.

    Returns:
        the exit status: 0 done, 1 a check failed, 2 an error the user can act on, 130 interrupted.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra shall let exceptions through, `reporting` tells them
    _statuses[:] = [DONE]
    try:
        with reporting():
            sys.argv[1:] = resumed(without_plus(sys.argv[1:]))
            refuse_no_choice(sys.argv[1:])
            main()
    except KeyboardInterrupt:
        print("\ninterrupted; the same command with resume=true goes on", file=sys.stderr)
        return INTERRUPTED
    return max(_statuses)


@contextmanager
def reporting() -> Iterator[None]:
    """Tell errors the user can act on in one line and note the exit status; a sweep's next job runs."""
    try:
        yield
    except (SpecdecError, HydraException, OmegaConfBaseException) as error:
        if os.environ.get("SPECDEC_DEBUG") == "1":
            raise
        print(f"error: {tell(error)}", file=sys.stderr)
        note(FAILED if isinstance(error, CheckFailed) else USER_ERROR)


def note(status: int) -> None:
    """Remember how a job of this process's command ended."""
    _statuses.append(status)


def without_plus(arguments: list[str]) -> list[str]:
    """`+x=1` as `x=1`: every option exists already, so that adding one would only bypass the schema."""
    return [re.sub(r"^\+{1,2}(?!hydra\b)", "", argument) for argument in arguments]


def refuse_no_choice(arguments: list[str]) -> None:
    """`~drafter`, `drafter=null`, `engine=3`: a group without a choice, told here in our terms.

    Raises:
        OptionError: for the first such argument.
    """
    for argument in arguments:
        group, _, choice = argument.removeprefix("~").partition("=")
        if group not in GROUPS or group == argument:
            continue
        value = OverridesParser.create().parse_override(argument).value()
        if argument.startswith("~") or value is None or isinstance(value, int | float):
            remedy = "must be the name of a choice; `python run.py --help` lists them."
            raise OptionError(group, choice or "null", remedy)


def tell(error: Exception) -> str:
    """An error in one line: option, value, and the remedy or the choices."""
    return " ".join(str(_in_our_terms(error)).split())


def _in_our_terms(error: Exception) -> Exception | str:
    if isinstance(error, SpecdecError):
        return error
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        remedy = f"there is no such {group}; {suggest(choice, sorted(error.options or ()))}"
        return OptionError(group, choice, remedy) if group else error
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not understood; write name=value, lists [a,b], text with signs 'a, b'."
    if isinstance(error, OmegaConfBaseException):
        return explain(error)
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        written = re.search(r"(?:use \+|merging override )[^=\s]+=(.*)", str(error))
        return _misplaced(cause) or explain(cause, value=written[1] if written else None)
    return error


def _misplaced(error: OmegaConfBaseException) -> str | None:
    """`gamma=4` where `drafter.gamma=4` is meant."""
    root, key = error.parent_node, error.key
    unknown = isinstance(error, ConfigKeyError | ConfigAttributeError)
    if not unknown or error.full_key != key or not isinstance(root, DictConfig):
        return None
    nodes = {group: root.get(group) for group in GROUPS}
    homes = [f"{g}.{key}" for g, node in nodes.items() if isinstance(node, DictConfig) and key in node]
    return f"{key}: no such option; did you mean {' or '.join(homes)}?" if homes else None
