"""What was to be reached, what was, and whether the interval leaves any doubt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from experiments.intervals import Interval


@dataclass(frozen=True)
class Goal:
    """One goal and what was measured.

    Arguments:
        label: what is compared.
        measured: value with its interval, if it has one.
        wanted: the goal; `at_most` says that less is better.
        unit: appended to numbers, e.g. " ×".
    """

    label: str
    measured: Interval
    wanted: float
    at_most: bool = False
    unit: str = " ×"

    @property
    def reached(self) -> bool:
        """Whether the value, taken as it is, meets the goal."""
        value = self.measured["value"]
        return value is not None and (value <= self.wanted if self.at_most else value >= self.wanted)

    @property
    def certain(self) -> bool:
        """Whether the whole interval lies on the value's side of the goal."""
        low, high = self.measured.get("low"), self.measured.get("high")
        if low is None or high is None:
            return False
        return high <= self.wanted if self.at_most == self.reached else low >= self.wanted

    @property
    def verdict(self) -> str:
        """`reached` or `not reached`; "?" where the interval holds the goal as well."""
        word = "reached" if self.reached else "not reached"
        return word if self.certain or self.measured.get("low") is None else f"{word}?"

    @property
    def plain(self) -> dict[str, Any]:
        """For the summary."""
        numbers = {"goal": self.wanted, "at_most": self.at_most, **self.measured}
        return {"label": self.label, **numbers, "reached": self.reached, "verdict": self.verdict}

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """For a table: label, measured, goal, verdict."""
        m = self.measured
        value = "–" if m["value"] is None else f"{m['value']:.2f}{self.unit}"
        if m.get("low") is not None:
            value += f" [{m['low']:.2f}, {m['high']:.2f}]"
        return self.label, value, f"{'≤' if self.at_most else '≥'} {self.wanted:g}{self.unit}", self.verdict


def point(value: float | None) -> Interval:
    """A number without an interval."""
    return {"value": value, "low": None, "high": None}
