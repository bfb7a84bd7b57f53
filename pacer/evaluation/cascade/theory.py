"""Where HiSpec pays: the closed form, with coins in place of texts.

Whether stage k + 1 accepts a token of stage k is a coin of chance ``accept[k]``, thrown anew at every place, and the
coins of different stages are independent of each other. Then rounds are alike, so speed is expected tokens over
expected cost, and both follow from the distribution of buffer lengths. A draft token is right for the whole model if
it passes every coin (a draft exit is never right where the verifying exit is wrong), so LayerSkip from the same exit
accepts with the product of them.

In real texts the coins of a place agree (easy words are easy for every exit), which lifts LayerSkip's acceptance above
the product, and easy places come in runs. Reports name the measured acceptance beside the product.

Shapes: A, B grid points, M buffer lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pacer.evaluation.cascade.costs import Prices
from pacer.evaluation.cascade.search import BUFFERS, DRAFTS, WINDOWS
from pacer.evaluation.cascade.table import Floats
from pacer.evaluation.cascade.walk import WIDTHS, Cascade


@dataclass(frozen=True)
class Point:
    """A model on the map: chances that L_i accepts L_d's token, and that the whole model accepts L_i's.

    ``direct``: that it accepts L_d's, where that is known; else the product.
    """

    name: str
    accept_i: float
    accept_f: float
    direct: float | None = None
    published: bool = False


# Llama2-70B on ShareGPT, exits 10 and 20 of 80 (arXiv 2510.01336): draft acceptance 39.7 %, 58.1 % with the
# intermediate verifier. What L_i accepts is not published; under the map's own assumption it is their quotient.
PUBLISHED = Point("Llama2-70B, ShareGPT (published)", 0.397 / 0.581, 0.581, 0.397, published=True)
PUBLISHED_DEPTHS = (10, 20, 80)


def gathered(cascade: Cascade, accept: Sequence[float], prices: Prices) -> tuple[Floats, float]:
    """Distribution of the last buffer's length ``(M,)``, and a round's expected cost: drafts to target pass.

    Args:
        accept: of each intermediate stage: one chance less than there are exits.
    """
    length = np.zeros(cascade.buffers[0] + 1)
    length[-1] = 1.0
    if cascade.buffers[0] == 0:
        return length, 1.0  # plain decoding
    groups, heads = prices.tables(cascade)
    cost = cascade.buffers[0] * prices.drafts[cascade.exits[0]]
    for number in range(1, len(groups)):
        last = number == len(cascade.exits) or cascade.bonus  # is the last token read too?
        widths = np.minimum(np.arange(len(length)), WIDTHS - 2)
        cost += float(length @ (groups[number][widths + last] + heads[number][widths + 1]))
        cost += last * float(groups[:number, 1].sum()) + prices.rest
        if number < len(cascade.exits):
            gain = _gained(length, accept[number - 1], cascade.bonus)
            length, rounds = _filled(gain, cascade.buffers[number])
            cost *= rounds  # rounds are alike, and whether there is another depends on those before
    return length, cost


def _gained(shown: Floats, accept: float, bonus: bool) -> Floats:
    """Distribution of the tokens that a stage passes on, from the distribution of those it is shown."""
    gain = np.zeros(len(shown) + 1)
    for m, chance in enumerate(shown):
        gain[1 : m + 1] += chance * accept ** np.arange(m) * (1 - accept)
        gain[m + 1 if bonus or m == 0 else m] += chance * accept**m
    return gain


def _filled(gain: Floats, size: int) -> tuple[Floats, float]:
    """Distribution of a buffer that grows until it holds ``size`` tokens, and the expected number of rounds."""
    reached = np.zeros(size + len(gain) - 1)
    reached[0] = 1.0
    for have in range(size):
        reached[have + 1 : have + len(gain)] += reached[have] * gain[1:]
    rounds = float(reached[:size].sum())
    reached[:size] = 0.0
    return reached, rounds


def emitted(length: Floats, accept: Floats) -> Floats:
    """Expected tokens of a round ``(B,)``: those of the buffer that the whole model accepts, and its own.

    Args:
        length: distribution of the buffer ``(M,)``. accept: chances ``(B,)``.
    """
    powers = np.asarray(accept)[:, None] ** np.arange(len(length))
    return np.asarray(np.cumsum(powers, 1) @ length)


def speed(cascade: Cascade, accept: Sequence[float], prices: Prices) -> float:
    """Speed over plain decoding.

    Args:
        accept: of each stage above the first, the whole model's last.
    """
    length, cost = gathered(cascade, accept[:-1], prices)
    return float(emitted(length, np.array(accept[-1:]))[0] / cost)


def best_layerskip(exit: int, accept: Floats, prices: Prices) -> Floats:
    """The highest speed over all windows, γ = 0 among them, for chances ``(…)``."""
    flat, found = np.asarray(accept, dtype=float).ravel(), []
    for gamma in WINDOWS:
        length, cost = gathered(Cascade((exit,), (gamma,)), (), prices)
        found.append(emitted(length, flat) / cost)
    return np.asarray(np.max(found, 0)).reshape(np.shape(accept))


def best_hispec(exits: tuple[int, int], accept_i: float, accept_f: Floats, prices: Prices) -> Floats:
    """The highest speed over all buffers, with and without bonus ``(B,)``."""
    found = []
    for drafts, size, bonus in itertools.product(DRAFTS, BUFFERS, (True, False)):
        length, cost = gathered(Cascade(exits, (drafts, size), bonus), (accept_i,), prices)
        found.append(emitted(length, accept_f) / cost)
    return np.asarray(np.max(found, 0))


def where_it_pays(
    exits: tuple[int, int], prices: Prices, name: str, points: Sequence[Point] = (), steps: int = 41
) -> dict[str, Any]:
    """The map over both chances, every setting tuned at every place, as plain data.

    Returns:
        ``accept_i (A,)``, ``accept_f (B,)``; ``over_same (A, B)``: HiSpec over the best LayerSkip from the same draft
        exit; ``over_best``: over the better of that and LayerSkip from L_i; ``over_ar``; the points, with the same.
    """
    grid = np.linspace(0, 1, steps)

    def values(accept_i: float, accept_f: Floats, direct: Floats) -> tuple[Floats, Floats, Floats]:
        mine = best_hispec(exits, accept_i, accept_f, prices)
        same = best_layerskip(exits[0], direct, prices)
        return mine / same, mine / np.maximum(same, best_layerskip(exits[1], accept_f, prices)), mine

    rows = [values(float(chance), grid, chance * grid) for chance in grid]
    over_same, over_best, over_ar = (np.stack(part).round(4).tolist() for part in zip(*rows, strict=True))
    placed = []
    for point in points:
        direct = point.accept_i * point.accept_f if point.direct is None else point.direct
        found = values(point.accept_i, np.array([point.accept_f]), np.array([direct]))
        same, best, over = (float(part[0]) for part in found)
        placed.append({**asdict(point), "over_same": same, "over_best": best, "over_ar": over})
    return {
        "name": name, "exits": list(exits), "n_layers": prices.n_layers, "accept_i": grid.round(4).tolist(),
        "accept_f": grid.round(4).tolist(), "over_same": over_same, "over_best": over_best, "over_ar": over_ar,
        "points": placed,
        "assumption": "acceptance by independent coins, alike at every place; L_d is right where both coins say so",
    }  # fmt: skip
