"""The Python interface: load a target, generate with a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec import verify as rules
from specdec.batch import Generation, TokenCallback
from specdec.config import EngineConfig, TargetConfig
from specdec.drafter import Drafter
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.ledger import Ledger
from specdec.model import Model
from specdec.sampling import Sampling
from specdec.verify import Rule

EMBEDDED = "smollm2-135m"


@dataclass
class Result:
    """What `generate` gives: the sequences in the order of the prompts, and the counts behind them."""

    sequences: list[Generation]
    ledger: Ledger

    @property
    def texts(self) -> list[str | None]:
        return [s.text for s in self.sequences]

    @property
    def tokens(self) -> list[list[int]]:
        return [s.tokens for s in self.sequences]


def load_target(source: str | TargetConfig = EMBEDDED, **options) -> Model:
    """Load a target.

    Arguments:
        source: `"smollm2-135m"` (the embedded model), a checkpoint folder, a hub id, or a whole
            `TargetConfig`.
        options: fields of `TargetConfig`, e.g. `dtype="float32"`, `device="cuda"`.
    """
    if isinstance(source, TargetConfig):
        return Model.load(replace(source, **options))
    if source == EMBEDDED:
        return Model.load(TargetConfig(name=source, source="embedded", **options))
    return Model.load(TargetConfig(name=source, source="hf", path=source, **options))


def generate(
    target: Model,
    drafter: Drafter | None,
    prompts: str | Sequence[str | list[int]],
    *,
    sampling: Sampling | None = None,
    verify: str | Rule | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 1,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    on_tokens: TokenCallback | None = None,
) -> Result:
    """Generate speculatively; with `drafter=None`, autoregressively.

    Arguments:
        target: from `load_target`.
        drafter: e.g. from `drafters.build({"name": "ngram"}, target)`.
        prompts: texts, or token ids.
        sampling: the law to sample from; greedy by default.
        verify: a rule or its name, by default `token` for chains and `recursive` for trees. Every exact rule
            leaves the target's law unchanged.
        max_new_tokens, batch_size, stop: as in `EngineConfig`.
        seed: the random source's; sequence i always sees the same random numbers, whoever shares its batch.
        on_tokens: called with (sequence, new token ids) as tokens are committed.

    Returns:
        Token ids, text and finish reason per prompt, and the ledger.

    Raises:
        OptionError: an impossible option, an empty or too long prompt, a biased pairing of drafter and rule.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if any(isinstance(t, int) for t in texts):
        raise OptionError("prompts", prompts, "is one prompt's token ids; write [[…]].")
    stop = [stop] if isinstance(stop, str) else list(stop)
    ids = [target.encode([t])[0] if isinstance(t, str) else t for t in texts]
    if verify is None:
        verify = "token" if drafter is None or drafter.is_chain else "recursive"
    rule = rules.build({"name": verify}) if isinstance(verify, str) else verify
    config = EngineConfig(max_new_tokens=max_new_tokens, batch_size=batch_size, stop=stop)
    engine = Engine(target, drafter, rule, sampling, config, seed, on_tokens)
    return Result(engine.generate(ids), engine.ledger)
