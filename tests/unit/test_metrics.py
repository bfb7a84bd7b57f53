"""Metrics of small hand-written traces; every expected value is computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacer.errors import ConfigError
from pacer.evaluation.metrics import (
    DEFINITIONS,
    check_trace,
    cost_model,
    evaluate_trace,
    group_requests,
    jsonable,
    load_trace,
    measures,
    tally,
)

Line = dict[str, Any]


def round_line(
    number: int, drafted: list[int], accepted: int, emitted: list[int], stop: str = "fixed", **time: float
) -> Line:
    times = {"draft": 0.0, "preverify": 0.0, "intermediate": 0.0, "target": 0.0, "rest": 0.0} | time
    return {
        "kind": "round", "arm": "sd", "benchmark": "gsm8k", "request": "p1", "round": number, "committed": 10,
        "drafted": drafted, "scores": [None] * len(drafted), "accepted": [accepted] if drafted else [],
        "emitted": emitted, "stop": stop, "time": times, "rows": 1,
    }  # fmt: skip


def request_line(ids: list[int], seconds: float, finish: str = "length", **names: str) -> Line:
    line: Line = {
        "kind": "request", "arm": "sd", "benchmark": "gsm8k", "request": "p1", "prompt_tokens": 9,
        "new_tokens": len(ids), "finish": finish, "seconds": seconds, "text": "", "ids": ids,
    }  # fmt: skip
    return line | names


def as_(arm: str, lines: list[Line], request: str = "p1", benchmark: str = "gsm8k") -> list[Line]:
    return [line | {"arm": arm, "request": request, "benchmark": benchmark} for line in lines]


SD = [
    round_line(0, [], 0, [1], "prefill", target=0.5),
    round_line(1, [2, 3, 9], 2, [2, 3, 4], draft=0.3, target=0.4, rest=0.1),  # two accepted, one corrected
    round_line(2, [5, 6, 7], 3, [5, 6, 7, 8], draft=0.3, target=0.5),  # all accepted and a bonus
    round_line(3, [9], 0, [10], "budget", draft=0.1, target=0.2, rest=0.1),
    request_line([1, 2, 3, 4, 5, 6, 7, 8, 10], 2.5),
]
AR = as_(
    "ar",
    [
        round_line(0, [], 0, [1], "prefill", target=0.5),
        *[round_line(i, [], 0, [t], "off", target=0.4, rest=0.1) for i, t in enumerate([2, 3, 4, 5, 6, 7, 8, 10], 1)],
        request_line([1, 2, 3, 4, 5, 6, 7, 8, 10], 5.0),
    ],
)


def row_of(lines: list[Line], arm: str = "sd", benchmark: str = "gsm8k", **kwargs: Any) -> Line:
    rows = evaluate_trace(lines, **kwargs)["rows"]
    return next(row for row in rows if row["arm"] == arm and row["benchmark"] == benchmark)


def test_decoding_metrics_of_one_request() -> None:
    row = row_of(SD + AR)
    assert row["tokens_per_verify"] == pytest.approx(8 / 3)  # 3 + 4 + 1 emitted, 3 target passes, prefill left out
    assert row["mean_drafted"] == pytest.approx(7 / 3)
    assert row["accepted_per_verify"] == pytest.approx(5 / 3)
    assert row["acceptance_rate"] == pytest.approx(5 / 7)
    assert row["stops"] == {"budget": 1, "fixed": 2}
    assert row["finishes"] == {"length": 1}


def test_acceptance_by_index_counts_leading_runs() -> None:
    row = row_of(SD + AR)
    # k = 1: drafted in 3 rounds, kept in 2; k = 2: drafted in 2, both kept; k = 3: drafted in 2, kept in 1.
    assert row["survival"] == pytest.approx([2 / 3, 2 / 2, 1 / 2])
    assert row["survival_counts"] == [3, 2, 2]
    assert row["conditional_acceptance"] == pytest.approx([2 / 3, 2 / 2, 1 / 2])
    assert row["conditional_counts"] == [3, 2, 2]  # both rounds that drafted token 3 had kept tokens 1 and 2


def test_survival_is_not_a_product_of_marginals() -> None:
    # Two rounds of 2 drafts: one keeps both, one none. Product of conditionals over all: 1/2 · 1/1 = 1/2 = survival;
    # the product of *marginal* matches would be 1/4.
    lines = [
        round_line(1, [1, 2], 2, [1, 2, 3]),
        round_line(2, [1, 2], 0, [4]),
        request_line([1, 2, 3, 4], 1.0),
    ]
    row = row_of(lines)
    assert row["conditional_acceptance"] == [0.5, 1.0]
    assert row["conditional_counts"] == [2, 1]
    assert row["survival"] == [0.5, 0.5]
    assert row["survival_counts"] == [2, 2]


def test_times_and_speeds() -> None:
    row = row_of(SD + AR)
    assert row["share"] == pytest.approx(
        {"draft": 0.7 / 2, "preverify": 0, "intermediate": 0, "target": 1.1 / 2, "rest": 0.2 / 2}
    )
    assert row["prefill_seconds"] == pytest.approx(0.5)
    assert row["tokens_per_second"] == pytest.approx(9 / 2.5)
    assert row["median_tokens_per_second"] == pytest.approx(9 / 2.5)
    assert row["decode_tokens_per_second"] == pytest.approx(8 / 2.0)
    assert row["ratio_to_ar"] == pytest.approx(2.0)
    assert row["ratio_low"] is None  # one prompt has no interval


def test_ar_has_one_token_per_pass_and_no_acceptance() -> None:
    row = row_of(SD + AR, "ar")
    assert row["tokens_per_verify"] == 1.0
    assert (row["mean_drafted"], row["accepted_per_verify"]) == (0.0, 0.0)
    assert row["acceptance_rate"] is None
    assert row["conditional_acceptance"] == []
    assert (row["ratio_to_ar"], row["exact"]) == (pytest.approx(1.0), True)


def test_speed_is_total_over_total_and_median_per_prompt() -> None:
    lines = [
        *[request_line([1] * n, s, request=f"p{i}") for i, (n, s) in enumerate([(10, 1.0), (30, 1.0), (10, 2.0)])],
        *[request_line([1] * n, s, request=f"p{i}", arm="ar") for i, (n, s) in enumerate([(10, 1), (30, 3), (10, 1)])],
    ]
    row = row_of(lines)
    assert row["tokens_per_second"] == pytest.approx(50 / 4)
    assert row["median_tokens_per_second"] == pytest.approx(10)
    assert row["ratio_to_ar"] == pytest.approx((50 / 4) / (50 / 5))
    assert row["ratio_low"] < row["ratio_to_ar"] < row["ratio_high"]


def test_tokens_past_the_end_never_count() -> None:
    # Three of four drafts were right but EOS is the second: the rest of the draft is neither accepted nor rejected.
    lines = [round_line(1, [5, 2, 7, 8], 3, [5, 2], "eos"), request_line([5, 2], 1.0, "eos")]
    row = row_of(lines)
    assert row["tokens_per_verify"] == 2.0
    assert row["accepted_per_verify"] == 2.0
    assert row["acceptance_rate"] == 0.5
    assert row["survival"] == [1.0, 1.0]


def test_last_stage_decides_acceptance() -> None:
    line = round_line(1, [1, 2, 3], 0, [1, 9]) | {"accepted": [3, 1]}  # intermediate kept 3, the target 1
    row = row_of([line, request_line([1, 9], 1.0)])
    assert row["accepted_per_verify"] == 1.0


def test_arms_without_rounds_have_null_round_metrics() -> None:
    row = row_of([*AR, request_line([1, 2], 1.0, arm="hf_generate")], "hf_generate")
    assert row["tokens_per_second"] == 2.0
    for name in ("tokens_per_verify", "mean_drafted", "acceptance_rate", "decode_tokens_per_second", "prefill_seconds"):
        assert row[name] is None
    assert set(row["share"].values()) == {None}


def test_only_prompts_finished_by_all_arms_count() -> None:
    lines = [
        request_line([1] * 10, 1.0, request="a"),
        request_line([1] * 10, 1.0, request="b"),
        request_line([1] * 99, 9.0, request="c"),
        request_line([1] * 10, 2.0, request="a", arm="ar"),
        request_line([1] * 10, 2.0, request="b", arm="ar"),
        request_line([], 0.1, request="c", arm="ar", finish="error"),
        request_line([1] * 99, 9.0, request="d", arm="ar"),
        request_line([], 0.1, request="a", arm="broken", finish="error"),
    ]
    sd, ar, broken = (row_of(lines, arm) for arm in ("sd", "ar", "broken"))
    assert (sd["prompts"], sd["failed"], sd["unfinished"]) == (2, 0, 1)  # d was never started
    assert (ar["prompts"], ar["failed"], ar["unfinished"]) == (2, 1, 0)
    assert (broken["prompts"], broken["failed"], broken["unfinished"]) == (0, 1, 3)
    assert sd["ratio_to_ar"] == pytest.approx(2.0)
    assert sd["tokens_per_second"] == pytest.approx(10)
    assert (broken["tokens_per_second"], broken["ratio_to_ar"], broken["exact"]) == (None, None, None)


def test_unfinished_request_is_not_measured() -> None:
    row = row_of([*SD, *AR, *as_("sd", SD[:3], "p2"), *as_("ar", AR, "p2")])
    assert (row["prompts"], row["unfinished"]) == (1, 1)
    assert row["tokens_per_verify"] == pytest.approx(8 / 3)


def test_a_repeated_request_counts_once() -> None:
    assert row_of([*SD[:3], *SD, *AR]) == row_of([*SD, *AR])  # interrupted in round 2, started again
    assert row_of([*SD, *SD, *AR]) == row_of([*SD, *AR])


def test_exact_names_the_first_difference() -> None:
    lines = [
        request_line([1, 2, 3], 1.0, request="a"),
        request_line([1, 2, 9, 4], 1.0, request="b"),
        request_line([1, 2], 1.0, request="c"),
        *[request_line([1, 2, 3], 1.0, request=name, arm="ar") for name in ("a", "c")],
        request_line([1, 2, 3, 4], 1.0, request="b", arm="ar"),
    ]
    row = row_of(lines)
    assert (row["exact"], row["exact_detail"]) == (False, "1/3 identical; b differs at 2")
    assert row_of([*lines[2:4]], "sd")["exact"] is None
    prefix = row_of([lines[2], lines[4]])
    assert (prefix["exact"], prefix["exact_detail"]) == (False, "0/1 identical; c differs at 2")
    same = row_of([lines[0], lines[3]])
    assert (same["exact"], same["exact_detail"]) == (True, "1/1 identical")
    assert row_of(lines, greedy=False)["exact"] is None
    no_ar = row_of(lines[:3])
    assert (no_ar["exact"], no_ar["ratio_to_ar"], no_ar["exact_detail"]) == (None, None, "no AR arm in this run")


def test_result_is_valid_json_with_definitions_and_order() -> None:
    lines = [*SD, *AR, *as_("sd", SD, benchmark="xsum"), *as_("ar", AR, benchmark="xsum")]
    result = evaluate_trace(
        lines, arms=["ar", "sd"], samples=["xsum"], guarantees={"sd": "lossy"},
        scores={("sd", "xsum"): {"rouge1": np.float64(0.25), "rouge2": float("nan")}}, settings_hash="abc",
    )  # fmt: skip
    text = json.dumps(result, allow_nan=False)
    assert json.loads(text) == result
    assert [(r["benchmark"], r["arm"]) for r in result["rows"]] == [
        ("gsm8k", "ar"), ("gsm8k", "sd"), ("xsum", "ar"), ("xsum", "sd"),
    ]  # fmt: skip
    last = result["rows"][-1]
    assert (last["sample"], last["guarantee"], last["score"]) == (True, "lossy", {"rouge1": 0.25, "rouge2": None})
    assert result["overall"][1] == {
        "arm": "sd",
        "ratio_to_ar": pytest.approx(2.0),
        "ratio_low": None,
        "ratio_high": None,
    }
    measured = set(last) - {"arm", "benchmark", "sample", "guarantee", "score", "totals", "exact_detail"}
    undefined = {n for n in measured if n not in DEFINITIONS and not n.endswith(("_counts", "_low", "_high"))}
    assert not undefined
    assert result["settings_hash"] == "abc"
    assert evaluate_trace([])["rows"] == []


def test_overall_is_null_where_a_benchmark_is_missing() -> None:
    result = evaluate_trace([*SD, *AR, *as_("ar", AR, benchmark="xsum")])
    assert {o["arm"]: o["ratio_to_ar"] for o in result["overall"]} == {"sd": None, "ar": pytest.approx(1.0)}


def test_totals_reproduce_the_row() -> None:
    row = row_of(SD + AR)
    assert row["totals"]["emitted"] / row["totals"]["target_passes"] == row["tokens_per_verify"]
    assert row["totals"]["new_tokens"] / row["totals"]["seconds"] == row["tokens_per_second"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_bounds_of_any_trace(rounds: list[tuple[int, int]]) -> None:
    rounds = [(drafted, min(drafted, accepted)) for drafted, accepted in rounds]
    lines = [round_line(i, [7] * d, a, [7] * (a + 1), target=0.1) for i, (d, a) in enumerate(rounds, 1)]
    lines.append(request_line([7] * sum(a + 1 for _, a in rounds), 1.0))
    assert check_trace(lines) == []
    gamma = max(d for d, _ in rounds)
    row = row_of(lines)
    assert 1 <= row["tokens_per_verify"] <= gamma + 1
    assert row["accepted_per_verify"] == pytest.approx(row["tokens_per_verify"] - 1)
    assert row["accepted_per_verify"] <= gamma
    # Expected accepted length from leading runs: sum over k of P(first k accepted) · P(drafted k).
    kept = sum(s * c for s, c in zip(row["survival"], row["survival_counts"], strict=True))
    assert kept / len(rounds) == pytest.approx(row["accepted_per_verify"])
    assert sum(row["share"].values()) == pytest.approx(1)


def test_load_trace_drops_a_cut_last_line_only(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    whole = "".join(json.dumps(line) + "\n" for line in SD)
    path.write_text(whole + '{"kind": "round", "dra')
    assert load_trace(path) == SD
    path.write_bytes(whole.encode() + '{"text": "é'.encode()[:-1])  # cut inside a character
    assert load_trace(path) == SD
    path.write_text(whole.rstrip("\n"))
    assert load_trace(path) == SD
    path.write_text('{"kind": "rou\n' + whole)
    with pytest.raises(ConfigError, match="line 1"):
        load_trace(path)


def test_check_trace_finds_contradictions() -> None:
    assert check_trace(SD + AR) == []
    assert "more accepted than drafted" in check_trace([round_line(1, [1], 2, [1, 2])])[0]
    assert "more emitted than drafted" in check_trace([round_line(1, [1], 1, [1, 2, 3])])[0]
    assert "not the ids" in check_trace([round_line(1, [1], 1, [1, 2]), request_line([1, 3], 1.0)])[0]
    assert "new_tokens" in check_trace([request_line([1, 3], 1.0) | {"new_tokens": 3}])[0]


def test_tallies_of_unfinished_requests_are_refused_and_empty_ones_are_null() -> None:
    with pytest.raises(ConfigError, match="unfinished"):
        tally(group_requests(SD[:2])["sd", "gsm8k"].values())
    assert measures(tally([]))["tokens_per_second"] is None


def test_cost_model() -> None:
    # τ 2.5 at γ̄ 3: v(4) = 1.3, three draft passes of 0.1, o = 0.05, p = 0.02: 2.5 / 1.67.
    table = {1: 1.0, 3: 1.2, 5: 1.4}
    assert cost_model(2.5, 3.0, table, 0.1, o=0.05, p=0.02) == pytest.approx(2.5 / 1.67)
    assert cost_model(2.5, 3.0, lambda n: 0.9 + 0.1 * n, 0.1, 0.05, 0.02) == pytest.approx(2.5 / 1.67)
    assert cost_model(1.0, 0.0, table, 0.1) == 1.0  # no drafting: AR
    with pytest.raises(ConfigError, match="outside the measured"):
        cost_model(2.5, 4.5, table, 0.1)
    with pytest.raises(ConfigError, match="above 0"):
        cost_model(1.0, 0.0, lambda n: 0.0, 0.1)


def test_jsonable() -> None:
    value = {"a": np.array([1.0, np.inf]), "b": (np.int64(3), float("nan"), "x", None, True)}
    assert jsonable(value) == {"a": [1.0, None], "b": [3, None, "x", None, True]}


def test_what_users_wait_for() -> None:
    """Percentiles over requests; the first token is round 0; null where an arm has no rounds or no latency."""
    lines = []
    for i, latency in enumerate([1.0, 2.0, 3.0]):
        first = round_line(0, [], 0, [1], "prefill", target=latency / 10)
        request = {**request_line([1], latency), "latency": latency}
        lines += as_("ar", [first, request], f"p{i}") + as_("hf_generate", [request], f"p{i}")
    row, other = row_of(lines, "ar"), row_of(lines, "hf_generate")
    assert row["latency_seconds_p50"] == other["latency_seconds_p50"] == 2.0
    assert row["latency_seconds_p95"] == pytest.approx(2.9)
    assert row["first_token_seconds_p50"] == pytest.approx(0.2) and other["first_token_seconds_p50"] is None
    assert row_of(SD + AR)["latency_seconds_p50"] is None  # an old trace does not say


def test_acceptance_by_context_length() -> None:
    """Classes begin at 0, 128, 256 …; tokens are summed and divided once."""
    short, edge = (round_line(k, [2, 3, 9], 2, [2, 3, 4]) for k in (1, 2))
    far = {**round_line(3, [5, 6], 0, [8]), "committed": 200}
    lines = [
        round_line(0, [], 0, [1], "prefill"), short | {"committed": 127}, edge | {"committed": 128}, far,
        request_line([1, 2, 3, 4, 2, 3, 4, 8], 1.0),
    ]  # fmt: skip
    assert row_of(lines)["acceptance_by_context"] == {"0": pytest.approx(2 / 3), "128": pytest.approx(2 / 5)}
