"""Rules, walk, prices and search on tables small enough to check by hand, and against a slow simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacer.artifacts import Stage
from pacer.errors import ConfigError, MismatchError, SourceError, UnsupportedError
from pacer.evaluation.profiler import Point
from pacer.evaluation.replay import choice, costs, evidence, results, rules, search
from pacer.evaluation.replay.rules import Plan
from pacer.evaluation.replay.table import Table, join
from pacer.evaluation.replay.walk import WIDTHS, usage, walk
from pacer.models.preverifier import TUNED, tuned_values
from pacer.settings import CostSettings

LN = np.log


def table(
    run: list[int], *, prompt: int = 3, ended: bool = False, budget: int | None = None, counts: list[int] | None = None,
    width: int = 4, probability: Any = None, score: Any = None, task: str = "t", name: str = "one",
) -> Table:  # fmt: skip
    """A text of ``len(run) + 1`` output tokens, whose draft at each start holds for ``run`` tokens."""
    starts = prompt + 1 + np.arange(len(run))
    budget = budget or len(run) + 1
    full = np.full((len(run), width), 0.5)
    signals = {"logprob": LN(full if probability is None else np.asarray(probability, float)).astype(np.float32)}
    signals |= {name: full.astype(np.float32) for name in ("entropy", "margin", "match")}
    if score is not None:
        signals["score"] = np.asarray(score, np.float32)
    whole = np.full(len(run), width)
    known = np.minimum(whole, prompt + len(run) + 1 - starts) if not ended else whole
    return Table(
        [name], [task], np.array([prompt]), np.array([len(run) + 1]), np.array([len(run)]), starts,
        prompt + budget - starts - 1, np.array(run, np.int64), np.array(counts or whole), known, whole, signals,
        width if score is not None else 0,
    )  # fmt: skip


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


def test_a_preverifier_of_longer_drafts_than_the_table() -> None:
    """An arm that may draft past the table is refused, as fixed windows and thresholds are."""
    score = [[0.9, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.1], [0.9, 0.1, 0.9, 0.9]]
    text = replace(table([4, 3, 1], score=score, budget=40), score_width=8)
    for arm in ("pacer b=1 t0=0.5", "pacer b=1 t0=0.5 gamma_max=6"):
        with pytest.raises(ConfigError, match=r"drafts past the table: .*replay\.gamma_max="):
            rules.rule_of(arm)(text)
    plan = rules.rule_of("pacer b=1 t0=0.5 gamma_max=4")(text)
    assert plan.drawn.tolist() == [4, 4, 2] and not plan.open.any()
    short = replace(text, score_width=3)  # never longer than it was trained on, whatever is asked for
    for arm in ("pacer b=1 t0=0.5", "pacer b=1 t0=0.5 gamma_max=16"):
        plan = rules.rule_of(arm)(short)
        assert plan.drawn.tolist() == [3, 3, 2] and not plan.open.any()
    tried = search.families(text, costs.from_settings(CostSettings()))["pacer"].settings
    assert max(setting.values["gamma_max"] for setting in tried) == 4


def test_thresholds_by_hand() -> None:
    probability = [[0.9, 0.5, 0.9, 0.9], [0.3, 0.9, 0.9, 0.9], [0.9, 0.8, 0.7, 0.1]]
    text = table([0, 0, 0], probability=probability, budget=20)
    assert rules.threshold(text, "probability", 0.5).drawn.tolist() == [4, 1, 4]
    assert rules.threshold(text, "probability", 0.6).drawn.tolist() == [2, 1, 4]
    assert rules.threshold(text, "probability", 0.44, "product").drawn.tolist() == [3, 1, 4]
    assert rules.threshold(text, "probability", 0.6, "product").drawn.tolist() == [2, 1, 3]
    assert rules.threshold(text, "probability", 0.0, gamma_max=2).drawn.tolist() == [2, 2, 2]
    text.signals["entropy"][:] = [[1, 2, 3, 4], [4, 1, 1, 1], [2, 2, 2, 2]]
    assert rules.threshold(text, "entropy", 2.0).drawn.tolist() == [3, 1, 4]


@pytest.mark.parametrize(
    ("arm", "reason"),
    [("hf_assisted", "transformers"), ("hf_generate", "transformers"), ("sd_full gamma=2", "model_full")],
)
def test_arms_that_cannot_be_replayed(arm: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        rules.rule_of(arm)


def test_what_the_table_lacks() -> None:
    text = table([0, 0])
    with pytest.raises(ConfigError, match=r"replay\.gamma_max=9"):
        rules.rule_of("sd gamma=9")(text)
    with pytest.raises(UnsupportedError, match="pre-verifier"):
        rules.rule_of("pacer b=1 t0=0.5")(text)
    with pytest.raises(ConfigError, match="b or t0"):
        rules.rule_of("pacer")
    with pytest.raises(ConfigError, match="joined"):
        join([text, table([0, 0], width=3)])


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


def planted(seed: int = 0, starts: int = 400) -> Table:
    """A draft whose third token holds iff the second's probability is 0.9, and whose estimates know everything."""
    rng = np.random.default_rng(seed)
    good = rng.random(starts) < 0.5
    run = np.where(good, 4, 2)
    probability = np.where(good[:, None], 0.9, np.array([0.9, 0.35, 0.5, 0.5]))
    score = np.where(np.arange(4) < run[:, None] - 1, 0.9, 0.15)  # of the next token's fate
    return table(run.tolist(), budget=10_000, ended=True, probability=probability, score=score)


