"""AdamW with linear warm-up and cosine decay, by optimiser step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pacer.settings import TrainerSettings


def warmup_cosine(step: int, total: int, warmup: int, floor: float = 0.0) -> float:
    """Learning-rate factor of optimiser step ``step`` (from 0) of ``total``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def adamw(
    parameters: Iterable[tuple[str, nn.Parameter]], settings: TrainerSettings, total: int, slow: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Optimiser and per-step schedule in Lightning's form.

    Args:
        total: optimiser steps. slow: names (prefixes) trained at a quarter of the rate.

    Matrices decay, vectors (norms, biases) do not.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault((name.startswith(slow) if slow else False, parameter.ndim > 1), []).append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {
                "params": members,
                "lr": settings.lr * (0.25 if is_slow else 1.0),
                "weight_decay": settings.weight_decay if decays else 0.0,
            }
            for (is_slow, decays), members in groups.items()
        ],
        betas=(settings.betas[0], settings.betas[1]),
    )
    warmup = max(1, round(settings.warmup * total))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, total, warmup))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
