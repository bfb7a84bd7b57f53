"""``python -m pacer.replay`` on a tiny model: what it writes, and that what it tunes is what decoding uses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from pacer import replay
from pacer.assemble import make_controller
from pacer.command.app import load_settings
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.methods.arms import method_settings
from pacer.stages.build import build
from tests.cli.test_verbs import words
from tests.folders import tiny_folder

PLOTS = {"lengths", "calibration", "gap", "gain_over_c", "gain_over_v"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target")
    return home


def folder_of(home: Path) -> Path:
    return max((home / "runs" / "replay").glob("*/*"), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.parametrize("experiment", ["replay/demo", "replay/smollm2"])
def test_a_replay_writes_results_tuned_arms_and_plots(
    home: Path, experiment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    replay.main(words(home, experiment, "replay.profile=measure", "replay.limit=2"))
    out = capsys.readouterr().out
    folder = folder_of(home)
    for name in ("results.json", "tuned.json", "profile.json"):
        assert (folder / name).is_file()
    assert str(folder / "results.json") in out and "oracle" in out
    assert {path.stem for path in (folder / "plots").iterdir()} <= PLOTS
    results = json.loads((folder / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    best = {row["family"]: row for row in results["rows"] if row["benchmark"] == "all"}
    for family, arm in json.loads((folder / "tuned.json").read_text()).items():
        assert method_settings(arm).name == arm and best[family]["arm"] == arm
    before = {path: path.stat().st_mtime_ns for path in (home / "runs" / "stages" / "tables").rglob("shard-*")}
    replay.main(words(home, experiment, "replay.limit=2"))
    assert {path: path.stat().st_mtime_ns for path in before} == before  # other prices, the same table
    rows = json.loads((folder_of(home) / "results.json").read_text())["rows"]
    # at the prices of the costs block, where longer passes are never cheaper, nothing beats the oracle
    speeds = {row["family"]: row["ratio_in_sample"] for row in rows if row["benchmark"] == "all"}
    assert max(speeds.values()) == pytest.approx(speeds["oracle"])


def test_the_tuned_values_are_the_used_values(home: Path) -> None:
    """A42: what the replay writes is what an arm without values decodes with, and the stage stays whole."""
    command = words(home, "replay/demo", "replay.write=true", "costs.draft=0.05", "replay.limit=4")
    before = build(load_settings(command), [method_settings("pacer")]).tuned
    replay.main(command)
    models = build(load_settings(command), [method_settings("pacer")])
    assert models.tuned is not None and models.preverifier_folder is not None and models.preverifier is not None
    found = json.loads((models.preverifier_folder / "tuned.json").read_text())
    assert found["tuned"] == models.tuned and models.tuned != before
    assert set(models.tuned) == {"b", "t0", "rho", "rule", "lo", "hi", "gamma_max"}
    controller = make_controller(method_settings("pacer"), models)
    assert isinstance(controller, PreverifierRule)
    used = {name: getattr(controller, name) for name in models.tuned}
    assert used == models.tuned
    evidence = found["evidence"]
    assert evidence["texts"] > 0 and len(evidence["table"]) == 64 and evidence["command"].startswith("python")
    assert {"fixed", "pacer", "pacer_lazy", "oracle"} <= set(evidence["speeds"])


@pytest.mark.parametrize("name", ["demo", "skip", "smollm2"])
def test_a_replay_has_the_settings_of_its_pair(name: str) -> None:
    """Else it would build labels and a pre-verifier of its own."""
    pair, own = (asdict(load_settings([f"+experiment={kind}/{name}"])) for kind in ("pacer", "replay"))
    assert {key for key in pair if pair[key] != own[key]} <= {"replay"}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["replay.write=true", "replay.split=report", "replay.texts=benchmark"], "tuning texts alone"),
        (["replay.profile=nowhere.json"], "replay.profile is no profile"),
        (["replay.write=true", "method=sd"], "needs a pre-verifier"),
        (["replay.texts=samples"], "replay.texts"),
        (["replay.gamma_max=0"], "replay.gamma_max"),
        (["replay.draft_costs=[]"], "replay.draft_costs"),
    ],
)
def test_errors(home: Path, extra: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        replay.main(words(home, "replay/demo", *extra))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("error: ") == 1


def test_without_a_preverifier(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay.main(words(home, "replay/demo", "method=threshold", "replay.limit=2"))
    assert "PACER" not in capsys.readouterr().out
    assert "pacer" not in json.loads((folder_of(home) / "tuned.json").read_text())
