"""Questions with answers (GSM8K and MMLU style), how they are asked, and how an answer is read off a text."""

from __future__ import annotations

import ast
import json
import operator
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import prompts
from specdec.errors import OptionError

BUILTIN = Path(__file__).parent / "data" / "questions.jsonl"
LETTERS = "ABCDEFGH"
LETTER = r"[A-H]\b"
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.USub: operator.neg,
}


@dataclass(frozen=True)
class Question:
    """One question.

    Arguments:
        answer: a number, or the letter of the right choice.
        check: the answer a second time, independently: a calculation, or the right choice's text.
        choices: what is offered; none where a number is asked for.
    """

    id: str
    subject: str
    question: str
    answer: str
    check: str
    choices: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether the reference agrees with its own check."""
        if self.choices:
            letters = LETTERS[: len(self.choices)]
            return self.answer in letters and self.choices[letters.index(self.answer)] == self.check
        return number(self.answer) == calculate(self.check)

    def asked(self, wording: str) -> str:
        """The prompt: `short` wants the answer only, `steps` a line of reasoning first."""
        options = "".join(f"\n{c}. {text}" for c, text in zip(LETTERS, self.choices, strict=False))
        what = "letter" if self.choices else "number"
        form = f'"Answer: " and the {what}'
        if wording == "short":
            return f"{self.question}{options}\n\nReply with {form}, nothing else."
        return f"{self.question}{options}\n\nThink step by step in one or two sentences. End with {form}."

    def strict(self, text: str) -> str | None:
        """What stands after the last "Answer:", as it was asked for; `None` if nothing does."""
        found = re.findall(rf"answer\s*:[^\w-]*({LETTER if self.choices else NUMBER})", text, re.I)
        return self._same_form(found[-1]) if found else None

    def lenient(self, text: str) -> str | None:
        """The last number, letter or choice's text, wherever it stands."""
        if not self.choices:
            found = re.findall(NUMBER, text)
            return self._same_form(found[-1]) if found else None
        places = {m.end(): m[1] for m in re.finditer(r"(?<![\w'])([A-H])(?=[.):,\s]|$)", text) if m[1] != "A"}
        places |= {m.end(): "A" for m in re.finditer(r"(?<![\w'])A(?=[.):]|\s*$)", text)}
        for letter, choice in zip(LETTERS, self.choices, strict=False):
            places |= {m.end(): letter for m in re.finditer(rf"\b{re.escape(choice)}(?!\w)", text, re.I)}
        return places[max(places)] if places else None

    def _same_form(self, found: str) -> str:
        return found.upper() if self.choices else f"{number(found):.15g}"

    def right(self, found: str | None) -> bool:
        """Exact match."""
        if found is None:
            return False
        return found == self.answer if self.choices else number(found) == number(self.answer)


def load(path: Path = BUILTIN) -> list[Question]:
    """The questions of a JSONL file.

    Raises:
        OptionError: a line that is no question (named).
    """
    if not path.is_file():
        raise OptionError("task.path", path, "there is no such file.")
    questions: dict[str, Question] = {}
    for place, line in prompts.lines(path, "task.path"):
        if line.strip():
            try:
                question = _question(json.loads(line))
            except (ValueError, TypeError, SyntaxError, ArithmeticError) as error:
                raise OptionError("task.path", place, f"is no question ({error}).") from error
            if question.id in questions:
                raise OptionError("task.path", place, f"the id {question.id} occurs twice.")
            questions[question.id] = question
    if not questions:
        raise OptionError("task.path", path, "holds no question.")
    return list(questions.values())


def _question(record: Any) -> Question:
    """From a line's JSON.

    Raises:
        ValueError, TypeError, SyntaxError, ArithmeticError: it is none.
    """
    if not isinstance(record, dict):
        raise ValueError("no JSON object")
    choices = record.pop("choices", ())
    if not (isinstance(choices, list | tuple) and all(isinstance(c, str) for c in choices)):
        raise ValueError("its choices are no list of texts")
    for name, value in record.items():
        if not isinstance(value, str):
            raise ValueError(f'{name} must be a text, e.g. "{name}": "{value}"')
    question = Question(**record, choices=tuple(choices))
    question.sound  # noqa: B018 - whether answer and check are numbers that can be read
    return question


def number(text: str) -> float:
    """`1,200` or `3.50` as a number."""
    return float(text.replace(",", ""))


def calculate(expression: str) -> float:
    """A calculation of numbers, + − * / // and parentheses.

    Raises:
        ValueError: it is something else.
    """

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.operand))
        raise ValueError(f"{expression!r} is no calculation")

    return value(ast.parse(expression, mode="eval").body)
