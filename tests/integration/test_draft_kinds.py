"""Drafts that are the target with layers left out, in another dtype than the target: exact, and as good as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pacer.assemble import Models, load_draft_model, load_target
from pacer.decoding.build import speculative
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request
from pacer.errors import PacerError
from pacer.settings import DraftSettings, ModelSettings, SamplingSettings, SourceSettings
from tests.folders import tiny_folder

PROMPT = [3, 40, 41, 42, 7, 9]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSettings, Models]:
    folder = tiny_folder(tmp_path_factory.mktemp("target"))
    draft = DraftSettings(kind="skip", layers=[0, 1, 2])
    model = ModelSettings(name="tiny", target=SourceSettings(str(folder)), draft=draft, dtype="float32", device="cpu")
    return model, load_target(model, folder)


def decoded(models: Models, model: ModelSettings, layers: list[int], dtype: str | None) -> tuple[list[int], list[int]]:
    """Greedy ids, and the accepted drafts of each round of three."""
    settings = replace(model, draft=replace(model.draft, layers=layers, dtype=dtype))
    draft = load_draft_model(settings, models, Path())
    assert draft.dtype == getattr(torch, dtype or "float32")
    assert draft.n_layers == len(layers)
    drafter = ModelDrafter(draft, models.target.vocab_size, SamplingSettings())
    decoder = speculative(models.target, drafter, Fixed(3), SamplingSettings())
    result = decoder.generate([Request("a", PROMPT, 21, frozenset())])[0]
    rounds: list[Any] = list(result.rounds)
    return result.ids, [line["accepted"][0] for line in rounds if len(line["drafted"]) == 3]


def test_with_no_layer_left_out_everything_is_accepted(pair: tuple[ModelSettings, Models]) -> None:
    model, models = pair
    plain = Decoder(models.target).generate([Request("a", PROMPT, 21, frozenset())])[0].ids
    ids, accepted = decoded(models, model, [0, 1, 2], None)
    assert ids == plain
    assert accepted
    assert set(accepted) == {3}


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_with_layers_left_out_the_output_is_the_targets(pair: tuple[ModelSettings, Models], dtype: str | None) -> None:
    model, models = pair
    before = models.target.embedding.weight.clone()
    plain = Decoder(models.target).generate([Request("a", PROMPT, 21, frozenset())])[0].ids
    assert decoded(models, model, [0, 2], dtype)[0] == plain
    assert models.target.dtype == torch.float32  # a draft in another dtype has weights of its own
    assert torch.equal(models.target.embedding.weight, before)


def test_layers_the_target_lacks_are_refused(pair: tuple[ModelSettings, Models]) -> None:
    model, models = pair
    with pytest.raises(PacerError, match="no such target layers"):
        decoded(models, model, [0, 7], None)