def test_the_search_finds_what_was_planted() -> None:
    of = planted()
    prices = costs.from_settings(CostSettings(draft=0.3, preverify=0.01, token=0.0, rest=0.0))
    found = search.families(of, prices)
    at = found["probability"].best(prices)
    best = found["probability"].settings[at].values
    assert 0.35 < best["t"] <= 0.9 and best["gamma_max"] >= 4  # stops after the second token, else goes on to the end
    exact = rules.threshold(of, "probability", best["t"], "last", 4)
    assert (exact.drawn == of.run).all()
    speeds = {family: float(prices.ratio(pool.usage).max()) for family, pool in found.items()}
    assert speeds["probability"] == pytest.approx(speeds["oracle"]) and speeds["fixed"] < speeds["probability"]
    assert speeds["fixed"] == max(
        float(prices.ratio(usage(of, rules.fixed(of, gamma)))) for gamma in range(of.width + 1)
    )
    pacer = found["pacer"].settings[found["pacer"].best(prices)].values
    assert (rules.preverified(of, **pacer).drawn == of.run).all()
    assert speeds["pacer_lazy"] >= speeds["pacer"] > speeds["fixed"]  # a lazy rule may skip calls
    assert found["pacer_lazy"].usage.passes.shape[1:3] == (1, 4)


@pytest.mark.parametrize(("label", "read"), [("survival", {"mean", "min"}), ("conditional", {"product", "min"})])
def test_a_search_tries_the_rules_that_read_the_labels(label: str, read: set[str]) -> None:
    of = replace(planted(1, 40), label=label)
    found = search.families(of, costs.from_settings(CostSettings()))
    tried = [s.values for family in ("pacer", "pacer_lazy") for s in found[family].settings]
    assert {values["rule"] for values in tried} == read
    other = ({"mean", "product"} - read).pop()
    with pytest.raises(MismatchError, match=f"of {label} labels: '{other}'"):
        rules.rule_of(f"pacer b=2 t0=0.5 rule={other} gamma_max=4")(of)


def test_every_setting_of_a_search_is_the_arm_it_is_called() -> None:
    of = planted(1, 60)
    prices = costs.from_settings(CostSettings())
    rng = np.random.default_rng(0)
    for family, pool in search.families(of, prices).items():
        for i in rng.choice(len(pool.settings), min(5, len(pool.settings)), replace=False):
            named = rules.rule_of(pool.settings[i].arm)(of)
            assert (named.drawn == pool.settings[i].rule(of).drawn).all(), (family, pool.settings[i].arm)


def test_a_draft_that_costs_too_much_is_not_used() -> None:
    """A46: γ = 0 is among the windows, and plain decoding is what it gives."""
    of = planted()
    prices = costs.from_settings(CostSettings(draft=9.0))
    found = search.families(of, prices)
    assert found["fixed"].settings[found["fixed"].best(prices)].arm == "sd gamma=0"
    rows = results.rows(found, prices, ["t"])
    assert {r["family"]: r["ratio_to_ar"] for r in rows}["fixed"] == 1.0


