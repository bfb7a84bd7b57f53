"""Walk, prices and evidence on tables small enough to check by hand, and against a slow simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacer.errors import ConfigError
from pacer.evaluation.profiler import Point
from pacer.evaluation.replay import costs, evidence, rules
from pacer.evaluation.replay.rules import Plan
from pacer.evaluation.replay.table import Table, join
from pacer.evaluation.replay.walk import WIDTHS, usage, walk
from pacer.settings import CostSettings
from tests.replays import planted, table


def rounds(of: Table, plan: Plan) -> list[tuple[int, int, int, int, int]]:
    """(committed, drawn, drafted, accepted, emitted)."""
    done = walk(of, plan)
    columns = (of.start[done.row], done.drawn, done.drafted, done.accepted, done.emitted)
    return list(zip(*(c.tolist() for c in columns), strict=True))


def test_a_walk_by_hand() -> None:
    """Ten new tokens after a prompt of 3: the first comes from the prefill, the budget shrinks the last draft."""
    text = table([0, 2, 3, 1, 0, 4, 3, 2, 1])
    assert rounds(text, rules.fixed(text, 3)) == [
        (4, 3, 3, 0, 1), (5, 3, 3, 2, 3), (8, 3, 3, 0, 1), (9, 3, 3, 3, 4)
    ]  # fmt: skip
    assert rounds(text, rules.fixed(text, 0)) == [(p, 0, 0, 0, 1) for p in range(4, 13)]
    # 8 → 9 → all 3 that the budget leaves; the oracle draws nothing where nothing holds
    assert rounds(text, rules.oracle(text)) == [(4, 0, 0, 0, 1), (5, 2, 2, 2, 3), (8, 0, 0, 0, 1), (9, 3, 3, 3, 4)]


def test_a_stop_id_ends_the_text_and_is_not_followed() -> None:
    """The text's last token is a stop id. At 5 the draft holds it in place 3: 2 tokens and the stop, nothing after."""
    text = table([1, 3, 2, 1], ended=True, budget=50, counts=[4, 3, 2, 1])
    assert rounds(text, rules.fixed(text, 4)) == [(4, 4, 4, 1, 2), (6, 4, 2, 2, 2)]
    assert rounds(text, rules.threshold(text, "probability", 0.1)) == [(4, 4, 4, 1, 2), (6, 2, 2, 2, 2)]
    text = table([0, 3, 2, 1], ended=True, budget=50, counts=[4, 3, 2, 1])
    assert rounds(text, rules.fixed(text, 2)) == [(4, 2, 2, 0, 1), (5, 2, 2, 2, 3)]


def test_passes_by_hand() -> None:
    """Prompt 3, γ = 2. The draft reads 1 token; after the full acceptance at 5 it reads 2 first."""
    text = table([0, 2, 3, 1, 0, 4, 3, 2, 1])
    assert rounds(text, rules.fixed(text, 2)) == [
        (4, 2, 2, 0, 1), (5, 2, 2, 2, 3), (8, 2, 2, 0, 1), (9, 2, 2, 2, 3), (12, 0, 0, 0, 1)
    ]  # fmt: skip
    used = usage(text, rules.fixed(text, 2))
    target, draft, preverifier, signals = used.passes[0]
    assert target[:4].tolist() == [0, 1, 0, 4] and preverifier.sum() == signals.sum() == 0
    assert draft[:3].tolist() == [0, 7, 1]  # first passes read 1, 1, 2, 1; four second passes read 1 each
    assert [int(v.sum()) for v in (used.emitted, used.rounds, used.drafting, used.drafted, used.accepted)] == [
        9, 5, 4, 8, 4
    ]  # fmt: skip


