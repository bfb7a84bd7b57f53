"""What trainings of exits share in tests: texts, a trainer, a module, a kill at a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pacer.data.corpus import Text
from pacer.models.exits import make_exits
from pacer.settings import LayerSkipSettings, TrainerSettings
from pacer.training.exits import ExitModule
from tests.scripted import Killed
from tests.texts import target, written
from tests.tiny import VOCAB

IDS = torch.arange(0, VOCAB, 2)
K = 5
RECIPE = LayerSkipSettings(p_max=0.2, exit_scale=0.5, rotation=2)


def texts(count: int = 24) -> tuple[tuple[Text, ...], tuple[Text, ...]]:
    """To learn from, and held out."""
    return written(count, new=20), written(8, new=20, seed=9)


def trainer(**changes: Any) -> TrainerSettings:
    values = {"precision": "fp32", "tokens_per_batch": 200, "epochs": 1, "patience": 0, "monitor": "val/agree"}
    return TrainerSettings(
        **{"part": "exits", "teacher_top_k": K, "kl_weight": 0.5, "val_every": 5, **values, **changes}
    )


def silent(module: Any) -> Any:
    module.log = lambda *_, **__: None  # no Trainer is attached
    return module


def make_module(
    ids: Tensor | None = IDS, kind: str = "norm", weights: tuple[float, ...] = (), **changes: Any
) -> ExitModule:
    heads = make_exits(target(), kind, [1, 2], ids, dtype=torch.float32)
    return silent(ExitModule(target(), heads, trainer(**changes), 1, weights))


def killed_at(step: int, module: type, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.training_step  # type: ignore[attr-defined]  # of a Lightning module

    def training_step(self: Any, batch: Any, index: int) -> Tensor:
        if index == step:
            raise Killed
        return real(self, batch, index)

    monkeypatch.setattr(module, "training_step", training_step)
