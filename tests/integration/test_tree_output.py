"""Drafts that branch through the whole loop: one forward, the accepted branch put in order in the cache, and the output
is the target's own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from pacer.decoding.clock import Clock
from pacer.decoding.controllers.buffer import Enough
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.lane import Lane
from pacer.decoding.loop import Decoder
from pacer.decoding.propose import Draft, Proposer
from pacer.decoding.request import Request, Result, Row
from pacer.decoding.staged import Staged
from pacer.decoding.verifier import Verifier
from pacer.errors import DecodingError, UnsupportedError
from pacer.evaluation.traces import check_trace
from pacer.models.paged import PagedCache
from pacer.models.stack import FAMILIES, Stack
from pacer.settings import SamplingSettings
from tests.exits import early_model, heads, ladder_of
from tests.tiny import generate, hf_generate, plain_greedy, tiny_model, tiny_stack
from tests.tree_decoders import DRAFT, NEW, PROMPTS, SHAPE, TARGET, _decoder, _hash, _requests, _texts
from tests.trees import Nodes, Scripted, guessed


def _check_cache(lane: Lane, texts: dict[int, list[int]]) -> None:
    """Every row holds the entries that a fresh pass over its text makes, place by place."""
    for i, text in texts.items():
        fresh = Lane(TARGET)
        fresh.reset(1, len(text))
        fresh.feed_ids(torch.tensor([text]), [len(text)])
        own = lane.cache
        at = [own._place(i, slot) for slot in range(len(text))]  # type: ignore[attr-defined]  # of both kinds
        for found, wanted in zip((own.keys, own.values), (fresh.cache.keys, fresh.cache.values), strict=True):
            places = found.flatten(1, 2)[:, torch.tensor(at)]
            torch.testing.assert_close(places, wanted[:, 0, : len(text)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize(("batch", "slots"), [(1, None), (4, None), (4, 2)])
def test_the_accepted_branch_is_put_in_order(batch: int, slots: int | None, block: int | None) -> None:
    """C18: the right branch lies behind others and is accepted whole in every round; memory against fresh passes."""
    decoder = _decoder(guessed(_texts(NEW), SHAPE, _hash), block=block)
    finish = decoder._finish
    lane = decoder.reader
    assert isinstance(lane, Lane)

    def checked(rows: list[Row], draft: Draft, chosen: list[int], on_commit: Any) -> None:
        finish(rows, draft, chosen, on_commit)
        going = {i: row.committed[:-1] for i, row in enumerate(rows) if row.finish is None}
        assert all(lane.lengths[i] == len(text) for i, text in going.items())
        _check_cache(lane, {i: text for i, text in going.items() if i in chosen})
        if isinstance(lane.cache, PagedCache):
            assert lane.cache.allocated_tokens() <= sum(lane.lengths) + len(rows) * lane.cache.block

    decoder._finish = checked  # type: ignore[method-assign]  # a spy
    requests = _requests()
    results = [r for i in range(0, 4, batch) for r in decoder.generate(requests[i : i + batch], slots=slots)]
    for result, prompt in zip(results, PROMPTS, strict=True):
        assert result.ids == plain_greedy(TARGET.model, prompt, NEW)
        for line in result.rounds[1:-1]:
            assert line["accepted"] == [4] and len(line["drafted"]) == len(line["parents"]) == len(SHAPE)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_reads_trees(family: str) -> None:
    """Logits after each node are those of a pass over its own branch; output is the target's."""
    stack = tiny_stack(family, layers=2)
    decoder = _decoder(guessed(_texts(12, tiny_model(family, 2)), SHAPE, _hash), stack, sees=True)
    results = decoder.generate(_requests(12))
    reference = tiny_model(family, 2)
    assert [r.ids for r in results] == [hf_generate(reference, prompt, 12) for prompt in PROMPTS]
    proposer = decoder.proposer
    assert isinstance(proposer, Scripted) and len(proposer.said) > 8
    for text, tokens, parents, choices in proposer.said[-8:]:
        for node in range(-1, len(tokens)):
            line: list[int] = []
            at = node
            while at >= 0:
                line, at = [tokens[at], *line], parents[at]
            assert [choices[node + 1]] == plain_greedy(reference, [*text, *line], 1)


