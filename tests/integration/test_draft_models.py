"""Draft models made of the target's layers, and drafts with a reduced head, in decoding and on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.decoding.distributions import penalised, probabilities
from pacer.decoding.lane import Lane
from pacer.decoding.request import Request
from pacer.errors import ConfigError, MismatchError, PacerError, SourceError
from pacer.evaluation.stats import chi_square
from pacer.models.draft import TrainableDraft, frequent_ids, load_draft, save_draft
from pacer.models.preverifier import load_preverifier, save_preverifier
from pacer.models.stack import FAMILIES, Stack, causal_mask
from pacer.settings import SamplingSettings
from tests.tiny import (
    VOCAB,
    generate,
    make_decoder,
    make_preverifier,
    near,
    plain_greedy,
    prompts,
    tiny_model,
    tiny_stack,
)

ALL = torch.arange(VOCAB)
SOME = torch.tensor([0, 3, 4, 10, 11, 42, 50, 51, 52, 77, 90, 96])
PROMPTS = prompts([5, 12, 8])


def _states(stack: Stack, ids: Tensor, layers: Sequence[int] | None = None) -> Tensor:
    """States after the given layers of a stack in turn (all of them by default), without a cache."""
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    mask, x = causal_mask(positions, ids.shape[1]), stack.embed(ids)
    return stack.run_in_turn(x, range(stack.n_layers) if layers is None else layers, positions, mask)


def _trained(target: Stack, layers: Sequence[int], head_ids: Tensor, seed: int = 0) -> TrainableDraft:
    """A draft after "training": its parameters moved, rounded to what a checkpoint holds."""
    draft = TrainableDraft(target, layers, head_ids)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            moved = parameter + 0.05 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(moved.bfloat16().float())
    return draft


def _ids() -> Tensor:
    return torch.tensor(prompts([9, 9], seed=4))


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("layers", [[0], [0, 1, 2, 3], [0, 2], [1, 3], [3]])
def test_an_untrained_draft_is_those_layers_of_the_target(family: str, layers: list[int]) -> None:
    """Whatever their numbers in the target: with a cache too, whose layers it counts from 0."""
    target = tiny_stack(family, 4)
    draft = TrainableDraft(target, layers, SOME)
    wanted = target.readout(_states(target, _ids(), layers))[..., SOME]
    torch.testing.assert_close(draft.logits(_states(draft.stack, _ids())), wanted, atol=1e-5, rtol=1e-5)
    decoding = draft.merged()
    assert decoding.n_layers == len(layers)
    torch.testing.assert_close(decoding.readout(_states(decoding, _ids())), wanted, atol=1e-5, rtol=1e-5)
    lane = Lane(decoding)
    lane.reset(2, 9)
    with torch.no_grad():
        cached = torch.cat([lane.feed_ids(part, [part.shape[1]] * 2) for part in _ids().split([4, 1, 4], 1)], 1)
    torch.testing.assert_close(decoding.readout(cached), wanted, atol=1e-5, rtol=1e-5)


def test_training_touches_layers_norm_and_projection_only() -> None:
    target = tiny_stack(layers=3)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    draft = TrainableDraft(target, [0, 2], SOME)
    names = {name.split(".")[0] for name, _ in draft.named_parameters()}
    assert names == {"layers", "norm", "projection"} and all(p.requires_grad for p in draft.parameters())
    optimiser = torch.optim.SGD(draft.parameters(), lr=0.5)
    draft.logits(_states(draft.stack, _ids())).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft.parameters())
    optimiser.step()
    after = target.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "the target stays as it was"


@pytest.mark.parametrize("family", [*sorted(FAMILIES), "opt, projected"])
def test_the_decoding_form_has_the_training_forms_logits(family: str) -> None:
    target = tiny_stack(family, 3)
    draft = _trained(target, [0, 2], SOME)
    logits = draft.logits(_states(draft.stack, _ids()))
    reduced, full = draft.merged(), draft.merged(full=True, target=target)
    assert reduced.head_ids is not None and reduced.head_ids.tolist() == SOME.tolist() and full.head_ids is None
    torch.testing.assert_close(reduced.readout(_states(reduced, _ids())), logits, atol=1e-4, rtol=1e-4)
    whole = full.readout(_states(full, _ids()))
    assert whole.shape[-1] == VOCAB
    torch.testing.assert_close(whole[..., SOME], logits, atol=1e-4, rtol=1e-4)
    again = draft.merged()
    assert torch.equal(again.head.weight, reduced.head.weight), "merging does not change what is merged"
    torch.testing.assert_close(draft.logits(_states(draft.stack, _ids())), logits)


def test_a_target_whose_head_is_its_embedding() -> None:
    target = tiny_stack(tie_word_embeddings=True)
    draft = _trained(target, [0, 1], SOME)
    assert target.head.weight is target.embedding.weight and "embed" not in "".join(dict(draft.named_parameters()))
    before, merged = target.embedding.weight.clone(), draft.merged()
    logits = draft.logits(_states(draft.stack, _ids()))
    torch.testing.assert_close(merged.readout(_states(merged, _ids())), logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(target.embedding.weight, before)


def test_a_head_of_all_ids_is_no_reduced_head() -> None:
    assert TrainableDraft(tiny_stack(), [0], ALL).merged().head_ids is None


@pytest.mark.parametrize("family", [*sorted(FAMILIES), "opt, projected"])
def test_a_saved_draft_has_the_same_logits(family: str, tmp_path: Path) -> None:
    """T90, K99: exactly, and the file holds what was trained (and the head's ids)."""
    target = tiny_stack(family, 3)
    draft = _trained(target, [0, 2], SOME)
    folder = save_draft(tmp_path / "d", draft, target, {"layers": [0, 2]}, "card")
    loaded = load_draft(folder, target)
    assert torch.equal(loaded.logits(_states(loaded.stack, _ids())), draft.logits(_states(draft.stack, _ids())))
    ours, theirs = draft.merged(), loaded.merged()
    assert torch.equal(theirs.readout(_states(theirs, _ids())), ours.readout(_states(ours, _ids())))
    assert theirs.head_ids is not None and theirs.head_ids.tolist() == SOME.tolist()
    assert set(load_file(folder / "model.safetensors")) == {*dict(draft.named_parameters()), "head_ids"}
    assert (folder / "README.md").read_text() == "card"


OTHERS: dict[str, Any] = {
    "seed": lambda: tiny_stack(seed=1), "family": lambda: tiny_stack("qwen2"), "depth": lambda: tiny_stack(layers=4),
    "width": lambda: tiny_stack(hidden_size=16), "vocabulary": lambda: tiny_stack(vocab=VOCAB + 1),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_a_draft_of_another_target_is_refused(other: str, tmp_path: Path) -> None:
    """V59, V60: naming what differs."""
    target = tiny_stack()
    folder = save_draft(tmp_path / "d", _trained(target, [0, 2], SOME), target, {"layers": [0, 2]}, "")
    with pytest.raises(MismatchError, match=r"draft d belongs to another model: \w+ is .* here"):
        load_draft(folder, OTHERS[other]())
    assert load_draft(folder, tiny_stack()), "the same model loaded again is the same"


def _remove(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


def _add(folder: Path) -> None:
    save_file({**load_file(folder / "model.safetensors"), "more": torch.zeros(1)}, folder / "model.safetensors")


def _edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


DAMAGE: dict[str, Any] = {
    "missing tensor": lambda folder: _remove(folder, "norm.weight"),
    "missing head ids": lambda folder: _remove(folder, "head_ids"),
    "unexpected tensor": _add,
    "other layers": lambda folder: _edit(folder, layers=[0, 1, 2]),
    "another kind": lambda folder: _edit(folder, kind="preverifier"),
    "another format": lambda folder: _edit(folder, format=99),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no config": lambda folder: (folder / "config.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_checkpoint_that_does_not_fit_is_refused(damage: str, tmp_path: Path) -> None:
    """T90."""
    target = tiny_stack()
    folder = save_draft(tmp_path / "d", _trained(target, [0, 2], SOME), target, {"layers": [0, 2]}, "")
    DAMAGE[damage](folder)
    with pytest.raises((MismatchError, SourceError)):
        load_draft(folder, target)


def test_saving_again_replaces_the_checkpoint_as_a_whole(tmp_path: Path) -> None:
    target = tiny_stack()
    for seed in (0, 1):
        draft = _trained(target, [0, 2], SOME, seed)
        folder = save_draft(tmp_path / "d", draft, target, {"layers": [0, 2]}, "")
        (folder / "stale").touch()
    save_draft(tmp_path / "d", draft, target, {"layers": [0, 2]}, "")
    files = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["README.md", "config.json", "model.safetensors"]
    loaded = load_draft(tmp_path / "d", target)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), draft.parameters(), strict=True))


def test_a_map_of_another_size_is_never_picked_up(tmp_path: Path) -> None:
    """V59: the ids of a reduced head come with its checkpoint, whatever was saved there or loaded before."""
    target = tiny_stack()
    for ids in (SOME, ALL[::4], SOME[:5]):
        draft = _trained(target, [0, 2], ids)
        folder = save_draft(tmp_path / "d", draft, target, {"layers": [0, 2], "head_size": 999}, "")
        stack = load_draft(folder, target).merged()
        assert stack.head_ids is not None and stack.head_ids.tolist() == ids.tolist()
        assert stack.readout(stack.embed(_ids())).shape[-1] == stack.head.weight.shape[0] == len(ids)
        results = make_decoder(target, stack, Fixed(3)).generate([Request("a", PROMPTS[0], 12)])
        drafted = {token for line in results[0].rounds for token in line["drafted"]}
        assert drafted and drafted <= set(ids.tolist())
        assert results[0].ids == plain_greedy(target.model, PROMPTS[0], 12)


@pytest.mark.parametrize("layers", [[], [4], [-1], [0, 7]])
def test_layers_that_the_target_lacks_are_refused(layers: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"no such target layers.*0 … 3"):
        TrainableDraft(tiny_stack(layers=4), layers, SOME)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("rule", ["sd", "pacer"])
def test_greedy_output_is_the_targets_with_a_reduced_head(full: bool, rule: str) -> None:
    """Ids that the head lacks are never drafted, and decoded all the same; the draft learns them as context."""
    target = tiny_stack(layers=3)
    draft = _trained(target, [0, 1], SOME).merged(full=full, target=target)
    controller = Fixed(3) if rule == "sd" else PreverifierRule(make_preverifier(draft), b=2, t0=0.2, gamma_max=5)
    results = make_decoder(target, draft, controller).generate([Request(str(i), p, 20) for i, p in enumerate(PROMPTS)])
    assert [r.ids for r in results] == [plain_greedy(tiny_model(layers=3), p, 20) for p in PROMPTS]
    drafted = {t for r in results for line in r.rounds for t in line["drafted"]}
    emitted = {t for r in results for t in r.ids}
    assert drafted and (full or drafted <= set(SOME.tolist())) and emitted - set(SOME.tolist())


@pytest.mark.parametrize(
    "sampling",
    [SamplingSettings(2.5), SamplingSettings(2.0, top_k=4, repetition_penalty=1.4, seed=2)],
    ids=["plain", "penalty"],
)
def test_sampling_with_a_reduced_head_keeps_the_distribution(sampling: SamplingSettings) -> None:
    """The rest of the vocabulary has q = 0. 1 false alarm in 10⁴ on other seeds."""
    vocab, prompt, count = 9, [3, 1, 4], 3000
    target = tiny_stack(layers=2, vocab=vocab)
    model, ids = near(tiny_model(layers=2, vocab=vocab), 0.05), torch.tensor([1, 2, 5, 8])
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[ids], requires_grad=False)
    decoder = make_decoder(target, Stack(model, ids), Fixed(2), sampling)
    results = generate(decoder, [Request(f"q{i}", prompt, 4) for i in range(count)], 400)

    def law(text: list[int]) -> Tensor:
        with torch.no_grad():
            logits = target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        seen = torch.zeros(vocab, dtype=torch.bool)
        seen[text] = True
        return probabilities(penalised(logits, seen, sampling.repetition_penalty), sampling).double()

    first = law(prompt)
    joint = torch.cat([first[t] * law([*prompt, t]) for t in range(vocab)])
    counts = torch.bincount(torch.tensor([r.ids[0] * vocab + r.ids[1] for r in results]), minlength=vocab**2)
    assert chi_square(counts.tolist(), joint.tolist()) > 1e-4
    drafted = [t for r in results for line in r.rounds for t in line["drafted"]]
    assert set(drafted) <= set(ids.tolist()) and {t for r in results for t in r.ids} - set(ids.tolist())
    assert sum(line["accepted"][0] for r in results for line in r.rounds) > 200


