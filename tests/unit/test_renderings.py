"""More prompts from the same rows: other tasks' templates, later parts of articles, and one split for all of a row."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from pacer.data.prompts import load_prompts
from pacer.data.renderings import CROSSINGS, LEAST_WORDS, crossed, parts, split_name
from pacer.data.splits import is_tuning, part_of, row_of
from pacer.data.templates import TEMPLATES, WORDS, Prompt
from pacer.errors import ConfigError, SourceError
from pacer.evaluation.sandbox import sandbox_available
from pacer.evaluation.scoring.code import run_tests
from pacer.settings import CorpusSettings

MBPP: dict[str, Any] = {
    "task_id": 7, "text": 'Add "two" numbers \\ here.', "test_setup_code": "K = 1",
    "code": "def help(x):\r\n\treturn x\r\ndef add(a, b=K, *rest):\r\n\treturn help(a + b)",
    "test_list": ["assert set(add(1, (2))) == {3}", "assert add(1, 1) == 2"],
}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "cnn_dm": {"article": "one  two\nthree", "highlights": "h", "id": "x"},
    "xsum": {"document": "one  two\nthree", "summary": "s", "id": 3},
    "mbpp": MBPP,
}


def prompt_of(task: str, row: dict[str, Any] | None = None, id: str = "row-0") -> Prompt:
    item = row or ROWS[task]
    return Prompt(id, task, TEMPLATES[task](item), item)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("cnn_dm", ("cnn_dm", None)),
        ("cnn_dm/validation>xsum", ("cnn_dm/validation", "xsum")),
        ("/home/a>b/mine.jsonl", ("/home/a>b/mine.jsonl", None)),
        ("/home/a>b/mine.jsonl>xsum", ("/home/a>b/mine.jsonl", "xsum")),
    ],
)
def test_names(name: str, found: tuple[str, str | None]) -> None:
    assert split_name(name) == found


@pytest.mark.parametrize(("task", "template"), CROSSINGS)
def test_a_crossed_row_is_a_row_of_the_other_task(task: str, template: str) -> None:
    """Its text is what that task's template makes of it, so nothing downstream knows where it came from."""
    prompt = crossed(prompt_of(task), template)
    assert (prompt.id, prompt.task) == (f"row-0>{template}", template)
    assert prompt.text == TEMPLATES[template](prompt.item)
    references = {"xsum": "summary", "cnn_dm": "highlights", "humaneval": "entry_point"}
    assert prompt.item[references[template]] in ("h", "s", "add")


def test_a_function_as_humaneval_asks_for_it() -> None:
    item = crossed(prompt_of("mbpp"), "humaneval").item
    head = 'def add(a, b=K, *rest):\n    """ Add "two" numbers \\\\ here.\n    >>> set(add(1, 2))\n    {3}\n    """\n'
    assert item["prompt"] == head
    assert ast.get_docstring(ast.parse(item["prompt"]).body[0]) == (  # type: ignore[arg-type]
        'Add "two" numbers \\ here.\n>>> set(add(1, 2))\n{3}'
    )
    assert item["test"].startswith("K = 1\ndef check(")
    quoted = crossed(prompt_of("mbpp", MBPP | {"text": 'Say """no""".', "test_list": ["assert add(1)"]}), "humaneval")
    assert quoted.item["prompt"].count('"""') == 2 and ">>>" not in quoted.item["prompt"]


@pytest.mark.parametrize("code", ["x = 1", "def other(a):\n    pass", "def add(a:", "class add: pass"])
def test_a_row_that_cannot_be_rendered_is_named(code: str) -> None:
    with pytest.raises(SourceError, match=r"row of row-0 cannot be rendered as humaneval .*'code'"):
        crossed(prompt_of("mbpp", MBPP | {"code": code}), "humaneval")
    with pytest.raises(SourceError, match=r"row of row-0 cannot be rendered as xsum \(KeyError\('highlights'\)\)"):
        crossed(prompt_of("cnn_dm", {"article": "a"}), "xsum")
    with pytest.raises(ConfigError, match=r"'gsm8k>xsum'; allowed: cnn_dm>xsum, xsum>cnn_dm, mbpp>humaneval"):
        crossed(Prompt("g", "gsm8k", "How?", {"question": "How?"}), "xsum")


