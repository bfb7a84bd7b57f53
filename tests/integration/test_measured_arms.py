"""Arms side by side: the same text from all, a trace that survives interruption, results that are valid JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pacer.assemble import Models
from pacer.data.splits import is_tuning
from pacer.evaluation import runner
from pacer.evaluation.arms import Arm, make_arm
from pacer.evaluation.metrics import check_trace, evaluate_trace, load_trace
from pacer.evaluation.runner import load_benchmarks, measure, open_trace, score_all
from pacer.reporting import tables
from pacer.settings import BenchmarkSettings, SamplingSettings
from pacer.work.stopping import Stopped
from tests.arms import ARMS, OURS, SETTINGS, Lines, arms, benchmarks, make_models, run
from tests.folders import tiny_folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tiny_folder(tmp_path_factory.mktemp("arms") / "target"))


def requests_of(lines: Lines) -> dict[tuple[str, str, str], list[int]]:
    ended = [line for line in lines if line["kind"] == "request"]
    return {(line["arm"], line["benchmark"], line["request"]): line["ids"] for line in ended}


@pytest.fixture(scope="module")
def measured(models: Models, tmp_path_factory: pytest.TempPathFactory) -> tuple[Lines, Path]:
    trace = tmp_path_factory.mktemp("measured") / "trace.jsonl"
    return measure(benchmarks(), arms(models), models, SETTINGS, trace), trace


def test_all_arms_write_the_same_text(measured: tuple[Lines, Path], models: Models) -> None:
    lines, trace = measured
    found = requests_of(lines)
    assert len(found) == len(ARMS) * 5
    for (arm, benchmark, request), ids in found.items():
        assert ids == found["ar", benchmark, request], (arm, request)
    finishes = Counter(line["finish"] for line in lines if line["kind"] == "request")
    assert finishes["eos"] >= len(ARMS) and finishes["length"] >= len(ARMS)
    for line in lines:
        if line["kind"] == "request":
            assert line["text"] == models.text(line["ids"]) and line["new_tokens"] == len(line["ids"])
    assert load_trace(trace) == lines and check_trace(lines) == []
    assert models.target.model.config._attn_implementation == "pacer_sdpa"


def test_arms_of_a_prompt_come_before_the_next_prompt(measured: tuple[Lines, Path]) -> None:
    order = [line["request"] for line in measured[0] if line["kind"] == "request"]
    blocks = [order[i : i + len(ARMS)] for i in range(0, len(order), len(ARMS))]
    assert all(len(set(block)) == 1 for block in blocks)
    assert [block[0] for block in blocks] != [p.id for b in benchmarks() for p in b.prompts]  # in random order


def test_results_are_valid_json(measured: tuple[Lines, Path]) -> None:
    """M45, M69, M78: bounds of the counts, null for what an arm has not, exactness judged by ids."""
    results = evaluate_trace(measured[0], arms=ARMS, resamples=20)
    text = json.dumps(results, allow_nan=False)
    rows = json.loads(text)["rows"]
    assert len(rows) == 2 * len(ARMS)
    for row in rows:
        assert row["exact"] is True and row["tokens_per_second"] > 0
        reference = row["arm"].startswith("hf")
        assert (row["tokens_per_verify"] is None) == reference
        if "gamma=" in row["arm"] and not reference:
            gamma = int(row["arm"].split("=")[1])
            assert 1 <= row["tokens_per_verify"] <= gamma + 1
            assert row["accepted_per_verify"] <= row["mean_drafted"] <= gamma
    assert next(row for row in rows if row["arm"] == "ar")["mean_drafted"] == 0


def test_acceptance_never_stands_alone(measured: tuple[Lines, Path]) -> None:
    """A45: mean drafted length and tokens per target pass beside it, in every row and in every table."""
    results = evaluate_trace(measured[0], arms=ARMS, resamples=20)
    drafting = [row for row in results["rows"] if row["acceptance_rate"] is not None]
    assert len(drafting) >= 2 * (len(OURS) - 1)
    for row in drafting:
        assert row["mean_drafted"] > 0 and row["tokens_per_verify"] >= 1
        passes, drafted = row["totals"]["target_passes"], row["totals"]["drafted"]
        assert row["mean_drafted"] == pytest.approx(drafted / passes)
    written = [tables.to_text(results, command="", machine=""), tables.to_markdown(results, command="", machine="")]
    heads = [line for text in written for line in text.split("\n") if "accepted" in line and "speed" in line.lower()]
    assert heads and all("mean draft" in line and "τ" in line for line in heads)
    named = tables.to_csv(results).split("\n")[0].split(",")
    assert {"acceptance_rate", "mean_drafted", "tokens_per_verify"} <= set(named)


def counted(made: list[Arm], runs: list[tuple[str, tuple[str, ...]]]) -> list[Arm]:
    """Arms that note what they were asked for."""

    def noting(arm: Arm) -> Arm:
        def run(requests: Any) -> Any:
            runs.append((arm.name, tuple(r.id for r in requests)))
            return arm.run(requests)

        return replace(arm, run=run)

    return [noting(arm) for arm in made]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.55, 0.9, 0.999])
def test_a_trace_cut_anywhere_is_completed(
    measured: tuple[Lines, Path], models: Models, tmp_path: Path, share: float
) -> None:
    """Killed in the middle of a line: finished requests stay, the rest is measured, nothing is there twice."""
    lines, whole = measured
    content = whole.read_bytes()
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(content[: int(share * len(content))])
    kept = requests_of([line for line in map(_parsed, trace.read_text().split("\n")) if line])
    runs: list[tuple[str, tuple[str, ...]]] = []
    again = measure(benchmarks(), counted(arms(models), runs), models, SETTINGS, trace)
    assert requests_of(again) == requests_of(lines) and check_trace(again) == []
    assert load_trace(trace) == again
    assert Counter((a, r) for a, _, r in requests_of(lines)) - Counter((a, r) for a, _, r in kept) == Counter(
        (arm, r) for arm, ids in runs for r in ids
    )
    assert all(count == 1 for count in Counter(
        (line["arm"], line["request"]) for line in again if line["kind"] == "request"
    ).values())  # fmt: skip
    runs.clear()
    assert measure(benchmarks(), counted(arms(models), runs), models, SETTINGS, trace) == again and not runs


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return dict(json.loads(text))
    except ValueError:
        return None


def test_rounds_without_their_request_are_dropped(measured: tuple[Lines, Path], tmp_path: Path) -> None:
    lines, _ = measured
    at = next(i for i, line in enumerate(lines) if i > 40 and line["kind"] == "round" and line["round"] == 2)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines[: at + 1]) + '{"kind": "rou')
    kept = open_trace(trace)
    assert kept == load_trace(trace) == lines[: at - 2] and kept[-1]["kind"] == "request"
    assert open_trace(tmp_path / "none.jsonl") == []


def test_batches(models: Models, measured: tuple[Lines, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream holds prompts of one benchmark; every row still gets its own text."""
    monkeypatch.setattr(runner, "STREAM", 1)
    settings = replace(SETTINGS, batch_size=2)
    runs: list[tuple[str, tuple[str, ...]]] = []
    lines = measure(benchmarks(), counted(arms(models), runs), models, settings, tmp_path / "t.jsonl")
    assert requests_of(lines) == requests_of(measured[0]) and check_trace(lines) == []
    asked = {ids for _, ids in runs}
    assert asked == {("gsm8k-0", "gsm8k-1"), ("gsm8k-2",), ("other-0", "other-1")}


