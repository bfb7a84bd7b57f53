"""A drafter fed by the target learns from it, from the settings to an arm that decodes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from pacer import evaluate, train
from pacer.assemble import make_decoder
from pacer.command.app import load_settings
from pacer.data.batching import token_batches
from pacer.data.corpus import Text
from pacer.decoding.request import Request
from pacer.errors import ConfigError, PacerError, UnsupportedError
from pacer.methods.arms import method_settings
from pacer.models.feature import load_feature
from pacer.models.stack import Stack
from pacer.settings import (
    FeatureDraftSettings,
    FeatureSettings,
    LoggerSettings,
    SamplingSettings,
    Settings,
    TrainerSettings,
)
from pacer.stages.build import build
from pacer.training.exits import collate_ids, rung_states
from pacer.training.exits_run import loaders
from pacer.training.feature import DECAY, JUDGED, FeatureModule, unrolled
from pacer.training.feature_run import train_feature
from pacer.training.losses import IGNORE, token_losses
from tests.cli.test_verbs import words
from tests.features import random_draft
from tests.folders import tiny_folder
from tests.texts import path, target, written
from tests.tiny import VOCAB

QUIET = LoggerSettings(csv=False)
IDS = torch.arange(0, VOCAB, 2)
K = 5


class Killed(Exception):
    """What ends a process at any moment."""


def texts(count: int = 24) -> tuple[tuple[Text, ...], tuple[Text, ...]]:
    """To learn from, and held out."""
    return written(count, new=20), written(8, new=20, seed=9)


def trainer(**changes: Any) -> TrainerSettings:
    values = {"precision": "fp32", "tokens_per_batch": 200, "epochs": 1, "patience": 0, "monitor": "val/length"}
    return TrainerSettings(**{"part": "feature_draft", "teacher_top_k": K, "val_every": 5, **values, **changes})


def make_module(ids: Tensor | None = IDS, own: FeatureDraftSettings | None = None, **changes: Any) -> FeatureModule:
    draft = random_draft(target(), ids).train().requires_grad_(True)
    module = FeatureModule(draft, trainer(**changes), own or FeatureDraftSettings(), 1)
    module.log = lambda *_, **__: None  # type: ignore[method-assign]  # no Trainer is attached
    return module


def measured(module: FeatureModule, batch: dict[str, Any]) -> dict[str, float]:
    module.on_validation_epoch_start()
    module.validation_step(batch, 0)
    return module.scores.figures()


def test_one_pass_of_the_target_serves_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls, real = make_module(own=FeatureDraftSettings(steps=3)), list[tuple[int, int]](), Stack.run
    batch = collate_ids(texts()[0][:3], 0.15)

    def run(self: Stack, x: Tensor, a: int, b: int, *rest: Any) -> Tensor:
        calls.append((a, b))
        return real(self, x, a, b, *rest)

    monkeypatch.setattr(Stack, "run", run)
    module.training_step(batch, 1).backward()
    module.validation_step(batch, 0)
    assert calls == [(0, 3), (0, 3)]
    assert all(p.grad is not None for p in module.parameters())
    assert all(p.grad is None for p in target().model.parameters())


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kl_weight", [0.0, 0.4])
def test_a_step_is_the_weighted_mean_of_places_and_of_a_drafts_tokens(kl_weight: float, steps: int) -> None:
    """Place by place, from the target's own logits or from the text alone; ids that the head lacks teach nothing but
    their feature, and a draft's token k has no place before k."""
    own = FeatureDraftSettings(steps=steps, regression=0.3)
    module, learn = make_module(own=own, kl_weight=kl_weight), texts()[0][:3]
    batch = collate_ids(learn, 0.15)
    head_of = torch.full((VOCAB,), IGNORE)
    head_of[IDS] = torch.arange(len(IDS))
    total, shares = 0.0, [DECAY**k for k in range(steps)]
    with torch.no_grad():
        states = rung_states(target(), batch["ids"], [3])[3]
        features, said = module.draft.heard(states), target().readout(states).log_softmax(-1)
        for share, passed in zip(shares, unrolled(module.draft, features, batch["ids"], steps), strict=True):
            k, sums = shares.index(share), [0.0, 0.0, 0.0, 0.0]
            for row, text in enumerate(learn):
                for place in range(k, len(path(text)) - 1):
                    weight = float(batch["weights"][row, place])
                    top = said[row, place].topk(K)
                    rest = said[row, place].scatter(0, top.indices, -torch.inf).logsumexp(0)
                    rows = head_of[top.indices if kl_weight else torch.tensor([path(text)[place + 1]])][None]
                    sums[2] += weight * float(
                        F.smooth_l1_loss(module.draft.features(passed[row, place]), features[row, place])
                    )
                    sums[3] += weight
                    if kl_weight == 0 and rows[0, 0] == IGNORE:
                        continue
                    teacher = (rows, top.values[None], rest[None]) if kl_weight else None
                    logits = module.draft.readout(passed[row, place])[None]
                    sums[0] += weight * float(token_losses(logits, rows[:, 0], teacher, kl_weight))
                    sums[1] += weight
            total += share / sum(shares) * (sums[0] / sums[1] + 0.3 * sums[2] / sums[3])
    assert float(module.training_step(batch, 1).detach()) == pytest.approx(total, rel=1e-4)


