"""Every verb and experiment, one step each, on a tiny model folder; what it wrote is there and true."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from pacer import doctor, evaluate, fetch, generate, label, profile, train
from pacer.evaluation.metrics import evaluate_trace, load_trace
from pacer.models.exits import RECORD
from pacer.resources import resource
from tests.folders import tiny_folder

EXPERIMENTS = sorted(
    str(path.relative_to(resource("conf") / "experiment").with_suffix(""))
    for path in (resource("conf") / "experiment").rglob("*.yaml")
    if path.parent.name != "table"  # of `report`: nothing is trained for them
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny target; runs and cache of this module go there too."""
    home = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target")
    return home


def words(home: Path, experiment: str, *more: str) -> list[str]:
    """A command line for an experiment with the tiny target in place of the real model."""
    return [
        f"+experiment={experiment}", "+debug=one_step", f"model.target.id={home / 'target'}", "model.target.file=null",
        "model.target.sha256=null", "model.draft.source=null", "model.draft.layers=[0,1]", "model.draft.head_size=300",
        "model.exits.layers=[1,2]", "model.feature.source=null", "model.dtype=float32", "trainer.precision=fp32",
        f"paths.runs={home / 'runs'}", f"paths.cache={home / 'cache'}", "paths.data_dir=null", "data=samples",
        "corpus.parts.draft=0.6", "corpus.parts.preverifier=0.25", "corpus.parts.tuning=0.15", "sandbox=off",
        *(["model.draft.kind=layers"] if experiment in ("pacer/hub", "replay/hub") else []),  # a pair
        *more,
    ]  # fmt: skip


