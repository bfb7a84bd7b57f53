"""LayerSkip's recipe: the whole model learns to exit early, and a killed tuning ends with the same bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pacer.assemble import Models
from pacer.models.exits import RECORD
from pacer.models.sources import check_folder, load_model, load_tokenizer
from pacer.models.stack import Stack
from pacer.settings import LayerSkipSettings
from pacer.training.exits import collate_ids, rung_states
from pacer.training.exits_run import loaders
from pacer.training.layerskip import LayerSkipModule, dropout_rates, train_layerskip
from tests.exit_trainings import RECIPE, killed_at, silent, texts, trainer
from tests.folders import tiny_tokenizer
from tests.scripted import QUIET, Killed
from tests.tiny import tiny_model


def tune(folder: Path, recipe: LayerSkipSettings = RECIPE, **changes: Any) -> tuple[Path, Models]:
    learn, check = texts()
    models = Models(Stack(tiny_model()), tiny_tokenizer(), (), folder)
    chosen = trainer(**{"part": "layerskip", "kl_weight": 0.0, "lr": 1e-3, **changes})
    made = train_layerskip(models, learn, check, [1, 2], recipe, chosen, QUIET, folder, command="tune it")
    return made, models


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tune(tmp_path_factory.mktemp("tuned"), epochs=3)[0]


def test_a_tuned_model_exits_earlier_and_is_another(tuned: Path) -> None:
    """Its record holds agreement before and after, and how far its output is the original's."""
    record = json.loads((tuned / RECORD).read_text())
    before, after = record["validation_before"], record["validation"]
    assert before["val/agree_text"] == 1 and after["val/agree_text"] < 1
    assert after["val/agree"] > before["val/agree"] + 0.05
    assert record["steps"] > 5 and record["exits"] == [1, 2] and record["recipe"]["p_max"] == 0.2
    original = silent(LayerSkipModule(Stack(tiny_model()), [1, 2], RECIPE, trainer(kl_weight=0.0), 1))
    assert original.measure(loaders(*texts(), trainer())[1]) == pytest.approx(before)


def test_a_tuned_model_is_a_model_folder(tuned: Path) -> None:
    """Loaded as any other, its shared exits score what the record says."""
    check_folder(tuned)
    load_tokenizer(tuned)
    loaded = Stack(load_model(tuned, "float32", "cpu"))
    assert load_file(tuned / "model.safetensors")["model.embed_tokens.weight"].dtype == torch.bfloat16
    record = json.loads((tuned / RECORD).read_text())
    module = silent(LayerSkipModule(loaded, [1, 2], RECIPE, trainer(kl_weight=0.0), 1))
    assert module.measure(loaders(*texts(), trainer())[1]) == pytest.approx(record["validation"])
    card = (tuned / "README.md").read_text()
    assert "This is another model than the original" in card and "tune it" in card and "model.exits.kind=shared" in card
    assert f"at {record['validation']['val/agree_text']:.4f} of all places" in card
    rows = [line for line in card.splitlines() if line.startswith(("| 1 |", "| 2 |"))]
    assert len(rows) == 2 and f"{record['validation_before']['val/agree_1']:.4f}" in rows[0]


def test_the_whole_model_learns_from_the_exits_whose_turn_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = collate_ids(texts()[0][:3], 0.15)
    for step, trained_exits in ((0, [1, 3]), (1, [2, 3])):
        stack = Stack(tiny_model())
        recipe = replace(RECIPE, p_max=0.0)
        module = silent(LayerSkipModule(stack, [1, 2], recipe, trainer(kl_weight=0.0), 1))
        monkeypatch.setattr(LayerSkipModule, "global_step", step)
        loss = module.training_step(batch, 1)
        loss.backward()
        assert all(p.grad is not None for p in stack.model.parameters())
        losses: dict[int, Tensor] = {}
        at = (batch["weights"] > 0).nonzero(as_tuple=True)
        weights = batch["weights"][at]
        with torch.no_grad():
            for depth, states in rung_states(stack, batch["ids"], [1, 2, 3]).items():
                each = torch.nn.functional.cross_entropy(
                    stack.readout(states[at]), batch["ids"].roll(-1, 1)[at], reduction="none"
                )
                losses[depth] = (each * weights).sum() / weights.sum()
        # indices 0, 1, 2 weigh 0.5 · (0, 1) and 2 + 0.5 · 1: the first exit has none
        share = {1: 0.0, 2: 0.5, 3: 2.5}
        wanted = sum(share[e] * losses[e] for e in trained_exits) / sum(share[e] for e in trained_exits)
        torch.testing.assert_close(loss.detach(), wanted)
    assert module.rates == dropout_rates(3, 0.0)


@pytest.mark.parametrize("step", [3])
def test_a_killed_tuning_ends_with_the_same_bytes(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are left out and exits that take turns depend on the step alone."""
    recipe, options = replace(RECIPE, p_max=0.6), {"checkpoint_every": 2, "val_every": 3}
    whole, _ = tune(tmp_path / "whole", recipe, **options)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(step, LayerSkipModule, patch)
        tune(tmp_path / "killed", recipe, **options)
    again, _ = tune(tmp_path / "killed", recipe, **options)
    for name in ("model.safetensors", RECORD):
        assert (again / name).read_bytes() == (whole / name).read_bytes()
