"""The bootstrap of speed ratios and the chi-square test."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats as scipy_stats

from pacer.errors import ConfigError
from pacer.evaluation.stats import chi_square, geometric_mean_ratio, paired_ratio

prompts = st.integers(2, 12).flatmap(
    lambda n: st.tuples(*[hnp.arrays(np.float64, n, elements=st.floats(0.5, 200)) for _ in range(4)])
)


def test_paired_ratio_is_total_over_total() -> None:
    # x: 30 tokens in 3 s = 10/s; y: 30 tokens in 6 s = 5/s; the mean of per-prompt ratios would be 2.25.
    ratio = paired_ratio([10, 20], [1, 2], [10, 20], [3, 3])
    assert ratio.value == pytest.approx(2.0)
    assert ratio.n == 2


@settings(max_examples=25, deadline=None)
@given(prompts)
def test_an_arm_against_itself_is_exactly_one(arrays: tuple[np.ndarray, ...]) -> None:
    ratio = paired_ratio(arrays[0], arrays[1], arrays[0], arrays[1], resamples=50)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.0, 1.0, 1.0))


@settings(max_examples=25, deadline=None)
@given(prompts, st.floats(0.1, 10))
def test_ratio_scales_with_time_and_reverses(arrays: tuple[np.ndarray, ...], factor: float) -> None:
    xt, xs, yt, ys = arrays
    ratio = paired_ratio(xt, xs, yt, ys, resamples=50)
    slower = paired_ratio(xt, xs * factor, yt, ys, resamples=50)
    swapped = paired_ratio(yt, ys, xt, xs, resamples=50)
    assert ratio.low <= ratio.high
    for whole, scaled, back in [
        (ratio.value, slower.value, swapped.value),
        (ratio.low, slower.low, swapped.high),
        (ratio.high, slower.high, swapped.low),
    ]:
        assert scaled * factor == pytest.approx(whole)
        assert back * whole == pytest.approx(1)


@settings(max_examples=25, deadline=None)
@given(prompts, st.randoms())
def test_value_does_not_depend_on_the_order_of_prompts(arrays: tuple[np.ndarray, ...], random: object) -> None:
    order = list(range(len(arrays[0])))
    random.shuffle(order)  # type: ignore[attr-defined]  # hypothesis hands out random.Random as object
    assert paired_ratio(*[a[order] for a in arrays], resamples=5).value == pytest.approx(
        paired_ratio(*arrays, resamples=5).value
    )


def test_constant_gain_has_no_width_and_same_seed_same_interval() -> None:
    rng = np.random.default_rng(0)
    tokens, seconds = rng.integers(10, 100, 9), rng.uniform(1, 5, 9)
    constant = paired_ratio(tokens, seconds / 1.5, tokens, seconds)
    assert (constant.low, constant.high) == pytest.approx((1.5, 1.5))
    noisy = seconds * rng.uniform(0.5, 1, 9)
    assert paired_ratio(tokens, noisy, tokens, seconds, seed=3) == paired_ratio(tokens, noisy, tokens, seconds, seed=3)
    assert paired_ratio(tokens, noisy, tokens, seconds, seed=3) != paired_ratio(tokens, noisy, tokens, seconds, seed=4)


def test_small_inputs() -> None:
    one = paired_ratio([10], [1], [10], [2])
    assert (one.value, one.low, one.high, one.n) == (pytest.approx(2.0), None, None, 1)
    assert paired_ratio([], [], [], []).value is None
    assert paired_ratio([1, 2], [1, 1], [0, 0], [1, 1]).value is None  # never inf or NaN
    for bad in ([[1], [1, 2], [1], [1]], [[1], [0], [1], [1]], [[-1], [1], [1], [1]], [[float("nan")], [1], [1], [1]]):
        with pytest.raises(ConfigError):
            paired_ratio(*bad)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        paired_ratio([1], [1], [1], [1], level=95)


def _simulate(rng: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    """Prompts of different length and gain; the true ratio of totals is E[t]·E[y] / (E[t]·E[x]) = 0.05 / 0.04."""
    tokens = rng.integers(20, 120, n).astype(float)
    return tokens, tokens * 0.04 * rng.gamma(20, 1 / 20, n), tokens, tokens * 0.05 * rng.gamma(60, 1 / 60, n)


@pytest.mark.parametrize("n", [8, 40])
def test_interval_covers_the_truth_as_often_as_it_says(n: int) -> None:
    rng = np.random.default_rng(1)
    runs = [paired_ratio(*_simulate(rng, n), resamples=600, seed=i) for i in range(400)]
    covered = np.mean([r.low <= 1.25 <= r.high for r in runs])
    assert 0.92 <= covered <= 0.985  # two standard errors of 400 runs are 0.022
    width_80 = np.mean([_width(*_simulate(rng, n), level=0.8) for _ in range(40)])
    width_95 = np.mean([r.high - r.low for r in runs])
    assert 0.4 * width_95 < width_80 < 0.8 * width_95


def _width(*arrays: np.ndarray, level: float) -> float:
    ratio = paired_ratio(*arrays, resamples=600, level=level)
    return ratio.high - ratio.low


def test_geometric_mean_over_benchmarks() -> None:
    fast = ([10, 10], [1, 1], [10, 10], [4, 4])  # four times as fast
    slow = ([10, 10, 10], [2, 2, 2], [10, 10, 10], [2, 2, 2])  # as fast
    mean = geometric_mean_ratio([fast, slow])
    assert (mean.value, mean.low, mean.high, mean.n) == (pytest.approx(2.0),) * 3 + (5,)
    assert geometric_mean_ratio([fast, ([], [], [], [])]).value is None
    assert geometric_mean_ratio([]).value is None


def test_geometric_mean_interval_covers() -> None:
    rng = np.random.default_rng(2)
    runs = [
        geometric_mean_ratio([_simulate(rng, 10), _simulate(rng, 6), _simulate(rng, 20)], resamples=400, seed=i)
        for i in range(300)
    ]
    assert 0.92 <= np.mean([r.low <= 1.25 <= r.high for r in runs]) <= 0.99


def test_chi_square_equals_scipy_without_small_cells() -> None:
    counts, probs = [30, 50, 20], [0.25, 0.5, 0.25]
    assert chi_square(counts, probs) == pytest.approx(scipy_stats.chisquare(counts, [25, 50, 25]).pvalue)


def test_chi_square_pools_small_cells() -> None:
    # Expected 60, 34, 3, 2, 1: the last three are pooled to 6.
    pooled = scipy_stats.chisquare([55, 40, 5], [60, 34, 6]).pvalue
    assert chi_square([55, 40, 2, 3, 0], [0.6, 0.34, 0.03, 0.02, 0.01]) == pytest.approx(pooled)
    # Expected 90, 8, 2: the pool of 2 is too small and takes the 8 with it.
    assert chi_square([85, 10, 5], [0.9, 0.08, 0.02]) == pytest.approx(scipy_stats.chisquare([85, 15], [90, 10]).pvalue)


def test_chi_square_edges() -> None:
    assert chi_square([99, 0, 1], [0.5, 0.5, 0.0]) == 0.0  # an impossible token was drawn
    assert chi_square([0, 12], [0, 1]) == 1.0
    assert chi_square([25, 25], [0.5, 0.5]) == 1.0
    for counts, probs in ([[1, 2], [0.5, 0.4]], [[1, 2], [1.0]], [[0, 0], [0.5, 0.5]], [[-1, 2], [0.5, 0.5]]):
        with pytest.raises(ConfigError):
            chi_square(counts, probs)
    with pytest.raises(ConfigError, match="draw more samples"):
        chi_square([1, 2], [0.5, 0.5])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=2, max_size=8), st.integers(0, 1000))
def test_chi_square_is_a_probability_and_ignores_order(weights: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    probs = np.array(weights) / sum(weights)
    counts = rng.multinomial(500, probs)
    order = rng.permutation(len(probs))
    p = chi_square(counts, probs)
    assert 0 <= p <= 1
    # Not bit for bit: equal expected counts at the border of the pool may be told apart by their order.
    if len(set(weights)) == len(weights):
        assert chi_square(counts[order], probs[order]) == pytest.approx(p)


def test_chi_square_keeps_its_level_and_has_power() -> None:
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(20))
    rejected = np.mean([chi_square(rng.multinomial(2000, probs), probs) < 0.05 for _ in range(600)])
    assert 0.03 <= rejected <= 0.075
    wrong = probs.copy()
    wrong[:2] += np.array([0.05, -0.05]) if probs[1] > 0.05 else np.array([-0.05, 0.05])
    wrong = np.clip(wrong, 1e-6, None) / np.clip(wrong, 1e-6, None).sum()
    assert np.mean([chi_square(rng.multinomial(2000, wrong), probs) < 0.05 for _ in range(50)]) > 0.9
