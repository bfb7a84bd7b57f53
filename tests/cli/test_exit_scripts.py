"""The bench of exits and the sweep over layers on a tiny model; a second run trains and measures nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pacer.evaluation.cascade.walk import Cascade
from pacer.evaluation.tuned import notes_on
from scripts import bench_exits, bench_layerskip, sweep_layers
from tests.cli.test_verbs import words
from tests.folders import tiny_folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target", layers=4)
    return home


def command(home: Path, *more: str) -> list[str]:
    return [*words(home, "exits/demo"), "model.exits.layers=[1,2,3]", "model.exits.head_size=300", *more]


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return found


def test_bench_exits(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code = bench_exits.main(command(home))
    line = last_line(capsys)
    assert code == (0 if line["ok"] else 1), "one step of training may or may not help"
    for what in ("agreement", "expected_accepted"):
        assert list(line[what]) == list(bench_exits.KINDS)
        assert all(list(own) == ["1", "2", "3"] for own in line[what].values())
    assert all(0 <= value <= 1 for own in line["agreement"].values() for value in own.values())
    for kind, took in line["training"].items():
        assert (took["tokens"] == 0) == (kind == "shared") and (took["minutes"] > 0) == (kind != "shared")
    for both in line["modelled"].values():
        assert both["layerskip"]["ratio_to_ar"] > 0 and both["hispec"]["tried"] <= both["layerskip"]["tried"]
    stored = Path(line["written"])
    whole = json.loads(stored.read_text())
    assert whole["texts"] > 0
    assert all((stored.parent / name).is_file() for name in ("agreement.png", "settings.yaml", "provenance.json"))
    assert {row["steps"] for row in whole["rows"] if row["kind"] != "shared"} == {1}
    monkeypatch.setattr("pacer.training.exits_run.train_exits", None)
    bench_exits.main(command(home))
    again = last_line(capsys)
    for what in ("agreement", "expected_accepted", "training"):
        assert again[what] == line[what], "the same heads, texts and minutes"


def test_bench_layerskip(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuned model's table says that it is one, with the task scores of both."""
    tune = [
        *words(home, "exits/layerskip"),
        "model.exits.layers=[1,2]",
        "benchmark.sets=[gsm8k,xsum]",
        "benchmark.limit=2",
    ]
    code = bench_layerskip.main(tune)
    line = last_line(capsys)
    assert code == (0 if line["ok"] else 1) and line["steps"] == 1, "one step of tuning may or may not help"
    assert set(line["over_own_ar"]) == set(bench_layerskip.arms_of([1, 2]))
    assert line["same_texts"].keys() == {"gsm8k", "xsum"}
    assert all(0 <= value <= 1 for both in line["agreement"].values() for value in both)
    folder = Path(line["written"]).parent
    results = json.loads((folder / "results.json").read_text())
    assert all(row["exact"] for row in results["rows"] if row["arm"] != "ar"), "exact to the tuned model"
    table = (folder / "table.md").read_text()
    assert "LayerSkip's recipe, 1 steps). Exact means exact to it" in table
    (note,) = (text for text in table.splitlines() if "Task scores before the tuning: " in text)
    assert "gsm8k exact_strict 0.000, " in note and "xsum rouge1 0." in note and note.count("(2 prompts)") == 2
    rows = json.loads((folder / "bench_layerskip.json").read_text())["tables"]["scores"][2:]
    (before,) = (home / "runs" / "evaluate" / "smollm2-layerskip-before").glob("*/results.json")
    original = {row["benchmark"]: row["score"] for row in json.loads(before.read_text())["rows"]}
    own = {row["benchmark"]: row["score"] for row in results["rows"] if row["arm"] == "ar"}
    assert {(b, k): (o, t) for b, k, o, t, _ in rows} == {
        (b, k): (f"{original[b][k]:.3f}", f"{own[b][k]:.3f}") for b in own for k in own[b]
    }
    assert (folder / "layerskip.md").read_text().count("gsm8k") == 2
    monkeypatch.setattr("pacer.training.layerskip.train_layerskip", None)
    bench_layerskip.main(tune)
    assert last_line(capsys) == line, "what is finished is kept"
    assert not notes_on(str(home / "target")), "the original is not tuned"


