"""More prompts from the same rows: rendered by another task's template, and of the later parts of long articles.

Such a prompt's id is its row's with a suffix, ``<id>>xsum`` or ``<id>#1``, by which `pacer.data.splits` keeps all
prompts of a row together. Its row has the fields of the task whose prompt it is.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from dataclasses import replace

from pacer.data.templates import TEMPLATES, WORDS, Item, Prompt
from pacer.errors import ConfigError, SourceError

LEAST_WORDS = 50  # of an article's last part: less is hardly worth a summary


def split_name(name: str) -> tuple[str, str | None]:
    """``cnn_dm/validation>xsum`` → ``cnn_dm/validation`` and the template's name; None where none is named."""
    found = re.fullmatch(r"(.*?)(?:>(\w+))?", name, re.DOTALL)
    assert found is not None
    return found[1], found[2]


def crossed(prompt: Prompt, template: str) -> Prompt:
    """The prompt's row as a row of another task, in that task's template.

    Raises:
        ConfigError: no such way from task to task.
        SourceError: a row that lacks what the other task needs.
    """
    pair = prompt.task, template
    if pair not in CROSSINGS:
        known = [f"{task}>{other}" for task, other in CROSSINGS]
        raise ConfigError("no rendering of one task's rows as another's", value=f"{pair[0]}>{template}", allowed=known)
    try:
        item = CROSSINGS[pair](prompt.item)
    except (KeyError, IndexError, TypeError, StopIteration, SyntaxError) as error:
        what = f"the row of {prompt.id} cannot be rendered as {template} ({error!r})"
        raise SourceError(what, value=sorted(prompt.item)) from error
    return Prompt(f"{prompt.id}>{template}", template, TEMPLATES[template](item), item)


def parts(prompt: Prompt, count: int) -> list[Prompt]:
    """Up to `count` prompts of successive parts of the article, each as long as its template takes.

    The first keeps its id. Prompts without an article, and articles that fit, stay one.
    """
    found = [prompt]
    if count > 1 and prompt.task in WORDS:
        field, size = WORDS[prompt.task]
        words = prompt.item[field].split()
        for index in range(1, count):
            part = words[index * size : (index + 1) * size]
            if len(part) < LEAST_WORDS:
                break
            item = {**prompt.item, field: " ".join(part)}
            found.append(replace(prompt, id=f"{prompt.id}#{index}", text=TEMPLATES[prompt.task](item), item=item))
    return found


def _function(item: Item) -> Item:
    """MBPP → HumanEval: the head of the function that the first test calls, with the words as its docstring."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the rows' own code, such as "\d" in a plain string
        test, code = (ast.parse(text).body for text in (item["test_list"][0], item["code"]))
    calls = [node.func for node in ast.walk(test[0]) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    head = next(node for node in code if isinstance(node, ast.FunctionDef) and node.name in called)
    words = [item["text"].strip()]
    match test[0]:
        case ast.Assert(test=ast.Compare(left=call, ops=[ast.Eq()], comparators=[value])):
            words += [f">>> {ast.unparse(call)}", ast.unparse(value)]
    docstring = "\n    ".join(words).replace("\\", "\\\\").replace('"""', "'''")
    asserts = "".join(f"    {line}\n" for line in item["test_list"])
    setup = item.get("test_setup_code") or ""
    return {
        "task_id": f"mbpp/{item['task_id']}",
        "prompt": f'def {head.name}({ast.unparse(head.args)}):\n    """ {docstring}\n    """\n',
        "entry_point": head.name,
        "test": f"{setup}\ndef check(candidate):\n{asserts}",
    }


CROSSINGS: dict[tuple[str, str], Callable[[Item], Item]] = {
    ("cnn_dm", "xsum"): lambda item: {"document": item["article"], "summary": item["highlights"]},
    ("xsum", "cnn_dm"): lambda item: {"article": item["document"], "highlights": item["summary"]},
    ("mbpp", "humaneval"): _function,
}
