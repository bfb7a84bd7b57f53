"""Shapes of the papers' models: complete, as large as published, and scaled down to what can be built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from pacer.command.app import load_settings
from pacer.errors import SourceError
from pacer.models.shapes import LEAST_LAYERS, ModelShape, config_of, known_shapes, random_model, shape_of
from pacer.models.sizes import skeleton, tensors
from pacer.random_models import random_models, scaled_exits
from pacer.resources import resource
from pacer.settings import SourceSettings

SHAPES = {id: shape for id, (shape, _) in known_shapes().items()}


def test_every_hub_model_has_one() -> None:
    found = set()
    for file in (resource("conf") / "model").glob("*.yaml"):
        if file.stem != "local" and not file.stem.startswith("smollm2"):
            model = OmegaConf.load(file)
            found |= {model.target.id, *([model.draft.source] if "draft" in model else [])}
    assert found == set(SHAPES)


@pytest.mark.parametrize("id", SHAPES)
def test_numbers_add_up_to_the_published_size(id: str) -> None:
    shape, billions = known_shapes()[id]
    count = sum(weight.numel() for weight in tensors([skeleton(shape.config(), "bfloat16").model]))
    assert count / 1e9 == pytest.approx(billions, rel=5e-3)
    assert shape_of(shape.config()) in (shape, replace(shape, head=shape.head_size))


@given(st.sampled_from(sorted(SHAPES)), st.integers(1, 128))
def test_scaled_down(id: str, factor: int) -> None:
    whole, small = SHAPES[id], SHAPES[id].scaled(factor)
    assert small.heads % small.kv_heads == 0 and small.width == small.heads * small.head_size
    assert small.head_size == whole.head_size and small.layers >= LEAST_LAYERS
    assert small.heads <= max(whole.heads / factor * 1.5, small.kv_heads)
    assert (small == whole) == (factor == 1)


@given(st.integers(2, 80), st.integers(4, 80), st.data())
def test_exits_of_a_shallower_model(whole: int, there: int, data: st.DataObject) -> None:
    layers = sorted(data.draw(st.sets(st.integers(1, whole - 1), min_size=1, max_size=3)))
    found = scaled_exits(layers, whole, there)
    assert found == sorted(set(found)) and all(0 < layer < there for layer in found)
    assert scaled_exits(layers, whole, whole) == layers


def test_random_weights_are_a_seeds_and_leave_other_draws_alone() -> None:
    config = ModelShape("llama", 16, 2, 2, 1, 24, 64).config()
    before = torch.random.get_rng_state()
    one, other, third = (random_model(config, "bfloat16", torch.device("cpu"), seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [next(model.parameters()) for model in (one, other, third)]
    assert weights[0].dtype == torch.bfloat16 and not weights[0].requires_grad
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("name", ["qwen25_05b_7b", "opt_7b", "layerskip_codellama_34b"])
def test_the_models_of_a_run(name: str) -> None:
    settings = load_settings(["+experiment=pacer/hub", f"model={name}", "profile.weights=random", "profile.scale=64"])
    models = random_models(settings)
    assert models.draft is not None and models.preverifier is not None
    assert models.draft.dtype == models.target.dtype == torch.bfloat16
    exits = settings.model.exits.layers
    assert list(models.exit_layers) == ([1, 2] if exits else []) and len(models.exits) == len(models.exit_layers)


def test_an_unknown_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pacer.models.shapes.read_config", lambda *_: "unknown offline")
    with pytest.raises(SourceError, match=r"not known .unknown offline.*config\.json"):
        config_of(SourceSettings(id="no/such"), tmp_path)
    monkeypatch.setattr("pacer.models.shapes.read_config", lambda *_: SHAPES["facebook/opt-6.7b"].config())
    assert config_of(SourceSettings(id="no/such"), tmp_path, 16).hidden_size == 256
