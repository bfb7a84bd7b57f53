"""Final answers of GSM8K in hostile formats."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacer.errors import PacerError
from pacer.evaluation.scoring.answers import exact_answers, flexible_answer, numbers, strict_answer

ANSWERS = [  # text, strict, flexible
    ("$29.00", None, "29"),
    ("9{,}500", None, "9500"),
    (r"7\,500", None, "7500"),
    ("1\u202f234", None, "1234"),
    ("-7", None, "-7"),
    ("\u22127", None, "-7"),
    ("-$7", None, "-7"),
    ("$-7", None, "-7"),
    ("x=-3", None, "-3"),
    ("5-3", None, "3"),
    ("3 - -4", None, "-4"),
    ("1,234.00", None, "1234"),
    ("10,000,000.", None, "10000000"),
    ("1, 2, 3", None, "3"),
    ("1,2345", None, "2345"),
    ("72 clips, altogether.", None, "72"),
    ("#### 42 (see page 3)", "42", "42"),
    ("#### 42\n\nThis took 3 steps.", "42", "42"),
    ("#### **$1,234.50**", "1234.50", "1234.5"),
    ("####\n\n42", "42", "42"),
    ("#### 5\nNo, wait.\n#### -6", "-6", "-6"),
    ("#### 5 + 3 = 8", "5", "8"),
    ("#### none", None, None),
    ("#### Step 2: add\n4 + 5 = 9", None, "9"),
    (r"\boxed{12}", None, "12"),
    (r"So $\boxed{\$1{,}200}$ after 3 years.", None, "1200"),
    (r"\boxed{\frac{3}{4}}", None, "0.75"),
    ("The answer is: 240", None, "240"),
    ("The answer is 42 (see page 3)", None, "42"),
    ("**Answer:** 42 apples out of 50", None, "42"),
    ("The answer to the problem is 5 + 3 = 8. Check: 1 + 1 = 2", None, "8"),
    ("She has 4. Answer: see above", None, "4"),
    ("3/4", None, "0.75"),
    ("16/2 apples", None, "8"),
    ("4/0", None, None),
    ("1.5 million", None, "1500000"),
    ("2 thousand dollars", None, "2000"),
    ("50%", None, "50"),
    (".5", None, "0.5"),
    ("It is 0.5.", None, "0.5"),
    ("Rs.20", None, "20"),
    ("US$20", None, "20"),
    ("5kg of H2O", None, "5"),
    ("<<48/2=24>>24 clips", None, "24"),
    ("12 apples by the 3rd day", None, "12"),
    ("the 5th", None, "5"),
    ("forty-two", None, None),
    ("", None, None),
]

# Each form of a number in each frame of words, markup and further numbers.
FORMS = {
    "29": "29", "$29.00": "29", r"\$29": "29", "9{,}500": "9500", "9,500.00": "9500", "-7": "-7", "\u22127": "-7",
    "-$1,234.50": "-1234.5", "0.05": "0.05", "3/4": "0.75", r"\frac{3}{4}": "0.75", "1.5 million": "1500000",
    "50%": "50", "\u20ac5": "5", "(8)": "8",
}  # fmt: skip
FRAMES = [
    "{}", " {}\n", "#### {}", "####{}", "####\n{}", "#### {}.", "#### {} (see page 3)", "#### {}\n\nThis took 3 steps.",
    "#### 1\nNo:\n#### {}", "The answer is {}.", "The answer is: {}", "Answer = {}", "**Answer:** {}", "Answer:\n\n{}",
    "**Final answer: {} clips**", r"\boxed{{{}}}", r"So $\boxed{{{}}}$ after 3 years.", r"\boxed{{{} \text{{ clips}}}}",
    r"\[ x = {} \]", r"\( {} \)", "{} clips, altogether.", "1 + 1 = {}", "Step 1: count 2.\nStep 2: {} in all.",
    "That makes {} in all (over 2 months).", "The answer is {} (see page 3), not 5.",
    "The answer is {}. A day has 24 hours.",
    "Answer: 8\nWait.\nAnswer: {}",
]  # fmt: skip


@pytest.mark.parametrize(("text", "strict", "flexible"), ANSWERS)
def test_final_answers(text: str, strict: str | None, flexible: str | None) -> None:
    assert strict_answer(text) == (None if strict is None else Decimal(strict))
    assert flexible_answer(text) == (None if flexible is None else Decimal(flexible))


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read_in_each_frame(form: str, frame: str) -> None:
    text, value = frame.format(form), Decimal(FORMS[form])
    assert flexible_answer(text) == value
    assert strict_answer(text) == (value if "####" in frame else None)


@settings(deadline=None, max_examples=300)
@given(st.text(st.sampled_from("0123456789.,/-+$%#=(){}\\ \n\u00bd\u0663\u00b2eEx_") | st.characters(), max_size=60))
def test_any_text_is_read(text: str) -> None:
    """A finite number or none, whatever a model writes; what is strictly an answer is one for the flexible reader."""
    strict, flexible = strict_answer(text), flexible_answer(text)
    assert all(value is None or value.is_finite() for value in (strict, flexible))
    assert strict is None or flexible is not None


@pytest.mark.parametrize(
    "piece", ["1,", "9", "answer ", "1,111", "-", "\\frac{1}{", "$", "answer x", "#### ", "1.", "= ", "(a", "(a)", "("]
)
def test_long_texts_are_read_in_linear_time(piece: str) -> None:
    started = time.monotonic()
    for text in (piece * (50_000 // len(piece)), piece + "a" * 50_000, piece + "9" * 4_000):
        strict_answer(text)
        flexible_answer(text)
    assert time.monotonic() - started < 5


def test_numbers_are_exact() -> None:
    digits = "9" * 40
    assert next(numbers(f"-{digits}.1")) == (Decimal(f"-{digits}.1"), False)
    assert exact_answers(["#### " + digits + "8"], ["#### " + digits + "9"])["exact_strict"] == 0


def test_exact_answers_are_shares() -> None:
    references = ["1 + 1 = 2\n#### 2", "#### 1,000", "#### 3", "#### 4"]
    assert exact_answers(["#### 2.0", "so $1000.00", "it is 5", ""], references) == {
        "exact_strict": 0.25,
        "exact_flexible": 0.5,
    }
    with pytest.raises(PacerError, match="#### <number>"):
        exact_answers(["1"], ["no number"])
