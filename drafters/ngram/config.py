"""Options of `drafter=ngram`."""

from dataclasses import dataclass

from specdec.errors import OptionError


@dataclass
class Config:
    name: str = "ngram"
    gamma: int = 8  # tokens copied at most
    max_ngram: int = 3  # longest match looked for
    min_ngram: int = 1  # shortest match accepted

    def proposes(self) -> tuple[str, bool | None]:
        return "deterministic", True

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise OptionError("drafter.gamma", self.gamma, "must be ≥ 1; use drafter=none for no draft.")
        if self.min_ngram < 1:
            raise OptionError("drafter.min_ngram", self.min_ngram, "must be ≥ 1.")
        if self.max_ngram < self.min_ngram:
            raise OptionError(
                "drafter.max_ngram", self.max_ngram, f"must be ≥ drafter.min_ngram={self.min_ngram}."
            )
