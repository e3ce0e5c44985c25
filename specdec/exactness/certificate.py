"""The certificate of one pairing of drafter and rule: proved by enumeration, tested through the real engine.

A tiny target whose whole law is known (`bench`) is decoded a hundred thousand times by the shipping engine,
and the joint law of all tokens is compared with what it should be. Knows no drafter by name.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.engine import Engine
from specdec.errors import ContractViolation
from specdec.exactness import goodness
from specdec.exactness.bench import Bench
from specdec.exactness.engine_law import (
    Outcome,
    TooManyBranches,
    WrapSource,
    accepted_law,
    composed_law,
    first_block,
    first_rows,
    output_law,
)
from specdec.exactness.enumeration import EnumerationError
from specdec.exactness.goodness import Fit
from specdec.exactness.pairing import Pairing, Plan, engine_for, seed_of
from specdec.exactness.scenarios import CONTRACT, GREEDY, MAIN, SCENARIOS, Scenario
from specdec.ledger import Ledger
from specdec.rng import RandomSource

PROOF_VOCABULARY, PROOF_TOLERANCE = 3, 1e-12
LEAST_IN_CONTEXT = 100  # observations that a conditional test needs
CONTROL_POWER = 0.999
REMEMBERED = 4096  # sequences whose tokens are kept for comparisons


@dataclass
class Sample:
    """What the engine emitted.

    Arguments:
        outcomes: counts of all new tokens, per prompt. accepted: of the accepted length of the first block.
        remembered: the tokens of the first sequences, in the order of their ids.
    """

    outcomes: list[Counter]
    accepted: Counter = field(default_factory=Counter)
    remembered: list[list[int]] = field(default_factory=list)


def certify(
    pairing: Pairing, bench: Bench, plan: Plan, report: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Everything that is known about one pairing, as one record.

    Arguments:
        report: told what is being done.

    Returns:
        `checks` (what, passed, detail): must hold with certainty. `tests` (what, scenario, n, df, chi2, …):
        enter the family of tests. `law`: counts and probability of every outcome of the main scenario.
    """
    started = time.perf_counter()
    record: dict[str, Any] = {
        "drafter": pairing.drafter,
        "rule": pairing.rule.name,
        "exact": pairing.rule.exact,
    }
    if not pairing.rule.exact:
        return record | _distance(pairing, bench, plan) | {"seconds": time.perf_counter() - started}
    report("proof by enumeration")
    checks = [_proof(pairing, bench)]
    try:
        report(plan.main.name)
        tests, law, check = _main(pairing, bench, plan)
        checks += check
        for name in plan.side:
            report(name)
            tests += run_scenario(pairing, bench, plan, SCENARIOS[name])
        report("greedy, contract")
        checks += [_greedy(pairing, bench, plan), _contract(pairing, bench, plan)]
    except ContractViolation as violation:
        tests, law = [], {}
        checks.append({"what": "contract of the drafter", "passed": False, "detail": str(violation)})
    record |= {"seed": plan.seed, "tests": tests, "checks": checks, "law": law}
    return record | {"seconds": time.perf_counter() - started}


def run_scenario(
    pairing: Pairing, bench: Bench, plan: Plan, scenario: Scenario, factor: int = 1, salt: object = ""
) -> list[dict[str, Any]]:
    """Sample one scenario and test it.

    Arguments:
        factor: times the planned number of sequences. salt: anything that shall give other random numbers.

    Returns:
        `joint` over all tokens, `after token t` for each first token t; of the main one `accepted length`.
    """
    count = round(plan.sequences * scenario.share) * factor
    sample = draw(pairing, bench, plan, scenario, count, salt)
    accepted = _accepted(pairing, bench, plan) if scenario == plan.main else None
    return judge(sample, bench.laws(scenario), scenario.name, accepted)


