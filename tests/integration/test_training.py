"""Fitting: steps, schedule, modes, the best parameters, and a run that was killed ends like one that was not."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pacer.assemble import Models
from pacer.data.batching import Loader, token_batches
from pacer.data.corpus import Text
from pacer.data.labels import Rounds, simulate
from pacer.data.packing import pack
from pacer.decoding.controllers.fixed import Fixed
from pacer.errors import ConfigError, MismatchError, PacerError
from pacer.evaluation.simulate import best_fixed, blockwise, oracle, outcome
from pacer.models.checkpoint import save_checkpoint
from pacer.models.draft import TrainableDraft, load_draft
from pacer.models.preverifier import Preverifier, load_preverifier
from pacer.models.stack import Stack
from pacer.progress import progress
from pacer.settings import (
    CostSettings,
    DraftSettings,
    LabelSettings,
    LoggerSettings,
    PreverifierSettings,
    Settings,
    TrainerSettings,
)
from pacer.stopping import Stopped, stop_signals
from pacer.training.distill import IGNORE, DistillModule, collate_texts
from pacer.training.draft_run import train_draft
from pacer.training.fit import fit, optimiser_steps, steps_of
from pacer.training.optim import warmup_cosine
from pacer.training.preverifier_run import packed_batches, train_preverifier
from pacer.training.preverify import PreverifierModule, RoundScores, packed_logits
from tests.texts import draft, path, requests, rounds_at, target, written
from tests.tiny import generate, make_decoder, make_preverifier, near, tiny_model, tiny_stack

QUIET = LoggerSettings(csv=False)
GAMMA = 4
Act = Callable[[], None]


class Killed(Exception):
    """What ends a process at any moment."""


def kill() -> None:
    raise Killed


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Script(lightning.LightningModule):
    """One weight that counts the optimiser steps, and a validation metric that is read off a list."""

    def __init__(self, scores: list[float], events: dict[str, Act] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.frozen_mode = nn.Dropout(0.5).eval()
        self.usual_mode = nn.Linear(1, 1).requires_grad_(False)
        self.scores, self.events = scores, events or {}
        self.seen: list[tuple[int, float]] = []  # batch, random number
        self.validated: list[int] = []
        self.steps = 0
        self.modes: list[list[bool]] = []

    def event(self, name: str) -> None:
        self.events.pop(name, lambda: None)()

    def training_step(self, batch: int, index: int) -> Tensor:
        self.event(f"step {index}")
        self.seen.append((batch, float(torch.rand(()))))
        self.modes.append([module.training for module in self.modules()])
        return -self.weight.sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps += 1
        self.weight.grad = -torch.ones(1)  # whatever share of an accumulation there was

    def validation_step(self, batch: int, index: int) -> None:
        assert not any(module.training for module in self.modules())
        step = round(self.weight.item())
        self.event(f"validation {step}")
        if index == 0:
            self.validated.append(step)
        self.log("val/score", self.scores[step], batch_size=1, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.weight], lr=1.0)


def scripted(
    folder: Path, scores: list[float], events: dict[str, Act] | None = None, batches: int = 9, **trainer: Any
) -> tuple[Script, dict[str, float]]:
    module = Script(scores, events)
    settings = TrainerSettings(**{
        "monitor": "val/score", "precision": "fp32", "checkpoint_every": 2, "val_every": 3, "patience": 0, "clip": 0.0,
        **trainer,
    })  # fmt: skip
    train, check = (Loader(list(range(n)), lambda batch: batch) for n in (batches, 2))
    return module, fit(module, train, check, settings, QUIET, folder)


@pytest.mark.parametrize(("batches", "accumulate"), [(1, 1), (5, 1), (5, 2), (6, 4), (3, 8)])
def test_optimiser_steps(tmp_path: Path, batches: int, accumulate: int) -> None:
    """T87: ceil(batches / accumulate), the last step over what is left, and a validation at the end."""
    module, figures = scripted(
        tmp_path, list(range(20)), batches=batches, accumulate=accumulate, val_every=100, checkpoint_every=100
    )
    steps = math.ceil(batches / accumulate)
    assert module.steps == steps == optimiser_steps(batches, accumulate)
    assert [batch for batch, _ in module.seen] == list(range(batches))
    assert module.validated == [steps, steps]  # in the fit, and at the end with the best parameters
    assert figures == {"val/score": steps, "steps": steps}


def test_fewer_steps_than_batches(tmp_path: Path) -> None:
    module, figures = scripted(tmp_path, list(range(20)), accumulate=2, max_steps=3, val_every=2)
    assert (module.steps, len(module.seen), figures["steps"]) == (3, 6, 3)
    assert optimiser_steps(9, 2, 3) == 3 and optimiser_steps(9, 2, 30) == 5 and optimiser_steps(9, 2) == 5


@pytest.mark.parametrize("val_every", [1, 2, 3])
def test_the_best_parameters_are_kept(tmp_path: Path, val_every: int) -> None:
    """T83: the module ends with the parameters of the highest metric, not of the last step."""
    scores = [0, 1, 5, 9, 8, 2, 7, 3, 3, 4]
    module, figures = scripted(tmp_path, scores, val_every=val_every)
    seen = module.validated[:-1]
    assert seen == list(range(val_every, 10, val_every))[: len(seen)] and len(seen) >= 9 // val_every
    best = max(seen, key=lambda step: scores[step])
    assert figures == {"val/score": scores[best], "steps": best}
    assert module.weight.item() == best
    kept = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert kept["state_dict"]["weight"].item() == best and "optimizer_states" not in kept


def test_the_lowest_may_be_the_best(tmp_path: Path) -> None:
    module = Script([9, 9, 9, 2, 9, 9, 5, 9, 9, 9])
    settings = TrainerSettings(monitor="val/score", precision="fp32", val_every=3, patience=0, clip=0.0)
    train, check = Loader(list(range(9)), int), Loader([0], int)
    assert fit(module, train, check, settings, QUIET, tmp_path, maximise=False)["steps"] == 3


def test_patience(tmp_path: Path) -> None:
    module, figures = scripted(tmp_path, [0, 1, 5, 4, 3, 9, 9, 9, 9, 9], val_every=1, patience=2)
    assert module.steps == 4 and figures["steps"] == 2


def test_modes_come_back_after_validation(tmp_path: Path) -> None:
    """T88: each module's own mode, eval inside training included."""
    module, _ = scripted(tmp_path, list(range(20)), val_every=2)
    assert len(module.validated) == 5
    assert all(modes == module.modes[0] for modes in module.modes)
    assert module.modes[0] == [True, False, True]


