"""A model whose layers lie on several devices. Here all of them are the CPU; hooks and split memory are real."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from transformers import PreTrainedModel

from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.lane import Lane
from pacer.decoding.request import Request
from pacer.errors import ConfigError
from pacer.models import sources
from pacer.models.cache import Cache
from pacer.models.draft import TrainableDraft
from pacer.models.exits import make_exits
from pacer.models.paged import make_cache
from pacer.models.placed import SplitCache
from pacer.models.stack import Stack
from tests.exits import early_model, heads, self_speculative
from tests.folders import tiny_folder
from tests.tiny import generate, hf_generate, make_decoder, near, prompts, tiny_model

PROMPTS = prompts([5, 9, 3, 7, 4, 6])
REQUESTS = [Request(str(i), prompt, 12) for i, prompt in enumerate(PROMPTS)]


def hooked(model: PreTrainedModel) -> PreTrainedModel:
    """With accelerate's hooks on every part, as after loading over two devices."""
    parts = [name for name, module in model.named_modules() if name and not list(module.children())]
    return dispatch_model(model, dict.fromkeys(parts, "cpu"), force_hooks=True)


def has_hooks(module: nn.Module) -> bool:
    return any(hasattr(part, "_hf_hook") or "forward" in vars(part) for part in module.modules())


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "opt"])
def test_slices_of_a_model_with_hooks(family: str) -> None:
    wanted = [hf_generate(early_model(family), prompt, 12) for prompt in PROMPTS]
    model = hooked(early_model(family))
    assert has_hooks(model)
    target = Stack(model)
    decoder = self_speculative(target, heads(target), Fixed(2), (4,))
    assert [r.ids for r in generate(decoder, REQUESTS, 3)] == wanted


def test_a_hook_on_the_decoder_itself_does_not_run_all_layers_in_each_slice() -> None:
    model = early_model()
    plain = Stack(early_model())
    stack = Stack(dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True))
    assert "forward" in vars(stack.decoder)
    x, places = torch.randn(1, 4, 32), torch.arange(4)[None]
    assert torch.equal(stack.run(x, 1, 3, places, None), plain.run(x, 1, 3, places, None))


def test_copies_are_free_of_hooks() -> None:
    target, plain = Stack(hooked(early_model())), Stack(early_model())
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    places, head_ids = torch.arange(5)[None], torch.arange(40)
    draft, wanted = (TrainableDraft(stack, [0, 2], head_ids, copying=True) for stack in (target, plain))
    assert not has_hooks(draft) and has_hooks(target.model)
    for part in (draft, wanted):
        part.stack.run(part.stack.embed(ids), 0, 2, places, None)
    found, there = (
        d.logits(d.stack.run(d.stack.embed(ids), 0, 2, places, None)).detach() for d in (draft, wanted)
    )  # fmt: skip
    assert torch.equal(found, there)
    for kind in ("norm", "linear", "adapter"):
        own, other = (make_exits(stack, kind, [2], head_ids)[2] for stack in (target, plain))
        assert not has_hooks(own)
        states = torch.randn(1, 5, 32)
        assert torch.equal(
            own.readout(own.adapted(states, places, None)), other.readout(other.adapted(states, places, None))
        )


class SplitStack(Stack):
    """A stack whose memory is split after its first layers, as over two devices."""

    def new_cache(self, rows: int, capacity: int, a: int = 0, b: int | None = None, block: int | None = None) -> Cache:
        whole = super().new_cache(rows, capacity, a, b, block)
        end = self.n_layers if b is None else b
        runs = [list(range(a, a + 1)), list(range(a + 1, end))]
        shape = (whole.keys.shape[-2], whole.keys.shape[-1])
        where: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        parts = [make_cache(layers, rows, capacity, *shape, block, **where) for layers in runs if layers]
        found = SplitCache(parts, [len(layers) for layers in runs if layers], a)
        assert (found.nbytes(), found.allocated_tokens()) == (whole.nbytes(), whole.allocated_tokens())
        return found


@pytest.mark.parametrize("block", [None, 4])
def test_memory_in_parts(block: int | None) -> None:
    """Rows of their own lengths, rows taken by others, prompts that begin alike."""
    prompts = [*PROMPTS, [*PROMPTS[1][:8], 1, 2], [*PROMPTS[1][:8], 3]]
    requests = [Request(str(i), prompt, 12) for i, prompt in enumerate(prompts)]
    model = tiny_model()
    wanted = [hf_generate(tiny_model(), prompt, 12) for prompt in prompts]
    decoder = make_decoder(SplitStack(model), SplitStack(near(tiny_model())), Fixed(3))
    decoder.reader.block = block  # type: ignore[attr-defined]
    for slots in (1, 3, 8):
        assert [r.ids for r in decoder.generate(requests, slots=slots)] == wanted
    assert isinstance(decoder.reader.cache, SplitCache)  # type: ignore[attr-defined]


def _in_use(cache: Cache) -> torch.Tensor:
    """Of each layer: tokens it has places for, and entries of its first row that are not zero."""
    parts = cache.parts if isinstance(cache, SplitCache) else [cache]
    rows = [[part.allocated_tokens(), int(layer[0].count_nonzero())] for part in parts for layer in part.keys]
    return torch.tensor(rows)


@pytest.mark.parametrize("block", [None, 4])
def test_a_row_begins_as_another_and_is_emptied_in_all_parts(block: int | None) -> None:
    ids, more = torch.tensor([[5, 3, 8, 1, 9, 2, 6, 7]]), torch.tensor([[4, 4, 1]])
    found = []
    for stack in (SplitStack(tiny_model()), Stack(tiny_model())):
        lane = Lane(stack, block=block)
        lane.reset(2, 16)
        with torch.no_grad():
            lane.feed_ids(ids, [8], [0])
            lane.adopt(1, 0, 6)
            shared = lane.feed_ids(more, [3], [1])
            lane.release(0)
            emptied = _in_use(lane.cache)
            lane.feed_ids(more, [3], [0])
            last = lane.feed_ids(more.expand(2, -1), [3, 3])
            lane.truncate([1, 1])
            found.append((shared, last, emptied, _in_use(lane.cache)))
    for own, plain in zip(*found, strict=True):
        assert torch.equal(own, plain)


def test_transformers_places_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU all of it is the CPU; a model that is left in parts on the CPU is refused."""
    folder = tiny_folder(tmp_path / "m")
    placed, plain = sources.load_model(folder, "float32", device_map="auto"), sources.load_model(folder, "float32")
    assert {str(p.device) for p in placed.parameters()} == {"cpu"}
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(placed(input_ids=ids).logits, plain(input_ids=ids).logits)
    with pytest.raises(ConfigError, match="do not hold"):
        sources._check_placed(SimpleNamespace(hf_device_map={"model": 0, "lm_head": "cpu"}))