def draw(
    pairing: Pairing, bench: Bench, plan: Plan, scenario: Scenario, count: int, salt: object = ""
) -> Sample:
    """Decode `count` sequences through the engine."""
    target = bench.target(scenario.eos)
    prompts = scenario.prompts_for(target.vocab_size)
    seed = seed_of(plan.seed, pairing.drafter, pairing.rule.name, scenario.name, salt)
    engine = engine_for(pairing, target, scenario, plan, seed)
    sample = Sample([Counter() for _ in prompts])
    for start in range(0, count, plan.batch_size):
        ids = range(start, min(start + plan.batch_size, count))
        engine.ledger = Ledger()
        with _no_collection():
            generations = list(engine.decode([prompts[i % len(prompts)] for i in ids], list(ids)))
        for generation in generations:
            sample.outcomes[generation.sequence % len(prompts)][tuple(generation.tokens)] += 1
            if generation.sequence < REMEMBERED:
                sample.remembered += [[]] * (generation.sequence + 1 - len(sample.remembered))
                sample.remembered[generation.sequence] = generation.tokens
        first = first_rows(engine)
        sample.accepted.update(accepted for accepted, _ in first.values())
        sample.accepted[-1] += len(ids) - len(first)
    return sample


def judge(
    sample: Sample,
    laws: Sequence[Mapping[Outcome, float]],
    scenario: str,
    accepted: Mapping[int, float] | None = None,
) -> list[dict[str, Any]]:
    """The tests of a sample against its exact laws, one per prompt, and that of the accepted length."""
    fits = [goodness.fit(c, law) for c, law in zip(sample.outcomes, laws, strict=True)]
    whole = Fit.sum(fits) if len(fits) > 1 else fits[0]
    tests = [entry("joint", scenario, whole)]
    for number, (counts, law) in enumerate(zip(sample.outcomes, laws, strict=True)):
        at = f" of prompt {number}" if len(laws) > 1 else ""
        for first in sorted({outcome[0] for outcome in law}):
            mass = sum(w for outcome, w in law.items() if outcome[0] == first)
            given = {outcome: w / mass for outcome, w in law.items() if outcome[0] == first}
            seen = {outcome: n for outcome, n in counts.items() if outcome and outcome[0] == first}
            if sum(seen.values()) >= LEAST_IN_CONTEXT and len(given) > 1:
                tests.append(entry(f"after token {first}{at}", scenario, goodness.fit(seen, given)))
    if accepted is not None:
        tests.append(entry("accepted length", scenario, goodness.fit(sample.accepted, accepted)))
    return tests


def entry(what: str, scenario: str, fit: Fit) -> dict[str, Any]:
    """A test as it stands in the record."""
    impossible = [[outcome, n] for outcome, n in fit.impossible.items()]
    values = {k: getattr(fit, k) for k in ("cells", "pooled", "df", "chi2", "p", "g", "g_p")}
    return {"what": what, "scenario": scenario, "n": fit.observations, **values, "impossible": impossible}


def control(
    name: str,
    pairing: Pairing,
    bench: Bench,
    plan: Plan,
    alpha: float,
    wrap: WrapSource = lambda source: source,
) -> dict[str, Any]:
    """A negative control: a wrong pairing that the certificate must reject, with the computed power to do so.

    Arguments:
        plan: as many sequences at most; fewer if fewer reject with certainty (power ≥ .999).
        alpha: level of the test.
        wrap: what stands between engine and enumeration when the wrong law is computed.
    """
    started = time.perf_counter()
    scenario, (exact, *_) = plan.main, bench.laws(plan.main)
    target = bench.target(scenario.eos)
    drafter = pairing.drafter_for(target)

    def make(source: RandomSource, tokens: int) -> Engine:
        return engine_for(
            pairing, target, scenario, plan, source, drafter, max_new_tokens=tokens, batch_size=1 << 20
        )

    prompt, *_ = scenario.prompts_for(target.vocab_size)
    wrong = composed_law(make, prompt, scenario.tokens, scenario.eos, wrap)
    for count in sorted({min(n, plan.sequences) for n in (2_000, 10_000, 20_000, 40_000, plan.sequences)}):
        power = goodness.power_against(wrong, exact, count, alpha)
        if power >= CONTROL_POWER:
            break
    fit = goodness.fit(draw(pairing, bench, plan, scenario, count).outcomes[0], exact)
    return {
        "control": name,
        "tv": goodness.total_variation(wrong, exact),
        "n": count,
        "power": power,
        "p": fit.p,
        "rejected": fit.p < alpha,
        "seconds": time.perf_counter() - started,
    }


