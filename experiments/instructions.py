"""Instructions of every domain from templates; none shares eight words in a row with the evaluation's.

A template names slots in braces, as in `str.format`: `{city}` is any line of the list `city`, `{City}` the
same with a capital, `{city1}` one city wherever it stands in a prompt, `{number:2-99}` a whole number.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import yaml

from experiments.prompts import DOMAINS, Prompt

TEMPLATES = Path(__file__).parent / "data" / "templates"
SHARED = ("words", "passages")
OVERLAP = 8  # so many words in a row in common make two prompts overlap


class Grammar:
    """One domain's templates and all the lists they refer to.

    Arguments:
        domain: names the file of its templates.
        written: texts for the slot `{written}`, taken as they are; without them it is a news item.
    """

    def __init__(self, domain: str, written: Sequence[str] = ()):
        lists: dict[str, list[str]] = {}
        for name in (*SHARED, domain):
            lists |= _lists(name)
        self.domain, self.written, self.lists = domain, written, lists

    def prompt(self, rng: random.Random) -> str:
        """A random prompt."""
        text = self._fill(rng.choice(self.lists["prompts"]), rng, {})
        return text.strip()  # an optional slot at the end may be empty

    def _fill(self, template: str, rng: random.Random, bound: dict[str, str]) -> str:
        """`template` with its slots filled, those of `bound` as before."""
        parts = []
        for literal, slot, spec, _ in string.Formatter().parse(template):
            parts.append(literal)
            if slot == "number":
                low, high = map(int, (spec or "").split("-"))
                parts.append(str(rng.randint(low, high)))
            elif slot is not None:
                parts.append(self._slot(slot, rng, bound))
        return "".join(parts)

    def _slot(self, slot: str, rng: random.Random, bound: dict[str, str]) -> str:
        if slot in bound:
            return bound[slot]
        if slot == "written":
            return rng.choice(self.written) if self.written else self._slot("news", rng, bound)
        name = slot.rstrip("0123456789")
        capital = name not in self.lists
        choices = self.lists[name.lower() if capital else name]
        siblings = {value for key, value in bound.items() if key.rstrip("0123456789") == name}
        for _ in range(20):  # {person1} and {person2} are two people
            value = self._fill(rng.choice(choices), rng, bound)
            value = value[:1].upper() + value[1:] if capital else value
            if name == slot or value not in siblings:
                break
        if name != slot:
            bound[slot] = value
        return value


class Overlap:
    """Which texts share `OVERLAP` words in a row with given ones."""

    def __init__(self, texts: Sequence[str], size: int = OVERLAP):
        self.size = size
        self.grams = {gram for text in texts for gram in self._grams(text)}

    def __call__(self, text: str) -> bool:
        return any(gram in self.grams for gram in self._grams(text))

    def _grams(self, text: str) -> Iterator[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return (tuple(words[i : i + self.size]) for i in range(len(words) - self.size + 1))


def instructions(
    rng: random.Random,
    forbidden: Overlap,
    written: Sequence[str] = (),
    weights: Mapping[str, float] | None = None,
) -> Iterator[Prompt]:
    """Endlessly many prompts of all domains, none overlapping with `forbidden` (repetitions are possible).

    Arguments:
        rng: decides everything.
        forbidden: the evaluation's prompts.
        written: texts for the slot `{written}`.
        weights: how often each domain is asked; equally often by default.
    """
    grammars = {domain: Grammar(domain, written) for domain in DOMAINS}
    shares = [(weights or {}).get(domain, 1.0) for domain in DOMAINS]
    number = 0
    while True:
        domain = rng.choices(DOMAINS, shares)[0]
        text = grammars[domain].prompt(rng)
        if not forbidden(text):
            number += 1
            yield Prompt(f"{domain}-{number}", domain, text)


@cache
def _lists(name: str) -> dict[str, list[str]]:
    content = yaml.load((TEMPLATES / f"{name}.yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return {slot: [str(line) for line in lines] for slot, lines in content.items()}
