"""The benches, end to end on a tiny model; a second run measures nothing anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pacer.data.corpus import Text
from scripts import bench_ablation, bench_pacer, search_draft, search_skip
from tests.cli.test_verbs import words
from tests.folders import tiny_folder
from tests.tiny import plain_greedy, tiny_stack


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target")
    return home


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return found


def tiny(home: Path, experiment: str) -> list[str]:
    return [word for word in words(home, experiment) if "experiment=" not in word] + ["benchmark.score=false"]


def test_bench_pacer(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["demo", *tiny(home, "pacer/demo"), "replay.limit=2", "benchmark.limit=2"]
    bench_pacer.main(command)
    (figures,) = last_line(capsys)["pairs"]
    assert figures["arms"]["fixed"].startswith("sd gamma=") and figures["arms"]["threshold"].startswith("threshold ")
    # every rule's best in hindsight is bounded by the oracle at the same prices
    speeds = figures["hindsight_predicted"]
    assert all(speed <= speeds["oracle"] + 1e-9 for speed in speeds.values())
    own = {"ar", figures["arms"]["fixed"], figures["arms"]["threshold"], "pacer"}
    theirs = {"hf_generate", "hf_dynamic"}
    assert set(figures["over_ar"]) > own | theirs
    traces = {path: path.stat().st_size for path in (home / "runs" / "evaluate").rglob("trace.jsonl")}
    bench_pacer.main(command)
    assert {path: path.stat().st_size for path in (home / "runs" / "evaluate").rglob("trace.jsonl")} == traces


def test_a_goal_is_reached_or_not() -> None:
    interval = {"value": 1.1, "low": 1.0, "high": 1.2}
    figures: dict[str, Any] = {
        "pair": "a", "over_fixed": interval, "over_threshold": {**interval, "value": 1.0}, "call_in_layers": 1.0,
        "over_fixed_by_benchmark": {"x": interval}, "over_threshold_by_benchmark": {"x": {**interval, "high": 0.9}},
        "rest_share": {"pacer": 0.2},
    }  # fmt: skip
    reached = [
        value >= bound if sign == "≥" else value <= bound for _, value, sign, bound in bench_pacer.wanted(figures)
    ]
    assert reached == [True, False, False, True, False]


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_bench_ablation(
    home: Path, temperature: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ablation, "CHANGES", ({}, {"b": 2, "gamma_max": 4}))
    more = [f"sampling.temperature={temperature}", "replay.limit=2", "benchmark.limit=2"]
    bench_ablation.main(["demo", *tiny(home, "pacer/demo"), *more])
    rows = last_line(capsys)["rows"]
    assert [row["arm"] for row in rows] == ["pacer", "pacer b=2 gamma_max=4"]
    for row in rows:
        assert row["ratio_low"] <= row["ratio_to_ar"] <= row["ratio_high"]
        assert (row["predicted"] is None) == (temperature > 0)


def test_search_draft(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"first": ["model.draft.layers=[0]"], "no copying": ["model.draft.copying=false"]}
    monkeypatch.setattr(search_draft, "VARIANTS", chosen)
    monkeypatch.setattr("sys.argv", ["search_draft.py", *words(home, "draft/smollm2", "corpus.extend=[]")])
    assert search_draft.main() == 0
    assert last_line(capsys)["best"]["variant"] in chosen
    assert len(json.loads((home / "runs" / "search_draft.json").read_text())["rows"]) == 2


def test_what_is_left_out_costs_least_and_has_no_neighbours() -> None:
    assert search_skip.leave_out({0: 0.1, 1: 0.9, 2: 0.95, 3: 0.8, 4: 0.3}, 2) == [2, 4]


def test_agreement_counts_the_targets_own_text() -> None:
    stack = tiny_stack(layers=3)
    prompt = [3, 4, 5]
    output = plain_greedy(stack.model, prompt, 12)
    text = Text("a", "t", prompt, output, True)
    assert search_skip.agreement(stack, [0, 1, 2], [text]) == 1.0
    wrong = Text("b", "t", prompt, [(output[0] + 1) % 40], True)
    assert search_skip.agreement(stack, [0, 1, 2], [text, wrong]) == pytest.approx(12 / 13)