def _main(pairing: Pairing, bench: Bench, plan: Plan) -> tuple[list[dict], dict[str, Any], list[dict]]:
    """The main scenario at full N: its tests, its counts for the plot, and exact comparisons on the way."""
    scenario, (exact, *_) = plan.main, bench.laws(plan.main)
    sample = draw(pairing, bench, plan, scenario, plan.sequences)
    accepted = _accepted(pairing, bench, plan)
    tests = judge(sample, [exact], scenario.name, accepted)
    counts = sample.outcomes[0]
    law = {
        "tokens": [list(o) for o in exact],
        "probability": list(exact.values()),
        "observed": [counts.get(o, 0) for o in exact],
        "accepted": {"observed": dict(sample.accepted), "probability": accepted},
    }
    checks = [_one_by_one(pairing, bench, plan, sample)]
    if pairing.rule.coupled:
        checks.append(_drafter_invariant(pairing, bench, plan, sample))
    return tests, law, checks


def _proof(pairing: Pairing, bench: Bench) -> dict[str, Any]:
    """The whole engine enumerated: every branch of prefill, draft, verification, roll-back and stop."""
    what = "proof by enumeration through the engine"
    if pairing.rule.coupled:
        return {"what": what, "passed": None, "detail": "noise is continuous; proved by bit-identity instead"}
    vocab = min(PROOF_VOCABULARY, bench.config.vocab_size)
    target, (exact, *_) = bench.target(vocab=vocab), bench.laws(MAIN, vocab)
    plan = Plan(0, 0, batch_size=1 << 20)
    drafter = pairing.drafter_for(target)

    def make(source: RandomSource, tokens: int) -> Engine:
        return engine_for(pairing, target, MAIN, plan, source, drafter, max_new_tokens=tokens)

    try:
        law = output_law(make, MAIN.prompts_for(vocab)[0], MAIN.tokens)
    except TooManyBranches as error:
        return {"what": what, "passed": None, "detail": f"{error}: only sampled"}
    except EnumerationError as error:
        return {"what": what, "passed": False, "detail": str(error)}
    worst = max(abs(law.get(o, 0.0) - exact.get(o, 0.0)) for o in law.keys() | exact.keys())
    detail = f"V={vocab}, {MAIN.tokens} tokens, max |output - target| = {worst:.1e}"
    return {"what": what, "passed": worst <= PROOF_TOLERANCE, "detail": detail, "error": worst}


def _accepted(pairing: Pairing, bench: Bench, plan: Plan) -> dict[int, float] | None:
    """The exact law of the first block's accepted length, `None` where it cannot be enumerated."""
    if pairing.rule.coupled:
        return None
    target = bench.target(plan.main.eos)
    drafter = pairing.drafter_for(target)

    def make(source: RandomSource, tokens: int) -> Engine:
        return engine_for(
            pairing, target, plan.main, plan, source, drafter, max_new_tokens=tokens, batch_size=1 << 20
        )

    try:
        prompt, *_ = plan.main.prompts_for(target.vocab_size)
        return accepted_law(first_block(make, prompt, plan.main.tokens))
    except (TooManyBranches, EnumerationError):
        return None