def test_a_deadline_ends_with_a_validation(tmp_path: Path) -> None:
    module, figures = scripted(tmp_path, list(range(20)), max_minutes=1e-9, val_every=3)
    assert module.steps == 1 and figures == {"val/score": 1, "steps": 1}
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 1


def test_what_a_training_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole lines off a terminal: steps, time left, the last validation; a run that goes on counts what was done."""
    began: list[int] = []

    def noting(*given: Any, initial: int) -> Any:
        began.append(initial)
        return progress(*given, initial=initial)

    monkeypatch.setattr("pacer.progress.LINE_SECONDS", 0.0)
    monkeypatch.setattr("pacer.training.shown.progress", noting)
    with pytest.raises(Killed):
        scripted(tmp_path, SCORES, {"step 7": kill})
    capsys.readouterr()
    scripted(tmp_path, SCORES, max_minutes=5)
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("training, at most 5 min: ")]
    assert "\r" not in said and began == [0, 6]  # the rate is of the steps made since
    assert " 9/9 step [" in lines[-1] and lines[-1].endswith(", val/score 4]")


def test_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(PacerError, match="nothing to train or validate on"):
        scripted(tmp_path, [0], batches=0)


SCORES = [0, 1, 6, 5, 9, 2, 8, 3, 7, 4]  # the best of validations 3, 6, 9 is at 6; without it at 3


MOMENTS = [f"step {i}" for i in range(9)] + ["validation 3", "validation 6", "validation 9"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Script, dict[str, float]]:
    return scripted(tmp_path_factory.mktemp("undisturbed"), SCORES)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_and_started_again(
    tmp_path: Path, undisturbed: tuple[Script, dict[str, float]], moment: str
) -> None:
    """The same batches under the same random numbers, no validation lost or made up, the same best."""
    with pytest.raises(Killed):
        scripted(tmp_path, SCORES, {moment: kill})
    last = tmp_path / "last.ckpt"
    reached = torch.load(last, weights_only=True)["global_step"] if last.exists() else 0
    again, figures = scripted(tmp_path, SCORES)
    whole, wanted = undisturbed
    assert figures == wanted and torch.equal(again.weight, whole.weight)
    assert again.seen == whole.seen[reached:]
    assert again.validated == [step for step in whole.validated[:-1] if step > reached] + [6]
    assert len({number for _, number in whole.seen}) == 9


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("moment", ["step 4", "step 5", "step 8", "validation 3"])
def test_sigterm_saves_the_current_step(tmp_path: Path, moment: str, accumulate: int) -> None:
    """K101: the step is finished (in an accumulation or a validation: that first), saved, and nothing more is done."""
    options = {"batches": 9 * accumulate, "accumulate": accumulate, "checkpoint_every": 100}
    whole, wanted = scripted(tmp_path / "whole", SCORES, **options)
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals(), pytest.raises(Stopped, match=r"state saved in .*last\.ckpt"):
        scripted(tmp_path / "stopped", SCORES, {moment: terminate}, **options)
    assert signal.getsignal(signal.SIGTERM) is before
    kind, number = moment.split()
    step = int(number) if kind == "validation" else int(number) // accumulate + 1
    state = torch.load(tmp_path / "stopped" / "last.ckpt", weights_only=True)
    assert state["global_step"] == step
    assert not list((tmp_path / "stopped").glob("*.part"))
    again, figures = scripted(tmp_path / "stopped", SCORES, **options)
    assert figures == wanted and torch.equal(again.weight, whole.weight)
    assert again.seen == whole.seen[step * accumulate :]
    assert again.validated == [s for s in whole.validated[:-1] if s > step] + [6]


def test_patience_survives_a_kill(tmp_path: Path) -> None:
    """A run that was killed after its patience had ended ends there again."""
    scores = [0, 1, 5, 4, 3, 2, 9, 9, 9, 9]
    options: dict[str, Any] = {"val_every": 1, "patience": 3, "checkpoint_every": 1}
    whole, wanted = scripted(tmp_path / "whole", scores, **options)
    assert (whole.steps, wanted["steps"]) == (5, 2)
    for moment in ("validation 4", "step 4"):
        with pytest.raises(Killed):
            scripted(tmp_path / moment, scores, {moment: kill}, **options)
    # after the fit, in the validation of the best parameters
    module = Script(scores)
    module.on_fit_end = lambda: module.events.update({"validation 2": kill})  # type: ignore[method-assign]  # a hook
    settings = TrainerSettings(monitor="val/score", precision="fp32", clip=0.0, **options)
    loaders = [Loader(list(range(n)), int) for n in (9, 2)]
    with pytest.raises(Killed):
        fit(module, *loaders, settings, QUIET, tmp_path / "end")
    for moment in ("validation 4", "step 4", "end"):
        assert scripted(tmp_path / moment, scores, **options)[1] == wanted, moment


def test_a_second_interrupt_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    """The verb's exit code is its own, not Lightning's."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scripted(tmp_path, SCORES, {"step 3": interrupt})
    assert scripted(tmp_path, SCORES)[1]["steps"] == 6


