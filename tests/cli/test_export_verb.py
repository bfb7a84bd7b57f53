"""``pacer.export`` for every part, and profiles of models that are shapes alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from pacer import export, profile
from pacer.command.app import load_settings
from pacer.methods.arms import method_settings
from pacer.models.exits import load_exits
from pacer.models.preverifier import load_preverifier
from pacer.models.sources import load_model, load_tokenizer
from pacer.models.stack import Stack
from pacer.stages.build import build
from scripts import gpu_shapes
from tests.cli.test_verbs import run_folders, words
from tests.folders import tiny_folder
from tests.integration.test_export import logits


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target")
    return home


def exported(home: Path, part: str, to: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """The output of an export."""
    export.main(words(home, "pacer/demo", f"export.part={part}", f"export.to={to}", *more))
    return capsys.readouterr().out


def test_a_draft_and_its_preverifier(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is exported is what the verbs decode with; a second export into the folder is refused."""
    out = exported(home, "draft", tmp_path / "draft", capsys)
    exported(home, "preverifier", tmp_path / "judge", capsys)
    methods = [method_settings("sd_full gamma=2"), method_settings("pacer")]
    models = build(load_settings(words(home, "pacer/demo")), methods)
    assert models.draft is not None and models.draft.head_ids is not None and models.draft_full is not None
    missing = models.target.vocab_size - len(models.draft.head_ids)
    assert missing > 0 and f"{missing} ids that its head was not trained on" in out and "copy" in out
    back = Stack(load_model(tmp_path / "draft", "float32", "cpu"))
    assert torch.equal(logits(back), logits(models.draft_full))
    assert load_tokenizer(tmp_path / "draft").get_vocab() == models.tokenizer.get_vocab()
    module, _ = load_preverifier(tmp_path / "judge", models.target, models.draft)
    assert models.preverifier is not None
    assert all(map(torch.equal, module.parameters(), models.preverifier.parameters()))
    with pytest.raises(SystemExit) as stop:
        exported(home, "draft", tmp_path / "draft", capsys, "trainer.seed=7")
    assert stop.value.code == 2 and "export.to is not empty" in capsys.readouterr().err


def test_exits_and_the_drafter_fed_by_the_target(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = exported(home, "exits", tmp_path / "shared", capsys)
    assert "assistant_early_exit=1" in out and (tmp_path / "shared" / "tokenizer.json").is_file()
    exported(home, "exits", tmp_path / "norm", capsys, "model.exits.kind=norm")
    target = Stack(load_model(tmp_path / "shared", "float32", "cpu"))
    assert sorted(load_exits(tmp_path / "norm", target)) == [1, 2]
    out = exported(home, "feature", tmp_path / "feature", capsys)
    assert "it is not EAGLE-1" in out
    assert {f.name for f in (tmp_path / "feature").iterdir()} == {"config.json", "model.safetensors", "README.md"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["export.to=null"], "export.to is not set"),
        (["export.to=x", "export.part=head"], "draft, feature, exits, preverifier"),
        (["export.to=x", "model.draft.kind=skip"], "allowed: layers"),
    ],
)
def test_what_is_refused(more: list[str], said: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        export.main([*words(home, "pacer/demo"), *more])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert stop.value.code == 2 and said in line


def test_a_profile_of_a_config_alone(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with config.json and nothing else: what is timed has its shape."""
    (tmp_path / "shape").mkdir()
    shutil.copy(home / "target" / "config.json", tmp_path / "shape")
    given = [word for word in words(home, "pacer/demo") if not word.startswith(("model.target.id", "paths.runs"))]
    command = [*given, f"model.target.id={tmp_path / 'shape'}", f"paths.runs={tmp_path / 'runs'}"]
    with pytest.raises(SystemExit):
        profile.main([*command, "profile.scale=2"])
    assert "add profile.weights=random" in capsys.readouterr().err
    profile.main([*command, "profile.weights=random"])
    (folder,) = run_folders(tmp_path, "profile")
    found = json.loads((folder / "profile.json").read_text())
    assert found["weights"] == "random" and found["scale"] == 1 and found["costs"]["draft"] > 0
    assert {point["part"] for point in found["points"]} >= {"target", "draft", "preverifier"}
    assert not (tmp_path / "runs" / "stages").exists(), "nothing is trained"


def test_gpu_shapes_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """The script on shapes scaled down: every figure beside its published one, where and how it was measured."""
    models = ["deepseek_1b_33b", "layerskip_codellama_34b"]
    few = ["profile.repeats=1", "profile.gamma_max=8"]
    assert gpu_shapes.main(["--models", *models, "--scale", "64", *few]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    pair, exits = (figures["models"][name] for name in models)
    assert figures["ok"] and figures["scale"] == 64
    assert set(pair["v"]) == {"2", "5", "9"} and 0 < pair["preverify_share"] < 1
    assert pair["c"] == pytest.approx(pair["draft_ms"] / pair["target_ms"])
    assert exits["wall"] == pytest.approx(exits["whole_ms"] / exits["draft_ms"])
    assert exits["exits"] == [1, 2] and 0 < exits["state_share"] < 1
    text = "\n".join(table)
    assert "about 2.1 (DeepSeek-Coder 1.3B → 33B) [summary]" in text and "less than 0.01" in text
    assert "float32, shapes over 64" in text and text.count("2–6.9") == 2
    assert gpu_shapes.main(["--minutes", "0", "--models", models[0], "--scale", "64"]) == 1
    assert "no time left" in capsys.readouterr().out
    assert gpu_shapes.main(["--models", "gpt2"]) == 2