def _one_by_one(pairing: Pairing, bench: Bench, plan: Plan, sample: Sample) -> dict[str, Any]:
    """Each sequence's tokens depend on its id and seed alone, not on who shares its batch."""
    target, scenario = bench.target(plan.main.eos), plan.main
    seed = seed_of(plan.seed, pairing.drafter, pairing.rule.name, scenario.name, "")
    count = min(plan.one_by_one, len(sample.remembered))
    engine = engine_for(pairing, target, scenario, plan, seed, batch_size=1)
    prompt, *_ = scenario.prompts_for(target.vocab_size)
    alone = [g.tokens for g in engine.generate([prompt] * count)]
    return _equal(
        f"batch sizes 1 and {plan.batch_size} give the same sequences", alone, sample.remembered[:count]
    )


def _drafter_invariant(pairing: Pairing, bench: Bench, plan: Plan, sample: Sample) -> dict[str, Any]:
    """A coupled rule emits the same tokens whatever the drafter: the same as without one."""
    target, scenario = bench.target(plan.main.eos), plan.main
    seed = seed_of(plan.seed, pairing.drafter, pairing.rule.name, scenario.name, "")
    config = replace(plan.engine, max_new_tokens=scenario.tokens, batch_size=plan.batch_size, stop=[])
    engine = Engine(target, None, pairing.rule, scenario.sampling, config, seed)
    prompt, *_ = scenario.prompts_for(target.vocab_size)
    plain = [g.tokens for g in engine.generate([prompt] * len(sample.remembered))]
    return _equal("the same seed gives the same tokens without a drafter", plain, sample.remembered)


def _greedy(pairing: Pairing, bench: Bench, plan: Plan) -> dict[str, Any]:
    """At temperature 0 the output is the path of the argmax, token for token."""
    target = bench.target(GREEDY.eos)
    expected = [list(outcome) for law in bench.laws(GREEDY) for outcome in law]
    engine = engine_for(pairing, target, GREEDY, plan, 0)
    found = [g.tokens for g in engine.generate(GREEDY.prompts_for(target.vocab_size))]
    return _equal("greedy output is the path of the argmax", expected, found)


def _contract(pairing: Pairing, bench: Bench, plan: Plan) -> dict[str, Any]:
    """The drafter keeps its promises, with penalties that make its law depend on the prefix."""
    target = bench.target(CONTRACT.eos)
    engine = engine_for(pairing, target, CONTRACT, plan, seed_of(plan.seed, "contract"), check_contract=True)
    engine.generate(CONTRACT.prompts_for(target.vocab_size) * 64)
    steps = len(engine.ledger.step_seconds)
    return {
        "what": "contract of the drafter",
        "passed": True,
        "detail": f"{steps} steps redrawn and compared",
    }


def _distance(pairing: Pairing, bench: Bench, plan: Plan) -> dict[str, Any]:
    """How far a lossy rule is from the target's law, measured."""
    exact, *_ = bench.laws(plan.main)
    count = max(1, plan.sequences // 5)
    counts = draw(pairing, bench, plan, plan.main, count).outcomes[0]
    measured = {outcome: n / count for outcome, n in counts.items()}
    fit = goodness.fit(counts, exact)
    return {
        "seed": plan.seed,
        "n": count,
        "tv": goodness.total_variation(measured, exact),
        "tv_of_noise": goodness.tv_of_noise(exact, count),
        "kl": goodness.kl_divergence(measured, exact),
        "tests": [entry("joint", plan.main.name, fit)],
    }


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing of so many small objects is garbage yet; looking for it would take a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _equal(what: str, expected: list[list[int]], found: list[list[int]]) -> dict[str, Any]:
    wrong = next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), None)
    detail = f"{len(expected)} sequences equal"
    if wrong is not None:
        detail = f"sequence {wrong}: {expected[wrong]} expected, {found[wrong]} found"
    return {"what": what, "passed": wrong is None, "detail": detail}
