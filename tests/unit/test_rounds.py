"""Rounds for readers: origins of tokens, fates of drafts, estimates against what happened, the page's data."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacer.decoding.trace import ids_of
from pacer.reporting.rounds import FATES, ORIGINS, authors, binned, estimates, fates, origins, page_data, verdicts
from tests.traces import Line, inner, line, trace

HISPEC = [inner([1, 2], 2, [1, 2, 3]), inner([4, 9], 1, [4, 5])]  # the exit adds 3, then puts 5 in place of 9


@pytest.mark.parametrize(
    ("given", "origin", "fate"),
    [
        (line([], 0, [7], "prefill", 0), "p", ""),
        (line([], 0, [7], "off"), "t", ""),
        (line([1, 2, 3], 2, [1, 2, 9]), "aac", "aar"),
        (line([1, 2, 3], 0, [9]), "c", "rxx"),
        (line([1, 2], 2, [1, 2, 9]), "aab", "aa"),
        (line([1, 2], 2, [1, 2]), "aa", "aa"),  # no token of the target's own (end of text, or a method without one)
        (line([1, 2, 3], 3, [1], "eos"), "a", "azz"),  # accepted, but the text has ended
        (line([1, 2, 3], 2, [1, 2, 9], unchecked=2), "uuc", "uur"),
        (line([1, 2, 3], 3, [1, 2, 3, 9], unchecked=2), "uuab", "uua"),
        (line([1, 2, 3, 4, 5], 5, [1, 2, 3, 4, 5, 9], inner=HISPEC), "aaiaib", "aaaaa"),
        (line([1, 2, 3, 4, 5], 3, [1, 2, 3, 9], inner=HISPEC), "aaic", "aaarx"),
        (line([1, 2, 3, 4, 5], 0, [9], inner=HISPEC), "c", "rxxxx"),
        (line([1, 2], 2, [1, 2, 9], inner=HISPEC), "aab", "aa"),  # cut at a stop id
        # a tree: 1 → 2, 3 below it, 4 beside 1
        (line([1, 2, 3, 4], 2, [1, 3, 9], parents=[-1, 0, 0, -1]), "aab", "arar"),
        (line([1, 2, 3, 4], 1, [1, 9], parents=[-1, 0, 0, -1]), "ac", "arrr"),
        (line([1, 2, 3, 4], 0, [9], parents=[-1, 0, 0, -1]), "c", "rxxr"),
    ],
)  # fmt: skip
def test_origins_and_fates(given: Line, origin: str, fate: str) -> None:
    assert (origins(given), fates(given)) == (origin, fate)
    assert set(origin) <= set(ORIGINS) and set(fate) <= set(FATES)


def test_three_stages_keep_the_author_of_each_token() -> None:
    low = [inner([1, 8], 1, [1, 2])]  # a draft's 1, the first exit's 2
    middle = [inner([1, 2], 2, [1, 2, 3], inner=low)]  # and the second's 3
    assert authors(line([1, 2, 3], 3, [1, 2, 3, 4], inner=middle)) == "aii"
    assert origins(line([1, 2, 3], 3, [1, 2, 3, 4], inner=middle)) == "aiib"


@given(st.lists(st.integers(0, 3), max_size=6), st.data())
def test_every_token_has_an_origin_and_every_draft_a_fate(drafted: list[int], data: st.DataObject) -> None:
    accepted = data.draw(st.integers(0, len(drafted)))
    own = 9 if accepted < len(drafted) else data.draw(st.integers(0, 3))
    emitted = [*drafted[:accepted], own][: data.draw(st.integers(1, len(drafted) + 1))]
    given = line(drafted, accepted, emitted)
    assert len(origins(given)) == len(emitted) and len(fates(given)) == len(drafted)
    assert fates(given).count("a") == origins(given).count("a") == min(accepted, len(emitted))
    assert (
        fates(given).count("r") == int(accepted < len(drafted) and len(emitted) > accepted) or len(emitted) <= accepted
    )


def test_estimates_are_paired_with_what_happened() -> None:
    rounds = [
        line([1, 2, 3], 1, [1, 9], scores=[0.9, None, 0.2]),  # not asked about 2
        line([4], 1, [4, 5], scores=[0.6]),
        line([1, 2], 2, [1], "eos", scores=[0.7, 0.8]),  # 2 is past the end: its fate has no meaning
        line([1, 2], 1, [1, 9], scores=[0.4, 0.3], unchecked=1),  # nobody judged 1
        line([1], 0, [2]),
    ]
    assert estimates(rounds) == [(0.9, True), (0.2, False), (0.6, True), (0.7, True), (0.3, False)]


def test_bins_count_all_and_hold_their_own() -> None:
    bins = binned([(0.0, False), (0.05, True), (0.95, True), (1.0, True)])
    assert [b["n"] for b in bins] == [2, *[0] * 8, 2]
    assert bins[0] == {"low": 0.0, "high": 0.1, "n": 2, "mean": 0.025, "accepted": 0.5}
    assert bins[9]["accepted"] == 1 and bins[4]["mean"] is None and bins[4]["accepted"] is None
    assert all(b["n"] == 0 for b in binned([]))


def test_verdicts_of_the_rule() -> None:
    rounds = [
        line([1, 2], 2, [1, 2, 9], "controller"), line([1, 2, 3], 1, [1, 9], "controller"),
        line([1, 2], 0, [9], "gamma_max"), line([], 0, [9], "controller"),
    ]  # fmt: skip
    assert verdicts(rounds) == {"stopped": 2, "whole": 1, "late": 1, "in_vain": 2}


ROUNDS = [
    line([], 0, [7], "prefill", 0), line([1, 2, 3], 2, [1, 2, 9], "controller", scores=[0.9, 0.8, 0.2]),
    line([4, 5], 2, [4, 5, 6], inner=[inner([4, 8], 1, [4, 5])], number=2),
]  # fmt: skip
PIECES = {str(id): f" t{id}" for id in ids_of(ROUNDS)}


def test_the_pages_data_is_the_trace() -> None:
    found = page_data(trace(ROUNDS, PIECES), lambda ids: pytest.fail("the trace has the texts"))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    (request,) = found["requests"]
    assert [r["o"] for r in request["rounds"]] == ["p", "aac", "aib"]
    assert [r["f"] for r in request["rounds"]] == ["", "aar", "aa"]
    assert [found["stops"][r["w"]][0] for r in request["rounds"]] == ["prefill", "controller", "fixed"]
    assert request["rounds"][1]["ms"] == [100.0, 10.0, 0.0, 200.0, 0.0] and "s" not in request["rounds"][2]
    assert (request["rounds"][2]["in"][0]["f"], request["rounds"][2]["in"][0]["o"]) == ("ar", "ai")
    assert "ms" not in request["rounds"][2]["in"][0]
    assert found["texts"] == PIECES and "8" in PIECES
    (judged,) = found["judged"]
    assert sum(b["n"] for b in judged["bins"]) == 3 and judged["in_vain"] == 1


def test_an_old_trace_asks_for_the_texts_it_lacks_or_does_without() -> None:
    asked: list[set[int]] = []

    def texts(ids: set[int]) -> dict[int, str]:
        asked.append(ids)
        return {1: "one"}

    assert page_data(trace(ROUNDS), texts)["texts"] == {"1": "one"}
    assert asked == [{1, 2, 3, 4, 5, 6, 7, 8, 9}]
    assert page_data(trace(ROUNDS))["texts"] == {}


def test_an_unfinished_request_is_left_out() -> None:
    assert page_data(ROUNDS)["requests"] == []
