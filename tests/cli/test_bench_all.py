"""bench_all on a tiny model, few families; the choice and the ranks from hand-made results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pacer.methods.arms import is_reference, method_settings
from scripts import bench_all
from tests.cli.test_verbs import words
from tests.folders import tiny_folder


def test_a_family_is_an_arm_that_exists() -> None:
    for arms in bench_all.FAMILIES.values():
        assert all(is_reference(arm) or method_settings(arm).name == arm for arm in arms)
    lossy = {name for name, arms in bench_all.FAMILIES.items() if not is_reference(arms[0])
             and method_settings(arms[0]).guarantee == "lossy"}  # fmt: skip
    assert lossy == {"sprinter"}


def test_each_family_comes_with_its_fastest_setting() -> None:
    families = {"a": ("a 1", "a 2"), "b": ("b 1", "b 2"), "c": ("c",)}
    overall = [
        {"arm": "a 1", "ratio_to_ar": 1.1},
        {"arm": "a 2", "ratio_to_ar": 1.2},
        {"arm": "b 2", "ratio_to_ar": None},
    ]
    assert bench_all.tuned(families, overall) == {"a": "a 2", "b": "b 1", "c": "c"}


def test_lossy_methods_are_ranked_apart() -> None:
    arms = {"ar": ("exact", 1.0), "x": ("exact", 1.3), "y": ("lossy", 2.0), "z": ("exact", None)}
    results = {
        "rows": [{"arm": arm, "guarantee": guarantee} for arm, (guarantee, _) in arms.items()],
        "overall": [{"arm": arm, "ratio_to_ar": ratio} for arm, (_, ratio) in arms.items()],
    }
    rows = bench_all.ranked({arm: arm for arm in arms}, results)
    assert [(row["arm"], row["rank"]) for row in rows] == [("x", 1), ("ar", 2), ("z", 3), ("y", 1)]


def test_a_lossy_method_says_what_it_leaves() -> None:
    ranks = [{"arm": "y", "guarantee": "lossy", "rank": 1, "ratio_to_ar": 2.0, "ratio_low": 1.9, "ratio_high": 2.1}]
    rows = [
        {"arm": "y", "benchmark": b, "ratio_to_ar": 2.0, "agreement": {"same_tokens": share}}
        for b, share in (("one", 0.031), ("two", 0.25))
    ]
    table = bench_all.ranks_table({"ranks": ranks, "rows": rows})
    assert "| lossy 1 | y (lossy: 3 to 25 % of AR's tokens) | 2.00 [1.90, 2.10] | 2.00 | 2.00 |" in table
    bare = bench_all.ranks_table({"ranks": ranks, "rows": [{**rows[0], "agreement": None}]})
    assert "(lossy: not compared with AR)" in bare


def test_it_tunes_then_measures_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_folder(tmp_path / "target", layers=4)
    few = {
        "sd": ("sd gamma=2", "sd gamma=1"),
        "prompt_lookup": ("prompt_lookup",),
        "layerskip": ("layerskip exits=[1]",),
    }
    monkeypatch.setattr(bench_all, "FAMILIES", few)
    command = words(
        tmp_path, "all/demo", "benchmark.limit=1", "benchmark.sets=[gsm8k,sharegpt]", "benchmark.score=false"
    )
    assert bench_all.main(command) == 0
    line: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert {row["family"] for row in line["ranks"]} == {"ar", *few} and line["ok"] and not line["failed"]
    table = Path(line["written"]).with_name("ranks.md").read_text().splitlines()
    assert table[0] == "| rank | method | × AR [95 % interval] | gsm8k | mt_bench for sharegpt |"
    assert len(table) == 2 + 1 + len(few) and any(row.startswith("| 1 | ") for row in table)
    rows = json.loads(Path(line["written"]).read_text())["rows"]
    assert {row["benchmark"] for row in rows} == {"gsm8k", "mt_bench for sharegpt"}
    assert all(row["exact"] for row in rows if row["arm"] != "ar")
    assert all(row["latency_seconds_p95"] >= row["latency_seconds_p50"] > 0 for row in rows)
    traces = {path: path.stat().st_size for path in (tmp_path / "runs" / "evaluate").rglob("trace.jsonl")}
    bench_all.main(command)
    assert {path: path.stat().st_size for path in (tmp_path / "runs" / "evaluate").rglob("trace.jsonl")} == traces
