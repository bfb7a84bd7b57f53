"""The search over exits and buffers, and the closed form on coins."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacer.evaluation.cascade import costs, search, theory
from pacer.evaluation.cascade.walk import Cascade, usage
from tests.cascades import L, coins


def test_both_families_try_as_many_settings() -> None:
    of, prices = coins((0.3, 0.9, 0.6), 6, 200), costs.synthetic(L, (1, 2, 3), token=0.02)
    skip = search.best_layerskip(of, prices)
    assert len(skip.speeds) == 3 * len(search.WINDOWS)
    found = search.best_hispec(of, prices, len(skip.speeds))
    assert len(found.speeds) == len(skip.speeds), "the budget is used, and kept"
    assert found.speeds[found.fastest()] == max(found.speeds.values())
    first = next(iter(found.speeds))
    assert (first.exits, first.buffers) == ((1, 3), (2, 4)), "an eighth and a quarter of 12 are 1.5 and 3"
    assert search.pairs((2, 3, 4, 8, 15), 32)[0] == (4, 8)


def test_the_search_finds_what_is_best() -> None:
    """L_d rarely agrees with L_i, L_i nearly always with the model: a filter pays; where L_d is as good, none."""
    prices = costs.synthetic(24, (1, 8))
    filtered = dataclasses.replace(coins((0.5, 0.97), 4, 800), layers=(1, 8), n_layers=24)
    rows = {row["family"]: row for row in search.chosen(filtered, prices) if row["benchmark"] == "all"}
    assert rows["hispec"]["ratio_to_ar"] > 1.05 * rows["layerskip"]["ratio_to_ar"]
    equal = dataclasses.replace(coins((1.0, 0.8), 4, 800), layers=(1, 8), n_layers=24)
    rows = {row["family"]: row for row in search.chosen(equal, prices) if row["benchmark"] == "all"}
    assert rows["hispec"]["ratio_to_ar"] < rows["layerskip"]["ratio_to_ar"]
    assert rows["layerskip"]["exits"] == [1]


def test_what_is_chosen_is_judged_on_other_texts() -> None:
    tuning, report = coins((0.6, 0.9), 4, 300), coins((0.2, 0.5), 4, 300, seed=1)
    prices = costs.synthetic(L, (1, 2))
    rows = search.chosen(tuning, prices, report)
    assert {(r["benchmark"], r["family"]) for r in rows} == set(
        itertools.product(("even", "odd", "all"), ("layerskip", "hispec"))
    )
    for row in rows:
        assert row["ratio_to_ar"] < row["ratio_in_sample"] and row["tried"] <= 2 * len(search.WINDOWS)
        cascade = Cascade(tuple(row["exits"]), tuple(row["buffers"]), row["bonus"])
        assert row["arm"] == cascade.arm
        part = {**report.by_task(), "all": report}[row["benchmark"]]
        assert row["tokens_per_verify"] == usage(part, cascade).tokens_per_verify
    one = search.chosen(tuning, prices, exits=[2])
    assert {row["family"] for row in one} == {"layerskip"}, "one exit has nothing to verify with"


def test_grids() -> None:
    of, prices = coins((0.4, 0.9, 0.7), 4, 200), costs.synthetic(L, (1, 2, 3), token=0.02)
    rows = {(r["draft"], r["verifier"]): r for r in search.layer_grid(of, prices)}
    assert rows.keys() == {(1, None), (2, None), (3, None), (1, 2), (1, 3), (2, 3)}
    for (_, verifier), row in rows.items():
        if verifier is not None:
            assert row["best"]["ratio_to_ar"] >= row["fixed"]["ratio_to_ar"]
            assert row["fixed"]["buffers"] == [2, 4] and row["fixed"]["exits"] == row["best"]["exits"]
    curves = search.buffer_curves(of, prices, (1, 2), drafts=(2,))
    assert [r["n_i"] for r in curves] == list(range(1, 17)) and {r["n_d"] for r in curves} == {2}
    best = max(r["ratio_to_ar"] for r in curves)
    assert best <= rows[1, 2]["best"]["ratio_to_ar"] + 0.05


@pytest.mark.parametrize(
    "cascade",
    [
        Cascade((2,), (0,)), Cascade((2,), (5,)), Cascade((2, 4), (2, 4)), Cascade((2, 4), (2, 4), bonus=False),
        Cascade((2, 4), (4, 9)), Cascade((1, 2, 4), (2, 3, 6)), Cascade((1, 2, 4), (2, 3, 6), bonus=False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("chances", [(0.5, 0.8, 0.9), (0.9, 0.6, 0.7), (1.0, 0.0, 1.0)])
def test_the_closed_form_is_the_walk_on_coins(cascade: Cascade, chances: tuple[float, ...]) -> None:
    used_chances = chances[: len(cascade.exits)]
    of = dataclasses.replace(coins(used_chances, places=6000), layers=cascade.exits)
    prices = costs.synthetic(L, cascade.exits, head=0.2, exit_head=0.05, token=0.03, rest=0.01)
    walked = prices.ratio(cascade, usage(of, cascade))
    assert theory.speed(cascade, used_chances, prices) == pytest.approx(walked, rel=0.012)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 0.95), st.floats(0.05, 0.95), st.integers(1, 6), st.integers(1, 12), st.booleans())
def test_more_acceptance_is_never_slower(low: float, high: float, drafts: int, size: int, bonus: bool) -> None:
    """By the model, whatever it costs; by L_i, more tokens per round cost."""
    prices, cascade = costs.synthetic(L, (2, 4), token=0.05), Cascade((2, 4), (drafts, size), bonus)
    assert theory.speed(cascade, (low, high), prices) <= theory.speed(cascade, (low, min(1.0, high + 0.05)), prices)
    length, cost = theory.gathered(cascade, (low,), prices)
    assert length.sum() == pytest.approx(1) and (length[:size] == 0).all() and cost > 0


def test_where_it_pays() -> None:
    prices = costs.synthetic(80, (10, 20))
    point = theory.Point("mine", 0.4, 0.95, direct=0.5)
    found = theory.where_it_pays((10, 20), prices, "70B", [theory.PUBLISHED, point], steps=7)
    over = np.array(found["over_same"])
    assert over.shape == (7, 7) and (over[-1, :-1] < 1).all(), "a draft that L_i hardly corrects needs no L_i"
    assert over[2, -1] > 1.05, "a poor draft, and a filter that is nearly the model"
    best = np.array(found["over_best"])
    assert (best <= over + 1e-9).all() and best[1, -1] < 0.9 * over[1, -1], "a poor L_d, a good L_i: draft from that"
    published, mine = found["points"]
    assert published["published"] and published["accept_i"] * published["accept_f"] == pytest.approx(0.397)
    product = theory.where_it_pays((10, 20), prices, "", [dataclasses.replace(point, direct=None)], steps=2)["points"]
    assert mine["over_same"] < product[0]["over_same"], "0.5 is more than 0.4 · 0.95"
    i, f = found["accept_i"][3], found["accept_f"][4]
    slow = max(
        theory.speed(Cascade((10, 20), (a, b), bonus), (i, f), prices)
        for a, b, bonus in itertools.product(search.DRAFTS, search.BUFFERS, (True, False))
    )
    same = max(theory.speed(Cascade((10,), (n,)), (i * f,), prices) for n in search.WINDOWS)
    assert over[3, 4] == pytest.approx(slow / same, abs=1e-3)
