"""Intervals and tests: the paired bootstrap of a speed ratio, its geometric mean, and Pearson's chi-square."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from pacer.errors import ConfigError

Floats = npt.NDArray[np.float64]
Values = Sequence[float] | Sequence[int] | npt.NDArray[np.floating] | npt.NDArray[np.integer]


@dataclass(frozen=True)
class Ratio:
    """A ratio of speeds with its bootstrap interval; ``low`` and ``high`` are None with fewer than two prompts."""

    value: float | None
    low: float | None
    high: float | None
    n: int  # prompts


def paired_ratio(
    x_tokens: Values,
    x_seconds: Values,
    y_tokens: Values,
    y_seconds: Values,
    *,
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Ratio:
    """Speed of ``x`` over speed of ``y`` on the same prompts, each speed total tokens over total seconds.

    Prompts are resampled with replacement, both arms with the same draw. The quantiles are taken on the log ratio
    (so x/y and y/x give reciprocal intervals) and widened for small samples: the expanded percentile interval of
    Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69(4), 2015.

    Args:
        x_tokens, x_seconds, y_tokens, y_seconds: one value per prompt, shape [n], in the same order.
        resamples: bootstrap draws.
        level: coverage of the interval.

    Raises:
        ConfigError: lengths differ, a count is negative, or a time is not positive and finite.
    """
    return geometric_mean_ratio(
        [(x_tokens, x_seconds, y_tokens, y_seconds)], resamples=resamples, seed=seed, level=level
    )


def geometric_mean_ratio(
    benchmarks: Sequence[tuple[Values, Values, Values, Values]],
    *,
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Ratio:
    """Geometric mean over benchmarks of the paired ratio; prompts are resampled inside each benchmark (strata).

    Args:
        benchmarks: per benchmark the four arrays of `paired_ratio`.

    Returns:
        The mean and its interval; ``n`` counts the prompts of all benchmarks. All None where a benchmark is empty.

    Raises:
        ConfigError: as `paired_ratio`; ``level`` outside (0, 1) or fewer than one resample.
    """
    if not 0 < level < 1:
        raise ConfigError("level of the interval", value=level, allowed="between 0 and 1")
    if resamples < 1:
        raise ConfigError("number of bootstrap resamples", value=resamples, allowed="1 or more")
    strata = [_checked(group) for group in benchmarks]
    sizes = [group.shape[1] for group in strata]
    if not sizes or min(sizes) == 0:
        return Ratio(None, None, None, sum(sizes))
    value = _finite(np.exp(np.mean([_log_ratio(group.sum(axis=1)) for group in strata])))
    if min(sizes) < 2:
        return Ratio(value, None, None, sum(sizes))
    rng = np.random.default_rng(seed)
    draws = np.mean([_log_ratio(_resample(group, resamples, rng)) for group in strata], axis=0)
    tail = _expanded_tail(sizes, level)
    with np.errstate(invalid="ignore"):
        low, high = np.exp(np.quantile(draws, [tail, 1 - tail]))
    return Ratio(value, _finite(low), _finite(high), sum(sizes))


def chi_square(counts: Values, probs: Values, min_expected: float = 5) -> float:
    """p-value of Pearson's goodness-of-fit test of ``counts`` against ``probs``.

    Cells whose expected count is below ``min_expected`` are pooled into one (joined to the smallest other cell while
    the pool itself is too small). A count where the probability is 0 is impossible: p = 0. A distribution with one
    possible outcome fits: p = 1.

    Args:
        counts: observed counts, shape [cells].
        probs: probabilities, shape [cells]; they must sum to 1 within 1e-3 and are normalised.

    Raises:
        ConfigError: shapes differ, negative values, no observations, probabilities that do not sum to 1, or too few
            observations to leave two cells.
    """
    observed, p = np.asarray(counts, dtype=np.float64), np.asarray(probs, dtype=np.float64)
    if observed.ndim != 1 or observed.shape != p.shape:
        raise ConfigError("counts and probabilities", value=(observed.shape, p.shape), allowed="two equal 1-d shapes")
    if not (np.isfinite(observed).all() and np.isfinite(p).all() and (observed >= 0).all() and (p >= 0).all()):
        raise ConfigError("counts and probabilities", allowed="finite values, 0 or more")
    total = observed.sum()
    if total == 0 or abs(p.sum() - 1) > 1e-3:
        raise ConfigError("chi-square input", value=(total, p.sum()), allowed="total > 0, probabilities summing to 1")
    possible = p > 0
    if observed[~possible].any():
        return 0.0
    observed, p = observed[possible], p[possible] / p.sum()
    if len(p) == 1:
        return 1.0
    observed, expected = _pool(observed, p * total, min_expected)
    if len(expected) < 2:
        raise ConfigError("too few observations for a chi-square test", value=total, remedy="draw more samples")
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, len(expected) - 1))


def _pool(observed: Floats, expected: Floats, min_expected: float) -> tuple[Floats, Floats]:
    order = np.argsort(expected, kind="stable")
    observed, expected = observed[order], expected[order]
    small = int((expected < min_expected).sum())
    if small == 0:
        return observed, expected
    while small < len(expected) and expected[:small].sum() < min_expected:
        small += 1
    pooled_observed = np.concatenate([[observed[:small].sum()], observed[small:]])
    return pooled_observed, np.concatenate([[expected[:small].sum()], expected[small:]])


def _checked(group: tuple[Values, Values, Values, Values]) -> Floats:
    """The four arrays as one of shape [4, n]."""
    arrays = [np.asarray(a, dtype=np.float64) for a in group]
    if any(a.ndim != 1 for a in arrays) or len({len(a) for a in arrays}) != 1:
        raise ConfigError("paired speeds", value=[a.shape for a in arrays], allowed="four 1-d arrays of one length")
    stacked = np.stack(arrays)
    if not np.isfinite(stacked).all() or (stacked < 0).any() or (stacked[[1, 3]] == 0).any():
        raise ConfigError("paired speeds", allowed="finite values, tokens 0 or more, seconds above 0")
    return stacked


def _resample(group: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Bootstrap totals, shape [4, resamples]; a draw is held as how often it takes each prompt."""
    n = group.shape[1]
    times = rng.multinomial(n, np.full(n, 1 / n), size=resamples)
    return group @ times.T.astype(np.float64)


def _log_ratio(totals: Floats) -> Floats:
    x_tokens, x_seconds, y_tokens, y_seconds = totals
    with np.errstate(divide="ignore", invalid="ignore"):  # an arm without tokens: not finite, shown as None
        return np.asarray(np.log(x_tokens) - np.log(x_seconds) - np.log(y_tokens) + np.log(y_seconds))


def _expanded_tail(sizes: Sequence[int], level: float) -> float:
    """Tail probability that undoes the bootstrap's (n - 1)/n variance and the normal instead of t quantile."""
    degrees = sum(size - 1 for size in sizes)
    scale = np.sqrt(min(sizes) / (min(sizes) - 1))
    return float(stats.norm.sf(scale * stats.t.ppf((1 + level) / 2, degrees)))


def _finite(value: float | np.floating) -> float | None:
    return float(value) if np.isfinite(value) else None
