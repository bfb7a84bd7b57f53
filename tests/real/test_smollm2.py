"""The real model and the packaged draft: exact output, a draft worth its name, labels that decoding confirms."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from pacer.assemble import Models, checkpoint_folder, load_draft_model, load_target, make_decoder
from pacer.command.app import load_settings
from pacer.data.corpus import Text
from pacer.data.labels import simulate
from pacer.data.prompts import encode, load_prompts
from pacer.decoding.request import Request
from pacer.methods.arms import method_settings
from pacer.models.feature import load_feature
from pacer.models.feature_stack import FeatureStack
from pacer.models.preverifier import Preverifier
from pacer.settings import LabelSettings, PreverifierSettings, SamplingSettings

TOKENS = 24
GREEDY = SamplingSettings()


@cache
def _models(folder: Path) -> Models:
    """SmolLM2 in float32 with the packaged draft and a pre-verifier that knows nothing: exactness needs no training."""
    settings = load_settings(["+experiment=pacer/demo"]).model
    target = replace(settings.target, id=str(folder), file=None, sha256=None)
    settings = replace(settings, dtype="float32", target=target)
    models = load_target(settings, Path("unused"))
    models.draft = load_draft_model(settings, models, Path("unused"))
    models.feature = FeatureStack(load_feature(checkpoint_folder(str(settings.feature.source)), models.target))
    torch.manual_seed(0)
    models.preverifier = Preverifier(models.draft, PreverifierSettings(gamma_max=8)).eval().requires_grad_(False)
    return models


def _requests(models: Models) -> list[Request]:
    names = ("gsm8k", "humaneval", "xsum", "mt_bench")
    prompts = [load_prompts(name, split="test", limit=1).items[0] for name in names]
    return [Request(p.id, encode(p, models.tokenizer), TOKENS, frozenset(models.stop_ids)) for p in prompts]


@cache
def _reference(folder: Path) -> dict[str, list[int]]:
    models = _models(folder)
    outputs = {}
    for request in _requests(models):
        ids = torch.tensor([list(request.prompt_ids)])
        out = models.target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=2
        )
        outputs[request.id] = out[0, ids.shape[1] :].tolist()
    return outputs


@pytest.mark.parametrize("arm", ["ar", "sd gamma=4", "pacer b=2 t0=0.3 rho=1.1", "feature gamma=3"])
def test_greedy_output_is_the_models_own(smollm2: Path, arm: str) -> None:
    models = _models(smollm2)
    results = make_decoder(method_settings(arm), models, GREEDY).generate(_requests(models))
    assert {r.request.id: r.ids for r in results} == _reference(smollm2)


@pytest.mark.parametrize("arm", ["sd gamma=2", "feature gamma=2"])
def test_the_packaged_draft_agrees_with_the_model(smollm2: Path, arm: str) -> None:
    models = _models(smollm2)
    assert models.draft is not None and models.draft.n_layers < models.target.n_layers
    results = make_decoder(method_settings(arm), models, GREEDY).generate(_requests(models))
    lines = [line for result in results for line in result.rounds[1:]]
    first = [bool(line["accepted"][0]) for line in lines if line["drafted"]]  # type: ignore[index]
    assert sum(first) / len(first) > 0.15, "the first drafted token of a round; a random draft has 0.0"


def test_simulated_rounds_are_what_decoding_does(smollm2: Path) -> None:
    models = _models(smollm2)
    assert models.draft is not None
    for request in _requests(models)[:2]:
        output = _reference(smollm2)[request.id]
        text = Text(request.id, "any", list(request.prompt_ids), output, output[-1] not in models.stop_ids)
        rounds = simulate(models.draft, text, LabelSettings(starts="rounds", gamma=4), models.stop_ids)
        result = make_decoder(method_settings("sd gamma=4"), models, GREEDY).generate([request])[0]
        assert rounds is not None
        lines = [line for line in result.rounds[1:] if line["drafted"]]
        for start, tokens, accepted, line in zip(rounds.starts, rounds.tokens, rounds.accepted, lines, strict=False):
            drafted = line["drafted"]
            assert isinstance(drafted, list)
            assert line["committed"] == int(start) and drafted == tokens[: len(drafted)].tolist()
            assert line["accepted"] == [min(int(accepted), len(drafted))]


@pytest.mark.parametrize("name", ["smollm2-copy2", "smollm2-copy4", "smollm2-feature"])
def test_the_packaged_checkpoint_is_small_and_has_a_card(smollm2: Path, name: str) -> None:
    folder = checkpoint_folder(f"packaged:{name}")
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 30e6
    assert "Made by" in (folder / "README.md").read_text()
