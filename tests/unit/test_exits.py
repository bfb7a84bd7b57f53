"""Exit heads: one readout for training and decoding, kinds that start alike, checkpoints that know their model."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from pacer.choices import CHOICES
from pacer.decoding.lane import Lane, padded
from pacer.errors import ConfigError, MismatchError
from pacer.models.exits import AttentionLayer, ExitHead, load_exits, make_exits, reduced_ids, save_exits, shared_exits
from pacer.models.stack import FAMILIES, Stack
from pacer.training.exits import ExitScores, leading_runs, places_of, rung_states
from pacer.training.layerskip import active_layers, dropout_rates, loss_shares
from tests.tiny import VOCAB, prompts, strangers, tiny_model, tiny_stack

IDS = torch.tensor([1, 2, 5, 30, 31, 32, 60, 90, 96])
KINDS: list[tuple[str, bool]] = [(kind, False) for kind in CHOICES["model.exits.kind"]] + [("adapter", True)]


def disturbed(heads: dict[int, ExitHead], seed: int = 3) -> dict[int, ExitHead]:
    """As training would leave them: nothing at its start any more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for head in heads.values():
            for parameter in head.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return heads


def whole(head: ExitHead, states: Tensor, ids: Tensor) -> Tensor:
    """Logits of all places at once, as training reads them."""
    with torch.no_grad():
        return head.readout(head.adapted(states, *places_of(ids)))


def test_shared_exits_read_as_the_model_does() -> None:
    target, states = tiny_stack(), torch.randn(2, 5, 32)
    heads = shared_exits(target, [1, 2])
    assert list(heads) == [1, 2] and [head.layer for head in heads.values()] == [1, 2]
    assert torch.equal(heads[1].readout(states), target.readout(states))
    reduced = shared_exits(target, [2], IDS)[2]
    torch.testing.assert_close(reduced.readout(states), target.readout(states)[..., IDS])
    assert not list(reduced.parameters()) and reduced.head_ids is not None and torch.equal(reduced.head_ids, IDS)


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize(("kind", "attention_only"), KINDS)
def test_every_kind_starts_as_the_shared_exit(kind: str, attention_only: bool, ids: Tensor | None) -> None:
    target, tokens = tiny_stack(), torch.tensor(prompts([7, 7]))
    states = rung_states(target, tokens, [2])[2]
    head = make_exits(target, kind, [2], ids, attention_only=attention_only)[2]
    torch.testing.assert_close(whole(head, states, tokens), shared_exits(target, [2], ids)[2].readout(states))
    moved = disturbed({2: head})[2]
    assert (kind == "shared") == torch.equal(
        whole(moved, states, tokens), shared_exits(target, [2], ids)[2].readout(states)
    )


LAYER = {"norm.weight", "qkv.weight", "o.weight"}
MLP = {"norm_mlp.weight", "gate_up.weight", "down.weight"}
TRAINED = {
    ("shared", False): set(),
    ("norm", False): {"own_norm.weight"},
    ("linear", False): {"own_norm.weight", "own_head.weight"},
    ("adapter", True): {f"adapter.layers.0.{name}" for name in LAYER} | {"adapter.norm.weight"},
    ("adapter", False): {f"adapter.layers.0.{name}" for name in LAYER | MLP} | {"adapter.norm.weight"},
}


@pytest.mark.parametrize(("kind", "attention_only"), KINDS)
def test_what_is_trained_is_the_heads_alone(kind: str, attention_only: bool) -> None:
    """K99: names of the parameters, their gradients, and that none is the target's; its rows are held once."""
    target, tokens = tiny_stack(), torch.tensor(prompts([9]))
    heads = disturbed(make_exits(target, kind, [1, 2], IDS, attention_only=attention_only))
    for head in heads.values():
        parameters = dict(head.named_parameters())
        assert parameters.keys() == TRAINED[kind, attention_only]
        states = rung_states(target, tokens, [head.layer])[head.layer]
        logits = head.readout(head.adapted(states, *places_of(tokens)))
        assert logits.requires_grad == bool(parameters)
        if parameters:
            logits.logsumexp(-1).sum().backward()
        assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in parameters.values())
    theirs = {p.data_ptr() for p in target.model.parameters()}
    assert not theirs & {p.data_ptr() for head in heads.values() for p in head.parameters()}
    assert all(p.grad is None for p in target.model.parameters())
    if kind != "linear":
        assert heads[1].head is heads[2].head


