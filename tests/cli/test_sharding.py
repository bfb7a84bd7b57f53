"""Labelling and measuring by several processes: the same corpus, and the table of one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pacer import evaluate, label, status, train
from pacer.evaluation.merging import merge, requests_of
from pacer.evaluation.metrics import evaluate_trace, load_trace
from pacer.evaluation.runner import load_benchmarks
from pacer.settings import BenchmarkSettings
from pacer.work.shards import Shard
from tests.cli.test_verbs import run_folders, words
from tests.folders import tiny_folder

SETS = ["gsm8k", "cnn_dm"]
ARMS = ["ar", "sd gamma=2"]
MEASURE = (
    f"benchmark.sets=[{','.join(SETS)}]", "benchmark.limit=6", 'benchmark.arms=[ar,"sd gamma=2"]',
    "benchmark.split=all", "benchmark.score=false",
)  # fmt: skip
TIMES = ("second", "latency", "ratio", "share")  # figures that a clock decides


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("sharding")
    tiny_folder(home / "target")
    evaluate.main(command(home))
    return home


def command(home: Path, *more: str) -> list[str]:
    given = {word.split("=")[0] for word in (*MEASURE, *more)}
    kept = [word for word in words(home, "pacer/demo") if word.split("=")[0] not in given]
    return [*kept, *(word for word in MEASURE if word.split("=")[0] not in {m.split("=")[0] for m in more}), *more]


def figures(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What does not depend on a clock."""
    rows = [{k: v for k, v in row.items() if not any(part in k for part in TIMES)} for row in results["rows"]]
    for row in rows:
        row["totals"] = {k: v for k, v in row["totals"].items() if not any(p in k for p in (*TIMES, "time"))}
    return rows


def test_parts_of_a_measurement_make_the_table_of_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two parts in two runs folders' time order: neither alone has a table, and the last has the whole."""
    (whole,) = run_folders(home, "evaluate")
    other = home / "apart"
    shutil.copytree(home / "runs" / "stages", other / "stages")
    parts = [command(home, f"paths.runs={other}", f"shard.index={i}", "shard.count=2") for i in (1, 0)]
    evaluate.main(parts[0])
    (folder,) = (other / "evaluate").glob("*/*")
    out = capsys.readouterr().out
    assert folder.name == whole.name and "part 1 of 2" in out and "The table comes with the last" in out
    assert not (folder / "results.json").exists()
    assert status.main([str(other)]) == 1
    out = capsys.readouterr().out
    assert f"missing  {folder}-0-of-2" in out and "shard.index=0 shard.count=2" in out
    before = (folder / "trace-1-of-2.jsonl").read_text()
    evaluate.main(parts[0])  # once more: nothing is measured again
    assert (folder / "trace-1-of-2.jsonl").read_text() == before
    evaluate.main(parts[1])
    assert "geometric mean" in capsys.readouterr().out
    found, wanted = (json.loads((f / "results.json").read_text()) for f in (folder, whole))
    assert figures(found) == figures(wanted)
    assert [p.name for p in folder.glob("trace*")] == ["trace.jsonl"]
    own, one = requests_of(load_trace(folder / "trace.jsonl")), requests_of(load_trace(whole / "trace.jsonl"))
    assert own.keys() == one.keys() and [k[1:] for k in own if k[0] == "ar"] == [k[1:] for k in one if k[0] == "ar"]
    assert status.main([str(other)]) == 0
    trace = (folder / "trace.jsonl").read_text()
    evaluate.main(parts[1])  # a part that is started again finds the whole
    assert (folder / "trace.jsonl").read_text() == trace


