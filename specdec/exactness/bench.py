"""Targets small enough to write down everything they can say, with their exact laws."""

from __future__ import annotations

from dataclasses import replace

from specdec.config import TargetConfig
from specdec.errors import OptionError
from specdec.exactness.engine_law import Outcome
from specdec.exactness.reference import Reference
from specdec.exactness.scenarios import Scenario
from specdec.model import Model

MOST_VOCABULARY = 8


class Bench:
    """The tiny target, as it is, with end-of-sequence tokens and with other vocabularies, and their laws.

    Raises:
        OptionError: the vocabulary is too large to enumerate.
    """

    def __init__(self, config: TargetConfig):
        if config.source != "tiny" or config.vocab_size > MOST_VOCABULARY:
            remedy = f"is too large to enumerate; target=enumerable has ≤ {MOST_VOCABULARY}."
            raise OptionError("target.vocab_size", config.vocab_size, remedy)
        self.config = config
        self._targets: dict[tuple[int, tuple[int, ...]], Model] = {}
        self._references: dict[tuple[int, tuple[int, ...]], Reference] = {}

    def target(self, eos: tuple[int, ...] = (), vocab: int | None = None) -> Model:
        vocab = vocab or self.config.vocab_size
        key = (vocab, tuple(token % vocab for token in eos))
        if key not in self._targets:
            self._targets[key] = Model.load(replace(self.config, vocab_size=vocab))
            self._targets[key].eos_token_ids = key[1]
            self._references[key] = Reference(self._targets[key])
        return self._targets[key]

    def laws(self, scenario: Scenario, vocab: int | None = None) -> list[dict[Outcome, float]]:
        """The exact law of the new tokens, for each of the scenario's prompts."""
        target = self.target(scenario.eos, vocab)
        reference = self._references[target.vocab_size, target.eos_token_ids]
        prompts = scenario.prompts_for(target.vocab_size)
        return [reference.joint(prompt, scenario.sampling, scenario.tokens) for prompt in prompts]
