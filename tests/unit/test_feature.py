"""A drafter fed by the target: its layer, drafts from everywhere at once, checkpoints that know their model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from pacer.errors import ConfigError, MismatchError, UnsupportedError
from pacer.models.checkpoint import identity
from pacer.models.feature import FeatureDraft, load_feature, save_feature
from pacer.models.feature_stack import FeatureStack
from pacer.models.stack import FAMILIES, Stack, causal_mask
from pacer.training.exits import places_of, rung_states
from pacer.training.feature import DraftScores, unrolled
from tests.features import mirror, oracle, random_draft
from tests.tiny import prompts, tiny_model, tiny_stack

IDS = torch.tensor([1, 2, 5, 30, 31, 32, 60, 90, 96])
OWN = {"inputs.weight", "layers.norm.weight"} | {
    f"layers.layers.0.{name}.weight" for name in ("norm", "norm_mlp", "qkv", "o", "gate_up", "down")
}


def last_states(target: Stack, ids: Tensor) -> Tensor:
    return rung_states(target, ids, [target.n_layers])[target.n_layers]


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_it_can_start_as_a_layer_of_the_target(family: str, layer: int) -> None:
    """Weight for weight: with rotary positions, grouped heads and another order of a head's parts."""
    target, x = tiny_stack(family), torch.randn(2, 9, 32)
    own = FeatureDraft(target, layer=layer).layers
    positions, mask = places_of(torch.zeros(2, 9, dtype=torch.long))
    wanted = target.run(x, layer, layer + 1, positions, mask)
    torch.testing.assert_close(own.run(x, 0, 1, positions, mask), wanted, atol=1e-5, rtol=1e-4)
    assert torch.equal(own.norm.weight, target.norm.weight)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"llama", "mistral"}))
def test_a_layer_of_other_parts_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedError, match=r"other parts than a drafter's: .*; allowed: those of a Llama; set mod"):
        FeatureDraft(tiny_stack(family), layer=0)
    FeatureDraft(tiny_stack(family))


def test_values_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"unknown model\.feature\.head: 'own'; allowed: frozen, trained"):
        FeatureDraft(tiny_stack(), head="own")
    with pytest.raises(ConfigError, match=r"model\.feature\.layer: 3; allowed: 0 … 2"):
        FeatureDraft(tiny_stack(), layer=3)


def test_a_fresh_layer_hands_its_input_through() -> None:
    target, ids = tiny_stack(), torch.tensor(prompts([7]))
    draft, features = FeatureDraft(target), torch.randn(1, 7, 32)
    entries = draft.entries(features, ids)
    assert torch.equal(draft.layers.run(entries, 0, 1, *places_of(ids)), entries)
    torch.testing.assert_close(draft.readout(entries), target.readout(entries))
    reduced = FeatureDraft(target, IDS)
    torch.testing.assert_close(reduced.readout(entries), target.readout(entries)[..., IDS])


