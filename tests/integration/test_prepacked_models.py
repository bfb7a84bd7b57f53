"""Whole models on packed weights: same output in every family, everything that decodes is packed, or nothing at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from pacer.assemble import Models, load_draft_model, load_target
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.decoding.request import Request
from pacer.models import prepacked
from pacer.models.exits import shared_exits
from pacer.models.prepacked import PackedLinear, packable, prepack
from pacer.models.stack import FAMILIES, Stack
from pacer.settings import DraftSettings, ModelSettings, SourceSettings
from tests.folders import tiny_folder
from tests.tiny import hf_generate, make_decoder, make_preverifier, near, prompts, tiny_model

NEW, PROMPTS = 16, prompts([5, 14, 8, 1])
pytestmark = pytest.mark.skipif(not packable(nn.Linear(256, 256)), reason="no kernels for packed weights here")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked, "LEAST", 1)


def plain(module: nn.Module) -> list[str]:
    """Names of the linear layers that are not packed."""
    return [name for name, child in module.named_modules() if type(child) is nn.Linear]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_greedy_output_is_that_of_plain_weights(family: str) -> None:
    requests = [Request(f"r{i}", prompt, NEW) for i, prompt in enumerate(PROMPTS)]
    wanted = [hf_generate(tiny_model(family), prompt, NEW) for prompt in PROMPTS]
    target, draft = tiny_model(family), near(tiny_model(family))
    stacks = Stack(target), Stack(draft)
    judge = make_preverifier(stacks[1])
    assert prepack([target, draft, judge]) > 0 and not plain(target) and not plain(judge)
    rule = PreverifierRule(judge, b=2, t0=0.4, gamma_max=6)
    for decoder in (make_decoder(stacks[0]), make_decoder(*stacks, Fixed(3)), make_decoder(*stacks, rule)):
        assert [result.ids for result in decoder.generate(requests)] == wanted
    assert [hf_generate(target, prompt, NEW) for prompt in PROMPTS] == wanted, "transformers' loop reads them too"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    folder = tiny_folder(tmp_path_factory.mktemp("target"))
    draft = DraftSettings(kind="skip", layers=[0, 1])
    return ModelSettings("tiny", SourceSettings(str(folder)), draft, dtype="float32", device="cpu")


def built(model: ModelSettings) -> Models:
    models = load_target(model, Path())
    models.draft = load_draft_model(model, models, Path())
    models.exits = {("shared", 1): shared_exits(models.target, [1])[1]}
    return models.pack()


def test_all_that_decodes_is_packed_or_nothing(model: ModelSettings) -> None:
    models = built(model)
    assert models.draft is not None
    parts = [models.target.model, models.draft.model, models.exits["shared", 1]]
    assert not any(plain(part) for part in parts)
    assert isinstance(models.target.head, PackedLinear) and isinstance(models.draft.head, PackedLinear)
    left = built(replace(model, prepack=False))
    assert left.draft is not None
    for part in (left.target.model, left.draft.model):
        assert not any(isinstance(child, PackedLinear) for child in part.modules())


def test_a_quantised_draft_of_a_packed_target(model: ModelSettings) -> None:
    models = load_target(model, Path())
    narrow = replace(model, draft=replace(model.draft, quantise="int4", dtype="bfloat16"))
    draft = load_draft_model(narrow, models, Path())
    assert any(type(child).__name__ == "Int4Linear" for child in draft.model.modules())