def test_a_deadline_and_the_next_time(models: Models, measured: tuple[Lines, Path], tmp_path: Path) -> None:
    settings = replace(SETTINGS, minutes=1e-9)
    runs: list[tuple[str, tuple[str, ...]]] = []
    made = counted(arms(models, ["ar", "sd gamma=4"]), runs)
    assert measure(benchmarks(), made, models, settings, tmp_path / "t.jsonl") == [] and not runs
    lines = measure(benchmarks(), made, models, replace(settings, minutes=60), tmp_path / "t.jsonl")
    wanted = {key: ids for key, ids in requests_of(measured[0]).items() if key[0] in ("ar", "sd gamma=4")}
    assert requests_of(lines) == wanted


def test_the_figures_so_far_are_shown(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an earlier run of the same trace too."""
    monkeypatch.setattr("pacer.work.progress.LINE_SECONDS", 0.0)
    made = arms(models, ["ar", "sd gamma=4", "hf_generate"])
    lines = measure(benchmarks()[:1], made, models, SETTINGS, tmp_path / "t.jsonl")
    capsys.readouterr()
    lines = measure(benchmarks(), made, models, replace(SETTINGS, minutes=60), tmp_path / "t.jsonl")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("measuring, at most 60 min: 5/5 batch [") and "<00:00" in last
    names = [arm.name for arm in made]
    row = evaluate_trace([line | {"benchmark": "all"} for line in lines], arms=names)["rows"][1]
    assert f"sd gamma=4: {row['tokens_per_second']:.1f} tok/s, τ {row['tokens_per_verify']:.2f}, " in last
    assert f"{100 * row['acceptance_rate']:.0f} % accepted; hf_generate: " in last and last.endswith(" tok/s]")


def test_a_stop_request_is_heeded_after_the_prompt(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise Stopped("SIGTERM")

    made = arms(models, ["ar", "sd gamma=4"])
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(runner, "check_stop", stop)
        measure(benchmarks(), made, models, SETTINGS, tmp_path / "t.jsonl")
    done = requests_of(load_trace(tmp_path / "t.jsonl"))
    assert len(done) == 2 and len({request for _, _, request in done}) == 1
    assert len(requests_of(measure(benchmarks(), made, models, SETTINGS, tmp_path / "t.jsonl"))) == 10


def test_warm_up_is_outside(models: Models, tmp_path: Path) -> None:
    """M77: it is run, short, and leaves no line."""
    runs: list[tuple[str, tuple[str, ...]]] = []
    made = counted(arms(models, ["ar", "pacer"]), runs)
    lines = measure(benchmarks(), made, models, replace(SETTINGS, warmup=2), tmp_path / "t.jsonl")
    assert len(requests_of(lines)) == 10 and len(runs) == 14
    assert Counter(arm for arm, _ in runs[:4]) == {"ar": 2, "pacer": 2}


def test_a_lossless_arm_is_not_scored_again(measured: tuple[Lines, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """M79: equal texts have equal scores; it is said."""
    import pacer.evaluation.scoring as scoring

    calls: list[str] = []

    def score(name: str, texts: list[str], items: list[Any], sandbox: str) -> dict[str, float]:
        assert len(texts) == len(items)
        calls.append(name)
        return {"value": len(calls)} if name == "gsm8k" else {}

    monkeypatch.setattr(scoring, "score", score)
    lines, _ = measured
    found, notes = score_all(lines, benchmarks(), "off")
    assert sorted(calls) == ["gsm8k", "other"]
    assert found.keys() == {(arm, "gsm8k") for arm in ARMS} and len({str(v) for v in found.values()}) == 1
    cells = 2 * len(ARMS)
    assert notes == [f"{cells - 2} of {cells} (arm, benchmark) pairs wrote the same texts: scored once."]
    changed = [dict(line) for line in lines]
    odd = {"kind": "request", "arm": "pacer", "benchmark": "gsm8k"}
    next(line for line in changed if odd.items() <= line.items())["text"] += "!"
    calls.clear()
    found, _ = score_all(changed, benchmarks(), "off")
    assert sorted(calls) == ["gsm8k", "gsm8k", "other"] and found["pacer", "gsm8k"] != found["ar", "gsm8k"]
    assert score_all([], benchmarks(), "off") == ({}, [])


def test_sampled_arms_repeat_themselves(models: Models) -> None:
    sampling = SamplingSettings(temperature=1.0, top_k=20, seed=3)
    for name in OURS:
        first, second = (run(make_arm(name, models, sampling), models) for _ in range(2))
        assert [line["ids"] for line in first if line["kind"] == "request"] == [
            line["ids"] for line in second if line["kind"] == "request"
        ]


def test_which_prompts_are_measured() -> None:
    """Settings are tuned on a fixed quarter and reported on the rest; a limit cuts what is left."""
    sets = ["gsm8k", "xsum"]
    whole = {s: load_benchmarks(BenchmarkSettings(sets, limit=None, split=s), None) for s in ("all", "tune", "report")}
    for i, name in enumerate(sets):
        ids = {split: {p.id for p in found[i].prompts} for split, found in whole.items()}
        assert ids["tune"] | ids["report"] == ids["all"] and not ids["tune"] & ids["report"]
        assert all(map(is_tuning, ids["tune"])) and ids["tune"]
        assert whole["all"][i].name == name and whole["all"][i].sample
    cut = load_benchmarks(BenchmarkSettings(sets, limit=3, split="report"), None)
    assert [len(b.prompts) for b in cut] == [3, 3]
    assert cut[0].prompts == whole["report"][0].prompts[:3]