def texts(count: int = 12) -> tuple[tuple[Text, ...], tuple[Text, ...]]:
    """To learn from, and held out."""
    return written(count, new=20), written(4, new=20, seed=9)


def pairs(of: tuple[Text, ...]) -> list[tuple[Text, Rounds]]:
    return [(text, rounds_at(text, [1, 4, 9, 15], GAMMA)) for text in of]


def part(name: str, settings: TrainerSettings) -> tuple[lightning.LightningModule, Loader, Loader]:
    """A real module, the same each time, with its batches."""
    learn, check = texts()
    if name == "draft":
        model = TrainableDraft(target(), [0, 1], torch.arange(97))
        sets = [token_batches([len(path(t)) for t in of], 70, seed=1, epochs=e) for of, e in ((learn, 2), (check, 1))]
        head = torch.arange(97)
        loaders = [
            Loader(b, lambda rows, of=of: collate_texts([of[i] for i in rows], head, 0.15))
            for of, b in zip((learn, check), sets, strict=True)
        ]
        steps = steps_of(settings, len(loaders[0]))
        return DistillModule(model, settings, steps), *loaders
    drafter = draft()
    torch.manual_seed(5)
    module = Preverifier(drafter, PreverifierSettings(gamma_max=GAMMA, width=16))
    groups = [pairs(of) for of in (learn, check)]
    sets = [packed_batches(of, 120, seed=1, epochs=e) for of, e in zip(groups, (2, 1), strict=True)]
    loaders = [
        Loader(b, lambda rows, of=of: pack([[of[i] for i in row] for row in rows], "survival"))
        for of, b in zip(groups, sets, strict=True)
    ]
    steps = steps_of(settings, len(loaders[0]))
    return PreverifierModule(module, settings, steps, CostSettings()), *loaders


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