def _as_tree(draft: Draft) -> Draft:
    chain = torch.arange(-1, draft.tokens.shape[1] - 1).expand(len(draft.counts), -1)
    draft.parents = chain if draft.tokens.shape[1] else None
    return draft


def _told(results: list[Result], without: tuple[str, ...] = ("time", "parents")) -> list[Any]:
    lines = [[{k: v for k, v in line.items() if k not in without} for line in r.rounds] for r in results]
    return [(r.ids, r.finish, rounds) for r, rounds in zip(results, lines, strict=True)]


@pytest.mark.parametrize(
    "sampling", [SamplingSettings(), SamplingSettings(2.5), SamplingSettings(2.0, repetition_penalty=1.2)]
)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_chain_given_as_a_tree_is_decoded_as_a_chain(sampling: SamplingSettings, batch: int) -> None:
    """The same rounds, whatever the way; all that a draft model and its memory have to do with it included."""

    class Tree(Proposer):
        spare = 8

        def propose(self, rows: Any) -> Draft:
            return _as_tree(super().propose(rows))

    told = []
    for kind in (Proposer, Tree):
        drafter = ModelDrafter(DRAFT, TARGET.vocab_size, sampling)
        proposer = kind(drafter, Fixed(4), TARGET.context, Clock(TARGET.device))
        told.append(_told(generate(Decoder(TARGET, proposer, sampling), _requests(), batch)))
    assert told[0] == told[1]
    assert {line["accepted"][0] for _, _, rounds in told[0] for line in rounds} >= {0, 1, 4}


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_a_repetition_penalty_sees_prefix_and_branch(penalty: float) -> None:
    """L12: as transformers' generate, on trees that hold the right text and on trees that do not."""
    reference = tiny_model(layers=2)
    expected = [hf_generate(reference, prompt, NEW, repetition_penalty=penalty) for prompt in PROMPTS]
    whole = {tuple(prompt): [*prompt, *new] for prompt, new in zip(PROMPTS, expected, strict=True)}
    grow = guessed(lambda row: whole[tuple(row.request.prompt_ids)][len(row.committed) :], SHAPE, _hash)
    results = _decoder(grow, sampling=SamplingSettings(repetition_penalty=penalty)).generate(_requests())
    assert [r.ids for r in results] == expected
    assert all(line["accepted"] == [4] for r in results for line in r.rounds[1:-1])


@pytest.mark.parametrize("new", [1, 2, 3, 5, 17])
def test_budgets_stop_ids_and_contexts_end_trees_as_chains(new: int) -> None:
    """S29, S30, S34, S37: exactly what the target alone would write, to its last token."""
    for stops in (frozenset(), frozenset(range(0, 97, 5))):
        plain = Decoder(TARGET).generate(_requests(new, stop_ids=stops))
        found = _decoder(guessed(_texts(new), SHAPE, _hash)).generate(_requests(new, stop_ids=stops))
        assert [(r.ids, r.finish) for r in found] == [(r.ids, r.finish) for r in plain]
    small = tiny_stack(layers=1, context=16)
    plain = Decoder(small).generate(_requests(40))
    found = _decoder(guessed(lambda row: [3, 4, 5, 6], SHAPE, _hash), small).generate(_requests(40))
    assert [(r.ids, r.finish) for r in found] == [(r.ids, r.finish) for r in plain]
    assert {r.finish for r in found} == {"context"}


def test_nothing_behind_a_stop_id_is_accepted() -> None:
    text = _texts(NEW)
    stop = text(Row(_requests()[0], list(PROMPTS[0]), 0))[2]
    decoder = _decoder(guessed(text, SHAPE, _hash))
    result = decoder.generate([Request("a", PROMPTS[0], NEW, frozenset([stop]))])[0]
    assert (
        result.finish == "eos"
        and result.ids[-1] == stop
        and result.ids == plain_greedy(TARGET.model, PROMPTS[0], len(result.ids))
    )
    assert result.rounds[-1]["accepted"][0] < 4  # type: ignore[index]  # a list
    lines = [{**line, "arm": "a", "benchmark": "b"} for line in result.rounds]
    assert check_trace(lines) == []


