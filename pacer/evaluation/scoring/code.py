"""HumanEval: from a model's answer to a program, and pass@1 over sandboxed runs.

Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374) and its harness,
github.com/openai/human-eval: a program passes when ``check(entry_point)`` returns.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pacer.evaluation.sandbox import Result, require_sandbox, run_program

# a fence left open, by an answer cut at its budget, runs to the end
FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)
PYTHON_FENCES = ("", "python", "python3", "py")
WORKERS = 2  # programs at a time


def build_program(answer: str, item: Mapping[str, str]) -> str:
    """The program that decides one item: prompt where needed, the model's code, the tests, the call of them.

    Args:
        answer: what the model wrote, as chat with fenced code or as the bare continuation of the prompt.
        item: ``prompt``, ``entry_point`` and ``test`` of the item.

    The code is the last fenced Python block that defines the entry point, else the last one, else the whole answer. If
    it defines the entry point, the prompt's text before that definition (imports, helpers) goes before it, so that
    nothing the prompt offers is missing; if not, it continues the prompt.
    """
    prompt, entry_point = item["prompt"], item["entry_point"]
    definition = re.compile(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(entry_point)}\b", re.MULTILINE)
    code = _extract_code(answer, definition)
    if definition.search(code):
        given = definition.split(prompt, maxsplit=1)[0]
        code = textwrap.dedent(code)
        futures = FUTURE.findall(code)  # must stand first in the file
        code = "\n".join([*futures, given, FUTURE.sub("", code)])
    else:
        code = prompt + code
    return f"{code}\n{item['test']}\ncheck({entry_point})\n"


def _extract_code(answer: str, definition: re.Pattern[str]) -> str:
    blocks = [body for language, body in FENCE.findall(answer) if language.lower() in PYTHON_FENCES]
    defining = [block for block in blocks if definition.search(block)]
    return (defining or blocks or [answer])[-1]


def run_tests(
    answers: Sequence[str], items: Sequence[Mapping[str, str]], *, seconds: float = 5.0, sandbox: str = "auto"
) -> list[Result]:
    """How the program of each answer ended, in order; two programs run at a time.

    Raises:
        PacerError: no sandbox works here and ``sandbox`` does not waive it.
    """
    require_sandbox(sandbox)
    programs = [build_program(answer, item) for answer, item in zip(answers, items, strict=True)]
    with ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda program: run_program(program, seconds=seconds, mode=sandbox), programs))


def pass_at_1(
    answers: Sequence[str], items: Sequence[Mapping[str, str]], *, seconds: float = 5.0, sandbox: str = "auto"
) -> float | None:
    """Share of items whose one program passes, in [0, 1]; None where ``sandbox`` is off or there are no items."""
    if require_sandbox(sandbox) == "off" or not answers:
        return None
    results = run_tests(answers, items, seconds=seconds, sandbox=sandbox)
    return sum(result.status == "passed" for result in results) / len(results)
