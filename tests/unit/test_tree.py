"""Trees as plain data: who descends from whom, where a node stands and what it sees, branches merged into a trie."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pacer.decoding.tree import ROOT, Tree, Trie, lineages, packed, placed
from pacer.models.stack import causal_mask

CPU = torch.device("cpu")


@st.composite
def forests(draw: st.DrawFn, rows: int = 3, most: int = 9) -> list[list[int]]:
    """Parents of each row's nodes, any number of them."""
    sizes = draw(st.lists(st.integers(0, most), min_size=1, max_size=rows).filter(any))
    return [[draw(st.integers(-1, j - 1)) for j in range(size)] for size in sizes]


def rectangular(parents: list[list[int]]) -> torch.Tensor:
    most = max(map(len, parents))
    return torch.tensor([[*row, *[ROOT] * (most - len(row))] for row in parents])


def above(parents: list[int], node: int) -> list[int]:
    """A node and its ancestors, itself last."""
    found: list[int] = []
    while node >= 0:
        found.insert(0, node)
        node = parents[node]
    return found


@given(forests())
def test_lineages_are_all_ancestors(parents: list[list[int]]) -> None:
    found = lineages(rectangular(parents))
    for row, own in zip(found, parents, strict=True):
        for j in range(len(own)):
            assert row[j].nonzero().flatten().tolist() == above(own, j)


def test_a_chain_of_any_length_has_the_triangle() -> None:
    for g in (1, 2, 3, 7, 8, 9, 33, 130):
        assert torch.equal(lineages(torch.arange(-1, g - 1)[None])[0], torch.ones(g, g).tril() > 0)


@given(forests(), st.data())
def test_a_node_stands_at_its_depth_and_sees_prefix_and_ancestors(
    parents: list[list[int]], data: st.DataObject
) -> None:
    """Rows with their own lengths, their own unread prefix tokens, and padding behind short trees."""
    firsts = [data.draw(st.integers(0, 4)) for _ in parents]
    sizes = [data.draw(st.integers(1, 3)) for _ in parents]
    g, counts = max(map(len, parents)), [size + len(own) for size, own in zip(sizes, parents, strict=True)]
    n, extent = max(counts), max(first + count for first, count in zip(firsts, counts, strict=True))
    slots = torch.tensor(firsts)[:, None] + torch.arange(n)
    positions, mask = placed(Tree(rectangular(parents), sizes), slots, causal_mask(slots, extent))
    assert mask.shape == (len(parents), 1, n, extent) and g > 0
    for i, own in enumerate(parents):
        start = firsts[i] + sizes[i]
        for k in range(counts[i]):
            seen = mask[i, 0, k].nonzero().flatten().tolist()
            if k < sizes[i]:
                assert positions[i, k] == firsts[i] + k and seen == list(range(firsts[i] + k + 1))
                continue
            line = above(own, k - sizes[i])
            assert positions[i, k] == start + len(line) - 1
            assert seen == [*range(start), *(start + node for node in line)]


def test_branches_with_equal_beginnings_share_nodes() -> None:
    trie = Trie(limit=3)
    assert trie.branch(ROOT, [5, 6, 7, 8]) == [0, 1, 2]  # the fourth is too deep
    assert trie.branch(ROOT, [5, 9]) == [0, 3]
    assert trie.branch(1, [7]) == [2] and trie.branch(1, [4]) == [4]
    assert trie.add(None, 1) is None and trie.branch(None, [1]) == [] and trie.branch(2, [1]) == []
    assert trie.branch(ROOT, [6]) == [5]
    assert (trie.tokens, trie.parents, trie.depths) == ([5, 6, 7, 9, 4, 6], [-1, 0, 1, 0, 1, -1], [1, 2, 3, 2, 3, 1])


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6), st.integers(0, 4))
def test_a_trie_holds_exactly_the_branches(branches: list[list[int]], limit: int) -> None:
    trie = Trie(limit)
    ends = [trie.branch(ROOT, branch) for branch in branches]
    for branch, nodes in zip(branches, ends, strict=True):
        assert [trie.tokens[node] for node in nodes] == branch[:limit]
        if nodes:
            assert above(trie.parents, nodes[-1]) == nodes
    assert set(range(len(trie.tokens))) == {node for nodes in ends for node in nodes}
    assert all(parent < node for node, parent in enumerate(trie.parents))
    siblings = list(zip(trie.parents, trie.tokens, strict=True))
    assert len(set(siblings)) == len(siblings)


def test_rows_that_do_not_branch_are_packed_as_chains() -> None:
    chain, fork, nothing = Trie(4), Trie(4), Trie(4)
    chain.branch(ROOT, [1, 2, 3])
    fork.branch(ROOT, [1, 2])
    tokens, parents, counts = packed([chain, nothing, fork], CPU)
    assert parents is None and counts == [3, 0, 2]
    assert tokens.tolist() == [[1, 2, 3], [0, 0, 0], [1, 2, 0]]
    fork.branch(0, [3])
    tokens, parents, counts = packed([chain, nothing, fork], CPU)
    assert parents is not None and parents.tolist() == [[-1, 0, 1], [-1, -1, -1], [-1, 0, 0]]
    tokens, parents, counts = packed([nothing, nothing], CPU)
    assert tokens.shape == (2, 0) and tokens.dtype == torch.long and parents is None and counts == [0, 0]
