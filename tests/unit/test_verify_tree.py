"""Verification of trees.

Chi-square tests use fixed seeds; each would raise a false alarm with probability 1e-4 on other seeds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pacer.decoding.distributions import draw, seen_before
from pacer.decoding.tree import lineages
from pacer.decoding.verify import verify, verify_greedy
from pacer.decoding.verify_tree import verify_tree, verify_tree_greedy
from pacer.evaluation.stats import chi_square
from tests.unit.test_tree import above, forests, rectangular

ALPHA = 1e-4
DRAWS = 100_000
BELOW_ONE = math.nextafter(1.0, 0.0)
KINDS = ("certain", "independent", "without replacement")


def _distributions(shape: tuple[int, ...], seed: int, scale: float = 1.5) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def _uniforms(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _counts(ids: Tensor, size: int) -> list[int]:
    return torch.bincount(ids.flatten(), minlength=size).tolist()


def _family(q: Tensor, kind: str, u: Tensor) -> tuple[Tensor, Tensor | None]:
    """Siblings ``(B, k)`` drawn from ``q (B, V)`` in the manner of their kind, and what each was drawn from."""
    if kind == "certain":
        return q.topk(u.shape[1]).indices, None
    tokens, drawn_from = [], []
    for k in range(u.shape[1]):
        tokens.append(draw(q, u[:, k]))
        drawn_from.append(q)
        if kind == "without replacement":
            q = q.scatter(1, tokens[-1][:, None], 0.0)
            q = q / q.sum(-1, keepdim=True)
    return torch.stack(tokens, 1), torch.stack(drawn_from, 1)


def _verify(
    p: Tensor, q: Tensor | None, tokens: Tensor, parents: Tensor, u: Tensor, alive: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Verification of trees whose nodes may all be accepted; the last of ``u (B, g + 1)`` draws the next token."""
    alive = torch.ones_like(tokens, dtype=torch.bool) if alive is None else alive
    return verify_tree(p, q, tokens, parents, lineages(parents), alive, u[:, :-1], u[:, -1])


@given(forests(), st.integers(0, 10_000))
def test_certain_siblings_are_those_of_a_one_hot_q(parents: list[list[int]], seed: int) -> None:
    """The same nodes and the same token after them, repeated siblings included."""
    table, rows, g = rectangular(parents), len(parents), max(map(len, parents))
    p, u = _distributions((rows, g + 1, 4), seed), _uniforms((rows, g + 1), seed)
    tokens = torch.randint(0, 4, (rows, g), generator=torch.Generator().manual_seed(seed))
    alive = torch.tensor([[j < len(own) for j in range(g)] for own in parents])
    one_hot = torch.nn.functional.one_hot(tokens, 4).float()
    certain, drawn = (_verify(p, q, tokens, table, u, alive) for q in (None, one_hot))
    assert [c.tolist() for c in certain] == [d.tolist() for d in drawn]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_node_with_three_children_emits_the_targets_distribution(kind: str, seed: int) -> None:
    """10⁵ draws at V = 5: the token there against p, and the one after each child against that child's own p."""
    p, q = _distributions((1, 4, 5), seed), _distributions((1, 5), seed + 100)
    u = _uniforms((7, DRAWS), seed).T
    tokens, drawn_from = _family(q.expand(DRAWS, -1), kind, u[:, :3])
    table = p.expand(DRAWS, -1, -1)
    last, following = _verify(table, drawn_from, tokens, torch.full((DRAWS, 3), -1), u[:, 3:])
    first = torch.where(last >= 0, tokens.gather(1, last.clamp_min(0)[:, None]).squeeze(1), following)
    assert chi_square(_counts(first, 5), p[0, 0].tolist()) > ALPHA
    for child in range(3):
        after = following[last == child]
        assert len(after) > 1000 and chi_square(_counts(after, 5), p[0, child + 1].tolist()) > ALPHA
    assert (last < 0).sum() > 1000


