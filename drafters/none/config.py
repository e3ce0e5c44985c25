"""Options of `drafter=none`."""

from dataclasses import dataclass


@dataclass
class Config:
    name: str = "none"

    def proposes(self) -> tuple[str, bool | None]:
        return "deterministic", True
