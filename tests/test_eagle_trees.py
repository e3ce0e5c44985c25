"""EAGLE's trees: the dynamic one by its description, copied branches, static shapes, options."""

import itertools
import math

import pytest
import torch
from test_eagle import TARGETS, VOCAB, Spy, decode, paths_of, random_prompts
from test_model import build as build_hf

from drafters.eagle.checkpoint import random_model
from drafters.eagle.config import Config
from drafters.eagle.drafter import EagleDrafter
from drafters.eagle.laws import Laws as EagleLaws
from drafters.eagle.model import new_architecture
from drafters.eagle.shape import built_in_paths, chain_paths, check_paths, levels_of
from drafters.eagle.trees import dynamic_tree, most_confident, with_branch
from specdec.errors import OptionError
from specdec.model import Model
from specdec.proposal import Kind, Proposal
from specdec.sampling import Sampling
from specdec.tree import Tree


@pytest.fixture(scope="module")
def target():
    return Model(build_hf(TARGETS["llama"]), name="llama")


def slow_dynamic_tree(
    law, depth: int, top_k: int, nodes: int, copied=(), stop_below=0.0
) -> set[tuple[int, ...]]:
    """EAGLE-2 by its description; `law(path)` is the draft's law of what follows.

    `copied`: the tokens of one more branch, each with its probability given the ones before. Another level
    must be of use with a chance of `stop_below`: the text goes on through its parents, the branch is wrong.
    """
    best = lambda scored: sorted(scored, key=lambda path: -scored[path])  # noqa: E731
    scored: dict[tuple[int, ...], float] = {}
    level = {(): 0.0}
    for d in range(1, depth + 1):
        copy_wrong = 1 - math.prod(p for _, p in copied[:d]) if d <= len(copied) else 1.0
        if d > 1 and sum(map(math.exp, level.values())) * copy_wrong < stop_below:
            break
        candidates = {}
        for path, score in level.items():
            probability, token = law(path).topk(top_k)
            for p, x in zip(probability.log().tolist(), token.tolist(), strict=True):
                candidates[*path, x] = score + p
        scored |= candidates
        level = {path: candidates[path] for path in best(candidates)[:top_k]}
    path, score = (), 0.0
    for x, p in copied:
        path, score = (*path, x), score + math.log(p)
        scored[path] = max(score, scored.get(path, -math.inf))
    return set(best(scored)[:nodes])


