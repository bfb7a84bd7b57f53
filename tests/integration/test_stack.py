"""A model as embed → layers[a:b] → readout, against the whole model and against transformers' own cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, LlamaForCausalLM, PreTrainedModel

import pacer
from pacer.decoding.lane import Lane, padded
from pacer.errors import UnsupportedError
from pacer.models.stack import FAMILIES, Stack, causal_mask, check_supported
from pacer.settings import LayerSkipSettings, TrainerSettings
from pacer.training.layerskip import LayerSkipModule
from tests.tiny import VARIANTS, VOCAB, hf_generate, prompts, table_model, tiny_model, tiny_stack

LAYERS = 4
CHUNKS = [7, 1, 3, 1]
ALL = [*sorted(FAMILIES), *VARIANTS]


def _close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def _states(model: PreTrainedModel, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Of a transformers model with its own cache, fed chunk by chunk: states after 0 … L − 1 layers, and the logits."""
    cache, states, logits, start = DynamicCache(config=model.config), [], [], 0
    name = "cache" if Stack(tiny_model(layers=1))._cache_argument == "cache" else "past_key_values"
    for size in CHUNKS:
        part = ids[:, start : start + size]
        out = model(input_ids=part, use_cache=True, output_hidden_states=True, **{name: cache})
        states.append(out.hidden_states[:-1])  # the last one is normed already
        logits.append(out.logits)
        start += size
    return [torch.cat(layer, 1) for layer in zip(*states, strict=True)], torch.cat(logits, 1)


def _ids(rows: int = 2) -> Tensor:
    return torch.tensor(prompts([sum(CHUNKS)] * rows))


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("bounds", [(0, 1), (0, LAYERS - 1), (0, LAYERS), (1, LAYERS), (1, 3), (LAYERS - 1, LAYERS)])
def test_slices_equal_the_whole_model(family: str, bounds: tuple[int, int]) -> None:
    """With a cache of their own layers only, chunk by chunk; exits 1, L − 1, L and starts above layer 0."""
    a, b = bounds
    ids = _ids()
    with torch.no_grad():
        states, logits = _states(tiny_model(family, LAYERS), ids)
        stack = tiny_stack(family, LAYERS)
        lane, start, found = Lane(stack, a, b), 0, []
        lane.reset(2, ids.shape[1])
        for size in CHUNKS:
            x = stack.embed(ids[:, start : start + size]) if a == 0 else states[a][:, start : start + size]
            found.append(lane.feed(x, [size, size]))
            start += size
        if b < LAYERS:
            _close(torch.cat(found, 1), states[b])
        else:
            _close(stack.readout(torch.cat(found, 1)), logits)


@pytest.mark.parametrize("family", ALL)
def test_slices_in_a_row_equal_the_whole_model_without_a_cache(family: str) -> None:
    ids, reference = _ids(), tiny_model(family, LAYERS)
    stack = tiny_stack(family, LAYERS)
    positions = torch.arange(ids.shape[1]).expand(2, -1)
    mask = causal_mask(positions, ids.shape[1])
    with torch.no_grad():
        x = stack.embed(ids)
        for a, b in ((0, 1), (1, LAYERS - 1), (LAYERS - 1, LAYERS)):
            x = stack.run(x, a, b, positions, mask)
        out = reference(input_ids=ids, output_hidden_states=True, use_cache=False)
        _close(stack.readout(x), out.logits)
        if family != "opt, projected":  # its last state is that of the narrower embedding
            _close(stack.normed(x), out.hidden_states[-1])
        exits = stack.readout(stack.run(stack.embed(ids), 0, 2, positions, mask))
        _close(exits, stack.head(stack.norm(out.hidden_states[2])))


@pytest.mark.parametrize("family", ALL)
def test_rows_of_their_own_length_equal_single_rows(family: str) -> None:
    stack, reference = tiny_stack(family, LAYERS), tiny_model(family, LAYERS)
    rows = prompts([9, 1, 4, 6])
    lane = Lane(stack)
    lane.reset(4, 12)
    with torch.no_grad():
        ids, counts = padded([row[:-1] for row in rows], stack.device)
        lane.feed_ids(ids, counts)
        ids, counts = padded([row[len(row) - 1 :] for row in rows], stack.device)
        logits = stack.readout(lane.feed_ids(ids, counts))
        for i, row in enumerate(rows):
            _close(logits[i, -1], reference(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1])