@pytest.mark.parametrize(("kind", "wrong"), [(KINDS[0], KINDS[1]), (KINDS[1], KINDS[2]), (KINDS[2], KINDS[1])])
def test_the_chi_square_notices_siblings_taken_for_another_kind(kind: str, wrong: str) -> None:
    p, q = _distributions((1, 4, 5), 0), _distributions((1, 5), 100)
    u = _uniforms((7, DRAWS), 0).T
    tokens, _ = _family(q.expand(DRAWS, -1), kind, u[:, :3])
    drawn_from = q[:, None].expand(DRAWS, 3, -1)
    if wrong == "without replacement":
        taken = torch.nn.functional.one_hot(tokens, 5).cumsum(1).roll(1, 1)
        taken[:, 0] = 0
        drawn_from = drawn_from * (taken == 0)
        drawn_from = drawn_from / drawn_from.sum(-1, keepdim=True)
    last, following = _verify(p.expand(DRAWS, -1, -1), drawn_from, tokens, torch.full((DRAWS, 3), -1), u[:, 3:])
    first = torch.where(last >= 0, tokens.gather(1, last.clamp_min(0)[:, None]).squeeze(1), following)
    assert chi_square(_counts(first, 5), p[0, 0].tolist()) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_of_two_generations_has_the_targets_joint_distribution(kind: str) -> None:
    """Two children with two children each, from one table, verified against another: the law of three tokens."""
    vocab = 4
    p_table, q_table = _distributions((vocab, vocab), 1), _distributions((vocab, vocab), 51)
    u = _uniforms((16, DRAWS), 5).T
    elder, q_elder = _family(q_table[torch.zeros(DRAWS, dtype=torch.long)], kind, u[:, :2])
    grown = [_family(q_table[elder[:, k]], kind, u[:, 2 + 2 * k : 4 + 2 * k]) for k in range(2)]
    tokens = torch.cat([elder, grown[0][0], grown[1][0]], 1)
    q = None if q_elder is None else torch.cat([q_elder, *(drawn for _, drawn in grown if drawn is not None)], 1)
    p = p_table[torch.cat([torch.zeros(DRAWS, 1, dtype=torch.long), tokens], 1)]
    parents = torch.tensor([-1, -1, 0, 0, 1, 1]).expand(DRAWS, -1)
    last, following = _verify(p, q, tokens, parents, u[:, 6:13])
    parent = parents.gather(1, last.clamp_min(0)[:, None]).squeeze(1)
    own = tokens.gather(1, last.clamp_min(0)[:, None]).squeeze(1)
    above_it = tokens.gather(1, parent.clamp_min(0)[:, None]).squeeze(1)
    depth = (last >= 0).long() + ((last >= 0) & (parent >= 0)).long()
    # a text that is shorter than three tokens is continued from the target itself
    out = torch.stack([torch.where(depth == 2, above_it, torch.where(depth == 1, own, following))], 1)
    second = torch.where(depth == 2, own, torch.where(depth == 1, following, draw(p_table[out[:, 0]], u[:, 13])))
    third = torch.where(depth == 2, following, draw(p_table[second], u[:, 14]))
    joint = p_table[0][:, None, None] * p_table[:, :, None] * p_table[None]
    codes = (out[:, 0] * vocab + second) * vocab + third
    assert chi_square(_counts(codes, vocab**3), joint.flatten().tolist()) > ALPHA
    assert all((depth == d).sum() > 1000 for d in range(3))


@given(st.integers(0, 10_000), st.booleans(), st.integers(1, 4))
def test_a_chain_given_as_a_tree_is_verified_as_a_chain(seed: int, certain: bool, g: int) -> None:
    """Bit for bit: the same tokens accepted, the same token after them."""
    p, q, u = _distributions((6, g + 1, 5), seed), _distributions((6, g, 5), seed + 1), _uniforms((6, g + 1), seed)
    generator = torch.Generator().manual_seed(seed)
    draft = torch.randint(0, 5, (6, g), generator=generator)
    counts = torch.randint(0, g + 1, (6,), generator=generator)
    chain, alive = torch.arange(-1, g - 1).expand(6, -1), torch.arange(g) < counts[:, None]
    given_q = None if certain else q
    accepted, following = verify(p, given_q, draft, counts, u[:, :g], u[:, g])
    last, after = _verify(p, given_q, draft, chain, u, alive)
    assert (last + 1).tolist() == accepted.tolist() and after.tolist() == following.tolist()
    choice = p.argmax(-1)
    accepted, following = verify_greedy(choice, draft, counts)
    last = verify_tree_greedy(choice, draft, chain, lineages(chain), alive)
    assert (last + 1).tolist() == accepted.tolist()
    assert choice.gather(1, last[:, None] + 1).squeeze(1).tolist() == following.tolist()


@given(forests(), st.data())
def test_greedy_acceptance_is_the_longest_branch_of_the_targets_own_tokens(
    parents: list[list[int]], data: st.DataObject
) -> None:
    """Also where siblings repeat each other, and where some nodes may not be accepted."""
    table, g = rectangular(parents), max(map(len, parents))
    ids = st.integers(0, 2)
    tokens = torch.tensor([[data.draw(ids) for _ in range(g)] for _ in parents])
    choice = torch.tensor([[data.draw(ids) for _ in range(g + 1)] for _ in parents])
    alive = torch.tensor([[j < len(own) and data.draw(st.integers(0, 5)) > 0 for j in range(g)] for own in parents])
    found = verify_tree_greedy(choice, tokens, table, lineages(table), alive).tolist()
    for i, own in enumerate(parents):
        best, node = 0, -1
        for j in range(len(own)):
            line = above(own, j)
            right = all(alive[i, k] and tokens[i, k] == choice[i, own[k] + 1] for k in line)
            if right and len(line) > best:
                best, node = len(line), j
        assert found[i] == node


