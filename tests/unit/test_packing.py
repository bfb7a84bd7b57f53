"""A packed batch means what its segments mean alone, in logits and gradients, and nothing sees what it must not."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from pacer.data.corpus import Text
from pacer.data.labels import Rounds, draft_rounds
from pacer.data.packing import Packed, attention_mask, dense_mask, first_fit, pack, packed_length, sees
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.decoding.request import Request
from pacer.errors import PacerError
from pacer.models.preverifier import Preverifier
from pacer.models.stack import causal_mask
from pacer.training.preverify import packed_logits
from tests.texts import draft, path, rounds_at, target, written
from tests.tiny import make_decoder, make_preverifier

GAMMA = 6
STOPS = (51,)  # drafted now and then, so segments differ in length
Pair = tuple[Text, Rounds]


def rows() -> list[list[Pair]]:
    """Two rows: three texts and one, with 4, 1, 3 and 6 segments; the second row ends in padding."""
    texts = written(4)
    starts = [[1, 5, 6, 30], [9], [2, 17, 35], [1, 8, 9, 10, 11, 33]]
    pairs = [(text, rounds_at(text, start, GAMMA, STOPS)) for text, start in zip(texts, starts, strict=True)]
    return [pairs[:3], pairs[3:]]


def segments(batch: list[list[Pair]]) -> Iterator[tuple[int, int, int, Text, Rounds, int]]:
    """Row, first place and length of each segment, with its text, rounds and number in them."""
    for row, members in enumerate(batch):
        offset = 0
        for text, rounds in members:
            offset += len(path(text))
            for s, count in enumerate(rounds.counts.tolist()):
                yield row, offset, count, text, rounds, s
                offset += count


def alone(module: Preverifier, text: Text, rounds: Rounds, s: int) -> Tensor:
    """Logits of one segment without any packing: the committed prefix and the draft as one causal sequence."""
    start, count = int(rounds.starts[s]), int(rounds.counts[s])
    ids = torch.tensor([[*path(text)[:start], *rounds.tokens[s, :count].tolist()]])
    places = torch.arange(ids.shape[1])[None]
    mask, drafter = causal_mask(places, ids.shape[1]), module.draft
    states = drafter.run(drafter.embed(ids), 0, drafter.n_layers, places, mask)
    produced = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
    index = (places - start + 1).clamp_min(0)
    said = {"cumulative": rounds.logprob.cumsum(1), **vars(rounds)}
    features = module.select(lambda name: F.pad(said[name][s : s + 1, :count], (start, 0)), index)
    x = module.entries(produced, ids, index, features)
    if not module.sees_prefix:
        x, places, mask, features = x[:, start:], places[:, start:], mask[:, :, start:, start:], features[:, start:]
    hidden = module.stack.run(x, 0, module.stack.n_layers, places, mask)
    if not module.sees_prefix:
        return module.logits(hidden, features)[0]
    return module.logits(hidden, features)[0, start:]


def gradients(module: Preverifier, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"state": "before_norm", "features": [], "depth": 2}, {"index_embedding": False, "width": 16},
        {"attention": "block", "features": ["cumulative", "match", "margin"]}, {"attention": "block", "depth": 2},
    ],
)  # fmt: skip
@pytest.mark.parametrize("label", ["survival", "conditional"])
def test_packed_equals_one_segment_at_a_time(settings: dict[str, object], label: str) -> None:
    module = make_preverifier(draft(), gamma_max=GAMMA, **settings).requires_grad_(True)
    batch = rows()
    packed = pack(batch, label)
    logits = packed_logits(module, packed)
    loss = F.binary_cross_entropy_with_logits(logits[packed.used], packed.labels[packed.used])
    packed_gradients = gradients(module, loss)
    total = torch.zeros(())
    for row, offset, count, text, rounds, s in segments(batch):
        single = alone(module, text, rounds, s)
        assert len(single) == count
        torch.testing.assert_close(logits[row, offset : offset + count], single, atol=5e-5, rtol=0)
        labels, used = (x[s, :count] for x in rounds.labels(label))
        total = total + F.binary_cross_entropy_with_logits(single[used], labels[used], reduction="sum")
    alone_gradients = gradients(module, total / packed.used.sum())
    assert alone_gradients.keys() == packed_gradients.keys() == dict(module.named_parameters()).keys()
    for name, gradient in packed_gradients.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, alone_gradients[name], atol=1e-5, rtol=1e-5, msg=name)


def test_what_is_packed() -> None:
    text = Text("a", "t", [11, 12], [13, 14, 15], True)
    rounds = Rounds(
        starts=torch.tensor([3, 4]), tokens=torch.tensor([[14, 9, 0], [15, 7, 8]]),
        logprob=torch.tensor([[-1.0, -2.0, 0.0], [-3.0, -4.0, -5.0]]), entropy=torch.ones(2, 3),
        margin=torch.tensor([[0.5, 0.25, 0.0], [1.0, 2.0, 3.0]]), match=torch.tensor([[0, 3, 0], [4, 0, 5]]),
        counts=torch.tensor([2, 3]), accepted=torch.tensor([1, 1]), known=torch.tensor([3, 1]),
    )  # fmt: skip
    short = Text("b", "t", [21], [22, 23], False)
    one = rounds.pick(torch.tensor([0]))
    one.starts = torch.tensor([2])
    packed = pack([[(text, rounds), (short, one)], [(short, one)]], "survival")
    assert packed.ids.tolist() == [
        [11, 12, 13, 14, 15, 14, 9, 15, 7, 8, 21, 22, 23, 14, 9], [21, 22, 23, 14, 9, *[0] * 10],
    ]  # fmt: skip
    assert packed.positions[0].tolist() == [0, 1, 2, 3, 4, 3, 4, 4, 5, 6, 0, 1, 2, 2, 3]
    assert packed.source[0].tolist() == [-1, 0, 1, 2, 3, 2, 5, 3, 7, 8, -1, 10, 11, 11, 13]
    assert packed.index[0].tolist() == [0, 0, 0, 0, 0, 1, 2, 1, 2, 3, 0, 0, 0, 1, 2]
    assert packed.document[0].tolist() == [0] * 10 + [1] * 5
    assert packed.document[1].tolist() == [0] * 5 + [-1] * 10
    assert packed.segment[0].tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 0, 0, 0, 3, 3]
    assert packed.start[0].tolist() == [0, 0, 0, 0, 0, 3, 3, 4, 4, 4, 0, 0, 0, 2, 2]
    assert packed.logprob[0].tolist() == [0, 0, 0, 0, 0, -1, -2, -3, -4, -5, 0, 0, 0, -1, -2]
    assert packed.cumulative[0].tolist() == [0, 0, 0, 0, 0, -1, -3, -3, -7, -12, 0, 0, 0, -1, -3]
    assert packed.margin[0].tolist() == [0, 0, 0, 0, 0, 0.5, 0.25, 1, 2, 3, 0, 0, 0, 0.5, 0.25]
    assert packed.match[0].tolist() == [0, 0, 0, 0, 0, 0, 3, 4, 0, 5, 0, 0, 0, 0, 3]
    assert packed.labels[0].tolist() == [0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 0]
    used = packed.used.long().tolist()
    assert used[0] == [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1]  # the text's end hides the second draft's tail
    assert used[1] == [0, 0, 0, 1, 1, *[0] * 10]
    assert packed_length(text, rounds) + packed_length(short, one) == packed.ids.shape[1]


def replaced(packed: Packed, row: int, places: list[int]) -> Packed:
    """Other tokens at these places."""
    ids = packed.ids.clone()
    ids[row, places] = (ids[row, places] + 17) % 97
    return dataclasses.replace(packed, ids=ids)


def test_a_segment_sees_its_text_before_its_start_and_itself_alone() -> None:
    module = make_preverifier(draft(), gamma_max=GAMMA)
    batch = rows()
    packed = pack(batch, "survival")
    before = packed_logits(module, packed)
    found = list(segments(batch))
    everything = {(row, place) for row in range(2) for place in range(packed.ids.shape[1])}
    for number in (0, 1, 3, 5, len(found) - 1):
        row, offset, count, text, rounds, s = found[number]
        own = list(range(offset, offset + count))
        first = next(offset for row_, offset, _, text_, _, _ in found if text_ is text) - len(path(text))
        visible = [*range(first, first + int(rounds.starts[s])), *own]
        assert packed.ids[row, visible].tolist() == [
            *path(text)[: int(rounds.starts[s])], *rounds.tokens[s, :count].tolist()
        ]  # fmt: skip
        hidden = everything - {(row, place) for place in visible}
        changed = packed
        for r in range(2):
            changed = replaced(changed, r, sorted(place for r_, place in hidden if r_ == r))
        after = packed_logits(module, changed)
        assert torch.equal(after[row, own], before[row, own])
        for place in (visible[0], visible[-count - 1], own[0]):  # and what it sees does matter
            moved = packed_logits(module, replaced(packed, row, [place]))
            assert not torch.isclose(moved[row, own[-1]], before[row, own[-1]], atol=1e-6)


def test_a_path_sees_its_own_past_alone() -> None:
    module = make_preverifier(draft(), gamma_max=GAMMA)
    packed = pack(rows(), "survival")
    before = packed_logits(module, packed)
    length = len(path(written(4)[0]))
    after = packed_logits(module, replaced(packed, 0, list(range(length, packed.ids.shape[1]))))
    assert torch.equal(after[0, :length], before[0, :length])
    later = packed_logits(module, replaced(packed, 0, [length - 1]))
    assert torch.equal(later[0, : length - 1], before[0, : length - 1])


def test_block_mask_is_the_dense_mask() -> None:
    packed = pack(rows(), "survival")
    count, n = packed.ids.shape
    dense = dense_mask(packed)
    assert dense.shape == (count, 1, n, n) and dense.any(-1).all()  # no query without a key
    assert torch.equal(create_mask(sees(packed), count, 1, n, n, device="cpu"), dense)
    alone = dense_mask(packed, prefix=False)
    assert torch.equal(create_mask(sees(packed, False), count, 1, n, n, device="cpu"), alone) and alone.any(-1).all()
    drafted = (packed.segment > 0)[:, None, :, None]
    assert torch.equal(alone, dense & (~drafted | drafted.transpose(2, 3)))
    on_cpu = attention_mask(packed)
    assert isinstance(on_cpu, Tensor) and torch.equal(on_cpu, dense)
    stack = draft()
    x = stack.embed(packed.ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's advice to compile
        block = create_block_mask(sees(packed), count, None, n, n, device="cpu")
        flex = stack.run(x, 0, stack.n_layers, packed.positions, block)
    real = packed.document >= 0
    plain = stack.run(x, 0, stack.n_layers, packed.positions, dense)
    torch.testing.assert_close(flex[real], plain[real], atol=1e-4, rtol=1e-5)


def test_training_sees_what_decoding_sees() -> None:
    """The estimates in the trace of a decoder equal the packed logits of the same rounds."""
    module = make_preverifier(draft(), gamma_max=GAMMA)
    text = written(4)[0]
    rule = PreverifierRule(module, b=2, t0=0.0, gamma_max=GAMMA)
    request = Request(text.id, text.prompt_ids, len(text.output_ids))
    trace = make_decoder(target(), draft(), rule).generate([request])[0].rounds
    checked = 0
    for line in trace[1:]:
        if len(line["drafted"]) < GAMMA:  # near the end of the budget
            continue
        scores = [score for score in line["scores"] if score is not None]
        assert len(scores) == GAMMA - 2  # the last block is never judged
        rounds = draft_rounds(draft(), text, torch.tensor([line["committed"]]), GAMMA, [])
        assert rounds.tokens[0].tolist() == line["drafted"]
        assert int(rounds.accepted[0]) == line["accepted"][0]
        packed = packed_logits(module, pack([[(text, rounds)]], "survival"))[0, -GAMMA:].sigmoid()
        torch.testing.assert_close(packed[: len(scores)], torch.tensor(scores), atol=1e-5, rtol=0)
        checked += 1
    assert checked > 5


def test_a_text_without_supervised_tokens_is_named() -> None:
    (text, rounds), *others = rows()[0]
    rounds.known = torch.zeros_like(rounds.known)
    with pytest.raises(PacerError, match="without supervised tokens: 'text-0'"):
        pack([[*others, (text, rounds)]], "survival")


def test_first_fit_by_hand() -> None:
    assert first_fit([], 5) == []
    assert first_fit([3, 2, 5, 4, 1], 5) == [[2], [3, 4], [0, 1]]
    assert first_fit([9, 1], 5) == [[0], [1]]  # too long: a bin of its own