def test_a_merged_trace_is_the_trace_of_one(home: Path, tmp_path: Path) -> None:
    """One run's own lines, dealt to three parts of which one has an unfinished and a repeated request."""
    (whole,) = run_folders(home, "evaluate")
    settings = BenchmarkSettings(sets=SETS, limit=6, split="all", arms=ARMS)
    benchmarks = load_benchmarks(settings, None)
    lines = load_trace(whole / "trace.jsonl")
    for index in range(3):
        shard = Shard(index, 3)
        own = [line for line in lines if shard.owns(line["request"])]
        repeated = [line for line in own if line["request"] == own[0]["request"]]
        stale = [{**line, "ids": []} for line in repeated if line["kind"] == "request"]
        text = "".join(json.dumps(line) + "\n" for line in [*stale, *own])
        (tmp_path / f"trace{shard.name}.jsonl").write_text(text + (json.dumps(own[0]) + "\n" if index else '{"ki'))
    for index in range(3):
        if index < 2:
            aside = tmp_path / f"trace-{index}-of-3.jsonl"
            rest, missing = merge_without(aside, benchmarks, settings)
            assert missing > 0 and len(requests_of(rest)) + missing == len(requests_of(lines))
    merged, missing = merge(tmp_path, benchmarks, ARMS, settings)
    assert missing == 0 and [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]
    assert merged == load_trace(tmp_path / "trace.jsonl")
    options: dict[str, Any] = {"arms": ARMS, "resamples": 50, "seed": 3}
    assert evaluate_trace(merged, **options) == evaluate_trace(lines, **options)  # times and intervals included


def merge_without(aside: Path, benchmarks: Any, settings: BenchmarkSettings) -> tuple[list[dict[str, Any]], int]:
    content = aside.read_text()
    aside.unlink()
    found = merge(aside.parent, benchmarks, ARMS, settings)
    aside.write_text(content)
    return found


def test_another_machine_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (whole,) = run_folders(home, "evaluate")
    record = json.loads((whole / "provenance.json").read_text())
    record["machine"]["processor"] = "another"
    (whole / "provenance-0-of-2.json").write_text(json.dumps(record))
    evaluate.main(command(home))
    (whole / "provenance-0-of-2.json").unlink()
    assert " and another, " in capsys.readouterr().out


def test_label_by_array_jobs(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of an array makes its own pieces first and the others' where nobody does; the texts are those of one."""
    texts = []
    for name, environment in (("one", {}), ("array", {"ID": "2", "COUNT": "3", "MIN": "1", "STEP": "1"})):
        for key, value in environment.items():
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{key}", value)
        label.main([
            *(w for w in words(home, "draft/smollm2") if not w.startswith(("paths.runs", "corpus.shard_size"))),
            f"paths.runs={tmp_path / name}", "corpus.shard_size=2", "corpus.limit=4",
        ])  # fmt: skip
        shards = sorted((tmp_path / name).rglob("shard-*"), key=lambda path: path.stat().st_mtime_ns)
        texts.append({str(path.relative_to(tmp_path / name)): path.read_text() for path in shards})
    one, array = texts
    assert one == array and list(one) != list(array)


def test_a_verb_starts_the_processes_of_a_training(home: Path, tmp_path: Path) -> None:
    """``trainer.devices=2``: one stage, one writer, and the draft of one process that accumulates twice."""
    drafts = []
    for name, more in (("one", "trainer.accumulate=2"), ("two", "trainer.devices=2")):
        train.main([
            *(w for w in words(home, "draft/smollm2") if not w.startswith(("paths.runs", "trainer.max_steps"))),
            f"paths.runs={tmp_path / name}", "trainer.max_steps=2", "corpus.shard_size=2", more,
        ])  # fmt: skip
        (draft,) = tmp_path.glob(f"{name}/stages/draft/*/draft/model.safetensors")
        drafts.append(draft)
    one, two = drafts
    assert one.parents[1].name == two.parents[1].name
    assert sorted(p.name for p in one.parents[1].rglob("*")) == sorted(p.name for p in two.parents[1].rglob("*"))
    for name, value in load_file(one).items():
        torch.testing.assert_close(load_file(two)[name], value, rtol=1e-2, atol=1e-4)
