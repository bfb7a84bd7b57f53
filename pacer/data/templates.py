"""From a row of a benchmark to the text a user would send, and how far an answer may go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Item = Mapping[str, Any]  # one row, as its publisher wrote it


@dataclass(frozen=True)
class Prompt:
    """One request of a benchmark: its user text, and the whole row for scoring.

    `shots` are worked examples, as pairs (user text, answer), that come before it.
    """

    id: str
    task: str
    text: str
    item: Item
    shots: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Limits:
    """How far an answer of a task may go: a budget of new tokens, and strings that end it."""

    max_new_tokens: int
    stop: tuple[str, ...] = ()


# The stop string of gsm8k ends models without a chat template, which go on with questions of their own.
LIMITS: dict[str, Limits] = {
    "gsm8k": Limits(256, ("\nQuestion:",)),
    "humaneval": Limits(384),
    "mbpp": Limits(256),
    "cnn_dm": Limits(128),
    "xsum": Limits(64),
    "mt_bench": Limits(512),
    "sharegpt": Limits(512),
    "instruct": Limits(256),
    "prompt": Limits(256),
}

# Tasks about an article: the field that holds it, and how many of its words a prompt takes.
WORDS = {"cnn_dm": ("article", 300), "xsum": ("document", 250)}


def _article(task: str, item: Item) -> str:
    """The article's first words, joined by single spaces."""
    field, count = WORDS[task]
    return " ".join(item[field].split()[:count])


def _gsm8k(item: Item) -> str:
    return item["question"]


def _humaneval(item: Item) -> str:
    ask = "Complete the following Python function. Reply with the whole function in a Python code block."
    return f"{ask}\n\n```python\n{item['prompt']}```"


def _mbpp(item: Item) -> str:
    return f"{item['text']}\nYour code should pass this test: {item['test_list'][0]}"


def _cnn_dm(item: Item) -> str:
    return "Summarize the following article.\n\n" + _article("cnn_dm", item)


def _xsum(item: Item) -> str:
    return "Summarize the following article in one sentence.\n\n" + _article("xsum", item)


def _mt_bench(item: Item) -> str:
    return item["turns"][0]


def _sharegpt(item: Item) -> str:
    """What the user said first; `said` tells rows that have it."""
    return next(turn["value"] for turn in item["conversations"] if turn["from"] in ("human", "user"))


def said(item: Item) -> bool:
    """Whether a row can be a prompt: some of ShareGPT's conversations begin in their middle, or are empty."""
    return "conversations" not in item or any(turn.get("from") in ("human", "user") for turn in item["conversations"])


def _instruct(item: Item) -> str:
    """Alpaca's form has `input` beside the instruction, self-instruct's seeds have it in `instances`."""
    extra = item["instances"][0]["input"] if "instances" in item else item.get("input")
    return f"{item['instruction']}\n{extra}" if extra else item["instruction"]


def _prompt(item: Item) -> str:
    return item["prompt"]


TEMPLATES: dict[str, Callable[[Item], str]] = {
    "gsm8k": _gsm8k,
    "humaneval": _humaneval,
    "mbpp": _mbpp,
    "cnn_dm": _cnn_dm,
    "xsum": _xsum,
    "mt_bench": _mt_bench,
    "sharegpt": _sharegpt,
    "instruct": _instruct,
    "prompt": _prompt,
}

# The field that tells whose rows a user's own file holds, in the order in which they are looked for.
MARKS = {
    "conversations": "sharegpt",
    "turns": "mt_bench",
    "article": "cnn_dm",
    "document": "xsum",
    "test_list": "mbpp",
    "entry_point": "humaneval",
    "instruction": "instruct",
    "question": "gsm8k",
    "prompt": "prompt",
}


def task_of(item: Item) -> str | None:
    """The task whose fields `item` has; None where no mark is found."""
    return next((task for mark, task in MARKS.items() if mark in item), None)