def run_preverifier(folder: Path, **settings: Any) -> tuple[Path, Models]:
    learn, check = (pairs(of) for of in texts())
    models = Models(target(), None, (), folder, draft())  # type: ignore[arg-type]  # no tokenizer is used
    chosen = Settings(
        preverifier=PreverifierSettings(gamma_max=GAMMA, width=16), labels=LabelSettings(gamma=GAMMA),
        trainer=TrainerSettings(precision="fp32", tokens_per_batch=256, epochs=1, patience=0, **settings), logger=QUIET,
    )  # fmt: skip
    return train_preverifier(models, learn, check, chosen, folder, command="train it"), models


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Models]:
    return run_preverifier(tmp_path_factory.mktemp("preverifier"))


def test_a_loaded_preverifier_scores_what_it_scored(saved: tuple[Path, Models]) -> None:
    """T90: the very validation that the checkpoint reports, from the loaded tensors alone."""
    folder, models = saved
    module, config = load_preverifier(folder, models.target, draft())
    assert not module.training and not any(p.requires_grad for p in module.parameters())
    held_out = pairs(texts()[1])
    scores = RoundScores(GAMMA)
    for rows in packed_batches(held_out, 256, seed=0):
        batch = pack([[held_out[i] for i in row] for row in rows], "survival")
        scores.add(batch, packed_logits(module, batch).sigmoid())
    rule, paced, gamma, window, best = scores.rounds(CostSettings())
    assert rule == config["tuned"]
    figures = config["validation"]
    found = (paced.speedup, paced.accepted, gamma, window.speedup, best.speedup)
    names = ("sim_speedup", "sim_accepted_length", "sim_fixed_gamma", "sim_fixed_speedup", "sim_oracle_speedup")
    assert found == pytest.approx([figures[f"val/{name}"] for name in names])
    assert {"val/loss", "val/auc", "val/ece", "val/accuracy_01", f"val/accuracy_{GAMMA:02}"} <= figures.keys()
    kept = torch.load(folder.parent / "best.ckpt", weights_only=True)["state_dict"]
    assert kept.keys() == {f"module.{name}" for name, _ in module.named_parameters()}  # K99
    for name, value in module.named_parameters():
        assert torch.equal(kept[f"module.{name}"], value)


def test_checkpoints_hold_trained_tensors_alone(saved: tuple[Path, Models], tmp_path: Path) -> None:
    """K99: nothing of the frozen models, but what identifies them."""
    folder, _ = saved
    tensors = load_file(folder / "model.safetensors")
    module = Preverifier(draft(), PreverifierSettings(gamma_max=GAMMA, width=16))
    assert tensors.keys() == dict(module.named_parameters()).keys()
    one_layer = sum(value.numel() for value in draft().decoder.layers[0].parameters())
    assert sum(value.numel() for value in tensors.values()) < one_layer  # nothing of the draft is in it
    config = json.loads((folder / "config.json").read_text())
    assert config["target"]["num_hidden_layers"] == 3
    assert config["draft"]["fingerprint"] != config["target"]["fingerprint"]
    learn, check = texts()
    trainer = TrainerSettings(precision="fp32", tokens_per_batch=200, epochs=1, patience=0, monitor="val/agreement")
    layers = DraftSettings(layers=[0, 2], head_size=50)
    made = train_draft(target(), learn, check, layers, trainer, QUIET, tmp_path, always=[96], command="")
    tensors = load_file(made / "model.safetensors")
    assert all(
        name.startswith(("layers.", "norm.", "projection.", "copying.")) or name == "head_ids" for name in tensors
    )
    assert len(tensors["head_ids"]) == 50 and 96 in tensors["head_ids"]
    frozen = torch.load(tmp_path / "best.ckpt", weights_only=True)["state_dict"]
    assert {f"draft.{name}" for name in tensors if name != "head_ids"} == frozen.keys()
    loaded = load_draft(made, target())
    for name, value in loaded.named_parameters():
        assert torch.equal(value, frozen[f"draft.{name}"].bfloat16().float())
    states = torch.randn(3, 32)
    merged = load_draft(made, target()).merged()
    torch.testing.assert_close(merged.readout(states), loaded.logits(states), atol=1e-4, rtol=1e-4)
    whole = load_draft(made, target()).merged(full=True, target=target())
    ids = tensors["head_ids"].long()
    torch.testing.assert_close(whole.readout(states)[:, ids], merged.readout(states), atol=1e-4, rtol=1e-4)


