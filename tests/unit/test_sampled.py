"""Labels of sampling: p and q of drawn tokens, and what speculative sampling makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from pacer.data.corpus import Text
from pacer.data.labels import Rounds, draft_rounds, from_line, to_line
from pacer.data.sampled import sampled_rounds, target_logprobs
from pacer.errors import ConfigError
from pacer.evaluation.stats import chi_square
from pacer.models.stack import Stack
from pacer.settings import LabelSettings
from tests.texts import draft, path, reduced_draft, rounds_at, target, written
from tests.tiny import random_table, table_model

ALPHA = 1e-4  # false-alarm rate of each chi-square test on other seeds


def by_hand(p: list[list[float]], q: list[list[float]], accepted: list[int], counts: list[int]) -> Rounds:
    """Rounds with these probabilities of their tokens."""
    logp, logq = torch.tensor(p).log(), torch.tensor(q).log()
    none, numbers = torch.zeros(logp.shape), torch.zeros(logp.shape, dtype=torch.long)
    known = torch.full((len(logp),), logp.shape[1])
    starts, ends = torch.arange(len(logp)) + 1, torch.tensor(counts)
    return Rounds(starts, numbers, none, none, none, numbers, ends, torch.tensor(accepted), known, logq, logp)


P = [[0.5, 0.2, 0.25], [0.1, 0.9, 0.3]]
Q = [[0.4, 0.8, 0.25], [0.2, 0.1, 0.6]]


def test_labels_of_hand_made_p_and_q() -> None:
    """min(1, p/q), and whether q ≤ p; both end after the first rejection, survival says 0 for all that follows."""
    rounds = by_hand(P, Q, accepted=[2, 0], counts=[3, 2])
    chance, used = rounds.labels("conditional")
    torch.testing.assert_close(chance, torch.tensor([[1.0, 0.25, 1.0], [0.5, 1.0, 0.5]]))
    certain, same = rounds.labels("certain")
    assert certain.tolist() == [[1, 0, 1], [0, 1, 0]]
    assert used.tolist() == same.tolist() == [[True, True, True], [True, False, False]]
    survived, all_used = rounds.labels("survival")
    assert survived.tolist() == [[1, 1, 0], [0, 0, 0]] and all_used.sum() == 5
    assert rounds.labels("next")[0].tolist() == [[1, 0, 0], [0, 0, 0]]


def test_greedy_labels_are_those_of_one_hot_p_and_q() -> None:
    """Where both are one-hot, min(1, p/q) is whether they agree, and so is q ≤ p."""
    rounds = rounds_at(written(6)[1], [1, 4, 9, 20], 5)
    assert rounds.logp is None and 0 < int(rounds.accepted.sum()) < 20
    chance, used = rounds.labels("conditional")
    certain, same = rounds.labels("certain")
    agree = torch.arange(5) < rounds.accepted[:, None]
    assert torch.equal(chance, agree.float()) and torch.equal(chance, certain) and torch.equal(used, same)


@pytest.mark.parametrize("by", [draft, reduced_draft])
def test_p_and_q_are_the_models_own(by: Callable[[], Stack]) -> None:
    """Every round packed beside others has the probabilities of the text alone, at the temperature of the labels."""
    text, chosen = written(6)[2], LabelSettings(gamma=4, starts_per_text=5, temperature=1.5, seed=3)
    rounds = sampled_rounds(by(), target(), text, chosen, [])
    assert rounds is not None and rounds.logp is not None and rounds.logq is not None
    for i, start in enumerate(rounds.starts.tolist()):
        tokens = rounds.tokens[i]
        ids = torch.tensor([[*path(text)[:start], *tokens.tolist()]])
        for model, found in ((target().model, rounds.logp), (by().model, rounds.logq)):
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1] / 1.5
            wanted = F.log_softmax(logits, -1).gather(1, tokens[:, None]).squeeze(1)  # a reduced head: the first ids
            torch.testing.assert_close(found[i], wanted, atol=1e-4, rtol=0)
    assert len({tuple(row) for row in rounds.tokens.tolist()}) > 1


VOCAB = 5
TABLE, OTHER = (Stack(table_model(random_table(VOCAB, seed))) for seed in (1, 2))


def test_tokens_are_drawn_from_q_and_accepted_by_the_ratio() -> None:
    """On table models both laws are known: of the first token, and of its acceptance."""
    settings, last = LabelSettings(gamma=2, starts="all", temperature=1.0), 3
    drawn, kept = torch.zeros(VOCAB), torch.zeros(VOCAB)
    for number in range(400):
        text = Text(f"t{number}", "x", [0, 1], [last, last, last, 0], True)  # rounds start after tokens 3, 3 and 3
        rounds = sampled_rounds(OTHER, TABLE, text, settings, [])
        assert rounds is not None and len(rounds.starts) == 3
        drawn += torch.bincount(rounds.tokens[:, 0], minlength=VOCAB)
        kept += torch.bincount(rounds.tokens[rounds.accepted > 0, 0], minlength=VOCAB)
    q, p = (random_table(VOCAB, seed)[last].softmax(-1) for seed in (2, 1))
    assert chi_square(drawn.long().tolist(), q.tolist()) > ALPHA
    outcomes = [*kept.long().tolist(), int((drawn - kept).sum())]  # min(p, q) each, else rejected
    both = torch.minimum(p, q)
    assert chi_square(outcomes, [*both.tolist(), 1 - float(both.sum())]) > ALPHA


def test_numbers_follow_from_seed_and_text_alone() -> None:
    text, settings = written(6)[3], LabelSettings(gamma=3, starts_per_text=4, temperature=2.0)
    first, again = (sampled_rounds(draft(), target(), text, settings, []) for _ in range(2))
    other = sampled_rounds(draft(), target(), text, replace(settings, seed=1), [])
    renamed = sampled_rounds(draft(), target(), replace(text, id="another"), settings, [])
    assert first is not None and again is not None and other is not None and renamed is not None
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.accepted, again.accepted)
    assert not torch.equal(first.tokens, renamed.tokens) and not torch.equal(first.starts, other.starts)


def test_many_rounds_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """T93: whatever fits together, the answer is the same; what follows a stop id is left out."""
    text = written(6)[0]
    rounds = draft_rounds(draft(), text, torch.tensor([6, 9, 12, 20]), 4, [35, 51, 75], None, 1.5, 7)
    whole = target_logprobs(target(), text, rounds, 1.5)
    monkeypatch.setattr("pacer.data.sampled.TOGETHER", 5)
    torch.testing.assert_close(target_logprobs(target(), text, rounds, 1.5), whole, atol=1e-5, rtol=0)
    real = torch.arange(4) < rounds.counts[:, None]
    assert (whole[real] < 0).all() and (whole[~real] == 0).all()


def test_a_line_gives_drawn_rounds_back() -> None:
    text, settings = written(6)[1], LabelSettings(gamma=3, starts_per_text=3, temperature=1.0)
    rounds = sampled_rounds(draft(), target(), text, settings, [])
    assert rounds is not None
    _, back = from_line(to_line("x", rounds))
    for name, value in vars(rounds).items():
        torch.testing.assert_close(getattr(back, name), value, atol=1e-5, rtol=0)
    assert torch.equal(back.pick(torch.tensor([2])).tokens, rounds.tokens[2:])


def test_rounds_that_follow_the_text_need_greedy_decoding() -> None:
    with pytest.raises(ConfigError, match=r"labels\.starts in sampling.*'rounds'.*uniform, all"):
        sampled_rounds(draft(), target(), written(6)[0], LabelSettings(starts="rounds", temperature=1.0), [])
    short = Text("s", "x", [1, 2], [3], True)
    assert sampled_rounds(draft(), target(), short, LabelSettings(temperature=1.0), []) is None