@pytest.mark.parametrize("family", ALL)
def test_blocks_of_memory_hold_the_same(family: str) -> None:
    """In float64: passes of other lengths round otherwise, in float32 by more than the bound on some processors."""
    ids, reference = _ids(), tiny_model(family, LAYERS).double()
    stack = Stack(tiny_model(family, LAYERS).double())
    lanes = [Lane(stack, 0, 2, block=4), Lane(stack, 2, LAYERS, block=4)]
    for lane in lanes:
        lane.reset(2, ids.shape[1])
    found = []
    with torch.no_grad():
        for part in ids.split(CHUNKS, 1):
            x = stack.embed(part)
            for lane in lanes:
                x = lane.feed(x, [part.shape[1]] * 2)
            found.append(stack.readout(x))
        _close(torch.cat(found, 1), reference(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize("family", ALL)
def test_any_mask_and_positions_are_taken_as_given(family: str) -> None:
    """Two continuations of one prefix side by side, each blind to the other: what trees and packed training need."""
    stack, reference = tiny_stack(family, LAYERS), tiny_model(family, LAYERS)
    prefix, left, right = [3, 1, 4, 1], [5, 9, 2], [6, 5]
    ids = torch.tensor([prefix + left + right])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 4, 5]])
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    mask[7:, 4:7] = False
    with torch.no_grad():
        logits = stack.readout(stack.run(stack.embed(ids), 0, LAYERS, positions, mask[None, None]))[0]
        for found, text in ((logits[4:7], prefix + left), (logits[7:], prefix + right)):
            wanted = reference(input_ids=torch.tensor([text]), use_cache=False).logits[0, 4:]
            _close(found, wanted)


@pytest.mark.parametrize("family", ALL)
def test_the_model_itself_works_on_as_before(family: str) -> None:
    """Its attention was replaced: transformers' own generate, also with padding on the left, gives the same."""
    model, reference = tiny_model(family), tiny_model(family)
    Stack(model)
    for prompt in prompts([6, 11]):
        assert hf_generate(model, prompt, 12) == hf_generate(reference, prompt, 12)
    ids, mask = torch.tensor(prompts([8, 8])), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        found, wanted = (m(input_ids=ids, attention_mask=mask, use_cache=False).logits for m in (model, reference))
    _close(found[0, 3:], wanted[0, 3:])
    _close(found[1], wanted[1])


def test_a_table_model_has_the_tables_logits() -> None:
    table = torch.tensor([[0.0, 1.5, -2.0], [3.0, 0.25, 7.0], [-1.0, -1.0, 0.0]])
    ids = torch.tensor([[0, 2, 1, 1, 0]])
    stack = Stack(table_model(table))
    positions = torch.arange(5)[None]
    logits = stack.readout(stack.run(stack.embed(ids), 0, 1, positions, causal_mask(positions, 5)))
    assert torch.equal(logits[0], table[ids[0]])


def test_the_vocabulary_is_the_models() -> None:
    """V57: the rows of the model, whatever a tokenizer says."""
    stack = tiny_stack(vocab=101)
    assert stack.vocab_size == stack.readout(torch.zeros(1, 1, stack.width)).shape[-1] == 101


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {}, "unsupported architecture"),
    ("gpt2", {}, "unsupported architecture"),
    ("mistral", {"sliding_window": 16, "max_position_embeddings": 128}, "sliding_window=16"),
    ("mistral", {}, "sliding_window=4096"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, "sliding_attention"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, "sliding_attention"),
    ("opt", {"do_layer_norm_before": False}, "variant of opt.*do_layer_norm_before=False"),
    ("opt", {"_remove_final_layer_norm": True}, "variant of opt.*_remove_final_layer_norm=True"),
    ("opt", {"layer_norm_elementwise_affine": False}, "variant of opt.*layer_norm_elementwise_affine=False"),
]