def test_calls_by_hand() -> None:
    """b = 1: calls read what was verified since the last call (prefill: the prompt), then one token each."""
    score = [[0.9, 0.1, 0, 0], [0.1, 0, 0, 0], [0.9, 0.9, 0.9, 0.9], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    text = table([1, 0, 3, 2, 1, 0], score=score, budget=20)
    plan = rules.preverified(text, b=1, t0=0.5)
    assert rounds(text, plan) == [(4, 2, 2, 1, 2), (6, 4, 4, 3, 4)]
    # at 4: prompt 3 read, so 1 verified + 1 drafted, then 1; at 6: 2 verified (since 4) + 1, then 1, 1; no call after 4
    assert usage(text, plan).passes[0, 2][:4].tolist() == [0, 3, 1, 1]
    lazy = rules.preverified(text, b=1, t0=0.5, lo=0.6)  # all probabilities are 0.5: no call, no second token
    assert rounds(text, lazy)[0] == (4, 1, 1, 1, 2) and usage(text, lazy).passes[0, 2].sum() == 0
    sure = rules.preverified(text, b=1, t0=0.5, hi=0.4)
    assert rounds(text, sure)[0] == (4, 4, 4, 1, 2) and usage(text, sure).passes[0, 2].sum() == 0


def slow(of: Table, plan: Plan) -> tuple[list[list[int]], np.ndarray[Any, Any]]:
    """One round after the other with counters for what each model has read."""
    found: list[list[int]] = []
    passes = np.zeros((len(of.ids), 4, WIDTHS), int)
    for text, first in enumerate(of.first[:-1]):
        p, end = int(of.prompt[text]) + 1, int(of.prompt[text] + of.output[text])
        had_draft = had_layer = int(of.prompt[text])
        while p < end:
            row = int(first) + p - int(of.prompt[text]) - 1
            drawn = int(plan.drawn[row])
            accepted = min(drawn, int(of.counts[row]), int(of.run[row]))
            emitted = min(accepted + 1, end - p)
            found.append([p, drawn, accepted, emitted])
            passes[text, 0, drawn + 1] += 1
            passes[text, 3, 1] += drawn if plan.looks else 0
            for k in range(drawn):
                passes[text, 1, p + k - had_draft] += 1
                had_draft = p + k
                if plan.asked is not None and plan.asked[row, k]:
                    passes[text, 2, p + k + 1 - had_layer] += 1
                    had_layer = p + k + 1
            had_draft, had_layer = min(had_draft, p + accepted), min(had_layer, p)
            p += emitted
    return found, passes


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_walk_is_the_slow_simulation(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 6))
    many = []
    for number in range(data.draw(st.integers(1, 3))):
        n = data.draw(st.integers(0, 12))
        ended = data.draw(st.booleans())
        left = n - np.arange(n) + (0 if ended else -1) if n else np.zeros(0, int)  # where the text's end bounds a run
        run = [data.draw(st.integers(0, max(0, min(width, int(k))))) for k in left]
        score = np.array([[data.draw(st.integers(0, 8)) / 8 for _ in range(width)] for _ in range(n)]).reshape(n, width)
        many.append(table(run, ended=ended, budget=n + 1 + 5 * ended, width=width, score=score, name=f"{number}",
                          prompt=2 + number, probability=np.clip(1 - score, 0.01, 1)))  # fmt: skip
    of = join(many)
    plans = [
        rules.fixed(of, data.draw(st.integers(0, width))), rules.oracle(of),
        rules.threshold(of, "probability", data.draw(st.sampled_from([0.2, 0.5, 0.8]))),
        rules.preverified(of, data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0.1, 0.4, 0.7])), 1.1,
                          lo=data.draw(st.sampled_from([0.0, 0.3])), hi=data.draw(st.sampled_from([0.8, 1.0]))),
    ]  # fmt: skip
    for plan in plans:
        wanted, passes = slow(of, plan)
        done = walk(of, plan)
        columns = [of.start[done.row], done.drawn, done.accepted, done.emitted]
        assert np.stack(columns, 1).tolist() == wanted
        used = usage(of, plan)
        assert (used.passes == passes).all()
        assert used.emitted.tolist() == [max(0, int(o) - 1) for o in of.output]


PROFILE = [
    *(Point("target", n, 1, 256, ms, ms, ms) for n, ms in ((1, 40.0), (3, 44.0), (5, 60.0))),
    Point("draft", 1, 1, 256, 4.0, 4, 4), Point("draft", 2, 1, 256, 6.0, 6, 6),
    Point("preverifier", 1, 1, 256, 1.0, 1, 1), Point("preverifier", 2, 1, 256, 2.0, 2, 2),
    Point("target", 1, 8, 256, 999.0, 0, 0), Point("target", 1, 1, 4096, 999.0, 0, 0),
]  # fmt: skip


