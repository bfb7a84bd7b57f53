"""The target's stored predictions: those of a direct forward, in any batch, and back from disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from pacer.data import teacher
from pacer.data.teacher import Predictions, Teacher, logit_rows, predict, token_bytes, write_shard
from pacer.models.stack import Stack
from tests.tiny import VOCAB, prompts, tiny_model

LENGTHS = [5, 17, 1, 9, 30, 12]
K = 6


@pytest.fixture(scope="module")
def found() -> list[Predictions]:
    return predict(Stack(tiny_model()), prompts(LENGTHS), K)


@pytest.mark.parametrize(("logits", "tokens"), [(2**25, 4096), (VOCAB * 4, 20)])
def test_predictions_are_those_of_a_direct_forward(monkeypatch: pytest.MonkeyPatch, logits: int, tokens: int) -> None:
    """Text by text through transformers' own forward; whatever shares a batch, and however logits are cut."""
    monkeypatch.setattr(teacher, "LOGITS", logits)
    monkeypatch.setattr(teacher, "TOKENS", tokens)
    model = tiny_model()
    reference = tiny_model()  # a model of its own: a stack changes the attention
    for ids, prediction in zip(prompts(LENGTHS), predict(Stack(model), prompts(LENGTHS), K), strict=True):
        with torch.no_grad():
            direct = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
        top = direct.topk(K)
        assert torch.equal(prediction.ids, top.indices)
        torch.testing.assert_close(prediction.logprobs.double(), top.values, atol=1e-5, rtol=1e-5)
        left_out = (1 - top.values.exp().sum(-1)).log()
        torch.testing.assert_close(prediction.rest.double(), left_out, atol=1e-5, rtol=1e-4)


def test_small_masses_are_not_lost() -> None:
    """1 − Σ would be 0 in float32."""
    prediction = teacher._top(torch.tensor([[60.0, 30.0, 4.0, 2.0]]), 2)
    assert prediction.rest.item() == pytest.approx(-56 + 0.126928, abs=1e-4)


def test_shards_give_back_what_was_written(tmp_path: Path, found: list[Predictions]) -> None:
    names = [f"text-{i}" for i in range(len(found))]
    about = {"dtype": "float32", "k": K}
    for index, (start, end) in enumerate(((0, 4), (4, 6))):
        write_shard(tmp_path / f"{index}.safetensors", names[start:end], found[start:end], VOCAB, about)
    stored = Teacher(sorted(tmp_path.iterdir()))
    for name, prediction in reversed(list(zip(names, found, strict=True))):
        again = stored(name)
        assert torch.equal(again.ids, prediction.ids)
        for one, other in ((again.logprobs, prediction.logprobs), (again.rest, prediction.rest)):
            assert one.dtype == torch.float32
            torch.testing.assert_close(one, other, rtol=2**-11, atol=1e-7)
    with safe_open(tmp_path / "1.safetensors", "pt") as file:
        assert json.loads(file.metadata()["about"]) == {"texts": names[4:], **about}
        assert sorted(file.keys()) == ["ends", "ids", "logprobs", "rest"]


@pytest.mark.parametrize(("vocabulary", "each"), [(49_152, 34), (65_536, 34), (65_537, 50)])
def test_the_size_is_known_beforehand(tmp_path: Path, vocabulary: int, each: int) -> None:
    tokens, file = 10_000, tmp_path / "shard.safetensors"
    ids = torch.randint(vocabulary - 9, vocabulary, (tokens, 8))
    prediction = Predictions(ids, torch.zeros(tokens, 8), torch.zeros(tokens))
    write_shard(file, ["one"], [prediction], vocabulary, {})
    assert token_bytes(8, vocabulary) == each
    assert 0 < file.stat().st_size - tokens * each < 1000  # the header
    assert torch.equal(Teacher([file])("one").ids, ids)


def test_logits_do_not_grow_with_the_vocabulary() -> None:
    for vocabulary in (100, 8192, 49_152, 256_000):
        assert logit_rows(vocabulary) * vocabulary <= 2**25
    assert logit_rows(2**30) == 1
