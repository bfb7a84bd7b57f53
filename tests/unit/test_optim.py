"""Warm-up and cosine by optimiser step, and which parameters decay or learn slowly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pacer.settings import TrainerSettings
from pacer.training.optim import adamw, warmup_cosine


def test_values() -> None:
    factors = [warmup_cosine(step, 10, 4) for step in range(11)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[5:] == pytest.approx([0.5 * (1 + math.cos(math.pi * i / 6)) for i in range(1, 7)])
    assert factors[7] == pytest.approx(0.5) and factors[10] == pytest.approx(0.0)
    assert warmup_cosine(25, 10, 4) == pytest.approx(0.0)  # never below its end, never up again
    assert warmup_cosine(10, 10, 4, floor=0.1) == pytest.approx(0.1)
    assert warmup_cosine(0, 1, 1) == 1.0


@settings(deadline=None)
@given(st.integers(1, 300), st.floats(0, 1))
def test_shape(total: int, share: float) -> None:
    warmup = max(1, round(share * total))
    factors = [warmup_cosine(step, total, warmup) for step in range(total)]
    assert all(0 < factor <= 1 for factor in factors)
    peak = min(warmup, total) - 1
    assert factors[peak] == 1.0
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)


def test_groups_and_rates() -> None:
    square = nn.Linear(2, 2, bias=False)
    model = nn.ModuleDict(
        {"layer": nn.Linear(3, 2), "norm": nn.LayerNorm(2), "projection": square, "frozen": nn.Linear(2, 2)}
    )
    model["frozen"].requires_grad_(False)
    chosen = TrainerSettings(lr=0.1, weight_decay=0.3, betas=[0.8, 0.9], warmup=0.2)
    found = adamw(model.named_parameters(), chosen, total=10, slow=("projection",))
    optimizer = found["optimizer"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {
        (group["initial_lr"], group["weight_decay"]): sorted(names[id(p)] for p in group["params"])
        for group in optimizer.param_groups
    }
    assert groups == {
        (0.1, 0.3): ["layer.weight"],
        (0.1, 0.0): ["layer.bias", "norm.bias", "norm.weight"],
        (0.025, 0.3): ["projection.weight"],
    }
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
    assert found["lr_scheduler"]["interval"] == "step"
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        found["lr_scheduler"]["scheduler"].step()
    assert rates == pytest.approx([0.1 * warmup_cosine(step, 10, 2) for step in range(10)])


def test_without_a_slow_part() -> None:
    groups = adamw(nn.Linear(2, 2).named_parameters(), TrainerSettings(lr=0.5), total=1)["optimizer"].param_groups
    assert {group["initial_lr"] for group in groups} == {0.5}
    assert torch.equal(torch.tensor([group["lr"] for group in groups]), torch.tensor([0.5, 0.5]))