@pytest.mark.parametrize("task", WORDS)
@pytest.mark.parametrize("parts_wanted", [1, 2, 3, 9])
@pytest.mark.parametrize("extra", [-1, 0, LEAST_WORDS - 1, LEAST_WORDS, 2 * LEAST_WORDS])
def test_parts_of_an_article(task: str, parts_wanted: int, extra: int) -> None:
    """Successive words, none twice, no tiny last part; the first is the prompt there always was."""
    field, size = WORDS[task]
    words = [f"w{i}" for i in range(3 * size + extra)]
    whole = prompt_of(task, {**ROWS[task], field: "\n ".join(words)})
    found = parts(whole, parts_wanted)
    assert found[0] is whole
    assert [prompt.id for prompt in found] == ["row-0", *(f"row-0#{i}" for i in range(1, len(found)))]
    assert len(found) == min(parts_wanted, 4 if extra >= LEAST_WORDS else 3)
    said = [word for prompt in found for word in prompt.text.split("\n\n")[1].split()]
    assert said == words[: min(len(found) * size, len(words))]
    assert all(prompt.text == TEMPLATES[task](prompt.item) and prompt.task == task for prompt in found)


@pytest.mark.parametrize("task", ["cnn_dm", "mbpp"])
def test_what_fits_stays_one_prompt(task: str) -> None:
    prompt = prompt_of(task)
    assert parts(prompt, 5) == [prompt]


def test_all_prompts_of_a_row_fall_into_one_part() -> None:
    """No part and no other rendering of a text that made the draft makes labels or tunes."""
    shares = CorpusSettings().parts
    article = " ".join(f"w{i}" for i in range(1000))
    for index in range(200):
        row = prompt_of("cnn_dm", ROWS["cnn_dm"] | {"article": article}, f"cnn_dm-validation-{index}")
        other = crossed(row, "xsum")
        family = [*parts(row, 3), *parts(other, 4)]
        assert len({prompt.id for prompt in family}) == 7
        assert {row_of(prompt.id) for prompt in family} == {row.id}
        assert {part_of(prompt.id, shares) for prompt in family} == {part_of(row.id, shares)}
        assert {is_tuning(prompt.id) for prompt in family} == {is_tuning(row.id)}


@pytest.mark.parametrize("id", ["gsm8k-train-3", "HumanEval-7", "mine#2-0", "a>b-1", "x#", "x#1\n", ">", ""])
def test_other_ids_are_their_own_rows(id: str) -> None:
    assert row_of(id) == id


def test_a_set_by_another_template(tmp_path: Path) -> None:
    (tmp_path / "cnn_dm").mkdir()
    path = tmp_path / "cnn_dm" / "train.jsonl"
    path.write_text(json.dumps(ROWS["cnn_dm"]) + "\n")
    text = "Summarize the following article in one sentence.\n\none two three"
    for name, split, id in (
        ("cnn_dm", "train>xsum", "cnn_dm-train-0>xsum"),
        ("cnn_dm>xsum", "train", "cnn_dm-train-0>xsum"),
        (f"{path}>xsum", "train", "train-0>xsum"),
    ):
        found = load_prompts(name, split=split, data_dir=tmp_path)
        assert [(p.id, p.task, p.text) for p in found.items] == [(id, "xsum", text)] and found.name.endswith(">xsum")
    with pytest.raises(ConfigError, match="no rendering"):
        load_prompts("cnn_dm>gsm8k", split="train", data_dir=tmp_path)


@pytest.mark.real
def test_every_row_of_mbpp_is_a_function_with_true_tests(real_data: Path) -> None:
    """Each renders as sound Python, and the reference code of some passes the tests that went along."""
    found = [p for split in ("train", "validation", "test") for p in load_prompts(
        "mbpp", split=f"{split}>humaneval", data_dir=real_data).items]  # fmt: skip
    assert len(found) == 374 + 90 + 500
    for prompt in found:
        (head,) = ast.parse(prompt.item["prompt"]).body
        assert isinstance(head, ast.FunctionDef) and ast.get_docstring(head)
    if sandbox_available() is None:
        rows = load_prompts("mbpp", split="validation", data_dir=real_data, limit=12).items
        items = load_prompts("mbpp", split="validation>humaneval", data_dir=real_data, limit=12).items
        answers = [f"```python\n{row.item['code']}\n```" for row in rows]
        assert [r.status for r in run_tests(answers, [p.item for p in items])] == ["passed"] * 12
