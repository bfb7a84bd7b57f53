"""Drafts that start from a trained one: where it ended, what must fit, and how a stage knows it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pacer.errors import MismatchError, SourceError
from pacer.files import sha256
from pacer.models.draft import TrainableDraft, load_draft
from pacer.settings import CorpusSettings, ModelSettings, PathSettings, Settings, SourceSettings
from pacer.stages.draft import draft_checkpoint
from pacer.training.draft_run import starting_draft, train_draft
from tests.folders import tiny_folder
from tests.scripted import QUIET
from tests.teachers import LAYERS, agreement, trainer
from tests.texts import target, written
from tests.tiny import VOCAB, tiny_stack


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    learn, check = written(24), written(12, seed=9)
    return train_draft(target(), learn, check, LAYERS, trainer(lr=3e-3), QUIET, folder, always=[96], command="make")


def test_a_start_is_where_the_other_ended(trained: Path, tmp_path: Path) -> None:
    """T90: at step 0 the agreement is what the checkpoint says; its head stays, whatever the new texts."""
    config = json.loads((trained / "config.json").read_text())
    draft = starting_draft(target(), torch.arange(60), LAYERS, str(trained), [96])
    assert draft.stack.head_ids is not None and all(p.requires_grad for p in draft.parameters())
    check = written(12, seed=9)
    assert agreement(draft, check, draft.stack.head_ids) == pytest.approx(config["validation"]["val/agreement"])
    untrained = TrainableDraft(target(), [0, 1], draft.stack.head_ids)
    assert agreement(untrained, check, draft.stack.head_ids) != pytest.approx(config["validation"]["val/agreement"])
    still = trainer(lr=1e-12, weight_decay=0.0, start_from=str(trained), max_steps=1)
    again = train_draft(target(), written(8, seed=3), check, LAYERS, still, QUIET, tmp_path, always=[96], command="")
    other = json.loads((again / "config.json").read_text())
    assert other["validation"] == config["validation"]
    for (name, one), two in zip(
        load_draft(trained, target()).named_parameters(), load_draft(again, target()).parameters(), strict=True
    ):
        assert torch.equal(one, two), name
    card = (again / "README.md").read_text()
    assert f"Started from the draft {trained} (sha256 {other['start_sha256']})" in card


def test_gates_for_copying_are_added_to_a_start(trained: Path) -> None:
    draft = starting_draft(target(), torch.arange(60), replace(LAYERS, copying=True), str(trained), [])
    plain = starting_draft(target(), torch.arange(60), LAYERS, str(trained), [])
    assert draft.copying is not None and plain.copying is None
    states = torch.randn(4, 32)
    assert torch.equal(draft.logits(states), plain.logits(states))
    assert all(p.requires_grad for p in draft.parameters())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"layers": [0, 2]}, r"layers: \[0, 1\]; allowed: \[0, 2\]"),
        ({"layers": [0]}, r"layers: \[0, 1\]; allowed: \[0\]"),
        ({"head_size": 61}, r"head size: 60; allowed: 61"),
    ],
)
def test_a_start_that_does_not_fit(trained: Path, changes: dict[str, Any], what: str) -> None:
    draft = replace(LAYERS, **changes)
    with pytest.raises(MismatchError, match=rf"trainer\.start_from=.*: {what}; set model\.draft like the checkpoint"):
        starting_draft(target(), torch.arange(draft.head_size), draft, str(trained), [])


def test_a_start_without_a_needed_id_or_of_another_target(trained: Path) -> None:
    own = load_draft(trained, target()).stack.head_ids
    assert own is not None
    lacking = next(i for i in range(VOCAB) if i not in own.tolist())
    with pytest.raises(MismatchError, match=rf"needed ids that the head lacks: \[{lacking}\]"):
        starting_draft(target(), torch.arange(60), LAYERS, str(trained), [lacking, 96])
    with pytest.raises(MismatchError, match="belongs to another model"):
        starting_draft(tiny_stack(seed=4), torch.arange(60), LAYERS, str(trained), [])


def test_from_settings_to_a_draft(tmp_path: Path) -> None:
    """Predictions are a stage of their own that drafts share; a start is known by its content, not by its name."""
    tiny_folder(tmp_path / "target")
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("".join(f'{{"prompt": "12 + {i} = the fox {i * 7}"}}\n' for i in range(14)))
    base = Settings(
        model=ModelSettings(
            "tiny", SourceSettings(str(tmp_path / "target")), replace(LAYERS, head_size=150), "float32", "cpu"
        ),
        corpus=CorpusSettings([str(prompts)], max_new_tokens=9, parts={"draft": 0.6, "tuning": 0.4}),
        trainer=trainer(max_steps=1, lr=3e-3), logger=QUIET, paths=PathSettings(str(tmp_path), str(tmp_path / "cache")),
    )  # fmt: skip

    def train(**changes: Any) -> Path:
        return draft_checkpoint(replace(base, trainer=replace(base.trainer, **changes)))

    def count(kind: str) -> int:
        return len(list((tmp_path / "stages" / kind).glob("*/manifest.json")))

    plain = train()
    assert (count("draft"), count("teacher")) == (1, 0)
    assert train(teacher_top_k=3) == plain  # nobody asked for predictions
    folders = {plain, train(kl_weight=0.5), train(kl_weight=0.7), train(prompt_labels="teacher")}
    assert (len(folders), count("draft"), count("teacher")) == (4, 4, 1)
    folders.add(train(kl_weight=0.5, teacher_top_k=3))
    assert (len(folders), count("draft"), count("teacher")) == (5, 5, 2)
    started = train(start_from=str(plain))
    shutil.copytree(plain, tmp_path / "copy")
    assert started not in folders and train(start_from=str(tmp_path / "copy")) == started
    manifest = json.loads((started.parent / "manifest.json").read_text())
    sha = json.loads((started / "config.json").read_text())["start_sha256"]
    assert manifest["key"]["trainer"]["start_from"] == sha == sha256(plain / "model.safetensors")
    assert train(start_from=str(started)) != started
    with pytest.raises(SourceError, match=r"no checkpoint: 'packaged:nothing'; allowed: a checkpoint folder"):
        train(start_from="packaged:nothing")
