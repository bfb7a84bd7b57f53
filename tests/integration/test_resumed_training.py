"""Trainings of real parts: a resumed one ends with the same bits, schedules follow from the data, metrics are kept."""

from __future__ import annotations

import csv
import json
import logging
import math
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn

from pacer.data.batching import token_batches
from pacer.errors import ConfigError
from pacer.settings import DraftSettings, LoggerSettings, TrainerSettings
from pacer.training.draft_run import train_draft
from pacer.training.fit import fit, optimiser_steps
from pacer.training.optim import warmup_cosine
from pacer.training.preverify import packed_logits
from tests.learners import part, texts
from tests.scripted import QUIET, Killed
from tests.texts import path, target


def trained(
    name: str, folder: Path, settings: TrainerSettings, kill_at: int | None = None, logger: LoggerSettings = QUIET
) -> tuple[lightning.LightningModule, dict[str, float], dict[int, float]]:
    """The fitted module, its figures, and the learning rate of each step."""
    module, train, check = part(name, settings)
    rates: dict[int, float] = {}
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == kill_at:
            raise Killed
        rates[module.global_step] = module.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]  # one optimiser
        return step(batch, batch_idx)

    module.training_step = training_step  # type: ignore[method-assign]  # to look in
    return module, fit(module, train, check, settings, logger, folder), rates


RUNS = [("draft", 1, 0.0), ("draft", 2, 0.0), ("preverifier", 1, 0.2), ("preverifier", 2, 0.0)]


@pytest.mark.parametrize(("name", "accumulate", "dropout"), RUNS)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, name: str, accumulate: int, dropout: float) -> None:
    """K96, K98: parameters, learning rates, best metric and its step equal those of the run that was not killed."""
    monitor = {"draft": "val/agreement", "preverifier": "val/sim_speedup"}[name]
    settings = TrainerSettings(
        precision="fp32", accumulate=accumulate, dropout=dropout, lr=3e-3, warmup=0.3, val_every=2, checkpoint_every=3,
        patience=0, monitor=monitor,
    )  # fmt: skip
    whole, wanted, rates = trained(name, tmp_path / "whole", settings)
    total = optimiser_steps(len(part(name, settings)[1]), accumulate)
    assert total >= 6
    warmup = max(1, round(0.3 * total))
    assert rates == {step: pytest.approx(3e-3 * warmup_cosine(step, total, warmup)) for step in range(total)}
    last_batch = len(part(name, settings)[1]) - 1
    merged: dict[int, float] = {}
    for index, at in enumerate((2 * accumulate, 4 * accumulate + accumulate - 1, last_batch)):
        with pytest.raises(Killed):
            trained(name, tmp_path / f"{index}", settings, kill_at=at)
        again, figures, later = trained(name, tmp_path / f"{index}", settings)
        assert figures == wanted
        merged |= later
        for (key, value), (_, other) in zip(whole.state_dict().items(), again.state_dict().items(), strict=True):
            assert torch.equal(value, other), key
        files = [tmp_path / folder / "best.ckpt" for folder in ("whole", f"{index}")]
        states = [torch.load(file, weights_only=True)["state_dict"] for file in files]
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert merged == rates  # to the bit
    start = dict(part(name, settings)[0].named_parameters())
    assert all(not torch.equal(value, start[key]) for key, value in whole.named_parameters() if "index" not in key)


def test_dropout_is_used_in_training_alone() -> None:
    module, train, _ = part("preverifier", TrainerSettings(dropout=0.5))
    nn.init.ones_(module.module.out.weight)  # the layers' share of an estimate starts at 0
    batch = next(iter(train))
    torch.manual_seed(0)
    noisy, other = (packed_logits(module.module, batch, 0.5) for _ in range(2))
    plain = packed_logits(module.module, batch)
    assert not torch.equal(noisy, other) and not torch.equal(noisy, plain)
    assert torch.equal(plain, packed_logits(module.module, batch))
    with pytest.raises(ConfigError, match=r"trainer\.dropout is for the pre-verifier: 0\.5"):
        part("draft", TrainerSettings(dropout=0.5))


def test_metrics_of_all_starts_are_kept(tmp_path: Path) -> None:
    settings = TrainerSettings(precision="fp32", val_every=2, checkpoint_every=2, patience=0, monitor="val/agreement")
    with pytest.raises(Killed):
        trained("draft", tmp_path, settings, 5, LoggerSettings())
    trained("draft", tmp_path, settings, None, LoggerSettings())
    files = sorted(tmp_path.glob("metrics/*/metrics.csv"))
    assert len(files) == 2
    rows = [[row for row in csv.DictReader(file.open()) if row["val/agreement"]] for file in files]
    assert len(rows[0]) == 2 and len(rows[1]) >= 2  # validations at 2 and 4 before the kill, the rest after it


def test_the_schedule_follows_from_the_data_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T89, and T84's share of supervised tokens at the start."""
    learn, check = texts()
    trainer = TrainerSettings(
        precision="fp32", tokens_per_batch=64, epochs=3, accumulate=2, warmup=0.25, patience=0, monitor="val/agreement"
    )
    batches = token_batches([len(path(t)) for t in learn], 64, seed=trainer.seed, epochs=3)
    steps = math.ceil(len(batches) / 2)
    with caplog.at_level(logging.INFO, "pacer"):
        folder = train_draft(
            target(), learn, check, DraftSettings(layers=[0, 2], head_size=50), trainer, QUIET, tmp_path,
            always=[0, 96], command="make it",
        )  # fmt: skip
    assert f"{len(batches)} batches, {steps} optimiser steps, warm-up {round(0.25 * steps)}" in caplog.text
    assert "supervised share of the first batch: 0." in caplog.text
    config = json.loads((folder / "config.json").read_text())
    assert config["steps"] == steps and config["command"] == "make it"
    assert 0 <= config["validation"]["val/agreement"] <= 1
    card = (folder / "README.md").read_text()
    assert "make it" in card and f"{steps} optimiser steps" in card
