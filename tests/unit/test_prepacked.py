"""Packed weights are a copy that nobody notices: the same answers, and all who hold a layer go on holding it."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pacer.models import prepacked
from pacer.models.prepacked import PackedLinear, packable, prepack

SIZES = st.integers(1, 70)
pytestmark = pytest.mark.skipif(not packable(nn.Linear(256, 256)), reason="no kernels for packed weights here")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked, "LEAST", 1)


def packed(layer: nn.Linear) -> nn.Linear:
    assert prepack([layer]) == 1 and isinstance(layer, PackedLinear)
    return layer


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 20), inputs=SIZES, outputs=SIZES, bias=st.booleans(), seed=st.integers(0, 99))
def test_the_same_answers(rows: int, inputs: int, outputs: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias)
    x = torch.randn(outputs, rows, 2, inputs).transpose(1, 2)  # lies otherwise in memory
    with torch.no_grad():
        wanted = layer.double()(x.double())
        layer = packed(layer.float())
        assert layer._packed is None
        found = layer(x)
    assert layer._packed is not None and found.shape == wanted.shape and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17])
def test_in_bfloat16(rows: int) -> None:
    layer = nn.Linear(96, 80, bias=False).bfloat16()
    if not packable(layer):
        pytest.skip("no bfloat16 kernels here")
    x = torch.randn(rows, 96).bfloat16()
    with torch.inference_mode():
        wanted = x.double() @ layer.weight.double().T
        found = packed(layer)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=2**-7, atol=1e-3)


def test_it_follows_whoever_writes_to_the_weight() -> None:
    layer, x = packed(nn.Linear(32, 16)), torch.randn(3, 32)

    def holds() -> bool:
        with torch.no_grad():
            return torch.allclose(layer(x), nn.functional.linear(x, layer.weight, layer.bias), atol=1e-6)

    assert holds()
    optimiser = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(x).square().sum().backward()
    optimiser.step()
    assert holds()
    layer.load_state_dict(nn.Linear(32, 16).state_dict())
    assert holds()
    layer.weight = nn.Parameter(torch.randn(16, 32))
    assert holds()


def test_gradients_are_a_plain_layers() -> None:
    plain = nn.Linear(32, 16)
    own, x = packed(copy.deepcopy(plain)), torch.randn(4, 32)
    for layer in (plain, own):
        layer(x).square().sum().backward()
    assert torch.equal(plain.weight.grad, own.weight.grad)  # type: ignore[arg-type]  # backward has made both


@pytest.mark.parametrize("again", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_pack_anew(again: Callable[[Any], Any]) -> None:
    layer, x = packed(nn.Linear(32, 16)), torch.randn(4, 32)
    with torch.inference_mode():
        wanted = layer(x)
        other = again(layer)
        assert other._packed is None and torch.equal(other(x), wanted)


def test_all_who_hold_a_layer_go_on_holding_it() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 8))
    held, names, weights = model[2], list(model.state_dict()), [id(p) for p in model.parameters()]
    assert prepack([model]) == 2 and prepack([model, model[0]]) == 0
    assert model[2] is held and isinstance(held, PackedLinear)
    assert list(model.state_dict()) == names and [id(p) for p in model.parameters()] == weights


def test_what_is_not_packed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(prepacked, "LEAST", 1000)
    half, nowhere = nn.Linear(64, 64).half(), nn.Linear(64, 64, device="meta")
    assert prepack([nn.Linear(31, 32), half, nowhere, nn.Embedding(64, 64)]) == 0
    layer = nn.Linear(64, 64)
    monkeypatch.setattr(prepacked, "_free_memory", lambda: 2 * 4 * 65 * 64 - 1)
    with caplog.at_level(logging.WARNING):
        assert prepack([layer]) == 0 and type(layer) is nn.Linear
    assert "not packed" in caplog.text
    monkeypatch.setattr(prepacked, "_free_memory", lambda: 2 * 4 * 65 * 64)
    assert prepack([layer]) == 1


def test_autocast_is_left_to_torch() -> None:
    layer, x = packed(nn.Linear(32, 16)), torch.randn(4, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16 and layer._packed is None
