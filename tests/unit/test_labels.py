"""Labels are what the decoder itself accepts on the same text."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from pacer.data.corpus import Text
from pacer.data.labels import Rounds, choose_starts, draft_rounds, from_line, simulate, to_line, walk
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.distributions import signals
from pacer.errors import ConfigError
from pacer.models.stack import Stack
from pacer.settings import LabelSettings
from tests.texts import draft, path, reduced_draft, requests, rounds_at, target, written
from tests.tiny import generate, make_decoder, plain_greedy

STOPS = (35, 51, 75)  # of ten texts one ends at once, eight later, and one is cut
COUNT = 10


def known_rounds(rounds: Rounds) -> list[tuple[int, list[int], int]]:
    """Start, drafted up to a stop id, accepted."""
    tokens = [row[:count] for row, count in zip(rounds.tokens.tolist(), rounds.counts.tolist(), strict=True)]
    return list(zip(rounds.starts.tolist(), tokens, rounds.accepted.tolist(), strict=True))


@pytest.mark.parametrize("stops", [(), STOPS])
@pytest.mark.parametrize("gamma", [1, 4, 7])
@pytest.mark.parametrize("by", [draft, reduced_draft])
def test_labels_are_what_the_decoder_accepts(by: type[Stack], gamma: int, stops: tuple[int, ...]) -> None:
    """T82, exactly: same rounds, same drafts, same accepted counts as decoding with the same window."""
    settings = LabelSettings(starts="rounds", gamma=gamma)
    texts = written(COUNT, stop_ids=stops)
    assert not stops or {text.cut for text in texts} == {True, False}
    results = generate(make_decoder(target(), by(), Fixed(gamma)), requests(COUNT, stop_ids=stops), 3)
    drafted, accepted = [0, 0], [0, 0]  # simulated, decoded
    for text, result in zip(texts, results, strict=True):
        assert result.ids == text.output_ids
        rounds = simulate(by(), text, settings, stops)
        if rounds is None:
            assert len(text.output_ids) == 1 and len(result.rounds) == 1
            continue
        trace = [(line["committed"], line["drafted"], line["accepted"][0]) for line in result.rounds[1:]]
        mine = known_rounds(rounds)
        assert [start for start, _, _ in mine] == [start for start, _, _ in trace]
        for (_, tokens, kept), (start, real, taken) in zip(mine, trace, strict=True):
            assert tokens[: len(real)] == real  # at the end of its budget a decoder drafts less
            assert min(kept, len(real)) == taken
            assert len(real) == len(tokens) or start + gamma >= len(path(text))
            if len(real) == len(tokens):
                drafted = [drafted[0] + len(tokens), drafted[1] + len(real)]
                accepted = [accepted[0] + kept, accepted[1] + taken]
    assert drafted[0] == drafted[1] > 50
    assert accepted[0] == accepted[1] > 0


def test_a_round_is_what_the_draft_writes_alone() -> None:
    """Every round equals plain greedy decoding of the draft from the text's prefix, and so do its signals."""
    text = written(COUNT)[2]
    rounds = rounds_at(text, [1, 2, 9, 30, 35], 5)
    for start, tokens, logprob, entropy in zip(
        rounds.starts.tolist(), rounds.tokens, rounds.logprob, rounds.entropy, strict=True
    ):
        prefix = path(text)[:start]
        assert tokens.tolist() == plain_greedy(draft().model, prefix, 5)
        with torch.no_grad():
            logits = draft().model(input_ids=torch.tensor([[*prefix, *tokens.tolist()]]), use_cache=False).logits
        wanted = signals(logits[0, start - 1 : -1], tokens)
        torch.testing.assert_close(logprob, wanted[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(entropy, wanted[1], atol=1e-4, rtol=0)


def test_a_reduced_head_drafts_its_own_ids_alone() -> None:
    rounds = rounds_at(written(COUNT)[0], list(range(1, 36)), 4, by=reduced_draft())
    assert int(rounds.tokens.max()) < 40
    assert int(rounds.accepted.sum()) > 0


def perfect(stops: tuple[int, ...] = ()) -> Rounds:
    """Rounds of the target as its own draft: everything the text holds is agreed."""
    text = written(COUNT, stop_ids=stops)[7]
    assert text.cut == (not stops)
    n = len(text.output_ids)
    return rounds_at(text, [n - 6, n - 3, n - 1], 5, stops, by=target())


def test_beyond_a_cut_text_nothing_is_known() -> None:
    """A text that ended by length does not tell what the target would have said: masked, not 0."""
    rounds = perfect()
    assert rounds.counts.tolist() == [5, 5, 5]
    assert rounds.accepted.tolist() == [5, 3, 1]
    assert rounds.known.tolist() == [5, 3, 1]
    labels, used = rounds.labels("survival")
    assert used.sum(1).tolist() == [5, 3, 1]
    assert labels[used].min() == 1


def test_an_ended_text_tells_all() -> None:
    rounds = perfect(STOPS)
    assert rounds.counts.tolist() == [5, 3, 1]  # up to and with the stop id
    assert rounds.accepted.tolist() == [5, 3, 1]
    assert rounds.known.tolist() == [5, 5, 5]
    labels, used = rounds.labels("survival")
    assert used.sum(1).tolist() == [5, 3, 1]
    assert labels[used].min() == 1


def test_a_rejection_in_a_cut_text_is_known() -> None:
    text = written(COUNT)[0]
    rounds = rounds_at(text, list(range(1, len(text.output_ids))), 6)
    rejected = rounds.accepted < len(path(text)) - rounds.starts
    assert rejected.any() and (rounds.known[rejected] == 6).all()


def test_survival_and_conditional_labels() -> None:
    one = torch.ones(3, 4)
    rounds = Rounds(
        torch.tensor([5, 6, 7]), torch.zeros(3, 4, dtype=torch.long), one, one, one, one.long(),
        counts=torch.tensor([4, 4, 3]), accepted=torch.tensor([2, 0, 3]), known=torch.tensor([4, 4, 2]),
    )  # fmt: skip
    labels, used = rounds.labels("survival")
    assert labels.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
    assert used.long().tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]
    labels, used = rounds.labels("next")
    assert labels.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]
    assert used.long().tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]]  # the fate of the token after it
    labels, used = rounds.labels("conditional")
    assert labels[used].tolist() == [1, 1, 0, 0, 1, 1]
    assert used.long().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]  # none after the first rejection