def test_rows_by_benchmark() -> None:
    easy = table([4] * 40, budget=10_000, ended=True, name="a", task="easy")
    hard = table([0] * 40, budget=10_000, ended=True, name="b", task="hard")
    of = join([easy, hard])
    prices = costs.from_settings(CostSettings(draft=0.1, token=0.0, rest=0.0))
    rows = {
        (r["benchmark"], r["family"]): r for r in results.rows(search.families(of, prices), prices, ["easy", "hard"])
    }
    assert rows["hard", "fixed_here"]["arm"] == "sd gamma=0" and rows["easy", "fixed_here"]["arm"] == "sd gamma=4"
    assert rows["all", "oracle"]["gap_share"] == 1.0 and rows["all", "fixed"]["gap_share"] == 0.0
    assert rows["easy", "oracle"]["tokens_per_verify"] == 5.0 and rows["hard", "oracle"]["ratio_to_ar"] == 1.0
    total = 80 / (8 * 1.4 + 40)  # eight rounds of 4 drafts, forty without
    assert rows["all", "oracle"]["ratio_to_ar"] == pytest.approx(total)


def test_each_half_is_judged_by_what_was_best_on_the_other() -> None:
    """Texts where everything holds, and texts where nothing does: chosen on the other half, each gets the wrong γ."""
    names = [f"text{i}" for i in range(12)]
    of = join([table([4] * 10, budget=10_000, ended=True, name=name) for name in names])
    sides = [group.partition(choice.MARK)[2] for group in choice.halved(of)]
    assert set(sides) == {"0", "1"}
    runs = [[4 if side == "0" else 0] * 10 for side in sides]
    of = join([table(run, budget=10_000, ended=True, name=name) for run, name in zip(runs, names, strict=True)])
    prices = costs.from_settings(CostSettings(draft=0.1, token=0.0, rest=0.0))
    groups = choice.halved(of)
    pool = search.pool(of, search.fixed_windows(of), groups)
    unique = list(dict.fromkeys(groups))
    for side, right, wrong in (("0", 4, 0), ("1", 0, 4)):
        mask = np.array([group.endswith(side) for group in unique])
        assert pool.settings[int(prices.ratio(pool.usage.of(mask)).argmax())].arm == f"sd gamma={right}"
        used = choice.judged(pool, prices, unique, mask)
        alone = search.pool(of, [pool.settings[wrong]], groups).usage.of(mask)
        assert prices.ratio(used) == pytest.approx(float(prices.ratio(alone)[0]))
        in_sample = choice.judged(pool, prices, unique, mask, mask)  # no other half to choose on
        assert prices.ratio(in_sample) == pytest.approx(float(prices.ratio(pool.usage.of(mask)).max()))


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


def checkpoint(root: Path) -> Path:
    folder = root / "preverifier"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"kind": "preverifier", "tuned": {"b": 1}, "label": "survival"}))
    return folder


def test_tuned_values_are_written_beside_what_was_there(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    search.write_tuned(folder, {"b": 3, "t0": 0.4}, {"texts": 2})
    assert json.loads((folder / TUNED).read_text()) == {"tuned": {"b": 3, "t0": 0.4}, "evidence": {"texts": 2}}
    assert sorted(f.name for f in folder.iterdir()) == ["config.json", TUNED]
    with pytest.raises(SourceError, match="no pre-verifier"):
        search.write_tuned(tmp_path, {}, {})


def test_a_replays_values_come_before_those_of_training(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    assert tuned_values(folder) == {"b": 1}
    search.write_tuned(folder, {"b": 3, "t0": 0.4}, {})
    assert tuned_values(folder) == {"b": 3, "t0": 0.4}
    for damage in ("{", "[]", '{"tuned": 3}'):
        (folder / TUNED).write_text(damage)
        with pytest.raises(SourceError, match=r"no tuned values can be read .*tuned\.json.*; delete it"):
            tuned_values(folder)


def test_a_stage_stays_whole_when_its_checkpoint_is_tuned(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "preverifier", {"a": 1})
    folder = checkpoint(stage.folder)
    stage.finish()
    before = {file: file.read_bytes() for file in stage.folder.rglob("*") if file.is_file()}
    search.write_tuned(folder, {"b": 3, "t0": 0.4, "rule": "product"}, {"texts": 2})
    again = Stage(tmp_path, "preverifier", {"a": 1})
    assert again.complete and again.manifest(verify=True)["files"]
    assert {file: file.read_bytes() for file in before} == before  # so a kill between two writes can damage nothing
