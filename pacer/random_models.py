"""The models of a run with random weights in the shapes of real ones: nothing is fetched or trained, all is timed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from pacer.assemble import Models
from pacer.errors import ConfigError
from pacer.models.exits import shared_exits
from pacer.models.preverifier import NARROW, Preverifier
from pacer.models.shapes import config_of, random_model
from pacer.models.sizes import draft_skeleton
from pacer.models.sources import pick_device
from pacer.models.stack import Stack
from pacer.settings import ModelSettings, Settings, SourceSettings


def random_models(settings: Settings, *, drafts: bool = True) -> Models:
    """Target, draft, pre-verifier and shared exits of these settings; shapes divided by ``profile.scale``.

    They have no tokenizer: they decode ids. All are on ``model.device``, whatever ``model.device_map`` says.

    Args:
        drafts: also a draft model and its pre-verifier.

    Raises:
        SourceError: a model whose shape is not known. ConfigError: more than the device holds, or no draft is named.
    """
    model = settings.model
    target = _stack(model, model.target, model.dtype, settings)
    models = Models(target, cast(Any, None), (), Path(), block=model.block, prepack=model.prepack)
    whole = config_of(model.target, settings.paths.cache_folder).num_hidden_layers
    models.exit_layers = scaled_exits(model.exits.layers, whole, target.n_layers)
    exits = shared_exits(target, models.exit_layers) if models.exit_layers else {}
    models.exits = {("shared", layer): head for layer, head in exits.items()}
    if not drafts:
        return models.pack()
    if model.draft.kind == "model":
        if model.draft.source is None:
            raise ConfigError("model.draft.source is not set", allowed="a hub id or a folder with a config.json")
        source = SourceSettings(id=model.draft.source)
        models.draft = _stack(model, source, model.draft.dtype or model.dtype, settings)
    else:
        models.draft = draft_skeleton(target, model.draft).merged()
    module = Preverifier(models.draft, settings.preverifier)
    narrow = target.device.type == "cpu" and module.width <= NARROW  # as one that is loaded
    models.preverifier = module.to(torch.float32 if narrow else models.draft.dtype).eval().requires_grad_(False)
    return models.pack()


def _stack(model: ModelSettings, source: SourceSettings, dtype: str, settings: Settings) -> Stack:
    config = config_of(source, settings.paths.cache_folder, settings.profile.scale)
    return Stack(random_model(config, dtype, pick_device(model.device)))


def scaled_exits(layers: Sequence[int], whole: int, there: int) -> list[int]:
    """Exits of a model of ``whole`` layers, at the same shares of the depth of one of ``there``; all different."""
    found: list[int] = []
    for layer in layers:
        found.append(max(round(layer * there / whole), found[-1] + 1 if found else 1))
    return [layer for layer in found if layer < there]
