"""ROUGE-1, -2, -L and -Lsum of summaries: `rouge_score` does the counting, this module the sentences.

ROUGE-L takes the longest common subsequence of the whole texts, ROUGE-Lsum the union of those of their sentences. For
Lsum, `rouge_score` takes each line as a sentence, so that a text on one line would make it equal to L.

Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries"; github.com/google-research/google-research,
folder rouge.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
# in lower case, without the final full stop
ABBREVIATION = re.compile(
    "mr|mrs|ms|dr|prof|rev|hon|gen|col|lt|sgt|capt|gov|sen|rep|st|jr|sr|vs|etc|e\\.g|i\\.e|cf|inc|ltd|co|corp|dept|fig"
    "|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|u\\.s|u\\.k|u\\.n|a\\.m|p\\.m"
)
INITIAL = re.compile(r"(?:\w\.)*[A-Z]")
# the end of a sentence: closing punctuation, quotes or brackets, white space, and a start in upper case, digit or quote
OPENING, CLOSING = r"\"'\u201c\u2018(\[", r"\"'\u201d\u2019)\]"
BOUNDARY = re.compile(rf"(?<=[.!?\u2026])[{CLOSING}]*(\s+)(?=[{OPENING}]*[A-Z0-9\u00c0-\u00d6\u00d8-\u00de])")
LAST_WORD = re.compile(rf"([^\s{OPENING}]+)\.[{CLOSING}]*$")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text in English, by punctuation; abbreviations and initials end none."""
    sentences, start = [], 0
    for match in BOUNDARY.finditer(text):
        word = LAST_WORD.search(text[start : match.start(1)])
        if word is None or not (ABBREVIATION.fullmatch(word[1].lower()) or INITIAL.fullmatch(word[1])):
            sentences.append(text[start : match.start(1)].strip())
            start = match.end(1)
    return [sentence for sentence in [*sentences, text[start:].strip()] if sentence]


def one_sentence_per_line(text: str) -> str:
    """The text as it is where it has several lines; else with a newline between its sentences."""
    return text if "\n" in text.strip() else "\n".join(split_sentences(text))


def rouge(summaries: Sequence[str], references: Sequence[str]) -> dict[str, float | None]:
    """Mean F1 of each kind over the pairs, in [0, 1], words stemmed (Porter); None for each without any pair."""
    from rouge_score.rouge_scorer import RougeScorer  # slow to import, and only summaries need it

    if len(summaries) != len(references):
        raise ValueError(f"{len(summaries)} summaries and {len(references)} references")
    if not summaries:
        return dict.fromkeys(KINDS)
    scorer = RougeScorer(list(KINDS), use_stemmer=True)
    pairs = zip(references, summaries, strict=True)
    scores = [scorer.score(one_sentence_per_line(reference), one_sentence_per_line(text)) for reference, text in pairs]
    return {kind: sum(score[kind].fmeasure for score in scores) / len(scores) for kind in KINDS}