def test_judged_on_texts_that_no_exit_learnt_from(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that chooses no checkpoint, where there is one."""
    settings = bench_exits.settings_of("norm", command(home))
    parts = {"draft": ["a"], "tuning": ["b"], "preverifier": ["c"]}
    monkeypatch.setattr(bench_exits, "corpus", lambda settings, models: ([], ""))
    monkeypatch.setattr(bench_exits, "stable_hash", lambda name: name)

    class Named(str):
        id = ""

    monkeypatch.setattr(
        bench_exits, "split_texts", lambda texts, shares: {k: [Named(v) for v in found] for k, found in parts.items()}
    )
    assert bench_exits.unseen(settings, None) == ["c"]  # type: ignore[arg-type]
    parts["preverifier"] = []
    assert bench_exits.unseen(settings, None) == ["b"]  # type: ignore[arg-type]
    parts["tuning"] = []
    with pytest.raises(bench_exits.ConfigError, match="no unseen texts"):
        bench_exits.unseen(settings, None)  # type: ignore[arg-type]


def test_exits_that_are_named_are_used(home: Path) -> None:
    assert bench_exits.settings_of("norm", command(home)).model.exits.layers == [1, 2, 3]
    free = [word for word in command(home) if not word.startswith("model.exits.layers")]
    settings = bench_exits.settings_of("adapter", free)
    assert settings.model.exits.layers == list(bench_exits.LAYERS) and settings.model.exits.kind == "adapter"


def test_training_that_does_not_help_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def row(kind: str, agreement: float) -> dict[str, Any]:
        return {
            "kind": kind,
            "layer": 4,
            "agreement": agreement,
            "expected_accepted": 1.0,
            "minutes": None,
            "tokens": 1,
        }

    assert bench_exits.report([row("shared", 0.3), row("norm", 0.4)], {}, tmp_path) == 0
    assert bench_exits.report([row("shared", 0.3), row("norm", 0.4), row("linear", 0.2)], {}, tmp_path) == 1
    out = capsys.readouterr().out
    assert "NOT reached  mean agreement with linear heads: 0.200, untrained 0.300" in out


def sweep(home: Path) -> list[str]:
    return command(
        home, "model.exits.kind=shared", "replay.texts=corpus", "benchmark.split=all", "benchmark.sets=[gsm8k,xsum]",
        "benchmark.limit=1", "benchmark.max_new_tokens=12", "benchmark.score=false",
    )  # fmt: skip


def test_sweep_layers(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code = sweep_layers.main(sweep(home))
    line = last_line(capsys)
    assert code == (0 if line["ok"] else 1), "milliseconds of a tiny model are what they are"
    assert line["median_errors"]["tau"] < 1e-9, "in float32 tokens are exact"
    folder = Path(line["written"])
    found = json.loads((folder / "checked.json").read_text())["compared"]
    assert len({row["arm"] for row in found}) == 5 and line["points"] == len(found) == 10
    for name in ("layers", "where_it_pays", "buffers", "checked"):
        assert (folder / f"{name}.png").is_file()
    swept = json.loads((folder / "sweep.json").read_text())
    assert {(r["draft"], r["verifier"]) for r in swept["grid"]} == {
        (1, None), (2, None), (3, None), (1, 2), (1, 3), (2, 3)
    }  # fmt: skip
    mine, published = (each["points"][0] for each in swept["pays"])
    assert published["published"] and not mine["published"]
    trace = (folder / "trace.jsonl").stat().st_size
    monkeypatch.setattr(sweep_layers, "sweep", None)
    sweep_layers.main(sweep(home))
    assert last_line(capsys)["best"] == line["best"] and (folder / "trace.jsonl").stat().st_size == trace


def test_five_points_are_decoded() -> None:
    """Never plain decoding, never one twice, whatever was chosen."""

    def row(family: str, cascade: Cascade) -> dict[str, Any]:
        return {"benchmark": "all", "family": family, "exits": list(cascade.exits), "buffers": list(cascade.buffers),
                "bonus": cascade.bonus, "ratio_to_ar": 1.0}  # fmt: skip

    def points(skip: Cascade, hispec: Cascade, grid: Sequence[Cascade]) -> list[Cascade]:
        cells = [{"verifier": 8, "best": row("hispec", cascade)} for cascade in grid]
        return sweep_layers.to_check([row("layerskip", skip), row("hispec", hispec)], cells)

    other = Cascade((2, 6), (1, 3))
    found = points(Cascade((4,), (3,)), Cascade((4, 8), (3, 6)), [Cascade((4, 8), (3, 6)), other])
    assert [c.arm for c in found] == [
        "layerskip exits=[4] gamma=3", "hispec exits=[4,8] gamma=3 n=6", "hispec exits=[4,8] gamma=2 n=4",
        "hispec exits=[4,8] gamma=2 n=10", other.arm,
    ]  # fmt: skip
    few = points(Cascade((4,), (0,)), Cascade((4, 8), (2, 4)), [])
    assert len(set(few)) == 5 and all(cascade.buffers[0] > 0 for cascade in few)


@pytest.mark.parametrize("script", [bench_exits, sweep_layers])
def test_a_wrong_setting_is_one_line(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["trainer.lrr=1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "lrr" in error


def test_a_sweep_needs_two_exits(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_layers.main([*sweep(home), "model.exits.layers=[2]"]) == 2
    assert "two exits or more" in capsys.readouterr().err