def test_a_profile_gives_the_speed_by_hand() -> None:
    """γ = 2 on the text of `test_passes_by_hand`: 4 passes over 3 tokens, 1 over one; 7 draft passes and one of two."""
    text = table([0, 2, 3, 1, 0, 4, 3, 2, 1])
    prices = costs.from_points(PROFILE, 300, rest=0.25)
    used = usage(text, rules.fixed(text, 2))
    wanted = (4 * 44 + 40 + 7 * 4 + 6) / 40 + 4 * 0.25
    assert prices.cost(used).tolist() == pytest.approx([wanted])
    assert float(prices.ratio(used)) == pytest.approx(9 / wanted)
    assert prices.target[2] == pytest.approx(42 / 40) and prices.target[7] == pytest.approx((60 + 2 * 5) / 40)
    # with 10 ms around every pass, a round of plain decoding takes 50
    slower = costs.from_points(PROFILE, 300, rest=0.0, overhead_ms=10.0)
    assert slower.cost(used).tolist() == pytest.approx([(4 * 54 + 50 + 7 * 4 + 6) / 50])
    plain = usage(text, rules.fixed(text, 0))
    assert float(prices.ratio(plain)) == float(slower.ratio(plain)) == 1.0  # A49
    twice = costs.from_points([*PROFILE, Point("target", 1, 1, 256, 60.0, 60, 60)], 300)
    assert twice.draft[1] == pytest.approx(4 / 50)
    with pytest.raises(ConfigError, match="single-token target pass"):
        costs.from_points(PROFILE[1:2], 256)


def test_prices_of_the_costs_block_and_of_other_drafts() -> None:
    prices = costs.from_settings(CostSettings(draft=0.2, preverify=0.05, token=0.01, rest=0.03))
    assert prices.target[[1, 4]].tolist() == pytest.approx([1.0, 1.03]) and prices.draft[1:3].tolist() == [0.2, 0.2]
    assert prices.with_draft(0.4).draft[2] == pytest.approx(0.4) and prices.with_draft(0.4).preverifier[1] == 0.05
    assert prices.with_verify(0.5).target[[1, 3]].tolist() == [1.0, 2.0]
    measured = costs.from_points(PROFILE, 256).with_draft(0.2)
    assert measured.draft[1:3].tolist() == pytest.approx([0.2, 0.3])


def test_rules_that_look_at_signals_pay_for_them() -> None:
    of = planted(2, 50)
    free = costs.from_settings(CostSettings(draft=0.1, rest=0.0))
    prices = replace(free, signals=0.05)
    for rule, looks in ((rules.fixed(of, 2), False), (rules.threshold(of, "probability", 0.0, gamma_max=2), True)):
        done = walk(of, rule)
        used = usage(of, rule)
        extra = float((prices.cost(used) - free.cost(used)).sum())
        assert extra == pytest.approx(0.05 * int(done.drawn.sum()) if looks else 0.0)


def test_evidence_by_hand() -> None:
    """Two starts: survival counts every place, conditional only up to the first rejection."""
    probability = [[0.9, 0.8, 0.3, 0.7], [0.6, 0.2, 0.5, 0.5]]
    of = table([2, 0], budget=50, ended=True, probability=probability)
    label, used = evidence.judged(of, "conditional")
    assert used.tolist() == [[True, True, True, False], [True, False, False, False]]
    assert label.tolist() == [[True, True, False, False], [False] * 4]
    found = evidence.quality(of, "probability", "conditional")
    assert (found["places"], found["auc"], found["accepted"]) == (4, 1.0, 0.5)  # 0.9, 0.8 over 0.3, 0.6
    assert found["ece"] == pytest.approx((0.1 + 0.2 + 0.3 + 0.6) / 4, abs=1e-6)
    survival = evidence.quality(of, "probability", "survival")
    assert survival["places"] == 8 and survival["auc"] == 1.0
    of.signals["entropy"][:] = -of.signals["logprob"]
    assert evidence.quality(of, "entropy", "conditional")["auc"] == 1.0  # falls as acceptance rises
    assert evidence.quality(of, "entropy", "conditional")["ece"] is None
    assert evidence.gap_share(1.5, 1.2, 1.8) == pytest.approx(0.5) and evidence.gap_share(1, 1, 1) is None


def test_censored_places_are_not_judged() -> None:
    of = table([1, 0], budget=3)  # three new tokens, cut: after the second nothing is known past one token
    assert evidence.judged(of, "survival")[1].tolist() == [[True, True, False, False], [True, False, False, False]]
    runs = evidence.runs(table([0, 2, 1, 0, 2, 1, 4, 3, 2, 1]))
    assert runs["counts"] == [1, 0, 2, 0, 0] and runs["ended_by_text"] == 1  # 0, 2, 2; the text's end decides the last


def test_autocorrelation_by_hand() -> None:
    """Lengths 0, 2, 0, 2, 0, 2, …: each is the opposite of the last."""
    runs = [0, 2, 1, 0] * 40
    found = evidence.runs(table(runs, budget=10_000, ended=True))
    assert found["mean"] == pytest.approx(1.0, abs=0.1) and found["variance"] == pytest.approx(1.0, abs=0.1)
    first, second = found["autocorrelation"][:2]
    assert first["value"] == pytest.approx(-1, abs=0.05) and second["value"] == pytest.approx(1, abs=0.05)
