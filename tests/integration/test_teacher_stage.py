"""The stage of the target's stored predictions: what it holds, what names it, disks that fill, kills in between."""

from __future__ import annotations

import errno
import logging
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from pacer.artifacts import ArtifactError
from pacer.command.app import load_settings
from pacer.data import teacher as data
from pacer.data.teacher import Predictions, predict
from pacer.errors import ConfigError
from pacer.settings import DraftSettings, TrainerSettings
from pacer.stages import teacher as module
from pacer.stages.teacher import teacher_labels, teacher_stage
from pacer.training.draft_run import train_draft
from pacer.work.records import is_own
from tests.scripted import QUIET
from tests.teachers import K, make_stage, remembered, settings, trainer
from tests.texts import path, target, written
from tests.tiny import VOCAB

Usage = namedtuple("Usage", "total used free")


def test_the_stage_holds_the_predictions_of_every_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = written(8)
    stage = make_stage(tmp_path)
    with caplog.at_level(logging.INFO, "pacer"):
        stored = teacher_labels(stage, target(), texts)
    tokens = sum(len(path(t)) for t in texts)
    each = K * 4 + 2
    said = f"labelling 8 texts × {tokens / 8:.0f} tokens × {each} bytes (k = {K}) = {tokens * each / 1e6:.1f} MB"
    assert said in caplog.text
    for name, prediction in remembered(texts).items():
        assert torch.equal(stored(name).ids, prediction.ids)
        torch.testing.assert_close(stored(name).logprobs, prediction.logprobs, rtol=2**-10, atol=1e-5)
    for text in texts:  # greedy text: what was emitted is the first choice
        first = len(text.prompt_ids) - 1
        assert stored(text.id).ids[first:-1, 0].tolist() == text.output_ids
    manifest = stage.manifest(verify=True)
    assert manifest["extra"] == {"texts": 8, "tokens": tokens, "bytes_per_token": each}
    assert manifest["key"]["target"]["id"] == "tiny" and manifest["key"]["dtype"] == "bfloat16"
    assert sorted(manifest["files"]) == [f"shard-0000{i}.safetensors" for i in range(3)]


def test_only_what_decides_the_predictions_names_the_stage(tmp_path: Path) -> None:
    assert teacher_stage(settings(tmp_path, kl_weight=0.0), TrainerSettings(part="draft"), "corpus") is None
    same = {make_stage(tmp_path, **change).hash for change in ({}, {"kl_weight": 0.1}, {"prompt_labels": "teacher"})}
    assert same == {make_stage(tmp_path, kl_weight=0.0, prompt_labels="teacher").hash}
    assert make_stage(tmp_path, "another").hash not in same and make_stage(tmp_path, shard_size=4).hash not in same


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_a_killed_stage_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: int) -> None:
    """Finished shards are not made again, and the bytes are those of a run that was not killed."""
    texts, calls = written(8), []

    def killed(target: Any, texts: Any, k: int) -> list[Predictions]:
        calls.append(len(texts))
        if len(calls) == finished + 1:
            raise KeyboardInterrupt
        return predict(target, texts, k)

    stage = make_stage(tmp_path)
    monkeypatch.setattr(module, "predict", killed)
    with pytest.raises(KeyboardInterrupt):
        teacher_labels(stage, target(), texts)
    assert not stage.complete and len(stage.missing(3, module.SUFFIX)) == 3 - finished
    teacher_labels(stage, target(), texts)
    assert len(calls) == 4
    whole = make_stage(tmp_path / "whole")
    teacher_labels(whole, target(), texts)
    assert stage.manifest()["files"] == whole.manifest()["files"]
    teacher_labels(stage, target(), texts)  # complete: read alone
    assert len(calls) == 7


def test_a_disk_without_the_room_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = written(8)
    needed = sum(len(path(t)) for t in texts) * (K * 4 + 2)
    monkeypatch.setattr(module, "predict", lambda *_: pytest.fail("no pass was to be made"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, needed - 1))
    with pytest.raises(ArtifactError, match=r"predictions take 0\.0 MB in .* are free; free space, .*teacher_top_k"):
        teacher_labels(make_stage(tmp_path), target(), texts)
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, needed))
    teacher_labels(make_stage(tmp_path), target(), texts)


def test_a_disk_that_fills_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T92: nothing half-written, and the same call goes on from what is there."""
    texts, stage, real, calls = written(8), make_stage(tmp_path), data.save_file, []

    def full(tensors: Any, file: Path, metadata: Any) -> None:
        calls.append(file)
        if len(calls) == 2:
            file.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, file, metadata)

    monkeypatch.setattr(data, "save_file", full)
    with pytest.raises(ArtifactError, match=r"cannot write .*shard-00001\.safetensors: the disk is full; free space"):
        teacher_labels(stage, target(), texts)
    assert [file.name for file in stage.folder.iterdir() if not is_own(file)] == ["shard-00000.safetensors"]
    teacher_labels(stage, target(), texts)
    assert len(calls) == 4 and stage.complete


def test_too_many_ids(tmp_path: Path) -> None:
    chosen = settings(tmp_path, teacher_top_k=VOCAB)
    stage = teacher_stage(chosen, chosen.trainer, "corpus")
    assert stage is not None
    with pytest.raises(ConfigError, match=r"trainer\.teacher_top_k: 97; allowed: 2 … 96 for this target"):
        teacher_labels(stage, target(), written(2))
    learn, check = written(8), written(4, seed=5)
    small = DraftSettings(layers=[0], head_size=4, copying=False)
    with pytest.raises(ConfigError, match=r"trainer\.teacher_top_k: 8; allowed: less than the head's 4 ids"):
        train_draft(target(), learn, check, small, trainer(kl_weight=1.0), QUIET, tmp_path, always=[], command="")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["trainer=draft", "trainer.kl_weight=1.5"], r"trainer\.kl_weight: 1\.5; allowed: \[0, 1\]"),
        (["trainer=draft", "trainer.teacher_top_k=1"], r"trainer\.teacher_top_k: 1; allowed: ≥ 2"),
        (
            ["trainer=draft", "trainer.prompt_labels=target"],
            r"trainer\.prompt_labels: 'target'; allowed: text, teacher",
        ),
        (["trainer.kl_weight=0.5"], r"trainer\.kl_weight is for the draft: 0\.5; allowed: 0"),
        (["trainer.prompt_labels=teacher"], r"trainer\.prompt_labels is for the draft: 'teacher'; allowed: text"),
        (["trainer.start_from=x"], r"trainer\.start_from is for the draft: 'x'; allowed: None"),
    ],
)
def test_settings_that_do_not_fit(words: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        load_settings(words)
