"""From prompts to a decoder through every stage: each built once and reused, never mixing texts."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pacer.assemble import Models, load_target, make_decoder
from pacer.data.corpus import read_corpus
from pacer.data.splits import part_of
from pacer.decoding.request import Request
from pacer.errors import MismatchError
from pacer.methods.arms import method_settings
from pacer.models.checkpoint import load_checkpoint
from pacer.settings import DraftSettings, ModelSettings, SamplingSettings, Settings, SourceSettings, TrainerSettings
from pacer.stages import texts as text_stages
from pacer.stages.build import build
from pacer.stages.draft import draft_checkpoint, draft_key
from pacer.stages.training import trainer_of
from pacer.training import draft_run
from pacer.work.stopping import Stopped
from tests.folders import tiny_folder
from tests.homes import ARMS, GAMMA, METHODS, PROMPTS, files, make


def with_draft(settings: Settings, **changes: Any) -> Settings:
    return replace(settings, model=replace(settings.model, draft=replace(settings.model.draft, **changes)))


def folders(home: Path) -> dict[str, list[Path]]:
    """The finished stages by kind."""
    kinds = (home / "runs" / "stages").iterdir()
    return {kind.name: sorted(record.parent for record in kind.glob("*/manifest.json")) for kind in kinds}


def test_from_prompts_to_exact_decoding(home: Path, built: Models) -> None:
    """One training step of each part, and every method still writes the target's own text."""
    assert built.draft is not None and built.draft.head_ids is not None and len(built.draft.head_ids) == 150
    assert built.draft_full is not None and built.draft_full.head_ids is None
    assert built.tuned is not None and set(built.tuned) == {"b", "t0", "rho", "rule"}
    requests = [Request(f"r{i}", [1, 20 + i, 30, 7 * i + 3], 24, frozenset(built.stop_ids)) for i in range(4)]
    found: dict[str, list[list[int]]] = {}
    drafted: dict[str, int] = {}
    for arm, method in zip(ARMS, METHODS, strict=True):
        results = make_decoder(method, built, SamplingSettings()).generate(requests)
        found[arm] = [result.ids for result in results]
        lines: list[dict[str, Any]] = [line for result in results for line in result.rounds]
        drafted[arm] = max(len(line["drafted"]) for line in lines)
    assert all(ids == found["ar"] for ids in found.values())
    assert [drafted[arm] for arm in ARMS[:3]] == [0, 3, 2]
    assert all(0 < drafted[arm] <= GAMMA for arm in ARMS[3:])  # longer drafts were never trained on


def test_each_stage_has_a_folder_and_a_record(home: Path, built: Models) -> None:
    found = folders(home)
    assert {kind: len(members) for kind, members in found.items()} == {
        "corpus": 1, "labels": 2, "draft": 1, "preverifier": 1
    }  # fmt: skip
    for folder in (folder for members in found.values() for folder in members):
        manifest = json.loads((folder / "manifest.json").read_text())
        assert folder.name == manifest["hash"][:16] and manifest["files"]
        assert not list(folder.rglob(".part-*")) and not list(folder.rglob("*.part"))
    assert built.preverifier_folder == found["preverifier"][0] / "preverifier"


def test_a_draft_on_the_way_is_trained_as_a_draft(home: Path, built: Models) -> None:
    """With trainer=preverifier the draft follows conf/trainer/draft.yaml, within the run's limits."""
    _, config = load_checkpoint(folders(home)["draft"][0] / "draft", "draft_layers")
    assert config["trainer"]["part"] == "draft" and config["trainer"]["monitor"] == "val/agreement"
    assert config["trainer"]["max_steps"] == config["steps"] == 1 and config["trainer"]["precision"] == "fp32"
    given = make(home, trainer=TrainerSettings(part="draft", epochs=2))
    assert trainer_of(given, "draft") is given.trainer
    assert trainer_of(given, "preverifier").monitor == "val/sim_speedup"


def test_the_second_time_nothing_is_written(home: Path, built: Models, caplog: pytest.LogCaptureFixture) -> None:
    before = files(home / "runs")
    with caplog.at_level(logging.INFO, "pacer"):
        again = build(make(home), METHODS)
    assert files(home / "runs") == before
    assert not caplog.text
    assert again.tuned == built.tuned and again.preverifier is not None and built.preverifier is not None
    for (name, value), (_, other) in zip(
        built.preverifier.named_parameters(), again.preverifier.named_parameters(), strict=True
    ):
        assert torch.equal(value, other), name


