"""Copying from the context: candidates against a slow search, the candidate's logit, drafts that copy in the loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pacer.data.corpus import Text
from pacer.data.labels import draft_rounds
from pacer.decoding.build import speculative
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request, Row
from pacer.models.copying import (
    GATE_SCALE,
    LONGEST_MATCH,
    Copied,
    CopyHead,
    copied_all,
    copied_last,
    supported,
    token_of,
)
from pacer.models.draft import TrainableDraft, load_draft, save_draft
from pacer.models.stack import Stack, causal_mask
from pacer.settings import SamplingSettings
from tests.tiny import tiny_stack

TARGET = tiny_stack(layers=3, seed=3)
HEAD = torch.tensor([0, 2, 3, 5, 8, 13, 21, 34])


def slow(ids: list[int]) -> tuple[int, int]:
    """(candidate, match) for the token after ``ids``: the longest earlier match, the most recent of equals."""
    best, candidate = 0, -1
    for end in range(1, len(ids)):
        n = 0
        while n < min(end, LONGEST_MATCH) and ids[end - 1 - n] == ids[len(ids) - 1 - n]:
            n += 1
        if n >= max(best, 1):
            best, candidate = n, ids[end]
    return candidate, best


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
@settings(deadline=None)
def test_candidates_equal_a_slow_search(ids: list[int]) -> None:
    whole = copied_all(torch.tensor(ids))
    for length in range(1, len(ids) + 1):
        candidate, match = slow(ids[:length])
        # what lies beyond the length must not be looked at
        last = copied_last(torch.tensor([ids[:length] + [1] * 5, ids[:length] + [2] * 5]), torch.tensor([length] * 2))
        assert last.match.tolist() == [match, match]
        assert int(whole.match[length - 1]) == match
        if match:
            assert last.ids.tolist() == [candidate, candidate]
            assert int(whole.ids[length - 1]) == candidate


def test_rows_of_a_batch_have_their_own_lengths() -> None:
    ids = torch.tensor([[1, 2, 3, 1, 2, 0], [7, 7, 7, 0, 0, 0]])
    found = copied_last(ids, torch.tensor([5, 3]))
    assert found.ids.tolist() == [3, 7]
    assert found.match.tolist() == [2, 2]


def head(size: int = len(HEAD)) -> tuple[CopyHead, torch.Tensor]:
    torch.manual_seed(0)
    rows, projection = torch.randn(40, 6), torch.randn(6, 6)
    head_of = torch.full((40,), size)
    head_of[HEAD[:size]] = torch.arange(size)
    copying = CopyHead(rows, head_of, projection)
    torch.nn.init.normal_(copying.gate.weight)
    return copying, rows


@pytest.mark.parametrize("token", [5, 6], ids=["in the head", "outside"])
def test_the_candidates_logit_is_its_rows_plus_the_gate(token: int) -> None:
    copying, rows = head()
    normed = torch.randn(1, 6)
    projected = normed @ copying.shared[2].T
    logits = projected @ rows[HEAD].T
    out = copying(normed, logits, Copied(torch.tensor([token]), torch.tensor([3])))
    wanted = projected @ rows[token] + copying.gate(normed)[:, 2] * GATE_SCALE
    place = HEAD.tolist().index(token) if token in HEAD else len(HEAD)
    torch.testing.assert_close(out[:, place], wanted)
    others = [i for i in range(len(HEAD)) if i != place]
    assert torch.equal(out[:, others], logits[:, others])
    if token in HEAD:
        assert out[0, -1] == -torch.inf
    assert int(token_of(torch.tensor([place]), HEAD, Copied(torch.tensor([token]), torch.tensor([3])))) == token


def test_without_a_match_nothing_changes() -> None:
    copying, _ = head()
    logits = torch.randn(2, len(HEAD))
    out = copying(torch.randn(2, 6), logits, Copied(torch.tensor([5, 6]), torch.tensor([0, 0])))
    assert torch.equal(out[:, :-1], logits)
    assert torch.isinf(out[:, -1]).all()


def test_support_counts_only_the_candidate() -> None:
    copied = Copied(torch.tensor([4, 4]), torch.tensor([3, 3]))
    assert supported(torch.tensor([4, 5]), copied).tolist() == [3, 0]


def copier(strength: float = 0.0) -> TrainableDraft:
    """A draft of two layers; ``strength`` > 0: gates so wide open that it copies whatever has a match."""
    draft = TrainableDraft(TARGET, [0, 1], HEAD, copying=True)
    assert draft.copying is not None
    with torch.no_grad():
        torch.nn.init.normal_(draft.copying.gate.weight, std=0.1)
        draft.copying.gate.bias += strength
    return draft


def states(stack: Stack, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(ids.shape[1])[None]
    return stack.run(stack.embed(ids), 0, stack.n_layers, positions, causal_mask(positions, ids.shape[1]))


def test_training_form_merged_and_loaded_agree(tmp_path) -> None:  # type: ignore[no-untyped-def]
    draft = copier()
    ids = torch.randint(0, 40, (1, 30), generator=torch.Generator().manual_seed(1))
    copied = Copied(*(part[None] for part in copied_all(ids[0])))
    hidden = states(draft.stack, ids)
    wanted = draft.logits(hidden, copied)
    folder = save_draft(tmp_path / "draft", draft, TARGET, {"layers": [0, 1]}, "card")
    loaded = load_draft(folder, TARGET)
    assert loaded.copying is not None
    torch.testing.assert_close(loaded.logits(hidden, copied), wanted, atol=0.1, rtol=0.05)  # saved in bfloat16
    whole = draft.merged(full=True, target=TARGET)
    everything = whole.readout(states(whole, ids), copied)
    torch.testing.assert_close(everything[..., HEAD], wanted[..., :-1], atol=1e-4, rtol=1e-4)
    outside = torch.isfinite(wanted[..., -1])
    picked = everything.gather(-1, copied.ids[..., None]).squeeze(-1)
    torch.testing.assert_close(picked[outside], wanted[..., -1][outside], atol=1e-4, rtol=1e-4)
    merged = draft.merged()
    torch.testing.assert_close(merged.readout(states(merged, ids), copied), wanted, atol=1e-4, rtol=1e-4)


def test_it_drafts_what_the_context_says_even_outside_its_head() -> None:
    stack = copier(strength=50.0).merged()
    prompt = [30, 31, 32, 33, 30, 31]  # none of them in the head
    drafter = ModelDrafter(stack, TARGET.vocab_size, SamplingSettings())
    result = speculative(TARGET, drafter, Fixed(3)).generate([Request("a", prompt, 40, frozenset())])[0]
    whole, outside = prompt + result.ids, 0
    for line in result.rounds:
        context = whole[: int(line["committed"])]  # type: ignore[call-overload]
        for token in line["drafted"]:  # type: ignore[attr-defined]
            candidate, match = slow(context)
            if match:
                assert token == candidate
                outside += token not in HEAD
            context = [*context, token]
    assert outside > 3


def test_sampling_gives_the_candidate_its_probability() -> None:
    sampling = SamplingSettings(temperature=1.0)
    stack = copier(strength=0.5).merged()
    drafter = ModelDrafter(stack, TARGET.vocab_size, sampling)
    row = Row(Request("a", [30, 31, 32, 30, 31], 8, frozenset()), [30, 31, 32, 30, 31], 7)
    drafter.reset([row], 16)
    drafter.read([row], [True])
    _, q = drafter.draw(0, [True])
    assert q is not None
    logits = stack.readout(states(stack, torch.tensor([row.committed]))[:, -1:], Copied(*torch.tensor([[[32]], [[2]]])))
    wanted = logits.softmax(-1)[0, 0]
    torch.testing.assert_close(q[0, 0, 32], wanted[-1])
    torch.testing.assert_close(q[0, 0, HEAD], wanted[:-1])
    assert float(q.sum()) == pytest.approx(1.0, abs=1e-5)


def test_labels_draft_what_the_decoder_drafts() -> None:
    stack = copier(strength=0.3).merged()
    plain = Decoder(TARGET, sampling=SamplingSettings())
    prompt = [2, 3, 5, 2, 3, 9, 2, 3]
    output = plain.generate([Request("a", prompt, 24, frozenset())])[0].ids
    decoder = speculative(TARGET, ModelDrafter(stack, TARGET.vocab_size, SamplingSettings()), Fixed(4))
    result = decoder.generate([Request("a", prompt, 24, frozenset())])[0]
    assert result.ids == output
    rounds = [line for line in result.rounds if line["drafted"]]
    starts = torch.tensor([int(line["committed"]) for line in rounds])  # type: ignore[call-overload]
    table = draft_rounds(stack, Text("a", "t", prompt, output, True), starts, 4, [])
    for row, line in enumerate(rounds):
        drafted = list(line["drafted"])  # type: ignore[call-overload]
        assert table.tokens[row, : len(drafted)].tolist() == drafted
        known = min(int(table.known[row]), len(drafted))
        assert min(int(table.accepted[row]), known) == min(line["accepted"][0], known)  # type: ignore[index]
