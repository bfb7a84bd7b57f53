"""Stateless random numbers. Statistical tests use fixed seeds; false alarm 1e-4 each on other seeds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pacer.decoding.uniforms import ACCEPT, DRAFT, NEXT, request_key, uniforms
from pacer.evaluation.stats import chi_square

ALPHA = 1e-4
INT64 = st.integers(-(2**63), 2**63 - 1)


def _table(purpose: int, rows: int = 64, rounds: int = 16, offsets: int = 16, seed: int = 0) -> torch.Tensor:
    """``(rows, rounds, offsets)`` numbers of as many requests."""
    keys = torch.tensor([request_key(seed, f"r{i}") for i in range(rows)]).repeat_interleave(rounds)
    table = uniforms(keys, torch.arange(rounds).repeat(rows), torch.arange(offsets), purpose)
    return table.reshape(rows, rounds, offsets)


COUNTERS = st.lists(st.tuples(INT64, st.integers(0, 10**6)), min_size=1, max_size=6)


@given(COUNTERS, st.integers(1, 9), st.sampled_from([DRAFT, ACCEPT, NEXT]))
def test_a_number_depends_on_its_own_counters_only(pairs: list[tuple[int, int]], n: int, purpose: int) -> None:
    keys, rounds = (torch.tensor(column) for column in zip(*pairs, strict=True))
    batch = uniforms(keys, rounds, torch.arange(n), purpose)
    assert batch.dtype == torch.float64 and batch.shape == (len(pairs), n)
    assert ((batch >= 0) & (batch < 1)).all()
    for i in range(len(pairs)):
        alone = uniforms(keys[i : i + 1], rounds[i : i + 1], torch.tensor([n - 1]), purpose)
        assert alone.item() == batch[i, n - 1].item()


@pytest.mark.parametrize("purpose", [DRAFT, ACCEPT, NEXT])
def test_numbers_are_uniform_along_every_axis(purpose: int) -> None:
    table = _table(purpose)
    assert stats.kstest(table.flatten().numpy(), "uniform").pvalue > ALPHA
    for values in (table[:, 0, 0], table[0, :, 0], table[0, 0]):
        assert stats.kstest(values.numpy(), "uniform").pvalue > ALPHA
    assert len(set(table.flatten().tolist())) == table.numel()


def test_neighbours_are_independent() -> None:
    """Pairs along requests, rounds, offsets, purposes and seeds fall evenly on an 8 × 8 grid."""
    draft, accept, following = (_table(purpose) for purpose in (DRAFT, ACCEPT, NEXT))
    pairs = {
        "requests": (draft[1:], draft[:-1]),
        "rounds": (draft[:, 1:], draft[:, :-1]),
        "offsets": (draft[:, :, 1:], draft[:, :, :-1]),
        "rounds and offsets": (draft[:, 1:, :-1], draft[:, :-1, 1:]),
        "draft and accept": (draft, accept),
        "accept and next": (accept, following),
        "draft and next": (draft, following),
        "seeds": (draft, _table(DRAFT, seed=1)),
    }
    for name, (x, y) in pairs.items():
        cells = (x * 8).long().flatten() * 8 + (y * 8).long().flatten()
        assert chi_square(torch.bincount(cells, minlength=64).tolist(), [1 / 64] * 64) > ALPHA, name


def test_seed_0_is_a_seed() -> None:
    """R66: it gives its own numbers, every time the same."""
    keys = [request_key(seed, "a") for seed in (0, 1, 2, -1)] + [request_key(0, "b"), request_key(0, "")]
    assert len(set(keys)) == len(keys)
    assert request_key(0, "a") == request_key(0, "a") and request_key(1, "0:a") != request_key(10, ":a")
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_the_numbers_of_a_seed_never_change() -> None:
    """Results name a seed: these values are part of the format."""
    key = request_key(0, "gsm8k-test-3")
    assert key == 4786314241060014280
    found = uniforms(torch.tensor([key, 0]), torch.tensor([0, 5]), torch.tensor([0, 7]), ACCEPT)
    assert found.tolist() == [[0.762957101402269, 0.9286333168485288], [0.3051701410067461, 0.9450311198023522]]
