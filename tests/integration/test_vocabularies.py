"""Pairs whose vocabularies differ in size, added tokens, swapped tokens: exact, exact, refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from pacer.assemble import Models, load_draft_model, load_target, make_decoder
from pacer.data.prompts import encode
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.request import Request
from pacer.errors import MismatchError
from pacer.methods.arms import method_settings
from pacer.models.stack import Stack
from pacer.settings import (
    CorpusSettings,
    DraftSettings,
    LabelSettings,
    LoggerSettings,
    ModelSettings,
    PathSettings,
    PreverifierSettings,
    SamplingSettings,
    Settings,
    SourceSettings,
    TrainerSettings,
)
from pacer.stages import texts as text_stages
from pacer.stages.build import build
from tests.tiny import hf_generate, random_table, table_model
from tests.tiny import make_decoder as decoder_of
from tests.twins import TWINS, save_pair

QWEN = TWINS["qwen25"]
TEXTS = ("Why is the sky blue?", "def add(a, b): <tool>call</tool>", "x")


def settings_of(home: Path, target: Path, draft: Path) -> Settings:
    rows = [{"question": f"{i} + {3 * i}?", "answer": f"#### {4 * i}"} for i in range(12)]
    (home / "data" / "gsm8k").mkdir(parents=True, exist_ok=True)
    (home / "data" / "gsm8k" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pair = DraftSettings(kind="model", source=str(draft))
    return Settings(
        model=ModelSettings("tiny", SourceSettings(str(target)), pair, dtype="float32", device="cpu"),
        preverifier=PreverifierSettings(gamma_max=4, width=16),
        corpus=CorpusSettings(
            ["gsm8k/train"], max_new_tokens=16, batch_size=4, parts={"draft": 0.0, "preverifier": 0.7, "tuning": 0.3}
        ),
        labels=LabelSettings(gamma=4, starts_per_text=4),
        trainer=TrainerSettings(max_steps=3, precision="fp32", patience=0),
        logger=LoggerSettings(csv=False),
        paths=PathSettings(str(home / "runs"), str(home / "cache"), str(home / "data")),
        name="test",
    )  # fmt: skip


def exact(models: Models, arms: Sequence[str]) -> list[int]:
    """All ids that the target writes; every arm writes them too."""
    requests = [Request(text, encode(text, models.tokenizer), 20, frozenset(models.stop_ids)) for text in TEXTS]
    model, stops = models.target.model, sorted(models.stop_ids)
    wanted = [hf_generate(model, r.prompt_ids, 20, eos_token_id=stops) for r in requests]
    for arm in arms:
        results = make_decoder(method_settings(arm), models, SamplingSettings()).generate(requests, slots=2)
        assert [r.ids for r in results] == wanted, arm
        if arm != "ar":
            assert any(line["accepted"][-1] for r in results for line in r.rounds if line["accepted"])
    return [id for ids in wanted for id in ids]


@pytest.mark.parametrize("spare", [(40, 3), (2, 40)])
def test_unequal_padding_from_labels_to_decoding(spare: tuple[int, int], tmp_path: Path) -> None:
    """Qwen2.5's sizes have one tokenizer and different numbers of rows. Here the rows that belong to no token are as
    likely as others, so the target writes ids that the draft lacks, and the draft would write what the target lacks."""
    target, draft = save_pair(tmp_path, replace(QWEN, spare=spare))
    models = build(settings_of(tmp_path, target, draft), [method_settings("pacer")])
    assert models.draft is not None
    sizes = (models.target.vocab_size, models.draft.vocab_size)
    assert sizes == tuple(len(models.tokenizer) + rows for rows in spare)
    written = exact(models, ["ar", "sd gamma=3", "pacer", "pacer b=2 t0=0.2 gamma_max=4"])
    if spare[0] > spare[1]:
        assert max(written) >= sizes[1], "ids that the draft lacks occur"
        corpus, _ = text_stages.corpus(settings_of(tmp_path, target, draft), models)
        assert max(max(text.output_ids) for text in corpus) >= sizes[1], "in what the pre-verifier learns from too"


def test_a_draft_that_would_write_padding_is_exact_in_distribution() -> None:
    """V57: half of the draft's mass is on rows that are no tokens of the target; a wrong q would show."""
    target = Stack(table_model(random_table(5, 1)))
    loud = random_table(9, 2)
    loud[:, 5:] += 1.5
    draft, sampling, count = Stack(table_model(loud)), SamplingSettings(temperature=1.0), 12_000
    requests = [Request(str(i), [3], 3) for i in range(count)]
    results = decoder_of(target, draft, Fixed(2), sampling).generate(requests, slots=count // 4)
    p = torch.softmax(random_table(5, 1).double(), -1).numpy()
    wanted = np.einsum("a,ab,bc->abc", p[3], p, p).ravel() * count
    seen = np.bincount([r.ids[0] * 25 + r.ids[1] * 5 + r.ids[2] for r in results], minlength=125)
    rare = wanted < 5
    merged = [np.append(counts[~rare], counts[rare].sum()) for counts in (seen, wanted)]
    assert chisquare(*merged).pvalue > 1e-4  # false alarms: one in ten thousand seeds; the seed is fixed


def test_added_tokens_are_exact(tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path, QWEN, added=["<tool>", "</tool>"])
    settings = settings_of(tmp_path, target, draft)
    models = build(settings, [method_settings("sd")])
    ids = encode(TEXTS[1], models.tokenizer)
    assert {models.tokenizer.convert_tokens_to_ids(text) for text in ("<tool>", "</tool>")} <= set(ids)
    assert len(models.tokenizer) == models.target.vocab_size - QWEN.spare[0]
    exact(models, ["ar", "sd gamma=3"])


def _swap(tokenizer: dict[str, Any]) -> None:
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def _lack(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != "<tool>"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_swap, r"first at id {a}: 'a' in \S+target, 'b' in \S+draft; use a draft model with the target's tokenizer"),
        (_lack, r"first at id {tool}: '<tool>' in \S+target, missing in \S+draft \(sizes \d+ and \d+\)"),
    ],
)
def test_another_tokenizer_is_refused_by_name(
    spoil: Callable[[dict[str, Any]], None], said: str, tmp_path: Path
) -> None:
    """V56: two ids swapped, and a token that only one has; before anything is labelled or decoded."""
    target, draft = save_pair(tmp_path, TWINS["deepseek"], added=["<tool>"])
    settings = settings_of(tmp_path, target, draft)
    models = load_target(settings.model, tmp_path)
    assert load_draft_model(settings.model, models, tmp_path)
    ids = {"a": models.tokenizer.convert_tokens_to_ids("a"), "tool": models.tokenizer.convert_tokens_to_ids("<tool>")}
    file = draft / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    spoil(tokenizer)
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(MismatchError, match=said.format(**ids)):
        build(settings, [method_settings("pacer")])
    assert not (tmp_path / "runs").exists()
