"""Drafts that learn from the target's stored predictions, and drafts that start from a trained one."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pacer import stages
from pacer import teacher_stage as module
from pacer.app import load_settings
from pacer.artifacts import ArtifactError, Stage
from pacer.data import teacher as data
from pacer.data.batching import token_batches
from pacer.data.corpus import Text
from pacer.data.teacher import Predictions, predict
from pacer.errors import ConfigError, MismatchError, SourceError
from pacer.files import sha256
from pacer.models.copying import copied_all
from pacer.models.draft import TrainableDraft, load_draft
from pacer.settings import (
    CorpusSettings,
    DraftSettings,
    LoggerSettings,
    ModelSettings,
    PathSettings,
    Settings,
    SourceSettings,
    TrainerSettings,
)
from pacer.teacher_stage import teacher_labels, teacher_stage
from pacer.training.distill import COPIED, TEACHER, DistillModule, collate_texts
from pacer.training.draft_run import starting_draft, train_draft
from pacer.training.losses import IGNORE, chunked, token_losses
from pacer.work import is_own
from tests.folders import tiny_folder
from tests.texts import path, target, written
from tests.tiny import VOCAB, tiny_stack

K = 5
QUIET = LoggerSettings(csv=False)
LAYERS = DraftSettings(layers=[0, 1], head_size=60, copying=False)
Usage = namedtuple("Usage", "total used free")


def settings(runs: Path, shard_size: int = 3, **trainer: Any) -> Settings:
    found = Settings(
        model=ModelSettings("tiny"), trainer=TrainerSettings(part="draft", **{"kl_weight": 0.5, **trainer}),
        paths=PathSettings(str(runs), str(runs)),
    )  # fmt: skip
    found.model.target.id, found.corpus.shard_size = "tiny", shard_size
    return found


def make_stage(runs: Path, corpus_key: str = "corpus", **changes: Any) -> Stage:
    chosen = settings(runs, teacher_top_k=K, **changes)
    found = teacher_stage(chosen, chosen.trainer, corpus_key)
    assert found is not None
    return found


def trainer(**changes: Any) -> TrainerSettings:
    values = {"precision": "fp32", "tokens_per_batch": 200, "epochs": 1, "patience": 0, "monitor": "val/agreement"}
    return TrainerSettings(**{"part": "draft", **values, **changes})


def remembered(texts: tuple[Text, ...], k: int = K) -> dict[str, Predictions]:
    return dict(zip([t.id for t in texts], predict(target(), [path(t) for t in texts], k), strict=True))


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


def test_labels_and_predictions_of_a_batch() -> None:
    head_of = torch.full((10,), IGNORE)
    head_of[[2, 5, 7]] = torch.arange(3)
    text = Text("a", "x", [1, 2, 5], [7, 3], True)
    ids = torch.tensor([[5, 9], [3, 2], [7, 5], [2, 1], [0, 7]])
    stored = Predictions(ids, torch.randn(5, 2), torch.randn(5))
    for kind, prompt in (("text", [0, 1]), ("teacher", [1, IGNORE])):
        batch = collate_texts([text], head_of, 0.15, teacher={"a": stored}.__getitem__, prompt_labels=kind)
        assert batch["labels"].tolist() == [[*prompt, 2, IGNORE, IGNORE]]  # outputs: always the text
        rows, logprobs, rest = (batch[name][0] for name in TEACHER)
        assert rows.tolist() == [[1, IGNORE], [IGNORE, 0], [2, 1], [0, IGNORE], [IGNORE, 2]]
        assert torch.equal(logprobs, stored.logprobs) and torch.equal(rest, stored.rest)
    other = Text("b", "x", [1], [2], True)
    pad = {"a": stored, "b": Predictions(*(part[:2] for part in stored))}
    batch = collate_texts([text, other], head_of, 0.15, teacher=pad.__getitem__)
    assert batch["weights"][1].tolist() == [1, 0, 0, 0, 0] and (batch[TEACHER[0]][1, 2:] == IGNORE).all()


def test_candidates_for_copying_are_rows_of_their_own() -> None:
    head_of = torch.full((10,), IGNORE)
    head_of[[2, 5, 7]] = torch.arange(3)
    text = Text("a", "x", [4, 9, 5, 4], [9, 4, 9], True)
    stored = Predictions(torch.tensor([[9, 2]] * 7), torch.zeros(7, 2), torch.zeros(7))
    batch = collate_texts([text], head_of, 0.15, True, teacher={"a": stored}.__getitem__)
    candidates, match = copied_all(torch.tensor(path(text)))
    assert torch.equal(batch[COPIED[0]][0], candidates) and torch.equal(batch[COPIED[1]][0], match)
    # after the second 4 the candidate is 9, which the head lacks: row 3; the first 4 has no earlier one
    assert batch["labels"].tolist() == [[IGNORE, 1, IGNORE, 3, IGNORE, 3, IGNORE]]
    assert batch[TEACHER[0]][0, :, 0].tolist() == [IGNORE, IGNORE, IGNORE, 3, IGNORE, 3, IGNORE]


@pytest.mark.parametrize("copying", [False, True])
@pytest.mark.parametrize("kl_weight", [0.0, 0.4])
def test_a_training_step_is_the_weighted_mean_of_its_tokens(
    copying: bool, kl_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same in chunks of any size (T93)."""
    texts = written(4)
    head_ids = torch.arange(0, VOCAB, 2)
    head_of = torch.full((VOCAB,), IGNORE)
    head_of[head_ids] = torch.arange(len(head_ids))
    batch = collate_texts(texts, head_of, 0.15, copying, teacher=remembered(texts).__getitem__)
    found = []
    for size in (2**25, 7 * len(head_ids)):
        monkeypatch.setattr(data, "LOGITS", size)
        draft = TrainableDraft(target(), [0, 1], head_ids, copying)
        step = DistillModule(draft, trainer(kl_weight=kl_weight), 1)
        step.log = lambda *_, **__: None  # type: ignore[method-assign]  # no Trainer is attached
        loss = step.training_step(batch, 1)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in draft.parameters())])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    sums = [0.0, 0.0]
    states = step.states(batch["ids"])
    for row, text in enumerate(texts):
        for place in range(len(path(text)) - 1):
            weight = 0.15 if place < len(text.prompt_ids) - 1 else 1.0
            if kl_weight == 0 and batch["labels"][row, place] == IGNORE:
                continue
            at = (torch.tensor([row]), torch.tensor([place]))
            stored = [batch[name][at] for name in TEACHER]
            logits = step.logits(states[at], batch, at)
            sums[0] += weight * float(token_losses(logits, batch["labels"][at], stored, kl_weight).detach())
            sums[1] += weight
    assert float(found[0][0]) == pytest.approx(sums[0] / sums[1], rel=1e-4)


