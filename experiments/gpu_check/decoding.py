"""Whole decodes with random weights: autoregressive speed, drafters' steps, speedup at given acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import drafters
from experiments.gpu_check.forwards import step_bytes, told
from specdec import verify
from specdec.config import Config
from specdec.drafter import Drafter
from specdec.engine import Engine
from specdec.ledger import Ledger
from specdec.model import Model
from specdec.speed_model import Acceptance, SpeedModel, Steps, Workload

FIRST_STEPS = 1  # pay for caches that are made then


def prompts(target: Model, batch: int, length: int) -> list[list[int]]:
    """Random tokens, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, target.vocab_size, (batch, length), generator=generator).tolist()


def engine(
    config: Config, target: Model, drafter: Drafter | None, rate: float, tokens: int, **changes: Any
) -> Engine:
    """An engine whose drafts are accepted with probability `rate` whatever they are."""
    name = {"name": "token"} if drafter is None else {"name": "synthetic", "rates": [rate]}
    options = replace(config.engine, max_new_tokens=tokens, ignore_eos=True, **changes)
    return Engine(target, drafter, verify.build(name), config.sampling, options, config.seed)


def decode(own: Engine, asked: list[list[int]], first: int = 0) -> Ledger:
    """The counts of one batch; `first`: identity of its first sequence in the random source."""
    own.ledger = Ledger()
    for _ in own.decode(asked, list(range(first, first + len(asked)))):
        pass
    return own.ledger


def seconds_of_step(ledger: Ledger) -> float:
    """Mean: steps differ, since the host reads the tokens only after some of them."""
    steps = ledger.step_seconds[FIRST_STEPS:] or ledger.step_seconds
    return float(np.mean([sum(step[3:]) for step in steps]))


def modes(device: torch.device) -> tuple[str, ...]:
    """The values of `engine.compile` that are compared on a device; drafts are timed in all but the last."""
    return ("off", "graphs", "on") if device.type == "cuda" else ("off", "on")


def autoregressive(
    config: Config, target: Model, batches: Sequence[int], length: int, tokens: int, bandwidth: float
) -> list[dict[str, Any]]:
    """Tokens per second and the share of the memory bandwidth that a step uses, per engine mode and batch.

    The last mode but one runs again with a wait in every step.
    """
    found: list[dict[str, Any]] = []
    every = modes(target.device)
    options = {f"compile={mode}": {"compile": mode} for mode in every}
    options[f"compile={every[-2]}, read_every=1"] = {"compile": every[-2], "read_every": 1}
    for mode, changes in options.items():
        try:
            own = engine(config, target, None, 0.0, tokens, **changes)
            for batch in batches:
                asked = prompts(target, batch, length)
                decode(own, asked)  # warm up
                step = seconds_of_step(decode(own, asked))
                read = step_bytes(target, batch, length + tokens / 2)
                found.append(
                    {"mode": mode, "batch": batch, "seconds_per_step": step}
                    | {"tokens_per_second": batch / step, "bytes_per_second": read / step}
                    | {"fraction": read / step / bandwidth}
                )
        except Exception as error:  # the other modes' times stay
            found.append({"mode": mode, "error": told(error)})
    return found


def drafter_steps(
    config: Config, target: Model, options: Sequence[Any], batches: Sequence[int], length: int, tokens: int
) -> list[dict[str, Any]]:
    """Median seconds of drafting, target and the rest of a step, per drafter, engine mode and batch."""
    found: list[dict[str, Any]] = []
    for each in options:
        drafter = drafters.build(each, target)
        for mode in modes(target.device)[:-1]:
            row = {"drafter": drafter.name, "mode": f"compile={mode}"}
            try:
                own = engine(config, target, drafter, 0.7, tokens, compile=mode)
                for batch in batches:
                    asked = prompts(target, batch, length)
                    decode(own, asked)
                    taken = decode(own, asked).step_seconds
                    steps = np.array(taken[FIRST_STEPS:] or taken)
                    full = steps[steps[:, 1] == steps[:, 1].max()]  # drafts not cut by the end of the room
                    draft, target_, rule, other = np.median(full[:, 3:], axis=0).tolist()
                    found.append(
                        row
                        | {"batch": batch, "nodes": int(full[0, 1]), "draft": draft}
                        | {"target": target_, "overhead": rule + other}
                    )
            except Exception as error:
                found.append(row | {"error": told(error)})
    return found


def synthetic(
    config: Config,
    target: Model,
    options: Any,
    rates: Sequence[float],
    length: int,
    tokens: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """Speedup at each acceptance rate, measured, and as the speed model predicts it.

    The costs come from the baseline and from the other rates' steps, the acceptance is the one prescribed.
    Every repeat decodes the baseline and all rates, the second time in the opposite order.
    """
    drafter = drafters.build(options, target)
    gamma, mode = drafter.max_nodes, modes(target.device)[-2]
    engines = {rate: engine(config, target, drafter, rate, tokens, compile=mode) for rate in rates}
    engines = {0.0: engine(config, target, None, 0.0, tokens, compile=mode)} | engines
    asked = prompts(target, 1, length)
    ledgers: dict[float, list[Ledger]] = {rate: [] for rate in engines}
    for own in engines.values():
        decode(own, asked)
    for repeat in range(repeats):
        for rate in list(engines)[:: 1 if repeat % 2 == 0 else -1]:
            ledgers[rate].append(decode(engines[rate], asked, first=repeat))
    load = workload(ledgers[0.0], [x for rate in rates for x in ledgers[rate]], tokens)
    base = speed(ledgers[0.0])
    found = []
    for rate in rates:
        others = [steps_of(ledgers[other], other > 0) for other in engines if other != rate]
        model = SpeedModel.fit(Steps.concatenate(others))
        predicted = model.predict(Acceptance.given([rate] * gamma), load).speedup
        measured = speed(ledgers[rate]) / base
        tau = Ledger.merge(ledgers[rate]).block_efficiency
        found.append(
            {"drafter": drafter.name, "rate": rate, "gamma": gamma, "block_efficiency": tau}
            | {"measured": measured, "predicted": predicted, "error": predicted / measured - 1}
        )
    return found


def steps_of(ledgers: Sequence[Ledger], drafting: bool) -> Steps:
    """The measured steps of some decodes."""
    return Steps.concatenate(Steps.from_rows(x.step_seconds[FIRST_STEPS:], None, drafting) for x in ledgers)


def speed(ledgers: Sequence[Ledger]) -> float:
    """Tokens per second, prefill included: sum over sum."""
    return sum(x.emitted for x in ledgers) / sum(sum(x.seconds.values()) for x in ledgers)


def workload(base: Sequence[Ledger], fast: Sequence[Ledger], tokens: int) -> Workload:
    """What the baseline decoded; what the drafter adds to reading the prompt."""
    prefill, drafted = (float(np.median([x.seconds["prefill"] for x in ledgers])) for ledgers in (base, fast))
    context = float(np.mean([step[2] for x in base for step in x.step_seconds]))
    return Workload(tokens, context, 1.0, prefill, max(drafted - prefill, 0.0))
