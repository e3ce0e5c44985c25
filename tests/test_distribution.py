"""The one function that makes probabilities, against transformers' own processors, row by row."""

import pytest
import torch
from reference import path_to, random_parents
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from specdec.distribution import Prefix, distribution
from specdec.errors import OptionError
from specdec.sampling import Sampling
from specdec.sequences import Sequences
from specdec.tree import Tree

VOCAB, EOS = 12, (3, 7)


def processors(s: Sampling, prompt_length: int) -> list:
    """What `generate` would build from these parameters, in its order."""
    found = []
    if s.repetition_penalty != 1:
        found.append(hf.RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.no_repeat_ngram_size:
        found.append(hf.NoRepeatNGramLogitsProcessor(s.no_repeat_ngram_size))
    if s.bad_words:
        found.append(hf.NoBadWordsLogitsProcessor(s.bad_words))
    if s.min_new_tokens:
        found.append(hf.MinNewTokensLengthLogitsProcessor(prompt_length, s.min_new_tokens, list(EOS)))
    found += s.processors
    if s.temperature not in (0, 1):
        found.append(hf.TemperatureLogitsWarper(s.temperature))
    if s.top_k:
        found.append(hf.TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        found.append(hf.TopPLogitsWarper(s.top_p))
    if s.min_p:
        found.append(hf.MinPLogitsWarper(s.min_p))
    return found


def reference(logits: torch.Tensor, s: Sampling, prefix: list[int], prompt_length: int) -> torch.Tensor:
    """`[V]` probabilities of one node."""
    scores = logits[None].clone()
    for processor in processors(s, prompt_length):
        scores = processor(torch.tensor([prefix]), scores)
    if s.greedy:
        return torch.nn.functional.one_hot(scores[0].argmax(), len(logits)).to(logits.dtype)
    return scores.softmax(-1)[0]


class FavourSuccessor(LogitsProcessor):
    """A custom processor that looks at the last token of its prefix."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[torch.arange(len(scores)), (input_ids[:, -1] + 1) % VOCAB] += 3.0
        return scores


SAMPLINGS = {
    "plain": Sampling(temperature=1.0),
    "temperature": Sampling(temperature=0.6),
    "top-k": Sampling(temperature=1.3, top_k=4),
    "top-k 1": Sampling(temperature=1.0, top_k=1),
    "top-p": Sampling(temperature=0.8, top_p=0.7),
    "tiny top-p": Sampling(temperature=1.0, top_p=1e-6),
    "min-p": Sampling(temperature=1.0, min_p=0.2),
    "min-p 1": Sampling(temperature=1.0, min_p=1.0),
    "all truncations": Sampling(temperature=1.5, top_k=8, top_p=0.9, min_p=0.1),
    "repetition": Sampling(temperature=1.0, repetition_penalty=1.7),
    "reward for repetition": Sampling(temperature=1.0, repetition_penalty=0.6),
    "greedy with repetition": Sampling(repetition_penalty=2.5),
    "no repeated 1-gram": Sampling(temperature=1.0, no_repeat_ngram_size=1),
    "no repeated 2-gram": Sampling(temperature=1.0, no_repeat_ngram_size=2),
    "no repeated 3-gram": Sampling(no_repeat_ngram_size=3),
    "bad words": Sampling(temperature=1.0, bad_words=[[5], [1, 2], [2, 2, 4], [9, 1]]),
    "min new tokens": Sampling(temperature=1.0, min_new_tokens=3),
    "custom": Sampling(temperature=1.0, processors=[FavourSuccessor()]),
    "everything": Sampling(
        temperature=0.7,
        top_k=9,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.2,
        no_repeat_ngram_size=2,
        min_new_tokens=4,
        bad_words=[[5], [1, 2]],
        processors=[FavourSuccessor()],
    ),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_node_of_ragged_trees(name):
    """Small alphabets, so that n-grams and bad words do occur in prompts and along paths."""
    sampling, g = SAMPLINGS[name], torch.Generator().manual_seed(11)
    prompts = [torch.randint(5, (n,), generator=g).tolist() for n in (5, 1, 9)]
    sequences = Sequences(prompts, torch.arange(3), torch.full((3,), 20))
    for size in (0, 6):
        shape = random_parents(g, size)
        tree, drafted = Tree(torch.tensor(shape, dtype=torch.int64)), torch.randint(5, (3, size), generator=g)
        logits = 2 * torch.randn(3, size + 1, VOCAB, dtype=torch.float64, generator=g)
        found = distribution(logits, sampling, sequences.prefix(tree, drafted), EOS)
        assert found.dtype == torch.float64
        for b, prompt in enumerate(prompts):
            for node in range(-1, size):
                prefix = prompt + [int(drafted[b, n]) for n in path_to(shape, node)]
                expected = reference(logits[b, node + 1], sampling, prefix, len(prompt))
                torch.testing.assert_close(found[b, node + 1], expected, rtol=0, atol=1e-12)


def test_a_penalty_with_a_sibling_in_the_prefix_would_be_noticed():
    """Token 1 is drafted on one branch only, so only there does it carry the penalty."""
    sampling = Sampling(temperature=1.0, repetition_penalty=2.0)
    sequences = Sequences([[0]], torch.arange(1), torch.tensor([9]))
    prefix = sequences.prefix(Tree(torch.tensor([-1, -1])), torch.tensor([[1, 2]]))
    p = distribution(torch.ones(1, 3, 4, dtype=torch.float64), sampling, prefix)[0]
    high, low = torch.e, torch.e**0.5  # logits 1 and 1/2
    expected = torch.tensor([[low, high, high, high], [low, low, high, high], [low, high, low, high]])
    expected = expected.double() / expected.double().sum(1, keepdim=True)
    torch.testing.assert_close(p, expected, rtol=1e-6, atol=0)


def test_greedy_is_the_one_hot_of_the_first_best_token():
    logits = torch.tensor([[[0.0, 2.0, 2.0, -1.0]]])
    assert distribution(logits, Sampling()).tolist() == [[[0.0, 1.0, 0.0, 0.0]]]


@pytest.mark.parametrize("vocab", [50, 192, 640, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("turned", [False, True])
def test_the_first_best_token_of_many(vocab, dtype, turned):
    """Whole blocks or not, rows one after another in memory or side by side, with many ties."""
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-3, 3, (2, 5, vocab), generator=g).to(dtype)
    logits[0, 0] = -torch.inf
    logits[0, 0, vocab - 1] = -1e30  # the last token alone is possible
    logits[0, 1, vocab // 2] = torch.nan
    logits[1, 2] = -torch.inf
    given = logits.transpose(1, 2).contiguous().transpose(1, 2) if turned else logits
    p = distribution(given, Sampling())
    for b in range(2):
        for t in range(5):
            row = logits[b, t].tolist()
            if (b, t) in ((0, 1), (1, 2)):
                assert p[b, t].isnan().any()
            else:
                assert p[b, t].nonzero()[:, 0].tolist() == [row.index(max(row))]
                assert float(p[b, t].sum()) == 1.0


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-40, 1e-300])
def test_temperature_to_zero_is_greedy(temperature):
    logits = torch.tensor([[[30.0, -4.0, 31.0, 5.0]]])
    p = distribution(logits, Sampling(temperature=temperature))
    assert torch.equal(p, distribution(logits, Sampling()))


def test_ties_at_the_edges():
    """Top-k keeps every token as probable as the k-th; top-p stops as soon as the mass is reached."""
    logits = torch.tensor([[[2.0, 1.0, 1.0, 0.0]]]).double()
    assert (distribution(logits, Sampling(temperature=1.0, top_k=2)) > 0).tolist() == [
        [[True, True, True, False]]
    ]
    quarter = torch.zeros(1, 1, 4).double()
    assert int((distribution(quarter, Sampling(temperature=1.0, top_p=0.5)) > 0).sum()) == 2
    assert int((distribution(quarter, Sampling(temperature=1.0, top_p=0.51)) > 0).sum()) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_probabilities_are_never_below_float32(dtype):
    p = distribution(torch.randn(2, 3, 7).to(dtype), Sampling(temperature=1.0, top_p=0.9))
    assert p.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 3, dtype=p.dtype))


def test_logits_are_left_alone():
    logits = torch.randn(1, 1, VOCAB)
    before = logits.clone()
    prefix = Prefix(torch.tensor([[[1, 2]]]), torch.tensor([[2]]), torch.tensor([1]))
    distribution(logits, SAMPLINGS["everything"], prefix, EOS)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("scale", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary(scale, top_p):
    """The short way (no full sort) gives what a full sort gives, from peaked to almost uniform laws."""
    logits = scale * torch.randn(
        1, 2, 50_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    found = distribution(logits, Sampling(temperature=1.0, top_p=top_p))
    for node in range(2):
        probs, order = logits[0, node].softmax(-1).sort(descending=True)
        keep = probs.cumsum(0) - probs < top_p
        expected = torch.zeros(50_000, dtype=torch.float64)
        expected[order[keep]] = probs[keep] / probs[keep].sum()
        torch.testing.assert_close(found[0, node], expected, rtol=0, atol=1e-12)


def test_where_everything_is_banned_there_is_no_law():
    """NaN, greedy or not, so that the engine can name the step and the row; other rows are sound."""
    prefix = Prefix(torch.tensor([[[0, 1]], [[0, 0]]]), torch.tensor([[2], [2]]), torch.tensor([1, 1]))
    for temperature in (0.0, 0.5):
        sampling = Sampling(temperature=temperature, no_repeat_ngram_size=1)
        p = distribution(torch.zeros(2, 1, 2), sampling, prefix)
        assert p[0].isnan().any() and p[1].tolist() == [[0.0, 1.0]]


def test_a_prefix_is_demanded_where_it_matters():
    with pytest.raises(AssertionError, match="need the prefix"):
        distribution(torch.zeros(1, 1, 4), Sampling(repetition_penalty=1.1))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", float("nan")),
        ("top_k", -1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
        ("repetition_penalty", float("inf")),
        ("no_repeat_ngram_size", -1),
        ("min_new_tokens", -1),
        ("bad_words", [[1], []]),
    ],
)
def test_impossible_parameters(option, value):
    with pytest.raises(OptionError, match=f"sampling.{option}="):
        Sampling(**{option: value})


class Largest(TorchDispatchMode):
    """Counts the operations below it and the elements of the largest result."""

    operations = elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.operations += 1
        self.elements = max([self.elements, *(t.numel() for t in tree_leaves(result) if torch.is_tensor(t))])
        return result


def test_penalties_on_a_large_vocabulary_stay_affordable():
    """Few operations, however long the prefix, and no table of prefix × vocabulary."""
    sampling = Sampling(temperature=1.0, repetition_penalty=1.1, no_repeat_ngram_size=3)
    logits = torch.randn(1, 8, 50_000)
    operations = []
    for length in (20, 2000):
        prefix = Prefix(torch.randint(50_000, (1, 8, length)), torch.full((1, 8), length), torch.tensor([1]))
        with Largest() as largest:
            distribution(logits, sampling, prefix)
        operations.append(largest.operations)
        assert largest.elements < 1.1 * logits.numel()
    assert operations[0] == operations[1] < 100
