"""From settings to exit heads and tuned models: what is trained, found again, or refused first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pacer import train
from pacer.assemble import load_target
from pacer.command.app import load_settings
from pacer.errors import ConfigError, MismatchError
from pacer.settings import CorpusSettings, ExitSettings, ModelSettings, PathSettings, Settings, SourceSettings
from pacer.stages.exits import exit_heads, exits_checkpoint, layerskip_checkpoint
from pacer.stages.training import trainer_of
from pacer.training.exits import rung_states
from pacer.training.layerskip import thinned_states
from tests.exit_trainings import RECIPE, trainer
from tests.folders import tiny_folder
from tests.scripted import QUIET
from tests.tiny import VOCAB, tiny_stack


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target and prompts."""
    home = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target")
    rows = "".join(f'{{"prompt": "12 + {i} = the fox {i * 7}"}}\n' for i in range(14))
    (home / "mine.jsonl").write_text(rows)
    return home


def settings(home: Path, runs: Path, exits: dict[str, Any], **changes: Any) -> Settings:
    """Settings for one training step."""
    chosen = ExitSettings(**{"kind": "norm", "layers": [1, 2], "head_size": 150, **exits})
    return Settings(
        model=ModelSettings("tiny", SourceSettings(str(home / "target")), exits=chosen, dtype="float32", device="cpu"),
        corpus=CorpusSettings([str(home / "mine.jsonl")], max_new_tokens=9, parts={"draft": 0.6, "tuning": 0.4}),
        trainer=trainer(max_steps=1, **changes), logger=QUIET, paths=PathSettings(str(runs), str(home / "cache")),
    )  # fmt: skip


def test_from_settings_to_heads(home: Path, tmp_path: Path) -> None:
    """Trained once, found again, kept apart from what other settings make."""

    def files() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}

    chosen = settings(home, tmp_path, {})
    models = load_target(chosen.model, home / "cache")
    heads = exit_heads(chosen, models, [2])
    assert list(heads) == [2] and heads[2].kind == "norm" and len(heads[2].head.weight) == 150
    assert heads[2].head_ids is not None and set(models.stop_ids) <= set(heads[2].head_ids.tolist())
    (folder,) = (file.parent for file in tmp_path.glob("stages/exits/*/manifest.json"))
    assert not (folder / "last.ckpt").exists() and exits_checkpoint(chosen) == folder / "exits"
    before = files()
    assert list(exit_heads(chosen, models, [1, 2])) == [1, 2] and files() == before
    named = exit_heads(settings(home, tmp_path, {"source": str(folder / "exits"), "kind": "adapter"}), models, [1])
    assert list(named) == [1] and named[1].kind == "norm" and files() == before
    for exits, changes in (
        ({"kind": "adapter"}, {}), ({"kind": "adapter", "attention_only": True}, {}), ({"layers": [1]}, {}),
        ({"head_size": 0}, {}), ({"weights": [1.0, 2.0]}, {}), ({}, {"lr": 1e-4}),
    ):  # fmt: skip
        exits_checkpoint(settings(home, tmp_path, exits, **changes), models)
    assert len(list(tmp_path.glob("stages/exits/*/manifest.json"))) == 7
    assert exits_checkpoint(settings(home, tmp_path, {"attention_only": True}), models) == folder / "exits"
    needed = exit_heads(settings(home, tmp_path, {"layers": []}), models, [2, 1])  # what the method asks for
    assert list(needed) == [1, 2] and len(list(tmp_path.glob("stages/exits/*/manifest.json"))) == 7


def test_shared_exits_need_no_stage(home: Path, tmp_path: Path) -> None:
    chosen = settings(home, tmp_path, {"kind": "shared", "head_size": 0})
    models = load_target(chosen.model, home / "cache")
    heads = exit_heads(chosen, models, [2])
    assert heads[2].kind == "shared" and heads[2].head_ids is None and not (tmp_path / "stages").exists()
    reduced = exit_heads(settings(home, tmp_path, {"kind": "shared"}), models, [1])
    trained = exit_heads(settings(home, tmp_path, {}), models, [1])
    assert reduced[1].head_ids is not None and trained[1].head_ids is not None
    assert torch.equal(reduced[1].head_ids, trained[1].head_ids)  # both of the draft's part of the corpus
    with pytest.raises(ConfigError, match=r"exits after so many layers: \[3\]; allowed: different numbers from 1 to 2"):
        exit_heads(chosen, models, [3])