def test_tensors_that_do_not_fit_are_named(saved: tuple[Path, Models], tmp_path: Path) -> None:
    """T90: a missing, an unexpected, a misshapen tensor."""
    folder, models = saved
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    less = {name: value for name, value in tensors.items() if name != "out.weight"}
    for changed, what in (
        (less, r"'missing': \['out.weight'\]"),
        ({**tensors, "more": torch.zeros(1)}, r"'unexpected': \['more'\]"),
        ({**tensors, "out.weight": torch.zeros(1, 3)}, r"'wrong shape': \['out.weight'\]"),
    ):
        save_checkpoint(tmp_path / "changed", changed, config, "")
        with pytest.raises(MismatchError, match=what):
            load_preverifier(tmp_path / "changed", models.target, draft())
    save_file(less, tmp_path / "changed" / "model.safetensors")
    with pytest.raises(MismatchError, match="of another kind"):
        load_draft(tmp_path / "changed", target())


def test_a_part_refuses_models_it_was_not_trained_for(saved: tuple[Path, Models]) -> None:
    """V60: layers, width, vocabulary, and weights of the same shape."""
    folder, models = saved
    for other, what in (
        (tiny_stack(layers=4), "num_hidden_layers is 4 here: 3"),
        (tiny_stack(vocab=101), "vocab_size is 101 here: 97"),
        (tiny_stack(hidden_size=48), "hidden_size is 48 here: 32"),
        (tiny_stack("qwen3"), "model_type is 'qwen3' here: 'llama'"),
        (tiny_stack(seed=1), "fingerprint is"),
    ):
        with pytest.raises(MismatchError, match=rf"\(target\) belongs to another model: {what}"):
            load_preverifier(folder, other, draft())
    with pytest.raises(MismatchError, match=r"\(draft\) belongs to another model: fingerprint"):
        load_preverifier(folder, models.target, Stack(near(tiny_model(), seed=8)))


def test_lengths_of_labels_and_judgement_must_agree(tmp_path: Path) -> None:
    learn, check = (pairs(of) for of in texts())
    models = Models(target(), None, (), tmp_path, draft())  # type: ignore[arg-type]  # no tokenizer is used
    settings = Settings(preverifier=PreverifierSettings(gamma_max=3), labels=LabelSettings(gamma=GAMMA))
    with pytest.raises(ConfigError, match=r"labels\.gamma and preverifier\.gamma_max differ: 4; allowed: 3"):
        train_preverifier(models, learn, check, settings, tmp_path, command="")


def test_a_batch_without_supervised_tokens_is_named() -> None:
    """T84 for drafts: none of the text's ids is in the head."""
    module, _, _ = part("draft", TrainerSettings())
    nothing = torch.full((97,), IGNORE)
    batch = collate_texts([Text("odd", "t", [1, 2], [3], True)], nothing, 0.15)
    with pytest.raises(PacerError, match="a batch without supervised tokens: 'odd'"):
        module.training_step(batch, 0)
    with pytest.raises(PacerError, match="a text without supervised tokens: 'empty'"):
        collate_texts([Text("empty", "t", [1, 2], [], True)], nothing, 0.15)


def test_labels_and_weights_of_a_draft_batch() -> None:
    head_of = torch.full((10,), IGNORE)
    head_of[[2, 5, 7]] = torch.arange(3)
    batch = collate_texts([Text("a", "x", [1, 2, 5], [7, 3], True), Text("b", "y", [5], [2], True)], head_of, 0.15)
    assert batch["ids"].tolist() == [[1, 2, 5, 7, 3], [5, 2, 0, 0, 0]]
    ignored = IGNORE
    assert batch["labels"].tolist() == [[0, 1, 2, ignored, ignored], [0, *[ignored] * 4]]
    wanted = torch.tensor([[0.15, 0.15, 1, 1, 0], [1, 0, 0, 0, 0]])
    torch.testing.assert_close(batch["weights"], wanted)
    assert (batch["tasks"], batch["names"]) == (["x", "y"], ["a", "b"])


