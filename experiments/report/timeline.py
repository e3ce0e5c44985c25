"""One decode, step by step: what was drafted, what was accepted, what the target added."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from experiments.report.stored import StoredRun
from specdec.config import suggest
from specdec.errors import OptionError

ACCEPTED, REJECTED, UNREACHED, BONUS, CORRECTION, PLAIN = (
    "accepted",
    "rejected",
    "unreached",
    "bonus",
    "correction",
    "plain",
)
MEANING = {
    ACCEPTED: "drafted and accepted",
    REJECTED: "drafted and rejected",
    UNREACHED: "drafted behind a rejection, never looked at",
    CORRECTION: "the target's correction",
    BONUS: "bonus token after a draft accepted whole",
    PLAIN: "no draft: a plain step of the target",
}


@dataclass
class Token:
    """A token and what became of it."""

    text: str
    fate: str


@dataclass
class Step:
    """One draft → verify → commit.

    Arguments:
        tokens: in reading order; drafted ones first, the target's own last.
        aside: of a tree, the drafted nodes off the accepted path.
        milliseconds: of the whole step; 0 where several sequences shared it.
    """

    number: int
    tokens: list[Token]
    aside: list[Token] = field(default_factory=list)
    milliseconds: float = 0.0


@dataclass
class Timeline:
    """One decode.

    Arguments:
        prompt, domain: which. label: of its run. first: the token that reading the prompt gave.
        block_efficiency: tokens per step of this decode.
    """

    prompt: str
    domain: str
    label: str
    first: str
    steps: list[Step]
    block_efficiency: float


def timeline(run: StoredRun, prompt: str | None = None) -> Timeline | None:
    """The decode of `prompt`, or the one whose block efficiency is nearest to the run's.

    Returns:
        `None` where the run kept no drafts.

    Raises:
        OptionError: there is no such prompt.
    """
    known = dict.fromkeys(r["prompt"] for r in run.records)
    if prompt is not None and prompt not in known:
        raise OptionError("task.sample", prompt, f"no such prompt; {suggest(prompt, known)}")
    traced = [r for r in run.records if r.get("drafts") and (prompt is None or r["prompt"] == prompt)]
    if not traced:
        return None
    typical = run.overall["block_efficiency"]["value"]
    record = min(traced, key=lambda r: abs(_efficiency(r) - typical))
    return Timeline(
        prompt=record["prompt"],
        domain=record["domain"],
        label=run.label,
        first=visible(run.pieces, record["tokens"][0]),
        steps=steps(record, run.pieces),
        block_efficiency=_efficiency(record),
    )


def steps(record: dict[str, Any], pieces: dict[str, str]) -> list[Step]:
    """The steps of one stored sample."""
    columns, found, at = record["steps"], [], 1
    alone = len(record["step_seconds"]) == len(record["drafts"])
    for i, (tokens, parents, path) in enumerate(record["drafts"]):
        accepted, emitted = columns["accepted"][i], columns["emitted"][i]
        text = [visible(pieces, t) for t in tokens]
        shown = [Token(text[node], ACCEPTED) for node in path[:accepted]]
        aside: list[Token] = []
        if parents is None:
            behind = text[accepted:] if emitted > accepted else []
            shown += [Token(t, UNREACHED if j else REJECTED) for j, t in enumerate(behind)]
        else:
            on_path = set(path[:accepted])
            aside = [Token(t, REJECTED) for node, t in enumerate(text) if node not in on_path]
        if emitted > accepted:
            fate = PLAIN if not tokens else BONUS if columns["bonus"][i] else CORRECTION
            shown.append(Token(visible(pieces, record["tokens"][at + emitted - 1]), fate))
        milliseconds = 1000 * sum(record["step_seconds"][i][3:]) if alone else 0.0
        found.append(Step(i + 1, shown, aside, milliseconds))
        at += emitted
    return found


def visible(pieces: dict[str, str], token: int) -> str:
    """A token's text with its line breaks and outer blanks shown."""
    text = pieces.get(str(token), f"<{token}>")
    text = text.replace("\n", "⏎").replace("\t", "⇥")
    text = "".join(chr(0x2400 + ord(c)) if ord(c) < 0x20 else c for c in text)  # ␀ … ␟
    inner = text.strip(" ")
    left = len(text) - len(text.lstrip(" "))
    return "·" * left + inner + "·" * (len(text) - len(inner) - left) if inner else "·" * len(text) or "∅"


def _efficiency(record: dict[str, Any]) -> float:
    emitted = record["steps"]["emitted"]
    return sum(emitted) / len(emitted) if emitted else 0.0
