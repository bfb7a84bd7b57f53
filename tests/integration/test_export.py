"""Exported parts, loaded back by transformers' own classes: equal logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from pacer.errors import ConfigError, MismatchError, SourceError, UnsupportedError
from pacer.files import ArtifactError
from pacer.models.draft import TrainableDraft
from pacer.models.exits import KIND, make_exits, save_exits, shared_exits
from pacer.models.export import copy_checkpoint, copy_model, write_draft, write_feature, write_folder
from pacer.models.feature_stack import FeatureStack
from pacer.models.sources import check_folder, load_model
from pacer.models.stack import Stack, causal_mask
from tests.features import random_draft
from tests.folders import tiny_folder, tiny_tokenizer
from tests.tiny import tiny_stack

TEXT = torch.tensor([[3, 11, 42, 7, 0, 96, 5, 5, 61]])
SOME = torch.tensor([0, 3, 4, 10, 11, 42, 50, 51, 52, 77, 90, 96])


def logits(stack: Stack, ids: Tensor = TEXT) -> Tensor:
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    mask = causal_mask(positions, ids.shape[1])
    states = stack.run(stack.text_entries(ids, positions, mask), 0, stack.n_layers, positions, mask)
    return stack.readout(states)


def trained(target: Stack, head_ids: Tensor) -> TrainableDraft:
    draft = TrainableDraft(target, [0, 2], head_ids, copying=True)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return draft


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt_neox", "opt"])
def test_a_draft_is_a_model_of_its_family(family: str, tmp_path: Path) -> None:
    """The ids of the reduced head keep their logits; the others have the target's rows through the projection."""
    target = tiny_stack(family)
    reduced = logits(trained(target, SOME).merged())
    whole = trained(target, SOME).merged(full=True, target=target)
    to = write_folder(tmp_path / "draft", lambda folder: write_draft(folder, whole, tiny_tokenizer()), ["a draft"])
    check_folder(to)
    found = logits(Stack(load_model(to, "float32", "cpu")))
    assert torch.equal(found, logits(whole)) and found.shape[-1] == target.vocab_size
    torch.testing.assert_close(found[..., SOME], reduced, rtol=1e-6, atol=1e-6)
    plain = AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(plain(TEXT).logits, found, rtol=1e-4, atol=1e-5)
    assert "pacer" not in (to / "config.json").read_text() and (to / "README.md").read_text() == "- a draft\n"


def test_a_head_that_a_family_does_not_describe_is_refused(tmp_path: Path) -> None:
    target = tiny_stack("opt, projected")
    draft = trained(target, SOME).merged(full=True, target=target)
    with pytest.raises(UnsupportedError, match="projection before it"):
        write_folder(tmp_path / "draft", lambda folder: write_draft(folder, draft, tiny_tokenizer()), [])
    assert not list(tmp_path.iterdir())


def rms(x: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def by_a_llama_layer(folder: Path, target: Any, ids: Tensor) -> Tensor:
    """What config.json says, with transformers' own layer."""
    said, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config = LlamaConfig.from_dict(said["transformer_layer_config"])
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0).eval()
    own = {k.removeprefix("transformer."): v for k, v in tensors.items() if k.startswith("transformer.")}
    layer.load_state_dict(own, strict=True)
    heard = rms(target.model(ids).last_hidden_state)
    produced = F.pad(heard[:, :-1], (0, 0, 1, 0))
    x = F.linear(torch.cat([rms(target.model.embed_tokens(ids)), produced], -1), tensors["fusion_fc.weight"])
    places = torch.arange(ids.shape[1])[None]
    mask = torch.full((ids.shape[1],) * 2, -torch.inf).triu(1)[None, None]
    turns = LlamaRotaryEmbedding(config)(x, places)
    states = layer(x, attention_mask=mask, position_ids=places, position_embeddings=turns)
    states = states[0] if isinstance(states, tuple) else states
    norm = said["pre_lm_head_layernorm"]
    assert norm["kind"] == "rms"
    normed = rms(states, tensors["pre_lm_head_layernorm.weight"], norm["eps"])
    rows = tensors.get("lm_head.weight")
    if rows is None:
        rows = target.lm_head.weight
        rows = rows[tensors["head_ids"].long()] if "head_ids" in tensors else rows
    return F.linear(normed, rows)