@pytest.mark.parametrize("family", [*FAMILIES, "opt, projected"])
@pytest.mark.parametrize(("kind", "attention_only"), KINDS)
def test_training_and_decoding_read_the_same(family: str, kind: str, attention_only: bool) -> None:
    """Whole texts without memory against token by token through lanes, two rows of their own lengths, two exits."""
    target = tiny_stack(family, 4)
    heads = disturbed(make_exits(target, kind, [1, 3], IDS, attention_only=attention_only))
    tokens = torch.tensor(prompts([11, 11]))
    states = rung_states(target, tokens, [1, 3, 4])
    lanes = {1: Lane(target, 0, 1), 3: Lane(target, 1, 3)}
    adapters = {e: Lane(head.adapter) for e, head in heads.items() if head.adapter is not None}
    for lane in (*lanes.values(), *adapters.values()):
        lane.reset(2, 12)
    found: dict[int, list[list[Tensor]]] = {1: [[], []], 3: [[], []]}
    starts = [0, 0]
    with torch.no_grad():
        for counts in ([3, 1], *[[1, 1]] * 7, [1, 0], [0, 3]):
            ends = [start + count for start, count in zip(starts, counts, strict=True)]
            part, _ = padded([row[s:e] for row, s, e in zip(tokens.tolist(), starts, ends, strict=True)], target.device)
            x, starts = target.embed(part), ends
            for e, head in heads.items():
                x = lanes[e].feed(x, counts)
                logits = head.readout(adapters[e].feed(x, counts) if e in adapters else x)
                for row in (0, 1):
                    found[e][row].append(logits[row, : counts[row]])
    assert starts == [11, 11]
    for e, head in heads.items():
        got = torch.stack([torch.cat(row) for row in found[e]])
        torch.testing.assert_close(got, whole(head, states[e], tokens), atol=1e-5, rtol=1e-4)


def test_an_adapter_sees_what_came_before() -> None:
    """And one without MLP is attention and norms alone."""
    target = tiny_stack()
    for attention_only in (False, True):
        head = disturbed(make_exits(target, "adapter", [2], attention_only=attention_only))[2]
        assert head.adapter is not None
        assert isinstance(head.adapter.layers[0], AttentionLayer) == attention_only
        states = torch.randn(1, 6, 32)
        other = states.clone()
        other[0, 0] += 1.0
        tokens = torch.zeros(1, 6, dtype=torch.long)
        logits, changed = (whole(head, x, tokens) for x in (states, other))
        assert not torch.allclose(logits[0, 5], changed[0, 5])
        later = states.clone()
        later[0, 5] += 1.0
        torch.testing.assert_close(logits[0, :5], whole(head, later, tokens)[0, :5])


@pytest.mark.parametrize("layers", [[], [0], [3], [1, 1], [-1]])
def test_exits_that_do_not_exist_are_refused(layers: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"exits after so many layers: .*; allowed: different numbers from 1 to 2"):
        make_exits(tiny_stack(), "norm", layers)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown model\.exits\.kind: 'mlp'; allowed: shared, norm, linear, adapter"):
        make_exits(tiny_stack(), "mlp", [1])


def test_the_ids_of_a_reduced_head() -> None:
    texts = [[5, 5, 5, 7], [7, 9]]
    assert reduced_ids(texts, 3, [90], VOCAB).tolist() == [5, 7, 90]  # type: ignore[union-attr]  # it is reduced
    assert reduced_ids(texts, 0, [90], VOCAB) is None and reduced_ids(texts, VOCAB, [90], VOCAB) is None


