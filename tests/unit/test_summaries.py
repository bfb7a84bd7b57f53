"""ROUGE with sentences, as rouge_score has it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from pacer.evaluation.scoring.summaries import KINDS, one_sentence_per_line, rouge, split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four.", ["One.", "Two!", "Three?", "Four."]),
        ("Mr. Smith met Dr. J. R. Jones. They spoke.", ["Mr. Smith met Dr. J. R. Jones.", "They spoke."]),
        ("The U.S. Senate voted. It was 3.5 per cent.", ["The U.S. Senate voted.", "It was 3.5 per cent."]),
        ('He said "No." She left.', ['He said "No."', "She left."]),
        ("He asked, e.g. Tom. (Nobody came.) 20 left.", ["He asked, e.g. Tom.", "(Nobody came.)", "20 left."]),
        ("It cost $3. about that", ["It cost $3. about that"]),
        (
            "\u201cGo.\u201d \u201cWhere?\u201d \u00c9mile went\u2026 Then",
            ["\u201cGo.\u201d", "\u201cWhere?\u201d", "\u00c9mile went\u2026", "Then"],
        ),
        ("no end", ["no end"]),
        ("  ", []),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences
    assert one_sentence_per_line(text) == "\n".join(sentences)


def test_lines_are_kept_where_there_are_some() -> None:
    assert one_sentence_per_line("One. Two\nThree. Four") == "One. Two\nThree. Four"
    assert one_sentence_per_line("One. Two.\n") == "One.\nTwo."


PAIRS = [
    ("The cat sat on the mat. A dog was barking.", "A dog barked. The cat is sitting on a mat."),
    ("Police killed the gunman.\nNobody else died.", "The gunman was killed by police.\nNo one else has died."),
    ("Something else entirely.", "The gunman was killed."),
]


def test_rouge_equals_rouge_score() -> None:
    scorer = RougeScorer(list(KINDS), use_stemmer=True)
    for summary, reference in PAIRS:
        lines = [text if "\n" in text else text.replace(". ", ".\n") for text in (reference, summary)]
        expected = {kind: value.fmeasure for kind, value in scorer.score(*lines).items()}
        assert rouge([summary], [reference]) == pytest.approx(expected)
        flat = scorer.score(reference, summary)
        got = rouge([summary], [reference])
        assert all(got[kind] == pytest.approx(flat[kind].fmeasure) for kind in KINDS[:3])
    several, single = rouge(*zip(*PAIRS, strict=True)), [rouge([a], [b]) for a, b in PAIRS]
    assert several == pytest.approx({kind: sum(one[kind] or 0 for one in single) / len(single) for kind in KINDS})


SENTENCE = st.lists(
    st.sampled_from(["police", "found", "two", "men", "near", "the", "old", "harbour"]), min_size=1, max_size=6
)
SUMMARY = st.lists(SENTENCE.map(lambda words: " ".join(words).capitalize() + "."), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(SUMMARY, SUMMARY)
def test_newlines_between_sentences_change_nothing(summary: list[str], reference: list[str]) -> None:
    """Every kind equals rouge_score on one sentence a line, whichever of the two texts has its newlines."""
    scored = RougeScorer(list(KINDS), use_stemmer=True).score("\n".join(reference), "\n".join(summary))
    expected = {kind: value.fmeasure for kind, value in scored.items()}
    for one in (" ", "\n"):
        for other in (" ", "\n"):
            assert rouge([one.join(summary)], [other.join(reference)]) == pytest.approx(expected)


def test_lsum_is_not_l() -> None:
    """D112."""
    scores = rouge([PAIRS[0][0]], [PAIRS[0][1]])
    assert (scores["rougeLsum"] or 0) > (scores["rougeL"] or 0) > 0
