"""The probability core: acceptance, residual, bonus. Chi-square tests use fixed seeds; each would raise a false alarm
with probability 1e-4 on other seeds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pacer.decoding.distributions import draw
from pacer.decoding.verify import leading, residual, verify, verify_greedy
from pacer.evaluation.stats import chi_square

ALPHA = 1e-4
DRAWS = 100_000
BELOW_ONE = math.nextafter(1.0, 0.0)


def _distributions(shape: tuple[int, ...], seed: int, scale: float = 1.5) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def _uniforms(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _counts(ids: Tensor, size: int) -> list[int]:
    return torch.bincount(ids.flatten(), minlength=size).tolist()


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5))
def test_leading_counts_the_first_run(rows: list[list[bool]]) -> None:
    wanted = [next((i for i, ok in enumerate(row) if not ok), len(row)) for row in rows]
    assert leading(torch.tensor(rows)).tolist() == wanted


@given(st.data())
def test_greedy_acceptance_is_the_longest_equal_prefix(data: st.DataObject) -> None:
    rows, g = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 5))
    ids = st.integers(0, 2)
    target = data.draw(st.lists(st.lists(ids, min_size=g + 1, max_size=g + 1), min_size=rows, max_size=rows))
    draft = data.draw(st.lists(st.lists(ids, min_size=g, max_size=g), min_size=rows, max_size=rows))
    counts = data.draw(st.lists(st.integers(0, g), min_size=rows, max_size=rows))
    accepted, following = verify_greedy(
        torch.tensor(target), torch.tensor(draft, dtype=torch.long).reshape(rows, g), torch.tensor(counts)
    )
    for i in range(rows):
        n = 0
        while n < counts[i] and draft[i][n] == target[i][n]:
            n += 1
        assert (int(accepted[i]), int(following[i])) == (n, target[i][n])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("certain", [False, True])
def test_one_verified_token_is_distributed_as_the_target(seed: int, certain: bool) -> None:
    """L2, L9: 10⁵ draws at V = 5 against p; the draft sampled from q, or chosen without chance (q = one-hot)."""
    p, q = _distributions((1, 2, 5), seed), _distributions((1, 1, 5), seed + 100)
    u = _uniforms((3, DRAWS), seed)
    draft = torch.full((DRAWS, 1), seed) if certain else draw(q.expand(DRAWS, -1, -1), u[0, :, None])
    accepted, following = verify(
        p.expand(DRAWS, -1, -1), None if certain else q.expand(DRAWS, -1, -1), draft,
        torch.ones(DRAWS, dtype=torch.long), u[1, :, None], u[2],
    )  # fmt: skip
    first = torch.where(accepted > 0, draft[:, 0], following)
    assert chi_square(_counts(first, 5), p[0, 0].tolist()) > ALPHA
    bonus = following[accepted == 1]
    assert chi_square(_counts(bonus, 5), p[0, 1].tolist()) > ALPHA
    corrected = following[accepted == 0]
    left = p[0, 0].clone()
    if certain:
        left[seed] = 0
        assert chi_square([int(accepted.sum()), int((accepted == 0).sum())], [p[0, 0, seed], 1 - p[0, 0, seed]]) > ALPHA
    else:
        left = (left - q[0, 0]).clamp_min(0)
    assert chi_square(_counts(corrected, 5), (left / left.sum()).tolist()) > ALPHA, "the residual, renormalised"


@pytest.mark.parametrize("seed", range(3))
def test_verified_chains_have_the_targets_joint_distribution(seed: int) -> None:
    """Drafts of 0 … 3 tokens per row from one table, verified against another: the law of the first two tokens."""
    vocab, g = 4, 3
    p_table, q_table = _distributions((vocab, vocab), seed), _distributions((vocab, vocab), seed + 50)
    u = _uniforms((2 * g + 2, DRAWS), seed + 9)
    tokens, q, last = [], [], torch.zeros(DRAWS, dtype=torch.long)
    for k in range(g):
        q.append(q_table[last])
        last = draw(q[-1], u[k])
        tokens.append(last)
    draft = torch.stack(tokens, 1)
    p = p_table[torch.cat([torch.zeros(DRAWS, 1, dtype=torch.long), draft], 1)]
    counts = torch.arange(DRAWS) % (g + 1)
    accepted, following = verify(p, torch.stack(q, 1), draft, counts, u[g : 2 * g].T, u[-2])
    out = torch.cat([draft, draft[:, :1]], 1).scatter(1, accepted[:, None], following[:, None])
    # a row that ends after one token is continued from the target itself
    second = torch.where(accepted >= 1, out[:, 1], draw(p_table[out[:, 0]], u[-1]))
    joint = p_table[0][:, None] * p_table
    assert chi_square(_counts(out[:, 0] * vocab + second, vocab**2), joint.flatten().tolist()) > ALPHA
    assert (accepted <= counts).all()


PROBS = st.lists(st.one_of(st.just(0.0), st.floats(2**-20, 1, width=32)), min_size=5, max_size=5)
EDGES = st.one_of(st.sampled_from([0.0, BELOW_ONE]), st.floats(0, BELOW_ONE))


@given(
    st.lists(PROBS, min_size=3, max_size=3),
    st.lists(PROBS, min_size=2, max_size=2),
    st.booleans(),
    st.lists(st.integers(0, 4), min_size=2, max_size=2),
    st.lists(EDGES, min_size=3, max_size=3),
    st.integers(0, 2),
)
def test_an_impossible_token_is_never_emitted(
    p_rows: list[list[float]], q_rows: list[list[float]], certain: bool, draft: list[int], u: list[float], count: int
) -> None:
    """L6, L7: whatever was drafted, and at the edges of the uniforms (u = 0 accepts nothing of probability 0)."""
    p, q = torch.tensor([p_rows]), torch.tensor([q_rows])
    p[..., 0] += 1e-3 * (p.sum(-1) == 0)
    p = p / p.sum(-1, keepdim=True)
    accepted, following = verify(
        p, None if certain else q, torch.tensor([draft]), torch.tensor([count]),
        torch.tensor([u[:2]], dtype=torch.float64), torch.tensor(u[2:], dtype=torch.float64),
    )  # fmt: skip
    emitted = [*draft[: int(accepted)], int(following)]
    assert int(accepted) <= count
    assert all(p[0, k, token] > 0 for k, token in enumerate(emitted))
    if certain and int(accepted) < count:
        rest = p[0, int(accepted)].clone()
        rest[draft[int(accepted)]] = 0
        assert rest.sum() == 0 or int(following) != draft[int(accepted)], "a rejected certain draft is not drawn again"


def test_a_rejection_without_residual_falls_back_to_the_target() -> None:
    """L7: p = q up to rounding, rejected by rounding alone."""
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    for q in (p, p + 1e-7):
        assert torch.equal(residual(p, q, torch.tensor([0, 1])), p)
    certain = torch.tensor([[0.0, 1.0]])
    assert torch.equal(residual(certain, None, torch.tensor([1])), certain)
    u = torch.tensor([[1.0]], dtype=torch.float64)  # outside [0, 1): rejects even p = q
    accepted, following = verify(
        p[None, 1:].expand(1, 2, 2), p[None, 1:], torch.tensor([[1]]), torch.tensor([1]), u, torch.tensor([0.6])
    )
    assert (accepted.tolist(), following.tolist()) == ([0], [1])


@given(st.integers(0, 10_000))
def test_a_certain_draft_equals_a_one_hot_q(seed: int) -> None:
    """L3: at temperature 0 the draft's q is one-hot, not its softmax."""
    p, u = _distributions((6, 4, 5), seed), _uniforms((6, 4), seed)
    draft = torch.randint(0, 5, (6, 3), generator=torch.Generator().manual_seed(seed))
    counts = torch.tensor([0, 1, 2, 3, 3, 3])
    one_hot = torch.nn.functional.one_hot(draft, 5).float()
    with_none = verify(p, None, draft, counts, u[:, :3], u[:, 3])
    with_q = verify(p, one_hot, draft, counts, u[:, :3], u[:, 3])
    assert with_none[0].tolist() == with_q[0].tolist() and with_none[1].tolist() == with_q[1].tolist()