def saved(folder: Path, target: Stack, kind: str, attention_only: bool, **options: Any) -> dict[int, ExitHead]:
    heads = disturbed(
        make_exits(target, kind, [1, 2], options.get("ids"), attention_only=attention_only, dtype=torch.float32)
    )  # fmt: skip
    save_exits(folder, heads, target, {"steps": 3}, "card")
    return heads


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize(("kind", "attention_only"), KINDS)
def test_a_checkpoint_reads_as_what_was_saved(
    tmp_path: Path, kind: str, attention_only: bool, ids: Tensor | None
) -> None:
    """T90: trained tensors alone, in bfloat16; from the loaded ones the same logits."""
    target, tokens = tiny_stack(), torch.tensor(prompts([8]))
    heads = saved(tmp_path / "e", target, kind, attention_only, ids=ids)
    tensors = load_file(tmp_path / "e" / "model.safetensors")
    named = {f"{e}.{name}" for e in (1, 2) for name in TRAINED[kind, attention_only]}
    assert tensors.keys() == named | ({"head_ids"} if ids is not None else set())
    assert all(value.dtype == torch.bfloat16 for name, value in tensors.items() if name != "head_ids")
    config = json.loads((tmp_path / "e" / "config.json").read_text())
    assert (config["exit_kind"], config["layers"], config["steps"]) == (kind, [1, 2], 3)
    for parameter in (p for head in heads.values() for p in head.parameters()):
        parameter.data = parameter.data.bfloat16().float()
    loaded = load_exits(tmp_path / "e", target)
    states = rung_states(target, tokens, [1, 2])
    assert list(loaded) == [1, 2]
    for e, head in loaded.items():
        assert torch.equal(whole(head, states[e], tokens), whole(heads[e], states[e], tokens))
        assert not head.training and not any(p.requires_grad for p in head.parameters())
        assert (head.head_ids is None) == (ids is None)
    assert list(load_exits(tmp_path / "e", target, [2])) == [2]


def test_exits_are_decoded_in_the_models_dtype(tmp_path: Path) -> None:
    """But rotary positions keep their precision: rounded frequencies are another model at place 500."""
    saved(tmp_path / "e", tiny_stack(), "adapter", False, ids=IDS)
    target = Stack(tiny_model().bfloat16())
    head = load_exits(tmp_path / "e", target, [1])[1]
    assert head.adapter is not None and {p.dtype for p in head.parameters()} == {torch.bfloat16}
    shape = head.adapter.shape
    wanted = shape.theta ** (-torch.arange(0, shape.head_size, 2) / shape.head_size)
    assert head.adapter.frequencies.dtype == torch.float32 and torch.equal(head.adapter.frequencies, wanted)
    lane = Lane(head.adapter)
    lane.reset(1, 4)
    assert head.readout(lane.feed(torch.randn(1, 3, 32, dtype=torch.bfloat16), [3])).dtype == torch.bfloat16


@pytest.mark.parametrize(("kind", "attention_only"), KINDS[1:])
def test_masters_learn_beside_a_target_of_another_dtype(kind: str, attention_only: bool) -> None:
    target = Stack(tiny_model().bfloat16())
    head = make_exits(target, kind, [2], IDS, attention_only=attention_only, dtype=torch.float32)[2]
    tokens = torch.tensor(prompts([8]))
    states = rung_states(target, tokens, [2])[2]
    head.readout(head.adapted(states, *places_of(tokens))).float().logsumexp(-1).sum().backward()
    assert states.dtype == torch.bfloat16 and {p.dtype for p in head.parameters()} == {torch.float32}
    assert all(p.grad is not None for p in head.parameters())


def test_exits_refuse_models_they_were_not_made_for(tmp_path: Path) -> None:
    """V60: sizes, weights, and weights of the layers alone; but not the same model in another dtype."""
    saved(tmp_path / "e", tiny_stack(), "norm", False)
    changed = tiny_model()
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight.mul_(2)
    for other, what in (*strangers(), (Stack(changed), "layers is")):
        with pytest.raises(MismatchError, match=rf"exits e belongs to another model: {what}"):
            load_exits(tmp_path / "e", other)
    load_exits(tmp_path / "e", Stack(tiny_model().bfloat16()))


