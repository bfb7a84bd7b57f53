"""A training whose every moment is known: what it saw, when it validated, and kills in between."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from pacer.data.batching import Loader
from pacer.settings import LoggerSettings, TrainerSettings
from pacer.training.fit import fit

QUIET = LoggerSettings(csv=False)
SCORES = [0, 1, 6, 5, 9, 2, 8, 3, 7, 4]  # the best of validations 3, 6, 9 is at 6; without it at 3
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
