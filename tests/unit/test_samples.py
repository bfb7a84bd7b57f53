"""The bundled samples: schema, counts, ids, arithmetic, running code, and no leak from test into train.

The code of the samples is the project's own and trusted, so it runs in this process, without the sandbox.
"""

import ast
import json
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

SAMPLES = Path(__file__).resolve().parents[2] / "data" / "samples"

# file -> (fields, least number of items, field that identifies an item or None)
SCHEMAS: dict[str, tuple[dict[str, type], int, str | None]] = {
    "gsm8k/test.jsonl": ({"question": str, "answer": str}, 24, None),
    "gsm8k/train.jsonl": ({"question": str, "answer": str}, 100, None),
    "humaneval/test.jsonl": (
        {"task_id": str, "prompt": str, "entry_point": str, "canonical_solution": str, "test": str},
        24,
        "task_id",
    ),
    **{
        f"mbpp/{split}.jsonl": (
            {
                "text": str,
                "code": str,
                "task_id": int,
                "test_setup_code": str,
                "test_list": list,
                "challenge_test_list": list,
            },
            count,
            "task_id",
        )
        for split, count in (("test", 24), ("train", 40))
    },
    "cnn_dm/test.jsonl": ({"id": str, "article": str, "highlights": str}, 24, "id"),
    "cnn_dm/train.jsonl": ({"id": str, "article": str, "highlights": str}, 24, "id"),
    "xsum/test.jsonl": ({"id": int, "document": str, "summary": str}, 24, "id"),
    "xsum/train.jsonl": ({"id": int, "document": str, "summary": str}, 20, "id"),
    "mt_bench/test.jsonl": ({"question_id": int, "category": str, "turns": list}, 24, "question_id"),
    "instruct/train.jsonl": ({"instruction": str, "input": str, "output": str}, 80, None),
}
MAY_BE_EMPTY = {"input", "test_setup_code", "challenge_test_list"}
# The text a model is shown: two items with the same one are the same item.
TEXT_FIELD = {
    "gsm8k": "question",
    "humaneval": "prompt",
    "mbpp": "text",
    "cnn_dm": "article",
    "xsum": "document",
    "mt_bench": "turns",
}
BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def load(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SAMPLES / name).read_text(encoding="utf-8").splitlines()]


def arithmetic(expression: str) -> Fraction:
    """Exact value of an expression of numbers and + - * / ( )."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp):
            return BINARY[type(node.op)](value(node.left), value(node.right))
        assert isinstance(node, ast.Constant), f"not plain arithmetic: {expression}"
        return Fraction(str(node.value))

    return value(ast.parse(expression, mode="eval").body)


def text_of(name: str, item: dict[str, Any]) -> str:
    return str(item[TEXT_FIELD[name.split("/")[0]]])


def shingles(text: str, width: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + width]) for i in range(len(words) - width + 1)}


def test_no_unlisted_sample_file() -> None:
    found = {path.relative_to(SAMPLES).as_posix() for path in SAMPLES.rglob("*") if path.is_file()}
    assert found == set(SCHEMAS)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_schema_counts_and_unique_ids(name: str) -> None:
    fields, least, id_field = SCHEMAS[name]
    items = load(name)
    assert len(items) >= least
    for item in items:
        assert set(item) == set(fields)
        for field, kind in fields.items():
            assert type(item[field]) is kind, (name, field, item[field])
            assert item[field] or field in MAY_BE_EMPTY, (name, field, item)
    if id_field is not None:
        assert len({item[id_field] for item in items}) == len(items)


@pytest.mark.parametrize("benchmark", ["mbpp", "cnn_dm", "xsum"])
def test_ids_are_unique_across_splits(benchmark: str) -> None:
    id_field = "task_id" if benchmark == "mbpp" else "id"
    ids = [item[id_field] for split in ("test", "train") for item in load(f"{benchmark}/{split}.jsonl")]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("split", ["test", "train"])
def test_gsm8k_arithmetic(split: str) -> None:
    for item in load(f"gsm8k/{split}.jsonl"):
        *steps, last = item["answer"].split("\n")
        marks = re.findall(r"<<([^<>=]+)=([^<>=]+)>>(\S*)", item["answer"])
        assert marks, item
        assert all("<<" in step for step in steps if "=" in step), item
        for expression, result, shown in marks:
            assert arithmetic(expression) == Fraction(result), item
            assert shown.rstrip(".,") == result, item
        match = re.fullmatch(r"#### (\d+)", last)
        assert match, item
        assert match.group(1) == marks[-1][1], item


@pytest.mark.parametrize("item", load("humaneval/test.jsonl"), ids=lambda item: item["entry_point"])
def test_humaneval_solution_passes(item: dict[str, Any]) -> None:
    namespace: dict[str, Any] = {}
    exec(item["prompt"] + item["canonical_solution"] + item["test"], namespace)
    namespace["check"](namespace[item["entry_point"]])
    assert item["prompt"].rstrip().endswith('"""')
    assert ">>>" in item["prompt"]


