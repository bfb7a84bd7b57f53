"""Replay beside a trace: equal where nothing was changed, and every kind of change is found."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest

from pacer.assemble import Models
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.threshold import Threshold
from pacer.decoding.trace import request_line
from pacer.errors import ConfigError
from pacer.evaluation.metrics import group_requests
from pacer.evaluation.profiler import Point
from pacer.evaluation.replay.compare import ar_texts, compare_rounds, compare_speeds, replayable
from pacer.evaluation.replay.stage import text_table
from pacer.evaluation.replay.table import Table, join
from pacer.evaluation.replay.walk import usage
from tests.texts import draft, requests, target
from tests.tiny import make_decoder

ARMS = {"ar": None, "sd gamma=3": Fixed(3), "threshold t=0.1": Threshold(t=0.1)}
STOPS = (51, 75)
FAR = 1.0
MS = {("target", 1): 40.0, ("target", 17): 56.0, ("draft", 1): 4.0, ("draft", 2): 5.0}
POINTS = [Point(part, n, 1, 64, ms, ms, ms) for (part, n), ms in MS.items()]


def benchmark_of(name: str) -> str:
    return "even" if int(name.split("-")[1]) % 2 == 0 else "odd"


@functools.cache
def measured() -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Trace lines of all arms, as a run records them, and the requests by benchmark."""
    asked = requests(6, 30, STOPS)
    lines: list[dict[str, Any]] = []
    for arm, controller in ARMS.items():
        decoder = make_decoder(target(), draft() if controller else None, controller)
        for request in asked:
            result = decoder.generate([request])[0]
            named = {"arm": arm, "benchmark": benchmark_of(request.id)}
            lines += [{**named, **line} for line in (*result.rounds, request_line(result, ""))]
    by_benchmark: dict[str, dict[str, Any]] = {"even": {}, "odd": {}}
    for request in asked:
        by_benchmark[benchmark_of(request.id)][request.id] = request
    return lines, by_benchmark


@functools.cache
def replayed() -> tuple[Table, list[Any]]:
    lines, by_benchmark = measured()
    texts = ar_texts(lines, by_benchmark)
    models = Models(target(), None, STOPS, None, draft())  # type: ignore[arg-type]  # as far as a table needs them
    return join([text_table(models, text, 30, 16, None) for text in texts]), texts


def compared(lines: list[dict[str, Any]], arm: str, gap: float = FAR) -> dict[str, Any]:
    table, texts = replayed()
    rule = replayable([arm], None)[0][arm]
    return compare_rounds(table, texts, group_requests(lines), arm, rule, None, lambda prefix: gap)


def changed(arm: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A copy of the trace and, in it, the rounds of the arm that accepted something before their request's end."""
    lines = copy.deepcopy(measured()[0])
    mine = [line for line in lines if line["arm"] == arm and line["kind"] == "round" and line["round"] > 0]
    return lines, [a for a, b in itertools.pairwise(mine) if a["accepted"][0] and b["round"] > a["round"]]


def test_every_round_is_the_same() -> None:
    lines, _ = measured()
    for arm in ARMS:
        found = compared(lines, arm)
        rounds = [line for line in lines if line["arm"] == arm and line["kind"] == "round" and line["round"] > 0]
        assert found["rounds"] == len(rounds) > 20 and found["tokens"] == sum(len(line["emitted"]) for line in rounds)
        assert not found["differences"] and not found["near_ties"] and not found["skipped"]


def test_a_changed_round_is_a_difference_unless_something_was_close() -> None:
    for key, value in (("drafted", [1]), ("accepted", [0]), ("emitted", [1])):
        lines, rounds = changed("sd gamma=3")
        rounds[2][key] = value
        found = compared(lines, "sd gamma=3")
        assert len(found["differences"]) == 1 and not found["near_ties"]
        event = found["differences"][0]
        assert event["committed"] == rounds[2]["committed"] and 1e-4 <= event["gap"] <= FAR
        close = compared(lines, "sd gamma=3", gap=1e-5)
        assert len(close["near_ties"]) == 1 and not close["differences"]


def test_a_missing_round_and_another_text_are_differences() -> None:
    lines, rounds = changed("threshold t=0.1")
    lines.remove(rounds[-1])
    assert len(compared(lines, "threshold t=0.1")["differences"]) == 1
    lines, rounds = changed("threshold t=0.1")
    ended = [line for line in lines if line["kind"] == "request" and line["arm"] == "threshold t=0.1"]
    request = max(ended, key=lambda line: line["new_tokens"])
    request["ids"][5] += 1
    found = compared(lines, "threshold t=0.1")
    assert len(found["differences"]) == 1 and found["skipped"] > 0
    prompt = request["prompt_tokens"]
    assert found["differences"][0]["committed"] == prompt + 5
    close = compared(lines, "threshold t=0.1", gap=0.0)
    assert len(close["near_ties"]) == 1 and not close["differences"] and close["skipped"] == found["skipped"]


def test_speeds_are_foretold_where_costs_are_those_of_the_profile() -> None:
    """A trace whose rounds take exactly what the profile says, with 10 ms around each pass of the target."""
    lines = copy.deepcopy(measured()[0])
    table, texts = replayed()
    rules, _ = replayable(list(ARMS), None)
    full: dict[str, bool] = {}
    for line in lines:
        if line["kind"] == "round" and line["round"] > 0:
            drawn = len(line["drafted"])
            if line["arm"] == "sd gamma=3" and line["stop"] == "eos":
                drawn = 3  # a fixed window draws on behind a stop id
            first = MS["draft", 2 if full.get(line["request"]) else 1] if drawn else 0.0
            cost = 40 + drawn + 10 + first + 4 * max(0, drawn - 1) + (2.5 if drawn else 0)
            line["time"] = {"target": (cost - 10) / 1e3, "rest": 10 / 1e3}
        if line["kind"] == "round":
            full[line["request"]] = bool(line["round"]) and line["accepted"][0] == len(line["drafted"]) > 0
    points = compare_speeds(table, texts, group_requests(lines), rules, POINTS, rest=2.5 / 50)
    assert len(points) == len(ARMS) * 2
    assert all(abs(point["error"]) < 1e-9 for point in points), points
    assert [point["by_construction"] for point in points] == [point["arm"] == "ar" for point in points]
    assert len({round(point["measured"], 6) for point in points}) == len(points) - 1  # AR is the same twice
    wrong = compare_speeds(table, texts, group_requests(lines), rules, POINTS, rest=0.5)
    assert all(point["error"] < -0.1 for point in wrong if not point["by_construction"])
    used = usage(table, rules["sd gamma=3"](table))
    assert used.passes[:, 1, 2].sum() >= 3  # the two-token passes matter


def test_what_cannot_be_replayed_is_said() -> None:
    found, refused = replayable(["ar", "hf_assisted", "sd_full gamma=2"], None)
    assert list(found) == ["ar"] and set(refused) == {"hf_assisted", "sd_full gamma=2"}
    lines, by_benchmark = measured()
    with pytest.raises(ConfigError, match="no AR arm"):
        ar_texts([line for line in lines if line["arm"] != "ar"], by_benchmark)