@pytest.mark.parametrize(("kind", "options", "reason"), REFUSED)
def test_what_cannot_be_cut_or_rolled_back_is_refused(kind: str, options: dict[str, Any], reason: str) -> None:
    """L10, C23, T95."""
    with pytest.raises(UnsupportedError, match=reason) as error:
        check_supported(AutoConfig.for_model(kind, **options))
    assert error.value.allowed
    if "architecture" in reason:
        assert all(family in str(error.value) for family in FAMILIES)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_text_length_are_refused(scaling: str) -> None:
    """L10: transformers changes all frequencies with the longest position of a call, so entries in a cache go stale and
    a row depends on its neighbours."""
    half = [1.0 + i for i in range(4)]
    parameters = {"rope_type": scaling, "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 16}
    if scaling == "longrope":
        parameters |= {"short_factor": half, "long_factor": [2 * f for f in half]}
    with pytest.raises(UnsupportedError, match=scaling):
        tiny_stack(rope_parameters=parameters)


@pytest.mark.parametrize("scaling", ["default", "linear", "yarn", "llama3"])
def test_fixed_scalings_of_positions_are_supported(scaling: str) -> None:
    parameters = {"rope_type": scaling, "rope_theta": 10_000.0}
    if scaling != "default":
        parameters |= {"factor": 2.0}
    if scaling in ("yarn", "llama3"):
        parameters |= {"original_max_position_embeddings": 16}
    if scaling == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    stack, ids = tiny_stack(rope_parameters=dict(parameters)), torch.tensor(prompts([30]))
    lane = Lane(stack)
    lane.reset(1, 30)
    with torch.no_grad():
        found = torch.cat([lane.feed_ids(part, [part.shape[1]]) for part in ids.split([12, 1, 17], 1)], 1)
        reference = tiny_model(rope_parameters=dict(parameters))
        _close(stack.readout(found), reference(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mistral", {"sliding_window": 128}), ("mistral", {"sliding_window": None}),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}),
    ],
)  # fmt: skip
def test_a_window_that_is_off_or_spans_the_context_is_no_window(family: str, options: dict[str, Any]) -> None:
    """C23."""
    ids = torch.tensor(prompts([40]))
    positions = torch.arange(40)[None]
    stack = tiny_stack(family, **options)
    with torch.no_grad():
        found = stack.readout(stack.run(stack.embed(ids), 0, 3, positions, causal_mask(positions, 40)))
        _close(found, tiny_model(family, **options)(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize("bounds", [(0, 0), (2, 1), (-1, 2), (0, 4)])
def test_layers_that_do_not_exist_are_refused(bounds: tuple[int, int]) -> None:
    stack = tiny_stack(layers=3)
    with pytest.raises(UnsupportedError, match=r"no such layers.*0 ≤ a < b ≤ 3"):
        stack.run(torch.zeros(1, 1, 32), *bounds, torch.zeros(1, 1, dtype=torch.long), None)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_argument_is_named_as_the_library_has_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C26: transformers renamed it. A decoder of either kind is served, with the same result."""
    ids = torch.tensor(prompts([5]))

    def read(stack: Stack) -> Tensor:
        lane = Lane(stack)
        lane.reset(1, 6)
        lane.feed_ids(ids, [5])
        return lane.feed_ids(ids[:, :1], [1])

    stack = tiny_stack()
    wanted, own, plain = read(stack), stack._cache_argument, type(stack.decoder).forward

    def old(self: Any, *, past_key_values: Any = None, **rest: Any) -> Any:
        return plain(self, **{own: past_key_values}, **rest)

    def new(self: Any, *, cache: Any = None, **rest: Any) -> Any:
        return plain(self, **{own: cache}, **rest)

    monkeypatch.setattr(type(stack.decoder), "forward", new if name == "cache" else old)
    stack = tiny_stack()
    assert stack._cache_argument == name
    _close(read(stack), wanted)


def test_one_place_talks_to_the_library() -> None:
    """C26: only models/stack.py knows how transformers names its cache, and decoding does not import transformers."""
    root = Path(pacer.__file__).parent
    for path in root.rglob("*.py"):
        text = path.read_text()
        if path != root / "models" / "stack.py":
            assert not re.search(r"past_key_values\s*=|DynamicCache|AttentionInterface", text), path
        if (root / "decoding") in path.parents:
            assert "transformers import" not in text and "import transformers" not in text, path


def test_a_reduced_head_names_its_ids() -> None:
    model = tiny_model()
    assert isinstance(model, LlamaForCausalLM)
    ids = torch.tensor([3, 50, 96])
    full = tiny_stack()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[ids], requires_grad=False)
    stack = Stack(model, ids)
    x = torch.randn(2, 5, 32)
    _close(stack.readout(x), full.readout(x)[..., ids])
    assert stack.vocab_size == VOCAB


def test_a_projection_before_the_head_is_one_with_it() -> None:
    """Every head then reads states of the layers' width; transformers' own text stays what it was."""
    model, reference = tiny_model("opt, projected"), tiny_model("opt, projected")
    stack = Stack(model)
    assert stack.folded and stack.head.weight.shape == (VOCAB, stack.width) and model.model.decoder.project_out is None
    assert stack.embedding.weight.shape[1] == 24 and stack.embed(torch.tensor([[1]])).shape[-1] == stack.width
    for prompt in prompts([6, 11]):
        assert hf_generate(model, prompt, 12) == hf_generate(reference, prompt, 12)
    with pytest.raises(UnsupportedError, match="cannot be saved once it is tuned"):
        LayerSkipModule(stack, [1], LayerSkipSettings(), TrainerSettings(), 1)
    assert not tiny_stack("opt").folded