@given(st.integers(0, 10_000))
def test_padding_of_a_row_is_never_looked_at(seed: int) -> None:
    """A51: rows of one batch have their own draft lengths; what stands behind them may be anything, NaN too."""
    p, q, u = _distributions((4, 4, 5), seed), _distributions((4, 3, 5), seed + 1), _uniforms((4, 4), seed)
    draft = torch.randint(0, 5, (4, 3), generator=torch.Generator().manual_seed(seed))
    counts = torch.tensor([0, 1, 2, 3])
    wanted = verify(p, q, draft, counts, u[:, :3], u[:, 3])
    for i, count in enumerate(counts.tolist()):
        draft[i, count:] = 4
        q[i, count:] = math.nan
        p[i, count + 1 :] = math.nan
    found = verify(p, q, draft, counts, u[:, :3], u[:, 3])
    assert [f.tolist() for f in found] == [w.tolist() for w in wanted]


def test_without_a_draft_the_next_token_is_drawn_from_the_target() -> None:
    p, u = _distributions((1, 1, 5), 0).expand(DRAWS, -1, -1), _uniforms((DRAWS,), 1)
    none = torch.empty(DRAWS, 0, dtype=torch.long)
    accepted, following = verify(p, None, none, torch.zeros(DRAWS, dtype=torch.long), none.double(), u)
    assert accepted.sum() == 0 and chi_square(_counts(following, 5), p[0, 0].tolist()) > ALPHA