def test_noise_is_on_what_is_read_alone() -> None:
    batch = collate_ids(texts()[0][:3], 0.15)
    quiet, loud = make_module(), make_module(own=FeatureDraftSettings(noise=0.5))
    torch.manual_seed(1)
    one, other = (float(loud.training_step(batch, 1).detach()) for _ in range(2))
    assert len({one, other, float(quiet.training_step(batch, 1).detach())}) == 3
    assert measured(quiet, batch) == measured(loud, batch)


def test_a_batch_without_supervised_tokens_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """T84."""
    batch = collate_ids([Text("odd", "t", [1, 2], [3], True)], 0.0)
    with pytest.raises(PacerError, match=r"a batch without supervised tokens: 'odd'; raise model\.feature\.head_size"):
        make_module().training_step(batch, 1)
    with caplog.at_level(logging.INFO, "pacer"):
        make_module(None).training_step(collate_ids([Text("a", "t", [1, 2, 3], [4, 5], True)], 0.0), 0)
    assert "supervised share of the first batch: 0.400" in caplog.text


@pytest.mark.parametrize(("kl_weight", "head"), [(0.0, "frozen"), (0.5, "trained")])
def test_it_learns(kl_weight: float, head: str) -> None:
    """On unseen text, with its own features too."""
    learn, check = written(64, new=20), written(16, new=20, seed=9)
    judged = collate_ids(check, 0.0)
    draft = random_draft(target(), head=head).train().requires_grad_(True)
    module = FeatureModule(draft, trainer(kl_weight=kl_weight), FeatureDraftSettings(), 1)
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    before, first = measured(module, judged), float(module.training_step(judged, 1).detach())
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for rows in token_batches([len(path(t)) for t in learn], 400, seed=0, epochs=8):
        optimizer.zero_grad()
        module.training_step(collate_ids([learn[i] for i in rows], 0.15), 1).backward()
        optimizer.step()
    after = measured(module, judged)
    assert float(module.training_step(judged, 1).detach()) < 0.9 * first
    assert after["val/length"] > before["val/length"] + 0.05 and after["val/agree_1"] > before["val/agree_1"]


def run(folder: Path, **changes: Any) -> Path:
    learn, check = texts()
    feature = FeatureSettings(head_size=60, head=changes.pop("head", "frozen"), layer=changes.pop("layer", None))
    return train_feature(
        target(), learn, check, feature, FeatureDraftSettings(noise=0.1), trainer(lr=3e-3, **changes), QUIET, folder,
        always=[96], command="make it",
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("feature"), epochs=6, layer=2)


def test_a_loaded_drafter_scores_what_was_measured(trained: Path) -> None:
    """T90: from the file alone."""
    figures = json.loads((trained / "config.json").read_text())["validation"]
    module = FeatureModule(load_feature(trained, target()), trainer(), FeatureDraftSettings(), 1)
    module.on_validation_epoch_start()
    for batch in loaders(*texts(), trainer())[1]:
        module.validation_step(batch, 0)
    assert module.scores.figures() == pytest.approx(figures) and figures["val/length"] > 0


def test_what_a_run_leaves(trained: Path) -> None:
    """K99, and how it was made."""
    tensors = load_file(trained / "model.safetensors")
    best = torch.load(trained.parent / "best.ckpt", weights_only=True)["state_dict"]
    assert {f"draft.{name}" for name in tensors if name != "head_ids"} == best.keys()
    assert len(tensors["head_ids"]) == 60 and 96 in tensors["head_ids"]
    config = json.loads((trained / "config.json").read_text())
    assert (config["command"], config["texts"], config["layer"], config["head_size"]) == ("make it", 24, 2, 60)
    assert config["feature_draft"] == {"steps": 2, "regression": 0.1, "noise": 0.1} and config["steps"] > 3
    assert config["validation"].keys() == {*(f"val/agree_{k}" for k in range(1, JUDGED + 1)), "val/length"}
    card = (trained / "README.md").read_text()
    assert "which began as the target's layer 2" in card and "own head rows of 60 ids" in card and "make it" in card
    assert f"- val/length: {config['validation']['val/length']:.4f}" in card