def test_an_exit_that_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    target = tiny_stack(layers=5)
    save_exits(tmp_path / "e", make_exits(target, "norm", [1, 4]), target, {}, "")
    with pytest.raises(MismatchError, match=r"e has no exit after so many layers: \[2, 3\]; allowed: 1, 4; ask for"):
        load_exits(tmp_path / "e", target, [1, 2, 3])


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3), st.integers(1, 8))
def test_leading_runs_are_counted_place_by_place(rows: list[list[bool]], longest: int) -> None:
    def run(row: list[bool], start: int) -> int:
        length = 0
        while start + length < len(row) and row[start + length] and length < longest:
            length += 1
        return length

    wanted = [[run(row, start) for start in range(len(row))] for row in rows]
    assert leading_runs(torch.tensor(rows), longest).tolist() == wanted


def test_scores_are_sums_and_counts() -> None:
    """M71: over batches of several sizes; runs end with a row's output, not in the next row or the padding."""
    scores = ExitScores()
    places = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]).bool()
    scores.add("2", torch.tensor([True, True, False, False, True]), places)  # runs 2 1 0 | 0 1
    scores.add("2", torch.ones(12, dtype=torch.bool), torch.ones(1, 12).bool())  # 8 8 8 8 8 7 6 … 1
    scores.add("1", torch.tensor([False]), torch.ones(1, 1).bool())
    found = scores.figures([1, 2])
    assert found["val/agree_2"] == pytest.approx(15 / 17) and found["val/agree_1"] == 0
    assert found["val/length_2"] == pytest.approx((4 + 5 * 8 + 28) / 17)
    assert found["val/agree"] == pytest.approx(15 / 34)


@pytest.mark.parametrize(("layers", "p_max"), [(2, 0.5), (12, 0.1), (30, 0.2), (1, 0.3)])
def test_layers_are_left_out_as_the_paper_says(layers: int, p_max: float) -> None:
    """p_l = p_max (exp(l ln 2 / (L − 1)) − 1): never the first, the last with p_max."""
    rates = dropout_rates(layers, p_max)
    for index, rate in enumerate(rates):
        assert rate == pytest.approx(p_max * (math.exp(index * math.log(2) / max(1, layers - 1)) - 1))
    assert rates[0] == 0 and rates == sorted(rates)
    if layers > 1:
        assert rates[-1] == pytest.approx(p_max)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 100))
def test_exits_take_turns(layers: int, rotation: int, start: int) -> None:
    """In any ``rotation`` steps every layer has a loss once, the last in each."""
    turns = [active_layers(step, layers, rotation) for step in range(start, start + rotation)]
    assert all(turn[-1] == layers - 1 and turn == sorted(set(turn)) for turn in turns)
    counts = [sum(index in turn for turn in turns) for index in range(layers)]
    assert counts == [1] * (layers - 1) + [rotation]
    assert {b - a for turn in turns for a, b in pairwise(turn[:-1])} <= {rotation}


@given(st.integers(2, 30), st.floats(0, 1), st.integers(1, 9), st.integers(0, 20))
def test_loss_shares_grow_with_the_layers_below(layers: int, scale: float, rotation: int, step: int) -> None:
    active = active_layers(step, layers, rotation)
    weights = {index: scale * sum(range(index + 1)) for index in active[:-1]}
    weights[layers - 1] = layers - 1 + scale * sum(range(layers - 1))
    total = sum(weights.values())
    shares = loss_shares(active, layers, scale)
    assert shares == {index + 1: pytest.approx(w / total) for index, w in weights.items() if w > 0}
    assert sum(shares.values()) == pytest.approx(1) and layers in shares
    assert list(shares.values()) == sorted(shares.values())