@pytest.mark.parametrize("item", load("humaneval/test.jsonl"), ids=lambda item: item["entry_point"])
def test_humaneval_check_rejects_an_empty_body(item: dict[str, Any]) -> None:
    namespace: dict[str, Any] = {}
    exec(item["prompt"] + "    return NotImplemented\n" + item["test"], namespace)
    with pytest.raises(AssertionError):
        namespace["check"](namespace[item["entry_point"]])


@pytest.mark.parametrize("name", ["mbpp/test.jsonl", "mbpp/train.jsonl"])
def test_mbpp_code_passes(name: str) -> None:
    for item in load(name):
        namespace: dict[str, Any] = {}
        exec(item["test_setup_code"] + "\n" + item["code"], namespace)
        assert len(item["test_list"]) == 3
        for line in item["test_list"] + item["challenge_test_list"]:
            assert line.startswith("assert ")
            exec(line, namespace)


@pytest.mark.parametrize("name", ["cnn_dm/test.jsonl", "cnn_dm/train.jsonl"])
def test_cnn_dm_lengths(name: str) -> None:
    for item in load(name):
        assert 180 <= len(item["article"].split()) <= 320, item["id"]
        assert 2 <= len(item["highlights"].split("\n")) <= 4, item["id"]


@pytest.mark.parametrize("name", ["xsum/test.jsonl", "xsum/train.jsonl"])
def test_xsum_lengths(name: str) -> None:
    for item in load(name):
        assert 80 <= len(item["document"].split()) <= 180, item["id"]
        assert "\n" not in item["summary"], item["id"]
        assert item["summary"].endswith("."), item["id"]


def test_mt_bench_has_two_turns_in_eight_categories() -> None:
    items = load("mt_bench/test.jsonl")
    assert all(len(item["turns"]) == 2 for item in items)
    assert all(isinstance(turn, str) and turn for item in items for turn in item["turns"])
    assert len({item["category"] for item in items}) == 8


@pytest.mark.parametrize("name", sorted(name for name in SCHEMAS if name.split("/")[0] in TEXT_FIELD))
def test_texts_are_distinct(name: str) -> None:
    texts = [" ".join(text_of(name, item).split()).lower() for item in load(name)]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("benchmark", ["gsm8k", "mbpp", "cnn_dm", "xsum"])
def test_no_test_item_in_train(benchmark: str) -> None:
    # Not even in part: no run of 12 words occurs in both splits.
    test_name, train_name = f"{benchmark}/test.jsonl", f"{benchmark}/train.jsonl"
    train = set().union(*(shingles(text_of(train_name, item), 12) for item in load(train_name)))
    shared = {text_of(test_name, item) for item in load(test_name) if shingles(text_of(test_name, item), 12) & train}
    assert not shared
