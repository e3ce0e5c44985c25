"""What is certified, a pairing of drafter and rule; how much is done for it; the engine that does it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.config import EngineConfig
from specdec.drafter import Drafter
from specdec.engine import Engine
from specdec.exactness.scenarios import MAIN, Scenario
from specdec.model import Model
from specdec.rng import RandomSource
from specdec.verify import Rule


@dataclass(frozen=True)
class Pairing:
    """What is certified.

    Arguments:
        drafter: how reports call it.
        rule: the verification rule.
        drafter_for: builds the drafter for a target of any small vocabulary.
    """

    drafter: str
    rule: Rule
    drafter_for: Callable[[Model], Drafter]


@dataclass(frozen=True)
class Plan:
    """How much is done for one pairing.

    Arguments:
        sequences: N of the main scenario.
        seed: of everything.
        main: the main scenario. side: names of further scenarios, at their share of N.
        one_by_one: sequences that are decoded once more at batch size 1.
        batch_size: sequences decoded together otherwise.
        engine: all other engine options.
    """

    sequences: int
    seed: int
    main: Scenario = MAIN
    side: tuple[str, ...] = ()
    one_by_one: int = 200
    batch_size: int = 4096
    engine: EngineConfig = field(default_factory=EngineConfig)


def seed_of(*names: object) -> int:
    """A seed of its own for whatever these names say (64 bits)."""
    return int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest())


def engine_for(
    pairing: Pairing,
    target: Model,
    scenario: Scenario,
    plan: Plan,
    source: RandomSource | int,
    drafter: Drafter | None = None,
    **options: Any,
) -> Engine:
    """The engine that certifies: the pairing's own drafter unless another is given."""
    options = {"max_new_tokens": scenario.tokens, "batch_size": plan.batch_size, "stop": [], **options}
    drafter = drafter or pairing.drafter_for(target)
    return Engine(target, drafter, pairing.rule, scenario.sampling, replace(plan.engine, **options), source)