def test_a_killed_run_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With noise, whose numbers are those of the step."""
    options: dict[str, Any] = {"checkpoint_every": 2, "val_every": 3, "epochs": 2}
    whole = run(tmp_path / "whole", **options)
    real = FeatureModule.training_step

    def training_step(self: Any, batch: Any, index: int) -> Tensor:
        if index == 5:
            raise Killed
        return real(self, batch, index)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(FeatureModule, "training_step", training_step)
        run(tmp_path / "killed", **options)
    again = run(tmp_path / "killed", **options)
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (whole / name).read_bytes()


def test_values_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.teacher_top_k: 60; allowed: less than the head's 60 ids"):
        run(tmp_path, teacher_top_k=60, kl_weight=0.5)
    with pytest.raises(ConfigError, match=r"trainer\.dropout is for the pre-verifier: 0\.1; allowed: 0"):
        run(tmp_path, dropout=0.1)
    for word, what in (
        ("model.feature.head=own", r"model\.feature\.head: 'own'; allowed: frozen, trained"),
        ("feature_draft.steps=0", r"feature_draft\.steps: 0"),
        ("feature_draft.noise=-1", r"feature_draft\.noise: -1"),
        ("trainer.start_from=x", r"trainer\.start_from is for the draft"),
    ):
        with pytest.raises(ConfigError, match=what):
            load_settings(["+experiment=feature_draft/demo", word])
    assert load_settings(["trainer=feature_draft", "trainer.kl_weight=0.5"]).trainer.kl_weight == 0.5


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    tiny_folder(folder / "target", layers=4)
    return folder


ARMS = [
    "feature gamma=2", "feature controller=threshold t=0.01 gamma_max=3", "pacer drafter=feature",
    "feature controller=specdecpp", "sd gamma=2",
]  # fmt: skip


def chosen(home: Path) -> Settings:
    return load_settings([*words(home, "feature_draft/demo"), "labels.gamma=4", "preverifier.gamma_max=4"])


def test_arms_find_or_train_what_they_need(home: Path) -> None:
    """One drafter for all of them, trained once; pre-verifier and head on its own states; exact, alone and in a
    stream. A rule over the draft model keeps the draft model's own."""
    settings, methods = chosen(home), [method_settings(arm) for arm in ARMS]
    models = build(settings, methods)
    stages = home / "runs" / "stages"
    assert len(list(stages.glob("feature/*/manifest.json"))) == 1 and models.preverifier is None
    assert models.judges.keys() == {("preverifier", "feature"), ("specdecpp", "feature")}
    before = {file: file.stat().st_mtime_ns for file in stages.rglob("*") if file.is_file()}
    assert build(settings, methods).feature is not None
    assert {file: file.stat().st_mtime_ns for file in stages.rglob("*") if file.is_file()} == before
    asked = [Request(f"r{i}", [3 + i, 7, 9, 4], 9) for i in range(3)]
    plain = [r.ids for r in make_decoder(method_settings("ar"), models, SamplingSettings()).generate(asked)]
    for method in methods:
        decoder = make_decoder(method, models, SamplingSettings())
        for slots in (None, 2):
            results = decoder.generate(asked, slots=slots)
            assert [r.ids for r in results] == plain, method.name
            assert sum(len(line["drafted"]) for r in results for line in r.rounds) > 0
    models.feature = None
    with pytest.raises(UnsupportedError, match="method feature gamma=2 needs a drafter fed by the target"):
        make_decoder(methods[0], models, SamplingSettings())


def test_evaluate_measures_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over paged memory and in a batch; a drafter trained anew is another one."""
    command = [
        *words(home, "feature_draft/demo"), "benchmark.sets=[gsm8k]", "benchmark.score=false", "benchmark.limit=2",
        "benchmark.arms=[ar,feature]", "benchmark.batch_size=2", "model.block=4",
    ]  # fmt: skip
    evaluate.main(command)
    out = capsys.readouterr().out
    found = next(Path(line.strip()) for line in out.splitlines() if "results.json" in line)
    rows = {row["arm"]: row for row in json.loads(found.read_text())["rows"]}
    assert rows["feature"]["exact"] is True and rows["feature"]["mean_drafted"] > 0
    parts = json.loads((found.parent / "parts.json").read_text())
    assert parts["feature"] and parts["draft"] is None
    parts["feature"] = "another"
    (found.parent / "parts.json").write_text(json.dumps(parts))
    with pytest.raises(SystemExit):
        evaluate.main(command)
    assert "another draft" in capsys.readouterr().err


def test_a_named_checkpoint_is_not_trained(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But decoded with, and refused for another target (V60)."""
    folder = build(chosen(home), [method_settings("feature")]).feature
    assert folder is not None
    (saved,) = (home / "runs" / "stages" / "feature").glob("*/feature")
    with pytest.raises(SystemExit):
        train.main([*words(home, "feature_draft/demo"), f"model.feature.source={saved}"])
    assert "model.feature.source names a trained one" in capsys.readouterr().err
    other = tiny_folder(home / "other", layers=4, seed=3)
    with pytest.raises(SystemExit):
        evaluate.main([
            *(w for w in words(home, "feature_draft/demo") if not w.startswith("model.target.id")),
            f"model.target.id={other}", f"model.feature.source={saved}", "benchmark.arms=[ar,feature]",
        ])  # fmt: skip
    assert "feature drafter feature belongs to another model: fingerprint" in capsys.readouterr().err
