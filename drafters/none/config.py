"""Options of `drafter=none`."""

from dataclasses import dataclass


@dataclass
class Config:
    name: str = "none"