@pytest.mark.parametrize(
    ("family", "head", "ids"), [("llama", "frozen", None), ("llama", "trained", SOME), ("qwen3", "frozen", SOME)]
)
def test_the_drafter_fed_by_the_target_runs_in_a_llama_layer(
    family: str, head: str, ids: Tensor | None, tmp_path: Path
) -> None:
    target = tiny_stack(family)
    draft = random_draft(target, ids, head=head)
    to = write_folder(tmp_path / "feature", lambda folder: write_feature(folder, draft), [])
    with torch.no_grad():
        found, own = by_a_llama_layer(to, target.model, TEXT), logits(FeatureStack(draft))
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)
    said = json.loads((to / "config.json").read_text())
    assert said["lm_head"] == ("own" if head == "trained" else "the target's rows")
    assert not {"model_type", "speculators_model_type", "architectures"} & said.keys(), "nobody takes it for EAGLE-1"


def test_shared_exits_are_the_models_folder(tmp_path: Path) -> None:
    """An exit's logits are transformers' own hidden states through norm and head; files of others stay behind."""
    source = tiny_folder(tmp_path / "model")
    (source / "optimizer.pt").write_bytes(b"x")
    to = write_folder(tmp_path / "exits", lambda folder: copy_model(folder, source), ["exits"])
    check_folder(to)
    assert {f.name for f in to.iterdir()} == {f.name for f in source.iterdir()} - {"optimizer.pt"} | {"README.md"}
    stack = Stack(load_model(source, "float32", "cpu"))
    plain: Any = AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        states = plain(TEXT, output_hidden_states=True).hidden_states[1]
        theirs = plain.lm_head(plain.model.norm(states))
        positions = torch.arange(TEXT.shape[1])[None]
        own = stack.run(stack.embed(TEXT), 0, 1, positions, causal_mask(positions, TEXT.shape[1]))
        torch.testing.assert_close(shared_exits(stack, [1])[1].readout(own), theirs, rtol=1e-4, atol=1e-5)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    early = plain.generate(TEXT, assistant_early_exit=1, **options)
    assert torch.equal(early, plain.generate(TEXT, **options))


def test_a_checkpoint_is_copied_if_it_is_one(tmp_path: Path) -> None:
    target = tiny_stack()
    saved = save_exits(tmp_path / "saved", make_exits(target, "norm", [1]), target, {}, "card")
    (saved / "tuned.json").write_text("{}")
    to = write_folder(tmp_path / "to", lambda folder: copy_checkpoint(folder, saved, KIND), ["no card"])
    assert {file.name: file.read_bytes() for file in to.iterdir()} == {f.name: f.read_bytes() for f in saved.iterdir()}
    with pytest.raises(MismatchError, match="another kind"):
        copy_checkpoint(tmp_path, saved, "preverifier")
    with pytest.raises(SourceError, match="no exits checkpoint"):
        copy_checkpoint(tmp_path, tmp_path / "nowhere", KIND)


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(ArtifactError, match="disk is full"):
        write_folder(tmp_path / "to", fails, [])
    assert not list(tmp_path.iterdir())
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", lambda folder: (folder / "a").write_text("1"), [])
    for taken in (tmp_path / "empty", tmp_path / "empty" / "a"):
        with pytest.raises(ConfigError, match=r"export\.to is not empty"):
            write_folder(taken, lambda folder: (folder / "b").write_text("2"), [])
    assert sorted(file.name for file in (tmp_path / "empty").iterdir()) == ["README.md", "a"]
