"""Killed at random points and started again, the pipeline ends like an undisturbed one; and what would not is seen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pacer.files import sha256
from scripts import kill_campaign as campaign
from scripts import left_behind as left


@pytest.mark.slow
def test_three_kills(tmp_path: Path) -> None:
    """`pacer.evaluate` makes all that it lacks, so it is the whole pipeline in one verb."""
    tally = campaign.campaign(tmp_path, 3, 1, campaign.PIPELINE[-1:])
    assert (tally.kills, tally.resumes) == (3, 3) and sum(tally.codes.values()) == 3
    assert not (tally.wrong or tally.unreadable or tally.done_twice or tally.differences)
    whole = left.outputs(tmp_path / "whole")
    kinds = {name.split("/")[1] if "/" in name else name.split()[0] for name in whole}
    assert kinds == {"corpus", "labels", "draft", "preverifier", "states", "trace", "table"}
    assert any(row["acceptance_rate"] for name, row in whole.items() if name.startswith("table pacer"))


def files(runs: Path) -> Path:
    """A folder as a run leaves it: a stage with a manifest, a trace."""
    stage, run = runs / "stages" / "corpus" / "0123", runs / "evaluate" / "demo" / "4567"
    stage.mkdir(parents=True)
    run.mkdir(parents=True)
    (stage / "shard-00000.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n')
    save_file({"x": torch.zeros(3)}, stage / "shard-00000.safetensors")
    torch.save({"x": torch.zeros(3)}, stage / "last.ckpt")
    names = ("shard-00000.jsonl", "shard-00000.safetensors")
    listed = {name: {"sha256": sha256(stage / name)} for name in names}
    (stage / "manifest.json").write_text(json.dumps({"files": listed}))
    (run / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines()))
    (run / "results.json").write_text(json.dumps({"rows": [{"arm": "ar", "benchmark": "b", "n": 1, "seconds": 2.0}]}))
    return runs


def lines() -> list[dict[str, Any]]:
    own = {"arm": "ar", "benchmark": "b", "request": "r"}
    return [{"kind": "round", "round": 0, "emitted": [5], **own}, {"kind": "request", "ids": [5], **own}]


@pytest.mark.parametrize(
    "name", ["manifest.json", "shard-00000.jsonl", "shard-00000.safetensors", "last.ckpt", "results.json"]
)
def test_half_a_file_is_seen(tmp_path: Path, name: str) -> None:
    stage = files(tmp_path) / "stages" / "corpus" / "0123"
    (stage / ".part-0-x.json").write_text("{")
    (stage.parents[2] / "evaluate" / "demo" / "4567" / "trace.jsonl").open("a").write('{"ki')
    assert left.unreadable(tmp_path) == []
    (file,) = tmp_path.rglob(name)
    file.write_bytes(file.read_bytes()[:-9])
    found = left.unreadable(tmp_path)
    assert found and any(name in line for line in found)


def test_a_leftover_that_counts_as_an_output_is_seen(tmp_path: Path) -> None:
    record = files(tmp_path) / "stages" / "corpus" / "0123" / "manifest.json"
    (record.parent / ".part-0-x").write_text("x")
    manifest = json.loads(record.read_text())
    manifest["files"][".part-0-x"] = {"sha256": sha256(record.parent / ".part-0-x")}
    record.write_text(json.dumps(manifest))
    assert len(left.unreadable(tmp_path)) == 1


def test_what_is_there_twice_or_other_is_seen(tmp_path: Path) -> None:
    runs = files(tmp_path / "one")
    shutil.copytree(runs, tmp_path / "other")
    stage, run = next(runs.glob("stages/*/*")), next(runs.glob("evaluate/*/*"))
    assert left.doubled(runs) == []
    (stage / "shard-00001.jsonl").write_text('{"id": "b"}\n')
    (run / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines(), lines()[-1]]))
    assert len(left.doubled(runs)) == 2
    one, other = left.outputs(runs), left.outputs(tmp_path / "other")
    differing = {key for key in one if one[key] != other.get(key)}
    assert differing == {"stages/corpus/0123/shard-00001.jsonl", "trace ar b r"}
    (run / "results.json").write_text(json.dumps({"rows": [{"arm": "ar", "benchmark": "b", "n": 1, "seconds": 3.0}]}))
    assert left.outputs(runs)["table ar b"] == other["table ar b"] == {"arm": "ar", "benchmark": "b", "n": 1}


@pytest.mark.parametrize("words", [["x"], ["-1"], ["1", "2", "3"]])
def test_words_that_are_no_numbers(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign.main(words) == 2
    assert "KILLS (default 20)" in capsys.readouterr().err