def run_folders(home: Path, verb: str) -> list[Path]:
    return sorted((home / "runs" / verb).glob("*/*"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_trains_one_step(home: Path, experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    train.main(words(home, experiment))
    out = capsys.readouterr().out
    saved = Path(out.strip().splitlines()[-1].removeprefix("saved in "))
    assert (saved / "model.safetensors").is_file() and (saved / "README.md").is_file()
    record = saved / RECORD if experiment == "exits/layerskip" else saved / "config.json"
    assert json.loads(record.read_text())["steps"] == 1


@pytest.mark.parametrize(
    ("experiment", "kinds"),
    [("draft/smollm2", ["corpus"]), ("exits/demo", ["corpus"]), ("pacer/demo", ["corpus", "labels"])],
)
def test_label_writes_what_training_reads(
    home: Path, tmp_path: Path, experiment: str, kinds: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft and exits learn from the corpus alone; what is written is found by the training that follows."""
    draft = home / "labelled" / "draft"
    if not draft.exists():
        train.main(words(home, "draft/smollm2"))
        saved = capsys.readouterr().out.strip().splitlines()[-1].removeprefix("saved in ")
        draft.parent.mkdir()
        draft.symlink_to(saved)
    more = [f"paths.runs={tmp_path}", *([] if experiment.startswith("draft") else [f"model.draft.source={draft}"])]
    command = [word for word in words(home, experiment) if not word.startswith("paths.runs")] + more
    label.main(command)
    out = capsys.readouterr().out
    assert "draft " in out and " tokens (" in out and ("tokens accepted a round" in out) == ("labels" in kinds)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("shard-*")}
    assert sorted(path.name for path in (tmp_path / "stages").iterdir()) == kinds and before
    train.main(command)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    read = {path.parent for path in tmp_path.rglob("shard-*") if path.parts[-3] in kinds}
    assert read == {path.parent for path in before}


def test_training_logs_to_wandb_offline(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    train.main(words(home, "pacer/demo", "logger=wandb", "trainer.seed=1"))
    assert list((home / "runs" / "stages").glob("*/*/wandb/offline-run-*")), "a folder that wandb sync uploads"


def test_evaluate_measures_and_its_table_follows_from_the_trace(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = '[ar,"sd gamma=2","sd_full gamma=2",pacer,hf_generate,hf_assisted,"hf_assisted gamma=2"]'
    command = words(home, "pacer/demo", f"benchmark.arms={arms}", "benchmark.score=false", "benchmark.limit=2")
    evaluate.main(command)
    out = capsys.readouterr().out
    (folder,) = run_folders(home, "evaluate")
    for name in ("trace.jsonl", "results.json", "table.md", "table.csv", "settings.yaml", "provenance.json"):
        assert str(folder / name) in out
    assert {path.stem for path in (folder / "plots").iterdir()} == {"speed", "time", "acceptance"}
    results = json.loads((folder / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert {row["arm"] for row in results["rows"]} == {
        "ar", "sd gamma=2", "sd_full gamma=2", "pacer", "hf_generate", "hf_assisted", "hf_assisted gamma=2"
    }  # fmt: skip
    assert all(row["exact"] for row in results["rows"]), [row["exact_detail"] for row in results["rows"]]
    arms_in_order = [row["arm"] for row in results["rows"]]
    again = evaluate_trace(load_trace(folder / "trace.jsonl"), arms=arms_in_order, resamples=20)
    for old, new in zip(results["rows"], again["rows"], strict=True):
        for key in ("tokens_per_second", "tokens_per_verify", "mean_drafted", "acceptance_rate"):
            assert (old[key] is None and new[key] is None) or math.isclose(old[key], new[key])
    before, made = (folder / "trace.jsonl").read_text(), folder / "provenance.json"
    made.write_text(json.dumps({**json.loads(made.read_text()), "commit": "earlier"}))
    evaluate.main(command)
    assert (folder / "trace.jsonl").read_text() == before, "a finished run is not measured again"
    assert json.loads(made.read_text())["commit"] == "earlier", "and says what measured it"
    parts = json.loads((folder / "parts.json").read_text())
    parts["tuned"]["t0"] += 0.125  # as after another search
    (folder / "parts.json").write_text(json.dumps(parts))
    with pytest.raises(SystemExit) as error:
        evaluate.main(command)
    assert error.value.code == 2 and "another draft, pre-verifier or tuning" in capsys.readouterr().err
    assert (folder / "trace.jsonl").read_text() == before
    parts["tuned"]["t0"] -= 0.125
    (folder / "parts.json").write_text(json.dumps(parts))
    (folder / "trace.jsonl").write_text(before[: before.rstrip().rindex("\n") + 1])  # one request is open again
    evaluate.main(command)
    assert json.loads(made.read_text())["commit"] != "earlier"


def test_generate_streams_the_targets_own_text(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for method in ("ar", "sd", "pacer"):
        generate.main(["Why is", "the sky blue?", *words(home, "pacer/demo", f"method={method}")])
        texts.append(capsys.readouterr().out)
    assert texts[0].strip() and texts[0] == texts[1] == texts[2]


def test_generate_in_colour_shows_every_origin(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate.main(["Hello", *words(home, "pacer/demo", "color=true")])
    out = capsys.readouterr().out
    assert "accepted draft" in out and "\x1b[33m" in out


def test_profile_writes_points_and_a_plot(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile.main(words(home, "pacer/demo"))
    (folder,) = run_folders(home, "profile")
    found = json.loads((folder / "profile.json").read_text())
    assert {point["part"] for point in found["points"]} == {
        "target", "head", "draft", "draft_head", "signals", "preverifier"
    }  # fmt: skip
    assert all(point["median_ms"] > 0 for point in found["points"])
    assert (folder / "profile.png").is_file()
    assert f"costs.draft={found['costs']['draft']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_doctor_examines_every_experiment(home: Path, experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(words(home, experiment))
    out = capsys.readouterr().out
    report = json.loads(Path(out.strip().splitlines()[-1].strip()).read_text(), parse_constant=lambda n: pytest.fail(n))
    assert 0 <= report["acceptance"] <= 1 and "costs and window" in report["checked"]
    assert f"acceptance of a drafted token (greedy, all before accepted): {report['acceptance']:.3f}" in out


def test_fetch_verifies_and_writes_nothing_of_its_own(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D115: no weights are loaded, nothing decodes, and no run folder appears; a damaged file is found."""
    monkeypatch.setattr("pacer.models.sources.load_model", lambda *_, **__: pytest.fail("loaded"))
    before = sorted(home.rglob("*"))
    fetch.main(words(home, "pacer/demo"))
    assert f"{home / 'target'}: verified" in capsys.readouterr().out
    assert sorted(home.rglob("*")) == before
    shutil.copytree(home / "target", home / "damaged")
    weights = home / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(SystemExit) as stop:
        fetch.main([w.replace(str(home / "target"), str(home / "damaged")) for w in words(home, "pacer/demo")])
    assert stop.value.code == 2 and "bytes instead of" in capsys.readouterr().err


def test_missing_bubblewrap_is_one_line_before_anything_is_built(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pacer.evaluation.sandbox.sandbox_available", lambda: "bubblewrap is not installed")
    monkeypatch.setattr("pacer.stages.build.build", lambda *_, **__: pytest.fail("built"))
    command = [w for w in words(home, "pacer/demo", "benchmark.sets=[humaneval]") if not w.startswith("sandbox=")]
    with pytest.raises(SystemExit) as stop:
        evaluate.main(command)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert stop.value.code == 2
    assert all(part in line for part in ("bubblewrap is not installed", "apt-get install bubblewrap", "sandbox=off"))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (['benchmark.arms=["sd gama=4"]'], "gama"),
        (["trainer.lrr=1"], "lrr"),
        (["preverifier.state=middle"], "middle"),
        (["model.target.id=no/such-model-anywhere"], "no/such-model-anywhere"),
        (["benchmark.sets=[gsm9k]"], "gsm9k"),
    ],
)
def test_what_is_wrong_is_one_line_and_a_code(
    home: Path, extra: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = [word for word in words(home, "pacer/demo") if not extra[0].startswith(word.split("=")[0] + "=")]
    with pytest.raises(SystemExit) as stop:
        evaluate.main([*command, *extra])
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert stop.value.code == 2 and len(error) == 1 and message in error[0]