def test_an_exit_that_will_not_be_trained_is_refused_first(home: Path, tmp_path: Path) -> None:
    chosen = settings(home, tmp_path, {"layers": [1]})
    models = load_target(chosen.model, home / "cache")
    with pytest.raises(
        MismatchError, match=r"model\.exits\.layers has no exit after so many layers: \[2\]; allowed: 1"
    ):
        exit_heads(chosen, models, [1, 2])
    assert not (tmp_path / "stages").exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["model.exits.layers=[8,4]"], r"model\.exits\.layers: \[8, 4\]; allowed: numbers of layers in rising order"),
        (["model.exits.layers=[0]"], r"model\.exits\.layers: \[0\]"),
        (["model.exits.layers=[4,8]", "model.exits.weights=[1]"], r"model\.exits\.weights: \[1\.0\]; allowed: one"),
        (["model.exits.kind=mlp"], r"model\.exits\.kind: 'mlp'; allowed: shared, norm, linear, adapter"),
        (["model.exits.head_size=-1"], r"model\.exits\.head_size: -1; allowed: ≥ 0"),
        (["layerskip.p_max=1.5"], r"layerskip\.p_max: 1\.5; allowed: \[0, 1\]"),
        (["layerskip.rotation=0"], r"layerskip\.rotation: 0; allowed: ≥ 1"),
        (["trainer=layerskip", "trainer.kl_weight=0.5"], r"trainer\.kl_weight is for the draft"),
        (["trainer=exits", "trainer.start_from=x"], r"trainer\.start_from is for the draft"),
    ],
)
def test_settings_that_do_not_fit(words: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        load_settings(words)
    assert load_settings(["trainer=exits", "trainer.kl_weight=0.25"]).trainer.kl_weight == 0.25


def test_a_named_checkpoint_is_not_trained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(["+experiment=exits/demo", "model.exits.source=there"])
    assert "model.exits.source names a trained one: 'there'; drop it" in capsys.readouterr().err


def test_rows_leave_out_layers_of_their_own() -> None:
    """Each row is what it would be alone, through the layers it kept."""
    stack = tiny_stack(layers=4)
    ids = torch.randint(0, VOCAB, (5, 7), generator=torch.Generator().manual_seed(1))
    depths = [1, 2, 3, 4]
    plain = rung_states(stack, ids, depths)
    never = thinned_states(stack, ids, [0.0] * 4, depths)
    assert all(torch.equal(never[d], plain[d]) for d in depths)
    always = thinned_states(stack, ids, [1.0] * 4, [4])
    assert torch.equal(always[4], stack.embed(ids)) and list(always) == [4]
    torch.manual_seed(5)
    found = thinned_states(stack, ids, [0.0, 0.3, 0.5, 0.6], depths)
    torch.manual_seed(5)
    kept = torch.stack([torch.rand(5) >= rate for rate in (0.0, 0.3, 0.5, 0.6)])
    assert 4 < int(kept.sum()) < 20
    for row in range(5):
        x, one = stack.embed(ids[row : row + 1]), ids[row : row + 1]
        positions = torch.arange(7)[None]
        mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
        for layer in range(4):
            if kept[layer, row]:
                x = stack.run(x, layer, layer + 1, positions, mask)
            torch.testing.assert_close(found[layer + 1][row], x[0], atol=1e-5, rtol=1e-5)
        assert one.shape == (1, 7)


def test_from_settings_to_a_tuned_model(home: Path, tmp_path: Path) -> None:
    """Tuned once, found again; then a target like any other, whose exits need no training."""
    chosen = settings(home, tmp_path, {"kind": "shared", "head_size": 0})
    chosen.trainer = trainer(part="layerskip", max_steps=1, kl_weight=0.0)
    folder = layerskip_checkpoint(chosen)
    state = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    assert layerskip_checkpoint(chosen) == folder and not list(tmp_path.rglob("*.ckpt"))
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()} == state
    chosen.model.target = SourceSettings(str(folder))
    models = load_target(chosen.model, home / "cache")
    assert models.stop_ids == load_target(settings(home, tmp_path, {}).model, home / "cache").stop_ids
    heads = exit_heads(chosen, models, [1, 2])
    states = torch.randn(2, 3, 32)
    assert torch.equal(heads[1].readout(states), models.target.readout(states))
    other = replace(chosen, layerskip=replace(RECIPE, p_max=0.9))
    other.model.target = SourceSettings(str(home / "target"))
    assert layerskip_checkpoint(other) != folder
    trained: Callable[..., Any] = trainer_of
    assert trained(chosen, "exits").monitor == "val/agree" and trained(chosen, "exits").part == "exits"
