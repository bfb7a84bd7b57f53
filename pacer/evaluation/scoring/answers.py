"""Final answers of GSM8K: the number a text ends in, compared as an exact decimal.

Strict is GSM8K's own form, the number after the last ``####``. Flexible reads answers of models that were not shown
that form. How the unclear cases are read: ``3/4`` is 0.75, ``1.5 million`` is 1500000, ``50%`` is 50, ``1,234`` is 1234
while ``3,4`` are two numbers, ``5-3`` holds a 3 and ``-3`` a -3, and digits after a letter (``H2``) are no number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal

from pacer.errors import PacerError

SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
CURRENCY = r"(?:\\?\$|[€£¥])"
# thousands: 1,234 and 1{,}234 and 1\,234 and with a thin or no-break space
DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}|\\,|[\u00a0\u2009\u202f])\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+"
NUMBER = re.compile(
    rf"""(?:(?<![\w)\]}}])(?P<sign>[-+]))?  # a sign, not the operator in 5-3
    (?:{CURRENCY}\s?(?P<inner>-)?|(?<![^\W\d_])(?<!\d)(?<!\d\.))  # $ before it, or no letter or number
    (?:\\[dt]?frac\{{(?P<over>\d+)\}}\{{(?P<under>\d+)\}}
      |(?P<digits>{DIGITS})(?P<ordinal>(?:st|nd|rd|th)\b)?
       (?:\s?/\s?(?P<divisor>\d+)(?![\d/])|\s?(?P<scale>{"|".join(SCALES)})s?\b)?)""",
    re.VERBOSE | re.IGNORECASE,
)
SAME = str.maketrans({"\u2212": "-", "\u2044": "/"})  # minus sign, fraction slash
BRACKETS = re.compile(r"(?<!\\)\([^()]*\)")
STATED = re.compile(r"\\boxed\s*\{|\banswer\b[^\d\n.]{0,60}?(?:\bis\b|[:=])", re.IGNORECASE)


def strict_answer(text: str) -> Decimal | None:
    """The number right after the last ``####``, on that line or the next one with text.

    Currency and markup may stand before it, words may not: ``#### Step 2`` is a heading.
    """
    _, marker, rest = text.rpartition("####")
    line = _first_line(rest)
    if not marker or line[:1].isalpha():
        return None
    return next((value for value, _ in numbers(line)), None)


def flexible_answer(text: str) -> Decimal | None:
    r"""The number a text gives as its answer; None if it holds no number.

    In this order: the strict answer; what follows the last ``\boxed{`` or "answer is" (or ":", "="); the last number
    of the text that is no ordinal such as "3rd", and in no remark such as "(over 2 months)" if there is another. Where
    an answer is stated as an equation, "5 + 3 = 8", its right side counts; where words and numbers follow an answer,
    "42 (see page 3)", its first number does.
    """
    if strict_answer(text) is not None:
        return _stated(_first_line(text.rpartition("####")[2]))
    starts = [match.end() for match in STATED.finditer(text)]
    stated = _stated(_first_line(text[starts[-1] :])) if starts else None
    if stated is not None:
        return stated
    found = list(numbers(BRACKETS.sub(_but_words, text))) or list(numbers(text))
    candidates = [value for value, ordinal in found if not ordinal] or [value for value, _ in found]
    return candidates[-1] if candidates else None


def exact_answers(answers: Sequence[str], references: Sequence[str]) -> dict[str, float | None]:
    """Shares of answers equal to their reference, in [0, 1], as ``exact_strict`` and ``exact_flexible``.

    Numbers compare as numbers: 29 and 29.00 are the same. None for both where there are no answers.

    Raises:
        PacerError: a reference that does not end in ``#### <number>``.
    """
    wanted = [strict_answer(reference) for reference in references]
    if None in wanted:
        raise PacerError(
            "a GSM8K reference without its number",
            value=references[wanted.index(None)][-80:],
            allowed="text ending in '#### <number>'",
        )
    if not answers:
        return {"exact_strict": None, "exact_flexible": None}
    readers = {"exact_strict": strict_answer, "exact_flexible": flexible_answer}
    pairs = list(zip(answers, wanted, strict=True))
    return {name: sum(read(text) == number for text, number in pairs) / len(pairs) for name, read in readers.items()}


def numbers(text: str) -> Iterator[tuple[Decimal, bool]]:
    """The numbers of a text from left to right, each with whether it is an ordinal."""
    for match in NUMBER.finditer(text.translate(SAME)):
        value = _value(match)
        if value is not None:
            yield value, match["ordinal"] is not None


def _but_words(brackets: re.Match[str]) -> str:
    """Nothing for a remark in words, "(over 2 months)"; the brackets themselves where they hold no letter."""
    return " " if any(map(str.isalpha, brackets[0])) else brackets[0]


def _first_line(text: str) -> str:
    return text.strip(" \n\t*_:`").split("\n", 1)[0]


def _stated(line: str) -> Decimal | None:
    sentence = re.split(r"\.\s|\.$", line, maxsplit=1)[0]
    for part in (sentence.rpartition("=")[2], line):
        value = next((value for value, _ in numbers(part)), None)
        if value is not None:
            return value
    return None


def _value(match: re.Match[str]) -> Decimal | None:
    if match["over"]:
        value, divisor = Decimal(match["over"]), Decimal(match["under"])
    else:
        value, divisor = Decimal(re.sub(r"[^\d.]", "", match["digits"])), Decimal(match["divisor"] or 1)
    if match["scale"]:
        value *= SCALES[match["scale"].lower()]
    if divisor != 1:
        if not divisor:
            return None
        value /= divisor
    # copy_negate: unlike arithmetic, it does not round to the context's 28 digits
    return value.copy_negate() if "-" in (match["sign"], match["inner"]) else value
