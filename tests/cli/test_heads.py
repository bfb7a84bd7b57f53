"""SPRINTER and SpecDec++ from the command line: heads of several methods side by side, built where they lack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pacer import evaluate, generate, label, train
from tests.cli.test_verbs import words
from tests.folders import tiny_folder

ARMS = ["ar", "sd gamma=2", "pacer", "sprinter", "specdecpp", "sprinter t=0.9 gamma_max=3"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("heads")
    tiny_folder(home / "target")
    return home


def made(home: Path, kind: str) -> list[Path]:
    return sorted((home / "runs" / "stages" / kind).glob("*/manifest.json"))


def test_all_heads_in_one_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is trained once, on the same labels; the lossy method says so wherever it is named, and what it loses."""
    command = words(home, "pacer/demo", f"benchmark.arms={json.dumps(ARMS)}", "benchmark.score=false")
    evaluate.main([*command, "benchmark.sets=[gsm8k]", "benchmark.limit=2"])
    out = capsys.readouterr().out
    (folder,) = (home / "runs" / "evaluate").glob("*/*")
    rows = {row["arm"]: row for row in json.loads((folder / "results.json").read_text())["rows"]}
    assert [row["guarantee"] for row in rows.values()] == ["exact"] * 3 + ["lossy", "exact", "lossy"]
    assert all(rows[arm]["exact"] for arm in ARMS if not arm.startswith("sprinter"))
    assert all(0 <= rows[arm]["agreement"]["same_tokens"] <= 1 for arm in ARMS)
    named = [line for line in out.splitlines() if line.startswith("sprinter")]
    assert len(named) == 4 and all("(lossy)" in line for line in named) and "gsm8k (samples): loss" in out
    assert [len(made(home, kind)) for kind in ("labels", "preverifier", "probe", "specdecpp")] == [2, 1, 1, 1]
    heads = json.loads((folder / "parts.json").read_text())["heads"]
    assert set(heads) == {"probe", "specdecpp"} and len(set(heads.values())) == 2
    before = {path: path.stat().st_mtime_ns for path in (home / "runs").rglob("*.safetensors")}
    train.main(words(home, "pacer/demo", "trainer=probe", "trainer.max_steps=1", "trainer.precision=fp32"))
    capsys.readouterr()
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_labels_of_sampling_are_made_for_a_head(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The papers' labels are soft: the experiments draw and verify at a temperature; training finds the labels."""
    label.main(words(home, "specdecpp/demo"))
    assert "tokens accepted a round" in capsys.readouterr().out
    kept = {path: path.stat().st_mtime_ns for path in (home / "runs" / "stages" / "labels").rglob("shard-*")}
    lines = [json.loads(line) for path in kept for line in path.read_text().splitlines()]
    drawn = [line for line in lines if "logp" in line]
    chances = [min(0.0, p - q) for line in drawn for p, q in zip(line["logp"][0], line["logq"][0], strict=True)]
    assert drawn and any(-5 < chance < 0 for chance in chances)
    train.main(words(home, "specdecpp/demo"))
    saved = Path(capsys.readouterr().out.strip().splitlines()[-1].removeprefix("saved in "))
    config = json.loads((saved / "config.json").read_text())
    assert (config["label"], config["temperature"], config["settings"]["reject_weight"]) == ("conditional", 1.0, 6.0)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_a_head_of_other_labels_is_refused_in_one_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.main(words(home, "probe/demo"))
    saved = capsys.readouterr().out.strip().splitlines()[-1].removeprefix("saved in ")
    with pytest.raises(SystemExit) as stop:
        generate.main(["Hello", *words(home, "specdecpp/demo", f"specdecpp.source={saved}")])
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert stop.value.code == 2
    assert "specdecpp cannot read a head of this label: 'certain'; allowed: conditional" in error
    with pytest.raises(SystemExit):
        train.main(words(home, "probe/demo", f"probe.source={saved}"))
    assert "probe.source names a trained one" in capsys.readouterr().err


def test_the_rule_works_on_an_exit_s_states(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any drafter with a record: an exit is a draft model to a head, which is trained for it."""
    texts = []
    for more in (["method=ar"], ["method=layerskip", "controller@method.controller=specdecpp"]):
        generate.main(["Why is", "the sky blue?", *words(home, "hispec/demo", *more)])
        texts.append(capsys.readouterr().out)
    assert texts[0].strip() and texts[1].endswith(texts[0])  # a progress bar of the training comes first
    keys = [json.loads(path.read_text())["key"] for path in made(home, "specdecpp")]
    assert len({json.dumps(key["labels"]) for key in keys}) == len(keys) > 1, "labels of the exit's own drafts"


def test_a_lossy_method_cannot_say_that_it_is_exact(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, message in (("method.guarantee=exact", "guarantee in method"), ("method.drafter=exit", "drafter in")):
        with pytest.raises(SystemExit):
            generate.main(["Hello", *words(home, "probe/demo", wrong)])
        assert f"{message}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        generate.main(["Hello", *words(home, "pacer/demo", "method.checks=first")])
    assert "method.checks" in capsys.readouterr().err
