"""Under which circumstances a pairing of drafter and rule is certified."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.sampling import Sampling

TOKENS = 4  # the first token comes from the prefill, three more are a block of γ = 2 and what follows it
PROMPT = (0, 1, 2)
RAGGED = ((2,), (0, 3), PROMPT, (4, 1, 4, 1, 0, 2))
EOS = 4


@dataclass(frozen=True)
class Scenario:
    """One law to sample from.

    Arguments:
        name: as in the report.
        sampling: temperature, truncation, penalties.
        prompts: token ids (modulo the vocabulary), given to the sequences in turn.
        tokens: max_new_tokens; everything that is emitted is one outcome.
        eos: end-of-sequence tokens.
        share: of the main scenario's sequences.
    """

    name: str
    sampling: Sampling
    prompts: tuple[tuple[int, ...], ...] = (PROMPT,)
    tokens: int = TOKENS
    eos: tuple[int, ...] = ()
    share: float = 0.2

    def prompts_for(self, vocab: int) -> list[list[int]]:
        return [[token % vocab for token in prompt] for prompt in self.prompts]


_T1 = Sampling(temperature=1.0)

MAIN = Scenario("plain", _T1, share=1.0)

SIDE = (
    Scenario("T=0.7, top-p 0.8", Sampling(temperature=0.7, top_p=0.8)),
    Scenario("T=0.7, top-k 3", Sampling(temperature=0.7, top_k=3)),
    Scenario(
        "repetition penalty 1.3, no repeated bigram",
        Sampling(temperature=1.0, repetition_penalty=1.3, no_repeat_ngram_size=2),
    ),
    Scenario("end of sequence inside the block", _T1, eos=(EOS,)),
    Scenario("maximal length inside the block", _T1, tokens=TOKENS - 1),
    Scenario("ragged batch of different prompts", _T1, prompts=RAGGED),
)

# These two are not sampled often but compared token for token.
GREEDY = Scenario("greedy", Sampling(temperature=0.0), prompts=RAGGED, tokens=12, eos=(EOS,))
CONTRACT = replace(SIDE[2], name="contract of the drafter", prompts=RAGGED, tokens=8, eos=(EOS,))

SCENARIOS = {scenario.name: scenario for scenario in (MAIN, *SIDE)}