@given(
    st.lists(st.lists(st.integers(0, 19), max_size=12), max_size=5), st.integers(-1, 25),
    st.lists(st.integers(0, 19), max_size=4),
)  # fmt: skip
def test_the_ids_of_a_reduced_head(texts: list[list[int]], size: int, always: list[int]) -> None:
    ids = frequent_ids(texts, size, always, 20).tolist()
    assert ids == sorted(set(ids)) and all(0 <= i < 20 for i in ids)
    if size <= 0 or size >= 20:
        assert ids == list(range(20))
        return
    assert set(always) <= set(ids), "end of text and chat template are always there"
    assert len(ids) == max(size, len(set(always)))
    flat = [i for text in texts for i in text]
    chosen = [flat.count(i) for i in ids if i not in always]
    left = [flat.count(i) for i in range(20) if i not in ids]
    assert min(chosen, default=math.inf) >= max(left, default=0), "the most frequent are in"


def test_a_pre_verifier_knows_the_draft_it_was_made_for(tmp_path: Path) -> None:
    """V60: a draft trained again, or of other layers of the same target, is another draft."""
    target = tiny_stack(layers=3)
    draft = _trained(target, [0, 2], SOME).merged()
    folder = save_preverifier(tmp_path / "p", make_preverifier(draft), target, {}, "")
    assert load_preverifier(folder, target, _trained(tiny_stack(layers=3), [0, 2], SOME).merged())
    for other in (_trained(target, [0, 2], SOME, seed=1), _trained(target, [0], SOME)):
        with pytest.raises(PacerError, match="belongs to another model"):
            load_preverifier(folder, target, other.merged())