def slow_copies(text, count: int, fewest: int):
    """What followed the last up to 4 words the last time they occurred, by how many words match there."""
    for n in range(4, fewest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                alike = [text[end - i] == text[-i] for i in range(1, min(end, 16) + 1)]
                m = (*alike, False).index(False)
                return [(x, (m + i) / (m + i + 1.6)) for i, x in enumerate(text[end : end + count])]
    return []


def test_a_dynamic_tree_of_width_one_is_a_chain(target):
    """The contract says so too, which is checked at every step."""
    for options in ({"top_k": 1}, {"nodes": 1}):
        model = random_model(new_architecture(target, 3, 1, None), target)
        drafter = EagleDrafter(model, Config(depth=3, ngram=False, stop_below=0.0, **options), target)
        assert drafter.is_chain
        prompts = random_prompts(3)
        found, ledger = decode(target, drafter, prompts, "token", check_contract=True)
        assert found == decode(target, None, prompts, "token")[0] and ledger.decode_rows


def test_a_static_tree_may_leave_out_ranks(target):
    """[0] and [2]: the best and the third best token, where nothing is drawn."""
    model = random_model(new_architecture(target, 3, 1, None), target)
    options = {"mode": "static", "tree": [[0], [2], [2, 1]], "ngram": False}
    drafter = EagleDrafter(model, Config(depth=3, **options), target)
    best, proposals = [], []
    propose = drafter.propose

    def note(sequences, draw, depth):
        proposals.append(propose(sequences, draw, depth))
        return proposals[-1]

    drafter.propose = note
    laws = EagleLaws.best

    def note_best(self, growth, count):
        best.append(laws(self, growth, count))
        return best[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagleLaws, "best", note_best)
        prompts = random_prompts(2)
        found, _ = decode(target, drafter, prompts)
    assert found == decode(target, None, prompts, "token")[0]
    first, (root, _), (below, _) = proposals[0].tokens, *best[:2]
    assert torch.equal(first[:, :2], root[:, 0, [0, 2]])
    assert torch.equal(first[:, 2], below[:, 0, 1])  # the one node that is expanded, [2]


@pytest.mark.parametrize("stop_below", [0.0, 0.1])
@pytest.mark.parametrize("copies", [False, True])
def test_dynamic_tree_is_eagle_2s(target, monkeypatch, copies, stop_below):
    """Against the slow description, from the laws that the drafter itself saw (ties do not occur).

    With copied branches as well: they share the 9 nodes and are merged where they run along the tree; and
    where levels are left out: some rows stop while others of their batch go on.
    """
    model = random_model(new_architecture(target, 3, 1, None), target)
    options = {"ngram": copies, "ngram_min": 1, "stop_below": stop_below}
    drafter = EagleDrafter(model, Config(depth=4, top_k=3, nodes=9, **options), target)
    spy = Spy(monkeypatch)
    proposals = []
    propose = drafter.propose

    def note(sequences, draw, depth):
        before = len(spy.seen)
        proposal = propose(sequences, draw, depth)
        proposals.append((sequences.lengths.tolist(), sequences.tokens.clone(), proposal, spy.seen[before:]))
        return proposal

    drafter.propose = note
    prompts = random_prompts(3)
    if copies:  # every token has occurred before
        prompts = [[*range(VOCAB), *p, *p] for p in prompts]
    decode(target, drafter, prompts, tokens=14)
    checked, copied, levels = 0, 0, set()
    for lengths, tokens, proposal, seen in proposals[:3]:
        logits = {tuple(t): x for t, _, x in seen}
        for b, n in enumerate(lengths):
            prefix = tuple(tokens[b, :n].tolist())
            branch = slow_copies(prefix, 8, 1) if copies else []
            expanded = set()

            def law(path, prefix=prefix, logits=logits, expanded=expanded):
                expanded.add(len(path))
                return logits[prefix + path].softmax(0)

            assert paths_of(proposal, b) == slow_dynamic_tree(law, 4, 3, 9, branch, stop_below)
            levels.add(len(expanded))
            checked, copied = checked + 1, copied + bool(branch)
    assert checked == 9 and proposal.size <= drafter.max_nodes == 9
    assert copied == (9 if copies else 0)
    assert len(levels) > 1 if stop_below else levels == {4}


def test_a_coupled_tree_is_ranked_by_the_targets_noise(target, monkeypatch):
    """EAGLE-2's description once more, each token's chance being q/E over the sum, E that of its position."""
    model = random_model(new_architecture(target, 3, 1, 30), target)
    options = {"siblings": "coupled", "ngram": False, "stop_below": 0.0}
    drafter = EagleDrafter(model, Config(depth=3, top_k=3, nodes=9, **options), target)
    spy = Spy(monkeypatch)
    proposals = []
    propose = drafter.propose

    def note(sequences, draw, depth):
        before = len(spy.seen)
        noise = [draw.draws.noise(VOCAB, d, model.fc.weight.device) for d in range(3)]
        proposal = propose(sequences, draw, depth)
        where = sequences.lengths.tolist(), sequences.tokens.clone()
        proposals.append((*where, noise, proposal, spy.seen[before:]))
        return proposal

    drafter.propose = note
    decode(target, drafter, random_prompts(3), "gumbel", Sampling(temperature=0.8), tokens=14)
    checked = 0
    for lengths, tokens, noise, proposal, seen in proposals[:3]:
        logits = {tuple(t): x for t, _, x in seen}
        assert proposal.kind is Kind.COUPLED
        for b, n in enumerate(lengths):
            prefix = tuple(tokens[b, :n].tolist())

            def law(path, b=b, prefix=prefix, logits=logits, noise=noise):
                q = torch.zeros(VOCAB, dtype=torch.float64)
                q[model.draft_ids] = (logits[prefix + path] / 0.8).softmax(0).double()
                raced = q / noise[len(path)][b]
                return raced / raced.sum()

            assert paths_of(proposal, b) == slow_dynamic_tree(law, 3, 3, 9)
            checked += 1
    assert checked == 9


def test_the_number_of_a_node_does_not_depend_on_the_batch():
    """Nodes that do not exist come last, wherever they stood among the candidates."""
    nothing = -math.inf
    tree = Proposal(torch.tensor([[5, 6, 7, 8]]), Tree(torch.tensor([[-1, 0, 0, 1]])), Kind.DETERMINISTIC)
    kept = most_confident(tree, torch.tensor([[-0.1, nothing, -0.3, nothing]]), 3)
    assert kept.tokens[0, :2].tolist() == [5, 7] and kept.valid.tolist() == [[True, True, False]]
    assert kept.tree.parents[0, :2].tolist() == [-1, 0]
    kept = most_confident(tree, torch.tensor([[-0.1, -0.1, -3.0, -0.2]]), 3)
    assert kept.tokens.tolist() == [[5, 6, 8]] and kept.tree.parents.tolist() == [[-1, 0, 1]]


def test_equally_good_nodes_keep_their_parents():
    """Where a child is certain it scores as high as its parent: the parent stays all the same."""

    class Certain:
        def best(self, growth, count):
            shape = (1, growth.states.shape[1], count)
            return torch.arange(count).expand(shape), torch.tensor([1.0, 0.0]).expand(shape)

    class NoGrowth:
        states = torch.zeros(1, 1, 1)

        def grow(self, tokens, parent):
            self.states = torch.zeros(1, tokens.shape[1], 1)

    for nodes in range(1, 6):
        proposal = dynamic_tree(NoGrowth(), Certain().best, 3, 2, nodes, torch.tensor([9]))
        assert paths_of(proposal, 0) == set([(0,), (0, 0), (0, 0, 0)][:nodes])


def test_a_copied_branch_is_merged():
    """Its nodes are the tree's own as far as it runs along them; the rest hangs off the last of these."""
    g = torch.Generator().manual_seed(0)
    for _ in range(40):
        parents = torch.tensor(
            [[int(torch.randint(-1, n, (1,), generator=g)) for n in range(6)] for _ in range(2)]
        )
        tokens = torch.arange(6)[None].expand(2, -1) % 5  # some tokens repeat
        kept = [_distinct(parents[b].tolist(), tokens[b].tolist()) for b in range(2)]
        tree = Proposal(tokens, Tree(parents), Kind.DETERMINISTIC, valid=torch.tensor(kept))
        branch = torch.randint(5, (2, 4), generator=g)
        length = torch.tensor([4, 2])
        grown, _ = with_branch(tree, branch, length, first=8, levels=tree.tree.max_depth)
        assert grown.size == 12
        for b in range(2):
            copies = {tuple(branch[b, : i + 1].tolist()) for i in range(int(length[b]))}
            assert paths_of(grown, b) == paths_of(tree, b) | copies


def _distinct(parents, tokens):
    """Which nodes exist if no two siblings may carry one token."""
    kept, seen = [], set()
    for parent, token in zip(parents, tokens, strict=True):
        kept.append((parent, token) not in seen and (parent < 0 or kept[parent]))
        seen.add((parent, token))
    return kept


def test_built_in_shape():
    paths = built_in_paths(4, 8, 24)
    assert len(set(paths)) == 24 and max(map(len, paths)) == 4 and not check_paths(paths, drawn=True)
    worth = lambda path: 0.6 ** len(path) * 0.4 ** sum(path)  # noqa: E731
    everything = [p for d in range(1, 5) for p in itertools.product(range(8), repeat=d)]
    assert min(map(worth, paths)) >= sorted(map(worth, everything))[-24] - 1e-12


def test_levels():
    """Elder siblings of all parents first."""
    a, b = levels_of([[0], [1], [0, 0], [0, 1], [1, 0]])
    assert (a.parents, a.rank, a.expanded) == ((-1, -1), (0, 1), (0, 1))
    assert (b.first, b.parents, b.parent, b.rank, b.expanded) == (2, (0, 1, 0), (0, 1, 0), (0, 0, 1), ())
    assert [level.parents for level in levels_of(chain_paths(3))] == [(-1,), (0,), (1,)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"siblings": "with_replacement"}, "drafter.siblings=with_replacement: would be biased"),
        ({"mode": "static", "siblings": "coupled"}, "drafter.siblings=coupled: is for drafter.mode=dynamic"),
        ({"mode": "tree"}, "drafter.mode=tree: no such choice; choices: dynamic, static, chain"),
        ({"tree": [[0]]}, "is for drafter.mode=static"),
        ({"mode": "static", "tree": [[0, 0]]}, r"has no parent \[0\]"),
        ({"mode": "static", "tree": [[1]], "siblings": "without_replacement"}, "no elder sibling"),
        ({"mode": "static", "tree": [[0], [0]]}, "given twice"),
        ({"generation": 2}, "is 1 .* or 3"),
        ({"depth": 0}, "drafter.depth=0: must be"),
        ({"mode": "chain", "siblings": "with_replacement", "ngram": True}, "drafter.ngram"),
    ],
)
def test_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Config(**options)