PROBS = st.lists(st.one_of(st.just(0.0), st.floats(2**-20, 1, width=32)), min_size=4, max_size=4)
EDGES = st.one_of(st.sampled_from([0.0, BELOW_ONE]), st.floats(0, BELOW_ONE))


@given(forests(rows=1, most=5), st.booleans(), st.data())
def test_an_impossible_token_is_never_emitted(parents: list[list[int]], certain: bool, data: st.DataObject) -> None:
    """Whatever was drafted, siblings that repeat each other included, and at the edges of the uniforms."""
    own, table = parents[0], rectangular(parents)
    g = len(own)
    p = torch.tensor([[data.draw(PROBS) for _ in range(g + 1)]])
    q = torch.tensor([[data.draw(PROBS) for _ in range(g)]])
    p[..., 0] += 1e-3 * (p.sum(-1) == 0)
    p = p / p.sum(-1, keepdim=True)
    tokens = torch.tensor([[data.draw(st.integers(0, 3)) for _ in range(g)]])
    u = torch.tensor([[data.draw(EDGES) for _ in range(g + 1)]], dtype=torch.float64)
    last, following = _verify(p, None if certain else q, tokens, table, u)
    line = above(own, int(last))
    for node in line:
        assert p[0, own[node] + 1, tokens[0, node]] > 0
    assert p[0, int(last) + 1, int(following)] > 0
    refused = {int(tokens[0, j]) for j in range(g) if own[j] == int(last)}
    possible = {v for v in range(4) if p[0, int(last) + 1, v] > 0}
    if certain and not possible <= refused:
        assert int(following) not in refused, "a refused certain token is not drawn again"


def test_a_token_that_siblings_repeat_has_its_chance_once() -> None:
    """Five certain siblings of one id are one: it comes with its own probability, not with five chances of it."""
    p = torch.tensor([0.3, 0.5, 0.2])
    u = _uniforms((6, DRAWS), 3).T
    tokens = torch.zeros(DRAWS, 5, dtype=torch.long)
    last, following = _verify(p.expand(DRAWS, 6, -1), None, tokens, torch.full((DRAWS, 5), -1), u)
    assert set(last.tolist()) == {-1, 0}
    first = torch.where(last >= 0, 0, following)
    assert chi_square(_counts(first, 3), p.tolist()) > ALPHA and (following[last < 0] > 0).all()


@given(forests(), st.integers(0, 10_000), st.booleans())
def test_padding_of_a_row_is_never_looked_at(parents: list[list[int]], seed: int, certain: bool) -> None:
    """What stands behind a row's nodes may be anything, NaN too."""
    table, rows, g = rectangular(parents), len(parents), max(map(len, parents))
    p, q, u = (
        _distributions((rows, g + 1, 5), seed),
        _distributions((rows, g, 5), seed + 1),
        _uniforms((rows, g + 1), seed),
    )
    tokens = torch.randint(0, 5, (rows, g), generator=torch.Generator().manual_seed(seed))
    alive = torch.tensor([[j < len(own) for j in range(g)] for own in parents])
    wanted = _verify(p, None if certain else q, tokens, table, u, alive)
    for i, own in enumerate(parents):
        tokens[i, len(own) :] = 4
        q[i, len(own) :] = math.nan
        p[i, len(own) + 1 :] = math.nan
    found = _verify(p, None if certain else q, tokens, table, u, alive)
    assert [f.tolist() for f in found] == [w.tolist() for w in wanted]


@given(forests(), st.integers(0, 10_000))
def test_a_repetition_penalty_sees_the_prefix_and_a_nodes_own_branch(parents: list[list[int]], seed: int) -> None:
    table, rows, g = rectangular(parents), len(parents), max(map(len, parents))
    generator = torch.Generator().manual_seed(seed)
    tokens, seen = torch.randint(0, 6, (rows, g), generator=generator), torch.rand(rows, 6, generator=generator) < 0.3
    found = seen_before(seen, tokens, lineages(table))
    for i, own in enumerate(parents):
        assert torch.equal(found[i, 0], seen[i])
        for j in range(len(own)):
            wanted = seen[i].clone()
            wanted[tokens[i, above(own, j)]] = True
            assert torch.equal(found[i, j + 1], wanted)