def test_trimmed_rounds_end_after_the_first_rejection() -> None:
    text = written(COUNT)[7]
    rounds = rounds_at(text, list(range(1, 36)), 8, STOPS)
    trimmed = rounds.trimmed(2)
    assert trimmed.counts.tolist() == [
        min(count, kept + 3) for count, kept in zip(rounds.counts.tolist(), rounds.accepted.tolist(), strict=True)
    ]
    assert trimmed.counts.sum() < rounds.counts.sum()
    place = torch.arange(8)
    for kind in ("survival", "conditional"):
        (labels, used), (whole, before) = trimmed.labels(kind), rounds.labels(kind)
        assert torch.equal(labels, whole) and torch.equal(used, before & (place < trimmed.counts[:, None]))
    assert torch.equal(rounds.trimmed(8).counts, rounds.counts)


def test_starts_are_a_texts_own() -> None:
    settings = LabelSettings(starts="uniform", starts_per_text=7, seed=3)
    texts = written(COUNT)
    first = {text.id: choose_starts(text, settings).tolist() for text in texts}
    again = {text.id: choose_starts(text, settings).tolist() for text in reversed(texts[2:])}
    assert all(first[name] == starts for name, starts in again.items())
    for text in texts:
        starts = first[text.id]
        assert len(set(starts)) == 7 and starts == sorted(starts)
        assert len(text.prompt_ids) + 1 <= starts[0] and starts[-1] <= len(path(text)) - 1
    assert len({tuple(s - len(t.prompt_ids) for s in first[t.id]) for t in texts}) == COUNT  # not the same for all
    other = dataclasses.replace(settings, seed=4)
    assert any(choose_starts(text, other).tolist() != first[text.id] for text in texts)


def test_starts_cover_what_can_start() -> None:
    """The first token comes from the prefill, and the last needs no draft."""
    text = Text("x", "t", [1, 2, 3], [4, 5, 6, 7], True)
    for settings in (LabelSettings(starts="all"), LabelSettings(starts="uniform", starts_per_text=3)):
        assert choose_starts(text, settings).tolist() == [4, 5, 6]
    assert set(choose_starts(text, LabelSettings(starts="uniform", starts_per_text=2)).tolist()) < {4, 5, 6}
    short = dataclasses.replace(text, output_ids=[4])
    assert simulate(draft(), short, LabelSettings(), []) is None
    with pytest.raises(ConfigError, match=r"labels\.starts: 'some'; allowed: uniform, rounds, all"):
        choose_starts(text, LabelSettings(starts="some"))


def test_a_walk_steps_over_what_each_round_emits() -> None:
    rounds = draft_rounds(draft(), written(COUNT)[3], torch.arange(8, 20), 3, [])
    rounds.accepted = torch.tensor([2, 0, 0, 0, 1, 0, 3, 0, 0, 0, 0, 0])
    assert walk(rounds).tolist() == [0, 3, 4, 6, 10, 11]


def test_a_line_gives_the_rounds_back() -> None:
    rounds = rounds_at(written(COUNT)[1], [1, 4, 20], 5, STOPS)
    line = to_line("a text", rounds)
    assert "NaN" not in line and json.loads(line)["id"] == "a text"
    name, back = from_line(line)
    assert name == "a text"
    for field, value in vars(rounds).items():
        restored = getattr(back, field)
        if value is None:  # greedy rounds are not drawn
            assert restored is None
            continue
        assert restored.shape == value.shape and restored.dtype == value.dtype
        if value.is_floating_point():
            torch.testing.assert_close(restored, value, atol=1e-5, rtol=0)
        else:
            assert torch.equal(restored, value)
