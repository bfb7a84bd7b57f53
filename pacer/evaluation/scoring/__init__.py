"""Scores of generated text, each an `evaluate` module in this package, loaded offline by its path.

The modules are thin; what they compute stands in `answers`, `code` and `summaries` as plain functions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pacer.errors import PacerError

MODULES = {"gsm8k": "gsm8k_answer", "humaneval": "humaneval_pass", "cnn_dm": "rouge_lsum", "xsum": "rouge_lsum"}
NAMES = {
    "gsm8k_answer": ("exact_strict", "exact_flexible"),
    "humaneval_pass": ("pass@1",),
    "rouge_lsum": ("rouge1", "rouge2", "rougeL", "rougeLsum"),
}
FIELDS = {"gsm8k": "answer", "cnn_dm": "highlights", "xsum": "summary"}  # of the reference; humaneval: the whole item


def score(
    task: str, predictions: Sequence[str], items: Sequence[Mapping[str, Any]], sandbox: str = "auto"
) -> dict[str, float | None]:
    """The scores of one benchmark.

    Args:
        task: gsm8k, humaneval, cnn_dm or xsum; any other has prompts only and gives an empty dictionary.
        predictions: what the model wrote, one text per item.
        items: rows of the data set, with the fields it has on the hub.
        sandbox: auto, unsafe or off (see `pacer.evaluation.sandbox`); matters for code only.

    Returns:
        Name of each score and its value in [0, 1]; None where it was not taken (no items, code with sandbox=off).

    Raises:
        PacerError: an item lacks its reference, numbers of predictions and items differ, or no sandbox works.
    """
    if task not in MODULES:
        return {}
    if len(predictions) != len(items):
        raise PacerError(f"{task}: {len(predictions)} predictions for {len(items)} items")
    if not items or (task == "humaneval" and sandbox == "off"):
        return dict.fromkeys(NAMES[MODULES[task]])
    options = {"sandbox": sandbox} if task == "humaneval" else {}
    references = [_reference(task, item) for item in items]
    with tempfile.TemporaryDirectory(prefix="pacer-scores-") as folder:
        metric = load_module(MODULES[task], folder)
        return dict(metric.compute(predictions=list(predictions), references=references, **options))


def load_module(name: str, cache_dir: str | None = None) -> Any:
    """The `evaluate.Metric` of this package called ``name``, e.g. ``gsm8k_answer``; needs no network.

    `evaluate` copies a module's file to its modules cache (``HF_MODULES_CACHE``) under a hash of the contents and holds
    a file lock while it does, so that processes can load at the same time; predictions stay in memory. Where that cache
    cannot be written, the installed module is taken without the copy.

    Args:
        cache_dir: a folder in which it makes one that stays empty; default: its metrics cache.
    """
    import evaluate  # imports transformers' pipelines: seconds that only scoring should pay

    path = Path(__file__).with_name(name) / f"{name}.py"
    try:
        return evaluate.load(str(path), cache_dir=cache_dir, keep_in_memory=True)
    except OSError:  # a read-only home
        installed = evaluate.loading.import_main_class(f"{__name__}.{name}.{name}")
        return installed(cache_dir=cache_dir, keep_in_memory=True)


def _reference(task: str, item: Mapping[str, Any]) -> Any:
    fields = ("prompt", "entry_point", "test") if task == "humaneval" else (FIELDS[task],)
    missing = [field for field in fields if not isinstance(item.get(field), str)]
    if missing:
        raise PacerError(f"a {task} item has no text in its reference fields", value=missing, allowed=fields)
    return {field: item[field] for field in fields} if task == "humaneval" else item[fields[0]]
