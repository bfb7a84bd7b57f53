"""Scores: answers in hostile formats, programs out of chat, ROUGE with sentences, `evaluate` modules offline."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from pacer.data.prompts import load_prompts
from pacer.errors import PacerError
from pacer.evaluation.sandbox import sandbox_available
from pacer.evaluation.scoring import FIELDS, MODULES, NAMES, load_module, score
from pacer.evaluation.scoring.answers import exact_answers, flexible_answer, numbers, strict_answer
from pacer.evaluation.scoring.code import build_program, pass_at_1, run_tests
from pacer.evaluation.scoring.summaries import KINDS, one_sentence_per_line, rouge, split_sentences

needs_sandbox = pytest.mark.skipif(sandbox_available() is not None, reason=f"no sandbox: {sandbox_available()}")

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

ITEM = {
    "prompt": 'import math\n\n\ndef helper(x):\n    return x\n\n\ndef area(r):\n    """Area of a circle."""\n',
    "entry_point": "area",
    "test": "def check(candidate):\n    assert abs(candidate(1) - 3.14159) < 1e-3\n",
}
BODY = "    return helper(math.pi) * r * r\n"
FULL = "def area(r):\n" + BODY


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


@pytest.mark.parametrize(
    "answer",
    [
        BODY,
        FULL,
        f"Sure!\n```python\n{FULL}```\nIt works.",
        f"```python\n{ITEM['prompt']}{BODY}```",
        f"```\n{FULL}```",
        f"```python\n{BODY}```",
        f"```py\n{FULL}",  # cut at the budget before the fence closed
        f"First:\n```python\n{FULL}```\nThen try it:\n```python\nprint(area(2))\n```",
        f"```python\ndef area(r):\n    return 0\n```\nBetter:\n```python\n{FULL}```",
        f"1. So:\n   ```python\n   def area(r):\n   {BODY}   ```",
        f"```python\nfrom __future__ import annotations\n{FULL}```",
        f"```bash\npip install x\n```\n```python\n{FULL}```",
    ],
)
@needs_sandbox
def test_programs_are_found_in_answers(answer: str) -> None:
    assert [result.status for result in run_tests([answer], [ITEM])] == ["passed"], build_program(answer, ITEM)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "    return 0\n",
        "I cannot.",
        "```python\nimport sys\nsys.exit(0)\n```",
        f"```python\n{FULL}import os; os._exit(0)```",
    ],
)
@needs_sandbox
def test_wrong_programs_do_not_pass(answer: str) -> None:
    assert pass_at_1([answer], [ITEM]) == 0


@needs_sandbox
def test_pass_at_1_is_a_share_and_off_is_none() -> None:
    assert pass_at_1([BODY, "    return 0", BODY, "    while True: pass"], [ITEM] * 4, seconds=1) == 0.5
    assert pass_at_1([BODY], [ITEM], sandbox="off") is None
    assert pass_at_1([], []) is None


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


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"network: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_scores_by_task_without_network(no_network: None) -> None:
    assert score("gsm8k", ["It is 3.", "#### 5"], [{"answer": "#### 3"}, {"answer": "#### 5"}]) == {
        "exact_strict": 0.5,
        "exact_flexible": 1.0,
    }
    (summary, reference) = PAIRS[0]
    expected = rouge([summary], [reference])
    assert score("cnn_dm", [summary], [{"highlights": reference, "id": 1}]) == pytest.approx(expected)
    assert score("xsum", [summary], [{"summary": reference, "document": ""}]) == pytest.approx(expected)
    assert score("humaneval", [BODY], [ITEM], "off") == {"pass@1": None}
    assert score("mbpp", ["x"], [{}]) == score("mt_bench", ["x"], [{}]) == {}
    for task, module in MODULES.items():
        assert score(task, [], []) == dict.fromkeys(NAMES[module])


@needs_sandbox
def test_scores_on_a_machine_without_network_or_cache(tmp_path: Path) -> None:
    """D113: a fresh process that sees no network device and an empty home, with the libraries' offline switches on."""
    code = (
        "from pacer.evaluation.scoring import score\n"
        "assert score('gsm8k', ['It is 3.'], [{'answer': '#### 3'}])['exact_flexible'] == 1\n"
        "assert score('xsum', ['A b.'], [{'summary': 'A b.'}])['rougeLsum'] == 1\n"
        "assert score('humaneval', ['x'], [{}], 'off') == {'pass@1': None}\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    alone = ["bwrap", "--unshare-net", "--dev-bind", "/", "/", "--chdir", root, sys.executable, "-c", code]
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_EVALUATE_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    done = subprocess.run(
        alone, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **offline}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@needs_sandbox
def test_humaneval_score_without_network(no_network: None) -> None:
    items: list[dict[str, Any]] = [{**ITEM, "task_id": "x/0", "canonical_solution": BODY}] * 2
    assert score("humaneval", [BODY, "    return 0"], items) == {"pass@1": 0.5}


def test_score_refuses_what_does_not_fit() -> None:
    with pytest.raises(PacerError, match="1 predictions for 2 items"):
        score("gsm8k", ["1"], [{"answer": "#### 1"}] * 2)
    with pytest.raises(PacerError, match="summary"):
        score("xsum", ["1"], [{"document": "x"}])


def test_code_is_refused_without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    from pacer.evaluation import sandbox

    monkeypatch.setattr(sandbox, "sandbox_available", lambda: "bubblewrap is not installed")
    with pytest.raises(PacerError, match="apt-get install bubblewrap"):
        score("humaneval", [BODY], [ITEM], "auto")
    with pytest.warns(RuntimeWarning, match="UNSAFE"):
        assert pass_at_1([BODY], [ITEM], sandbox="unsafe") == 1


@pytest.mark.parametrize("name", sorted(NAMES))
def test_modules_describe_themselves(name: str, tmp_path: Path) -> None:
    import evaluate

    module = load_module(name, str(tmp_path))
    assert isinstance(module, evaluate.Metric)
    assert module.name == name and module.citation and module.description
    assert set(module.features) == {"predictions", "references"}
    assert all(key in module.inputs_description for key in NAMES[name])


def test_module_loads_where_the_modules_cache_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import evaluate

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(evaluate, "load", refuse)
    module = load_module("gsm8k_answer", str(tmp_path))
    assert module.compute(predictions=["#### 1"], references=["#### 1"])["exact_strict"] == 1


def as_chat(item: dict[str, Any]) -> str:
    """The canonical solution in a fenced block, without the prompt's imports and helpers."""
    head = item["prompt"][item["prompt"].index("def " + item["entry_point"]) :]
    return f"Here:\n```python\n{head}{item['canonical_solution']}```\nDone."


@needs_sandbox
@pytest.mark.real
def test_canonical_solutions_of_humaneval_all_pass(real_data: Path) -> None:
    with gzip.open(real_data / "humaneval" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        items = [json.loads(line) for line in file]
    assert len(items) == 164
    for answers in ([item["canonical_solution"] for item in items], [as_chat(item) for item in items]):
        results = run_tests(answers, items)
        wrong = [item["task_id"] for item, result in zip(items, results, strict=True) if result.status != "passed"]
        assert wrong == []


@pytest.mark.parametrize("task", [*sorted(FIELDS), "humaneval"])
def test_references_of_the_samples_score_full_marks(task: str) -> None:
    if task == "humaneval" and (reason := sandbox_available()) is not None:
        pytest.skip(f"no sandbox: {reason}")
    items = [dict(prompt.item) for prompt in load_prompts(task).items]
    forms = [lambda item: item[FIELDS[task]]] if task in FIELDS else [lambda item: item["canonical_solution"], as_chat]
    for form in forms:
        assert score(task, [form(item) for item in items], items) == pytest.approx(
            dict.fromkeys(NAMES[MODULES[task]], 1)
        )


def test_references_of_gsm8k_all_have_their_number(real_data: Path) -> None:
    for name in ("train", "test"):
        with open(real_data / "gsm8k" / f"{name}.jsonl", encoding="utf-8") as file:
            answers = [json.loads(line)["answer"] for line in file]
        assert exact_answers(answers, answers) == {"exact_strict": 1.0, "exact_flexible": 1.0}