def test_no_text_has_two_uses(home: Path, built: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """What made the draft makes no labels, and what settings are tuned on is neither."""
    settings = make(home)
    folder = folders(home)["corpus"][0]
    everything = {t.id for shard in folder.glob("shard-*") for t in read_corpus(shard, built.stop_ids)}
    assert len(everything) == PROMPTS
    used: dict[str, set[str]] = {}
    for labelled in folders(home)["labels"]:
        part = json.loads((labelled / "manifest.json").read_text())["key"]["part"]
        used[part] = {json.loads(line)["id"] for f in labelled.glob("shard-*") for line in f.read_text().splitlines()}

    def note(target: object, texts: list[Any], held_out: list[Any], *_: object, **__: object) -> None:
        used["draft"] = {text.id for text in texts}
        used["held out of the draft"] = {text.id for text in held_out}
        raise Stopped

    monkeypatch.setattr(draft_run, "train_draft", note)
    with pytest.raises(Stopped):
        draft_checkpoint(with_draft(settings, head_size=151))
    for part in ("draft", "preverifier", "tuning"):
        assert used[part] and {part_of(name, settings.corpus.parts) for name in used[part]} == {part}
    assert used["held out of the draft"] == used["tuning"]
    assert used["draft"] | used["preverifier"] | used["tuning"] == everything
    assert len(used["draft"]) + len(used["preverifier"]) + len(used["tuning"]) == PROMPTS


def test_other_settings_have_other_folders(home: Path, built: Models) -> None:
    settings = make(home)
    keys: dict[str, str] = {}
    for name, changed in {
        "same": settings,
        "batch size": replace(settings, corpus=replace(settings.corpus, batch_size=3)),
        "tokens": replace(settings, corpus=replace(settings.corpus, max_new_tokens=8)),
        "limit": replace(settings, corpus=replace(settings.corpus, limit=6)),
    }.items():
        texts, keys[name] = text_stages.corpus(changed, built)
        assert max(len(text.output_ids) for text in texts) == (8 if name == "tokens" else 9)
        assert len(texts) == (6 if name == "limit" else PROMPTS)
    assert keys["same"] == keys["batch size"]  # greedy text in float32 does not depend on it
    assert len(set(keys.values())) == 3
    found = {
        name: text_stages.labels(changed, built, part, key)[1]
        for name, changed, part, key in (
            ("same", settings, "tuning", "a draft"),
            ("part", settings, "preverifier", "a draft"),
            ("draft", settings, "tuning", "another"),
            ("gamma", replace(settings, labels=replace(settings.labels, gamma=3)), "tuning", "a draft"),
            ("starts", replace(settings, labels=replace(settings.labels, starts="all")), "tuning", "a draft"),
        )
    }
    assert len(set(found.values())) == 5
    before = files(home / "runs")
    whole_head = with_draft(settings, full_head=True)  # the same draft, decoded otherwise
    assert draft_checkpoint(whole_head) == folders(home)["draft"][0] / "draft"
    assert files(home / "runs") == before
    models = build(whole_head, [method_settings("sd")])
    assert models.draft is not None and models.draft.head_ids is None


def test_what_a_draft_says_has_a_key(tmp_path: Path) -> None:
    """Everything that changes the draft changes it; how a checkpoint is named does not."""
    target, other = SourceSettings("one"), SourceSettings("one", revision="2")
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")

    def key(folder: Path | None = None, target: SourceSettings = target, whole: str = "float32", **draft: Any) -> str:
        return draft_key(Settings(model=ModelSettings("t", target, DraftSettings(**draft), whole)), folder)

    for where, kinds in ((None, ("model", "skip")), (folder, ("layers",))):
        found = [
            key(where, **{"kind": kind, **change})
            for kind in kinds
            for change in (
                {}, {"quantise": "int4"}, {"dtype": "bfloat16"}, {"full_head": True}, {"target": other},
                {"dtype": "float16"}, {"layers": [0, 2]}, {"whole": "bfloat16"},
            )
        ]  # fmt: skip
        assert len(set(found)) == len(found)
    assert key(folder, kind="layers", source="a") == key(folder, kind="layers", source="b")
    assert key(None, kind="model", source="a") != key(None, kind="model", source="b")
    before = key(folder, kind="layers")
    (folder / "model.safetensors").write_bytes(b"others")
    assert key(folder, kind="layers") != before


def test_a_draft_of_another_target_is_refused(home: Path, built: Models, tmp_path: Path) -> None:
    """V60, by the source that a user names."""
    tiny_folder(tmp_path / "other", seed=5)
    settings = with_draft(make(home), source=str(folders(home)["draft"][0] / "draft"))
    assert build(settings, [method_settings("sd")]).draft is not None
    settings.model.target = SourceSettings(str(tmp_path / "other"))
    with pytest.raises(MismatchError, match="draft draft belongs to another model: fingerprint"):
        build(settings, [method_settings("sd")])


def test_plain_decoding_builds_nothing(home: Path, tmp_path: Path) -> None:
    models = build(make(home, tmp_path), [method_settings("ar")])
    assert models.draft is None and not list(tmp_path.iterdir())
    again = load_target(make(home).model, home / "cache")
    assert again.stop_ids == models.stop_ids == (2,)
