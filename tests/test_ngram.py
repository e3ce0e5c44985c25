"""Prompt lookup against a slow search through the text."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import tiny

from drafters.ngram.config import Config
from drafters.ngram.drafter import NgramDrafter, NgramIndex
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.proposal import Kind
from specdec.sequences import Sequences
from specdec.verify.token import TokenRule


def search(text: list[int], longest: int, shortest: int, count: int) -> list[int]:
    """Longest suffix first; of its earlier occurrences the most recent; what followed it."""
    for n in range(longest, shortest - 1, -1):
        for at in range(len(text) - n - 1, -1, -1):
            if len(text) > n and text[at : at + n] == text[-n:]:
                return text[at + n : at + n + count]
    return []


texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(texts, st.integers(1, 4), st.integers(1, 4), st.integers(0, 6), st.data())
@settings(max_examples=200, deadline=None)
def test_the_growing_index_finds_what_a_search_finds(text, longest, shortest, count, data):
    shortest = min(longest, shortest)
    index, start = NgramIndex(range(longest, shortest - 1, -1)), 0
    while start < len(text):
        size = data.draw(st.integers(1, 5))
        index.extend(text[start : start + size])
        start += size
        assert index.lookup(count) == search(text[:start], longest, shortest, count)


def test_longest_then_most_recent():
    index = NgramIndex(range(3, 0, -1))
    index.extend([1, 2, 3, 7, 2, 3, 8, 9, 2, 3, 6, 1, 2, 3])
    assert index.lookup(4) == [7, 2, 3, 8]  # [1, 2, 3] is longer than the later [2, 3] → 6
    index.extend([5, 2, 3])
    assert index.lookup(4) == [5, 2, 3]  # now [2, 3] last stood before the 5; the text ends before a fourth


def test_how_long_a_match_is():
    """Beyond the longest indexed size, up to a limit and to the beginning of the text."""
    index = NgramIndex(range(2, 0, -1))
    index.extend([1, 2, 3, 4, 5, 9, 2, 3, 4, 5])
    assert index.match() == (5, 2)
    assert [index.match(limit) for limit in (3, 4, 5, 99)] == [(5, 3), (5, 4), (5, 4), (5, 4)]
    index.extend([9])
    assert index.match(99) == (6, 5)
    index = NgramIndex(range(2, 0, -1))
    index.extend([7, 7, 7, 7])
    assert index.match(99) == (3, 3)  # the earlier sevens begin the text
    index.extend([8])
    assert index.match(99) == (5, 0)


def test_no_match_no_draft():
    index = NgramIndex(range(3, 0, -1))
    assert index.lookup(4) == []
    index.extend([1, 2, 3, 4])
    assert index.lookup(4) == []


def test_a_batch_has_a_draft_length_per_row():
    drafter = NgramDrafter(Config(gamma=3))
    sequences = Sequences([[1, 2, 1], [5, 6, 7], [4, 4, 4, 4]], torch.arange(3), torch.tensor([9, 9, 9]))
    sequences.last_block = [[2], [8], [4]]
    drafter.begin(sequences, None, None, 0)
    proposal = drafter.propose(sequences, None, 8)
    assert proposal.kind is Kind.DETERMINISTIC and proposal.q is None and proposal.tree.is_chain
    assert proposal.mask.tolist() == [[True, True], [False, False], [True, False]]
    assert proposal.tokens[0, :2].tolist() == [1, 2] and proposal.tokens[2, 0] == 4
    assert drafter.propose(sequences, None, 1).size == 1 and drafter.propose(sequences, None, 0).size == 0
    drafter.select(torch.tensor([1]))
    assert drafter.propose(sequences, None, 8).size == 0


def test_the_first_draft_is_verified_too():
    """The first proposal after the prompt comes from the prompt and counts as tried."""
    target = tiny("float64")
    prompt = list(range(250))  # whatever comes first stands in the prompt already
    engine = Engine(target, NgramDrafter(Config(gamma=2)), TokenRule(), config=EngineConfig(max_new_tokens=4))
    tokens = engine.generate([prompt])[0].tokens
    first = engine.ledger.decode_rows[0]
    draft = search([*prompt, tokens[0]], 3, 1, 2)
    right = 0
    while right < len(draft) and draft[right] == tokens[1 + right]:
        right += 1
    assert (first.depth, first.accepted) == (len(draft), right) and len(draft) == 2


def test_the_index_follows_a_whole_run():
    """At every step of a run the draft is what a search through prompt and output gives."""
    target, seen = tiny("float64"), []

    class Spy(NgramDrafter):
        def propose(self, sequences, draw, depth):
            proposal = super().propose(sequences, draw, depth)
            for row, length in enumerate(sequences.lengths.tolist()):
                text = sequences.tokens[row, :length].tolist()
                expected = search(text, 3, 1, min(self.gamma, depth))
                seen.append(proposal.tokens[row, : len(expected)].tolist() == expected)
                seen.append(int(proposal.mask[row].sum()) == len(expected))
            return proposal

    config = EngineConfig(max_new_tokens=30, batch_size=3)
    Engine(target, Spy(Config(gamma=4)), TokenRule(), config=config).generate([[1, 2] * 5, [3], [4, 4, 5, 4]])
    assert len(seen) > 100 and all(seen)
