"""Prices of rounds with exits: by hand, from a profile."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pacer.errors import ConfigError
from pacer.evaluation.cascade import costs, theory
from pacer.evaluation.cascade.profile import IN_A_ROW, profile_rungs
from pacer.evaluation.cascade.walk import Cascade, usage
from pacer.models.preverifier_layer import Layers
from pacer.models.stack import Stack
from tests.cascades import L, points, table
from tests.exits import LAYERS, early_model, heads


def test_plain_decoding_costs_one() -> None:
    of, plain = table([[[True, False] * 20]], [True], exits=(2,)), Cascade((2,), (0,))
    for prices in (costs.synthetic(L, [2], head=0.3, token=0.2, rest=0.5), costs.from_points(points(), rest=0.5)):
        assert prices.ratio(plain, usage(of, plain)) == pytest.approx(1)
        assert theory.speed(plain, (0.5,), prices) == pytest.approx(1)
    prices = costs.synthetic(L, [2], head=0.3)
    whole = prices.group(0, L)[1] + prices.heads[L][1]
    assert whole == pytest.approx(1) and prices.group(0, 2)[1] + prices.group(2, L)[1] == pytest.approx(0.7)


def test_a_round_by_hand() -> None:
    """12 layers in 0.76, heads 0.24 and 0.1, further tokens 0.5 each. Exits 3 and 6, N_d 2, N_i 4; all agree; the text
    is 8 tokens: one after the prefill, then two inner rounds of 3 and the target's: 7."""
    of = table([[[True] * 8], [[True] * 8]], [True], exits=(3, 6))
    prices = costs.synthetic(L, (3, 6), head=0.24, exit_head=0.1, token=0.5, rest=0.01)
    cascade = Cascade((3, 6), (2, 4))
    layer = 0.76 / 12
    step, below = 3 * layer + 0.1, 3 * layer
    inner = 2 * step + below + (3 * layer + 0.1) * 2.0 + 0.01  # L_i reads 3 tokens: 1 + 2 · 0.5
    final = below + 3 * layer + (6 * layer + 0.24) * 4.0 + 0.01  # 7 tokens: 1 + 6 · 0.5
    used = usage(of, cascade)
    assert used.emitted.tolist() == [7] and prices.cost(cascade, used).tolist() == pytest.approx([2 * inner + final])
    tokens = (2 * 3 + 1) * 3 + (2 * 3 + 1) * 3 + 7 * 6
    assert used.layer_tokens(cascade, L) == pytest.approx(tokens / 7)
    with pytest.raises(ConfigError, match="exits without a price"):
        prices.cost(Cascade((2,), (1,)), usage(table([[[True] * 8]], [True], exits=(2,)), Cascade((2,), (1,))))


def test_prices_from_a_profile() -> None:
    prices = costs.from_points(points(0.8) + points(1.2), rest=0.01)
    assert prices.n_layers == L and prices.exits == (2,) and prices.worst_fit < 1e-9
    assert prices.group(2, 5)[[0, 1, 2, 3, 4, 6]].tolist() == pytest.approx(
        [0, 7 / 20, 10.5 / 20, 14 / 20, 17.5 / 20, 24.5 / 20]  # 3: between; 6: on the line
    )
    assert prices.group(0, 2)[1] == pytest.approx(5.5 / 20), "with the adapter"
    assert prices.heads[2][1] == pytest.approx(3 / 20) and prices.drafts[2] == pytest.approx(7 / 20)
    slow = costs.from_points(points(), overhead_ms=5.0)
    assert slow.heads[L][1] == pytest.approx((6 + 5) / 25) and slow.heads[2][1] == pytest.approx(3 / 25)
    crooked = [dataclasses.replace(p, median_ms=9.0) if (p.part, p.a, p.n) == ("rung", 0, 1) else p for p in points()]
    assert costs.from_points(crooked).worst_fit > 0.1
    falling = [dataclasses.replace(p, median_ms=0.1) if (p.part, p.a) == ("rung", 0) else p for p in points()]
    assert (costs.from_points(falling).call == 0).all() and (costs.from_points(falling).layer[1:] > 0).all()
    with pytest.raises(ConfigError, match="no pass of the whole model"):
        costs.from_points([p for p in points() if p.part != "whole"])


@pytest.mark.parametrize("kind", ["shared", "adapter"])
def test_a_profile_of_a_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, run = [], Layers.run

    def spy(self: Layers, *arguments: Any) -> torch.Tensor:
        calls.append(self)
        return run(self, *arguments)

    monkeypatch.setattr(Layers, "run", spy)
    target = Stack(early_model())
    found = {head.layer: head for head in heads(target, (2, 4), kind)}
    measured = profile_rungs(target, (2, 3, 4), found, context=8, widths=(1, 3), repeats=2)
    parts = {(p.part, p.a, p.b, p.n) for p in measured}
    rungs = {("rung", a, b, n) for a, b in ((0, 2), (2, 3), (3, 4), (4, LAYERS)) for n in (1, 3)}
    read = {("head", a, b, n) for a, b in ((0, 2), (3, 4), (4, LAYERS)) for n in (1, 3)}
    own = {("adapter", a, b, n) for a, b in ((0, 2), (3, 4)) for n in (1, 3)} if kind == "adapter" else set()
    steps = {("draft", 0, 2, 1), ("draft", 0, 4, 1), ("whole", 0, LAYERS, 1)}
    assert parts == rungs | read | own | steps and len(measured) == len(parts)
    assert all(0 < p.low_ms <= p.median_ms <= p.high_ms for p in measured)
    prices = costs.from_points(measured)
    assert prices.exits == (2, 4) and (len(prices.adapters) == 2) == (kind == "adapter")
    assert prices.drafts[4] > 0 and prices.as_json()["heads"].keys() == {2, 4, LAYERS}
    # three rounds: at two widths, and in a row of drafting steps with one untimed
    assert len(calls) == (2 * 3 * (2 + IN_A_ROW + 1) if kind == "adapter" else 0)
