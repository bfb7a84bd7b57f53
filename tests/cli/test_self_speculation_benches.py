"""bench_hispec and bench_batch, end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_batch, bench_hispec
from tests.cli.test_verbs import words
from tests.folders import tiny_folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target", layers=4)
    return home


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return found


def test_bench_hispec(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*words(home, "hispec/demo"), "model.exits.layers=[1,2,3]", "benchmark.sets=[gsm8k]",
               "benchmark.score=false", "benchmark.limit=1"]  # fmt: skip
    bench_hispec.main(command)
    line = last_line(capsys)
    assert set(line["arms"]) == {"ar", "layerskip", "hispec", "hispec_pacer", "kangaroo", "adadecode", "pacer"}
    assert all(value is not None for value, *_ in line["over_ar"].values())
    figures = json.loads(Path(line["written"]).read_text())
    assert {row["arm"] for row in figures["rows"]} == set(line["arms"].values())
    assert all(row["exact"] for row in figures["rows"] if row["arm"] != "ar")
    memory = figures["extra_memory"]
    assert memory["bytes"]["states"] > 0 and memory["bytes"]["heads"] >= 0 and memory["share"]["states"] < 1
    assert [place["points"] for place in figures["where_it_pays"]]
    assert line["ok"] == (line["over_layerskip"]["value"] >= bench_hispec.LEAST)


def test_bench_batch(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_batch, "ROWS", (1, 2))
    monkeypatch.setattr(bench_batch, "TOKENS", 5)
    command = [*words(home, "hispec/demo"), "benchmark.minutes=0.01", "benchmark.limit=4"]
    assert bench_batch.main(command) == 0
    line = last_line(capsys)
    assert {(row["arm"], row["rows"]) for row in line["table"]} == {(a, r) for a in bench_batch.ARMS for r in (1, 2)}
    memory = line["memory"]
    assert memory["same_output"] and memory["paged"]["within_a_block_per_row"]
    assert memory["paged"]["most_allocated_tokens"] < memory["contiguous"]["most_allocated_tokens"]
    assert memory["paged"]["most_unused_tokens"] < bench_batch.BLOCK * bench_batch.MEMORY_ROWS