def test_round_scores_are_the_rounds(saved: tuple[Path, Models]) -> None:
    """Tables gathered from packed batches, place by place; and T82: their acceptance is the decoder's."""
    stops = (35, 51, 75)
    settings = LabelSettings(starts="rounds", gamma=GAMMA)
    everyone = written(10, new=90, stop_ids=stops)
    found = [(t, r) for t in everyone if (r := simulate(draft(), t, settings, stops)) is not None]
    cut = written(10)[1]
    unsettled = [(cut, rounds_at(cut, [1, len(cut.output_ids) - 2], GAMMA, by=target()))]  # one of the two
    module = make_preverifier(draft(), gamma_max=GAMMA)
    for label in ("survival", "conditional"):
        gathered = RoundScores(GAMMA)
        order = []
        everything = [*found, *unsettled]
        for rows in packed_batches(everything, 200, seed=3):
            batch = pack([[everything[i] for i in row] for row in rows], label)
            gathered.add(batch, packed_logits(module, batch).sigmoid())
            order += [i for row in rows for i in row]
        scores, labels, used = gathered.tables()
        rounds = [everything[i][1] for i in order]
        place = np.arange(GAMMA)
        counts, accepted, known, starts = (
            torch.cat([getattr(r, name) for r in rounds]).numpy() for name in ("counts", "accepted", "known", "starts")
        )
        assert scores.shape == (len(starts), GAMMA)
        assert ((scores > 0) == (place < counts[:, None])).all()
        assert (labels == (place < accepted[:, None])).all()
        assert (used == torch.cat([r.labels(label)[1] for r in rounds]).numpy()).all()
        costs = CostSettings()
        settled = (accepted < known) | (counts <= known)
        assert 1 <= (~settled).sum() < 4
        rule, paced, gamma, window, best = gathered.rounds(costs)
        kept = [x[settled] for x in (scores, counts, accepted)]
        lengths, calls = blockwise(kept[0], kept[1], int(rule["b"]), rule["t0"], rule["rho"], GAMMA)
        assert paced == outcome(lengths, calls, kept[2], costs)
        assert (gamma, window) == best_fixed(kept[2], kept[1], costs, GAMMA)
        assert best == oracle(kept[2], costs)
    results = generate(make_decoder(target(), draft(), Fixed(GAMMA)), requests(10, 90, stops), 4)
    simulated = sum(int(r.accepted.sum()) for _, r in found) / sum(int(r.counts.sum()) for _, r in found)
    lines = [line for result in results for line in result.rounds]
    real = sum(line["accepted"][0] for line in lines) / sum(len(line["drafted"]) for line in lines)
    assert simulated == pytest.approx(real, abs=0.01)


VERB = """
import sys, time
from pathlib import Path
sys.path[:0] = {paths!r}
from test_training import Script, QUIET, SCORES
from pacer.app import verb
from pacer.data.batching import Loader
from pacer.settings import TrainerSettings
from pacer.training.fit import fit

DELAY = float(sys.argv[1])

class Slow(Script):
    def training_step(self, batch, index):
        print("batch", index, flush=True)
        time.sleep(DELAY)
        return super().training_step(batch, index)

@verb
def main(settings):
    "Trains slowly."
    trainer = TrainerSettings(
        monitor="val/score", precision="fp32", val_every=3, checkpoint_every=100, patience=0, clip=0.0
    )
    module = Slow(SCORES)
    print(fit(module, Loader(list(range(9)), int), Loader([0, 1], int), trainer, QUIET, Path({folder!r})), module.seen)

main([])
"""


def test_sigterm_ends_a_process_with_a_requeue_code(tmp_path: Path) -> None:
    """K101: exit code 75, the state of the current step on disk, and the same command goes on from it."""
    here = Path(__file__)
    program = tmp_path / "slowly.py"
    folder = tmp_path / "out"
    program.write_text(VERB.format(paths=[str(here.parent), str(here.parent.parent)], folder=str(folder)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    first = subprocess.Popen([sys.executable, str(program), "0.2"], **pipes)
    assert first.stdout is not None
    for line in first.stdout:
        if line.strip() == "batch 4":
            first.send_signal(signal.SIGTERM)
            break
    rest, errors = first.communicate(timeout=120)
    assert first.returncode == 75, errors
    assert "the same command resumes" in errors and "batch 5" not in rest
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 5
    second = subprocess.run([sys.executable, str(program), "0"], timeout=120, **pipes)
    assert second.returncode == 0, second.stderr
    _, figures = scripted(tmp_path / "whole", SCORES, checkpoint_every=100)
    assert "batch 5" in second.stdout and "batch 4" not in second.stdout and str(figures) in second.stdout