def agreement(draft: TrainableDraft, texts: tuple[Text, ...], head_ids: torch.Tensor) -> float:
    head_of = torch.full((VOCAB,), IGNORE)
    head_of[head_ids] = torch.arange(len(head_ids))
    step = DistillModule(draft, trainer(), 1)
    with torch.no_grad():
        for rows in token_batches([len(path(t)) for t in texts], 200, seed=0):
            step.validation_step(collate_texts([texts[i] for i in rows], head_of, 0.0), 0)
    hits, count = (sum(entry[i] for entry in step._agreed.values()) for i in (0, 1))
    return hits / count


@pytest.mark.parametrize(("prompt_labels", "kl_weight"), [("text", 1.0), ("teacher", 0.5), ("teacher", 0.0)])
def test_a_draft_learns_from_predictions(tmp_path: Path, prompt_labels: str, kl_weight: float) -> None:
    """A disturbed copy of the target comes back, on unseen text; with a weight of 1 it sees no hard label."""
    learn, check, head_ids = written(48), written(12, seed=9), torch.arange(80)
    stored = teacher_labels(make_stage(tmp_path), target(), learn)
    draft = TrainableDraft(target(), [0, 1, 2], head_ids)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    before = agreement(draft, check, head_ids)
    head_of = torch.full((VOCAB,), IGNORE)
    head_of[head_ids] = head_ids
    step = DistillModule(draft, trainer(kl_weight=kl_weight, prompt_weight=1.0), 1)
    step.log = lambda *_, **__: None  # type: ignore[method-assign]  # no Trainer is attached
    optimizer = torch.optim.AdamW(draft.parameters(), lr=2e-3)
    for rows in token_batches([len(path(t)) for t in learn], 400, seed=0, epochs=6):
        batch = collate_texts([learn[i] for i in rows], head_of, 1.0, teacher=stored, prompt_labels=prompt_labels)
        optimizer.zero_grad()
        step.training_step(batch, 1).backward()
        optimizer.step()
    gain = agreement(draft, check, head_ids) - before
    assert gain > (0.1 if kl_weight else 0.03)  # one id a token says less than a distribution


def test_training_reads_what_the_settings_ask_for(tmp_path: Path) -> None:
    """From the settings to the batches and the card."""
    learn, check = written(8), written(4, seed=9)
    cards = {}
    for name, asked in (("none", {}), ("kl", {"kl_weight": 0.3}), ("prompts", {"prompt_labels": "teacher"})):
        read: list[str] = []
        stored = remembered(learn)

        def teacher(text: str, read: list[str] = read, stored: dict[str, Predictions] = stored) -> Predictions:
            read.append(text)
            return stored[text]

        given = None if name == "none" else teacher
        chosen = trainer(teacher_top_k=K, **asked)
        folder = train_draft(
            target(), learn, check, LAYERS, chosen, QUIET, tmp_path / name, always=[], command="make", teacher=given
        )
        assert sorted(read) == ([] if name == "none" else sorted(t.id for t in learn))  # held-out text has no teacher
        cards[name] = (folder / "README.md").read_text()
    assert "0.3 of the loss is the divergence from the target's predictions (its top 5 ids)" in cards["kl"]
    assert "Labels inside the prompts are the target's choices" in cards["prompts"]
    assert all("Started from" not in card for card in cards.values()) and "loss" not in cards["none"]


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


def test_memory_of_the_loss_is_that_of_a_chunk() -> None:
    """T93: what is kept for the backward pass does not hold the logits of all tokens."""
    head, states = torch.randn(400, 8), torch.randn(300, 8, requires_grad=True)
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    def losses(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return token_losses(states @ head.T, labels, None, 0.0)

    labels = torch.arange(300)
    for rows, holds in ((300, True), (16, False)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            chunked(losses, rows, states, labels)
        assert (max(kept, default=0) >= 300 * 400) == holds


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
        return stages.draft_checkpoint(replace(base, trainer=replace(base.trainer, **changes)))

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
