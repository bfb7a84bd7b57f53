"""Scores: programs out of chat, every task without network, `evaluate` modules offline."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pacer.data.prompts import load_prompts
from pacer.errors import PacerError
from pacer.evaluation.sandbox import sandbox_available
from pacer.evaluation.scoring import FIELDS, MODULES, NAMES, load_module, score
from pacer.evaluation.scoring.answers import exact_answers
from pacer.evaluation.scoring.code import build_program, pass_at_1, run_tests
from pacer.evaluation.scoring.summaries import rouge

needs_sandbox = pytest.mark.skipif(sandbox_available() is not None, reason=f"no sandbox: {sandbox_available()}")

ITEM = {
    "prompt": 'import math\n\n\ndef helper(x):\n    return x\n\n\ndef area(r):\n    """Area of a circle."""\n',
    "entry_point": "area",
    "test": "def check(candidate):\n    assert abs(candidate(1) - 3.14159) < 1e-3\n",
}
BODY = "    return helper(math.pi) * r * r\n"
FULL = "def area(r):\n" + BODY


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
    summary, reference = "The cat sat on the mat. A dog was barking.", "A dog barked. The cat is sitting on a mat."
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