def test_one_that_is_the_target_says_what_the_target_says() -> None:
    target, ids = Stack(mirror()), torch.tensor(prompts([11]))
    draft = oracle(target)
    own = next(unrolled(draft, draft.heard(last_states(target, ids)), ids, 1))
    torch.testing.assert_close(draft.readout(own), target.readout(last_states(target, ids)), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(draft.features(own), draft.heard(last_states(target, ids)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head", ["frozen", "trained"])
def test_what_is_trained_is_its_own_alone(head: str) -> None:
    """K99: names of the parameters, their gradients, and that none is the target's."""
    target, ids = tiny_stack(), torch.tensor(prompts([9]))
    draft = random_draft(target, IDS, head=head).requires_grad_(True)
    parameters = dict(draft.named_parameters())
    assert parameters.keys() == OWN | ({"own_head.weight"} if head == "trained" else set())
    *_, own = unrolled(draft, draft.heard(last_states(target, ids)), ids, 2)
    draft.readout(own).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in parameters.values())
    theirs = {p.data_ptr() for p in target.model.parameters()}
    assert not theirs & {p.data_ptr() for p in parameters.values()}
    assert all(p.grad is None for p in target.model.parameters())


def one_by_one(draft: FeatureDraft, features: Tensor, ids: Tensor, place: int, steps: int) -> list[Tensor]:
    """A draft after ``place`` of one text ``(T,)``, by a fresh pass for each token."""
    produced = torch.nn.functional.pad(features[: place + 1], (0, 0, 1, 0))[: place + 1]
    found = []
    for k in range(steps):
        length = place + 1 + k
        positions = torch.arange(length)[None]
        entries = draft.entries(produced[None], ids[None, :length])
        found.append(draft.layers.run(entries, 0, 1, positions, causal_mask(positions, length))[0, -1])
        produced = torch.cat([produced, draft.features(found[-1])[None]])
    return found


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_drafts_from_everywhere_are_drafts_one_by_one(steps: int) -> None:
    """T82's mask: which entries of which pass each draft sees, in rows of a batch."""
    target, ids = tiny_stack(), torch.tensor(prompts([9, 9]))
    draft = random_draft(target)
    features = draft.heard(last_states(target, ids))
    with torch.no_grad():
        passes = list(unrolled(draft, features, ids, steps))
        for row in (0, 1):
            for place in range(9 - steps + 1):
                for k, state in enumerate(one_by_one(draft, features[row], ids[row], place, steps)):
                    torch.testing.assert_close(passes[k][row, place + k], state, atol=1e-4, rtol=1e-4)


def test_a_feature_is_the_normed_state_at_one_scale() -> None:
    target, states = tiny_stack(), torch.randn(3, 5, 32)
    found = random_draft(target).heard(states)
    torch.testing.assert_close(found.square().mean(-1), torch.ones(3, 5), atol=1e-5, rtol=1e-4)
    cosine = torch.nn.functional.cosine_similarity(found, target.normed(states), dim=-1)
    torch.testing.assert_close(cosine, torch.ones(3, 5))


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("head", ["frozen", "trained"])
def test_a_checkpoint_reads_as_what_was_saved(tmp_path: Path, head: str, ids: Tensor | None) -> None:
    """T90, K99: trained tensors alone, in bfloat16; from the loaded ones the same logits."""
    target, tokens = tiny_stack(), torch.tensor(prompts([8]))
    draft = random_draft(target, ids, head=head, dtype=torch.float32)
    save_feature(tmp_path / "f", draft, {"steps": 3}, "card")
    tensors = load_file(tmp_path / "f" / "model.safetensors")
    trained = OWN | ({"own_head.weight"} if head == "trained" else set())
    assert tensors.keys() == trained | ({"head_ids"} if ids is not None else set())
    assert all(value.dtype == torch.bfloat16 for name, value in tensors.items() if name != "head_ids")
    config = json.loads((tmp_path / "f" / "config.json").read_text())
    assert (config["kind"], config["head"], config["steps"]) == ("feature_draft", head, 3)
    for parameter in draft.parameters():
        parameter.data = parameter.data.bfloat16().float()
    loaded = load_feature(tmp_path / "f", target)
    assert (loaded.head_ids is None) == (ids is None)
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    said = [next(unrolled(d, d.heard(last_states(target, tokens)), tokens, 1)) for d in (draft, loaded)]
    assert torch.equal(draft.readout(said[0]), loaded.readout(said[1]))


def test_it_refuses_models_it_was_not_made_for(tmp_path: Path) -> None:
    """V60: sizes, weights, and weights of the layers alone; but not the same model in another dtype."""
    save_feature(tmp_path / "f", random_draft(tiny_stack()), {}, "")
    changed = tiny_model()
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight.mul_(2)
    for other, what in (
        (tiny_stack(layers=4), "num_hidden_layers is 4 here: 3"),
        (tiny_stack("qwen3"), "model_type is 'qwen3' here: 'llama'"),
        (tiny_stack(seed=1), "fingerprint is"),
        (Stack(changed), "layers is"),
    ):
        with pytest.raises(MismatchError, match=rf"feature drafter f belongs to another model: {what}"):
            load_feature(tmp_path / "f", other)
    half = load_feature(tmp_path / "f", Stack(tiny_model().bfloat16()))
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.layers.frequencies.dtype == torch.float32, "rounded frequencies are another model at place 500"
    tensors = tmp_path / "f" / "config.json"
    tensors.write_text(tensors.read_text().replace("frozen", "trained"))
    with pytest.raises(MismatchError, match="feature drafter f does not fit"):
        load_feature(tmp_path / "f", tiny_stack())


def test_as_a_model_it_is_one_layer_of_its_own() -> None:
    """What is trained on its states must tell it from another drafter of the same target."""
    target = tiny_stack()
    one, other = (FeatureStack(random_draft(target, IDS, layer=layer)) for layer in (None, 0))
    assert one.n_layers == 1 and one.context == target.context and torch.equal(one.embed(IDS), target.embed(IDS))
    assert identity(one, layers=True) != identity(other, layers=True)
    assert identity(one, layers=True) == identity(FeatureStack(random_draft(target, IDS)), layers=True)
    assert target.n_layers == 3 and target.head_ids is None, "nothing of the target has changed"
    for family in sorted({*FAMILIES, "opt, projected"}):  # where the embedding has parts of its own
        other = FeatureStack(random_draft(target := tiny_stack(family)))
        assert torch.equal(other.embed(IDS), target.embed(IDS)) and identity(other, layers=True)["layers"]


@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=5, max_size=5), min_size=1,
             max_size=2),
    st.tuples(st.integers(0, 4), st.integers(1, 5)),
)  # fmt: skip
def test_scores_are_sums_and_counts(rows: list[list[tuple[bool, ...]]], where: tuple[int, int]) -> None:
    """M70, M71: tries of each token are the drafts that were right so far and go on inside the text."""
    agree = torch.tensor(rows).permute(2, 0, 1)  # (3, B, 5)
    places = torch.zeros(len(rows), 5, dtype=torch.bool)
    places[:, where[0] : where[0] + where[1]] = True
    tried, hits, rounds = [0, 0, 0], [0, 0, 0], 0
    for row in range(len(rows)):
        for start in range(5):
            if not places[row, start]:
                continue
            rounds += 1
            for k in range(3):
                if start + k >= 5 or not places[row, start + k]:
                    break
                tried[k] += 1
                if not agree[k, row, start + k]:
                    break
                hits[k] += 1
    scores = DraftScores(3)
    scores.add(agree, places)
    scores.add(agree, places)
    found = scores.figures()
    assert found.pop("val/length") == pytest.approx(sum(hits) / rounds)
    assert list(found.values()) == [pytest.approx(h / max(1, t)) for h, t in zip(hits, tried, strict=True)]
    assert scores.rounds == 2 * rounds