def test_who_listens_hears_the_branch_that_was_kept() -> None:
    """As after reading the text itself: ids, states, places."""
    for block in (None, 4):
        decoder = _decoder(guessed(_texts(NEW), SHAPE, _hash), block=block)
        decoder.shares_prefixes = False
        heard: list[dict[int, tuple[int, Tensor]]] = [{} for _ in PROMPTS]

        def hear(ids: Tensor, states: Tensor, starts: Any, counts: Any, rows: Any, heard: Any = heard) -> None:
            for j, (start, count) in enumerate(zip(starts, counts, strict=True)):
                i = j if rows is None else rows[j]
                heard[i].update({start + k: (int(ids[j, k]), states[j, k]) for k in range(count)})

        decoder.reader.heard = hear
        results = decoder.generate(_requests())
        for told, result, prompt in zip(heard, results, PROMPTS, strict=True):
            text = [*prompt, *result.ids]
            lane = Lane(TARGET)
            lane.reset(1, len(text))
            states = lane.feed_ids(torch.tensor([text]), [len(text)])[0]
            assert len(told) >= len(text) - 6
            for place, (token, state) in told.items():
                if place < len(text):
                    assert token == text[place]
                    torch.testing.assert_close(state, states[place], rtol=1e-3, atol=1e-4)


def test_exits_refuse_trees_when_the_decoder_is_built() -> None:
    target = Stack(early_model())
    ladder = ladder_of(target, heads(target))
    grow = guessed(lambda row: [1], SHAPE, _hash)
    with pytest.raises(UnsupportedError, match="drafts that branch"):
        Decoder(target, Scripted(grow, target.context, target.vocab_size), None, None, ladder.rungs[-1])
    check = Verifier(ladder.rungs[1], target.readout, SamplingSettings(), target.vocab_size, target.device)
    with pytest.raises(UnsupportedError, match="drafts that branch"):
        Staged(Scripted(grow, 9, 9), check, Enough(2), target.context, Clock(target.device))


@pytest.mark.parametrize(("node", "depth"), [(-1, 0), (0, 1), (3, 2), (8, 3)])
def test_broken_numbers_are_an_error_that_names_the_place(node: int, depth: int) -> None:
    """L7: by the distance from the text, not by the number of a node."""
    decoder, readout = _decoder(guessed(_texts(NEW), SHAPE, _hash)), TARGET.readout

    def broken(states: Tensor) -> Tensor:
        logits = readout(states)
        if logits.shape[1] > 1:
            logits[:, node + 1] = torch.nan
        return logits

    decoder.verifier.readout = broken
    with pytest.raises(DecodingError, match=f"position {len(PROMPTS[0]) + 1 + depth}'"):
        decoder.generate(_requests()[:1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_host_read_per_round(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict, the branch and the choices come in one."""
    decoder = _decoder(guessed(_texts(NEW), SHAPE, _hash), sampling=SamplingSettings(temperature), sees=True)
    reads: list[int] = []
    tolist = Tensor.tolist

    def counted(self: Tensor) -> Any:
        reads.append(1)
        return tolist(self)

    monkeypatch.setattr(Tensor, "tolist", counted)
    result = decoder.generate(_requests()[:1])[0]
    assert len(reads) == len(result.rounds)


def test_a_request_is_the_same_alone_and_in_any_batch() -> None:
    """Greedy and sampled; rows whose trees have their own sizes, and rows without any."""

    def grow(row: Row) -> Nodes:
        size = (len(row.committed) + len(row.request.prompt_ids)) % (len(SHAPE) + 1)
        return [_hash(row, node) for node in range(size)], SHAPE[:size], None

    for sampling in (SamplingSettings(), SamplingSettings(3.0)):
        for chains in (False, True):
            decoder = _decoder(grow, sampling=sampling, chains=chains)
            alone = _told(generate(decoder, _requests(), 1), ("time", "parents", "rows"))
            for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 7):
                requests = _requests()
                found = _told(decoder.generate([requests[i] for i in order]), ("time", "parents", "rows"))
                assert found == [alone[i] for i in order]
