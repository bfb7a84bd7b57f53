"""Benchmarks as sets of prompts: from local files, the hub, or the samples that ship with the project."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pacer.data.renderings import crossed, split_name
from pacer.data.splits import is_tuning, part_of
from pacer.data.templates import LIMITS, MARKS, TEMPLATES, Item, Limits, Prompt, said, task_of
from pacer.errors import ConfigError, SourceError
from pacer.resources import resource

__all__ = ["LIMITS", "NAMES", "Limits", "Prompt", "PromptSet", "encode", "is_tuning", "load_prompts", "part_of"]

log = logging.getLogger(__name__)

NAMES = ("gsm8k", "humaneval", "cnn_dm", "xsum", "mbpp", "mt_bench", "sharegpt", "instruct")
SPLITS = ("train", "validation", "test")
HUB = {
    "gsm8k": ("openai/gsm8k", "main"),
    "humaneval": ("openai/openai_humaneval", None),
    "mbpp": ("google-research-datasets/mbpp", "full"),
    "cnn_dm": ("abisee/cnn_dailymail", "3.0.0"),
    "xsum": ("EdinburghNLP/xsum", None),
    "sharegpt": ("anon8231489123/ShareGPT_Vicuna_unfiltered", None),
}
HUB_FILES = {"sharegpt": "ShareGPT_V3_unfiltered_cleaned_split.json"}  # of repositories that are no data set script
STAND_IN = {"sharegpt": "mt_bench"}  # other conversations, where there are none of these; the name says so
# Files under the names their publishers gave them, with the prefix of their ids (None: the usual id).
PUBLISHED: dict[tuple[str, str], tuple[tuple[str, str | None], ...]] = {
    ("humaneval", "test"): (("HumanEval.jsonl.gz", None), ("HumanEval.jsonl", None)),
    ("mbpp", "train"): (("mbpp.jsonl", None),),
    ("mbpp", "validation"): (("mbpp.jsonl", None),),
    ("mbpp", "test"): (("mbpp.jsonl", None),),
    ("mt_bench", "test"): (("question.jsonl", None),),
    ("sharegpt", "test"): ((HUB_FILES["sharegpt"], None),),
    ("instruct", "train"): (("instruction_1100.json", "instruct"), ("self_instruct_seed_175.jsonl", "seed")),
}
# By task_id; 1 to 10 are few-shot prompts.
MBPP_IDS = {"test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}
ROLES = ("user", "assistant")
FILE_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
HOW_LOCAL = "put JSON lines at <data_dir>/<name>/<split>.jsonl and set paths.data_dir (or PACER_DATA) to that folder"


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one benchmark split. `sample`: written for this project; `source`: file, folder or hub id."""

    name: str
    items: list[Prompt]
    sample: bool
    source: str


def load_prompts(
    name: str,
    *,
    split: str = "test",
    data_dir: Path | str | None = None,
    limit: int | None = None,
    few_shot: int = 0,
) -> PromptSet:
    """The prompts of a benchmark.

    Looked for in this order: the file that `name` or `split` is a path of; ``<data_dir>/<name>``; with
    ``data_dir="hub"`` the Hugging Face hub; the packaged samples.

    Args:
        name: one of `NAMES`, or a path of JSON (lines) with the field `prompt` or a benchmark's fields; name or split
            may end in ``>template``: the rows rendered by another task's template, such as ``cnn_dm>xsum``.
        split: train, validation or test; or a path, read with the template of `name`.
        data_dir: folder of real data, or "hub".
        limit: only the first so many.
        few_shot: gsm8k only: so many worked examples from the train split of the same place before each prompt.

    Raises:
        ConfigError: an unknown name, split or option.
        SourceError: no such data, no network, or a row that lacks its fields; the row is named.
    """
    if limit is not None and limit < 0:
        raise ConfigError("a limit of prompts below 0", value=limit)
    (name, template), (split, of_split) = split_name(name), split_name(split)
    own = next((text for text in (name, split) if text.endswith(FILE_ENDINGS)), None)
    if own is None:
        found = _load_named(name, split, data_dir)
    else:
        found = _load_own(Path(own).expanduser(), None if own == name else _known(name))
    if not found.items:
        raise SourceError(f"no prompts in {found.name}", value=found.source)
    if other := template or of_split:
        found = replace(found, name=f"{name}>{other}", items=[crossed(prompt, other) for prompt in found.items])
    if few_shot:
        found = _with_shots(found, data_dir, few_shot)
    return replace(found, items=found.items[:limit])


def _known(name: str) -> str:
    if name not in NAMES:
        raise ConfigError("unknown prompt set", value=name, allowed=(*NAMES, "the path of a .jsonl or .json file"))
    return name


def _load_named(name: str, split: str, data_dir: Path | str | None) -> PromptSet:
    _known(name)
    if split not in SPLITS:
        raise ConfigError(f"unknown split of {name}", value=split, allowed=(*SPLITS, "the path of a .jsonl file"))
    if str(data_dir) == "hub":
        return _load_hub(name, split)
    if data_dir is not None:
        root = Path(data_dir).expanduser()
        if not root.is_dir():
            raise SourceError("the data folder does not exist", value=str(root), remedy=HOW_LOCAL)
        if items := _load_local(name, split, root / name):
            return PromptSet(name, items, False, str(root / name))
        if name in STAND_IN:
            return _stand_in(name, split, data_dir, root)
        log.warning("no %s split of %s in %s: using this project's samples", split, name, root)
    if name in STAND_IN:
        return _stand_in(name, split, data_dir, "the samples")
    path = resource("data/samples") / name / f"{split}.jsonl"
    if not path.is_file():
        raise SourceError(f"no {split} split of {name} in the samples", value=str(path), remedy=HOW_LOCAL)
    return PromptSet(name, _prompts(name, split, _read(path), str(path)), True, str(path))


def _stand_in(name: str, split: str, data_dir: Path | str | None, where: Path | str) -> PromptSet:
    other = STAND_IN[name]
    log.warning("no %s split of %s in %s: %s stands in", split, name, where, other)
    found = _load_named(other, split, data_dir)
    return replace(found, name=f"{other} for {name}")


def _load_local(name: str, split: str, folder: Path) -> list[Prompt]:
    for path in (folder / f"{split}.jsonl", folder / f"{split}.jsonl.gz"):
        if path.is_file():
            return _prompts(name, split, _read(path), str(path))
    items: dict[str, Prompt] = {}
    for file, prefix in PUBLISHED.get((name, split), ()):
        path = folder / file
        if not path.is_file():
            continue
        rows = _read(path)
        if name == "mbpp":
            rows = [row for row in rows if row.get("task_id") in MBPP_IDS[split]]
        items |= {prompt.id: prompt for prompt in _prompts(name, split, rows, str(path), prefix)}
    return list(items.values())


def _load_hub(name: str, split: str) -> PromptSet:
    # Here, not at the top: `datasets` takes a second to import, and most runs do without.
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from huggingface_hub import HfApi, is_offline_mode

    from pacer.models.sources import HUB_ERRORS

    if name not in HUB:
        raise ConfigError("this prompt set has no hub form", value=name, allowed=HUB, remedy=HOW_LOCAL)
    repo, config = HUB[name]
    try:
        if not is_offline_mode():
            HfApi().dataset_info(repo, timeout=10)  # fails at once, where load_dataset tries for half a minute
        file = HUB_FILES.get(name)  # one file is one split, which `datasets` calls train
        options = {"split": split} if file is None else {"split": "train", "data_files": file}
        rows = [dict(row) for row in load_dataset(repo, config, **options)]
    except (*HUB_ERRORS, ValueError, DatasetsError) as error:
        what = f"the data set {name} ({split}) cannot be read from the hub (offline?)"
        remedy = f"{HOW_LOCAL}; with HF_HUB_OFFLINE=1 a copy in the Hugging Face cache is used"
        raise SourceError(what, value=repo, remedy=remedy) from error
    return PromptSet(name, _prompts(name, split, rows, repo), False, repo)


def _load_own(path: Path, task: str | None) -> PromptSet:
    if not path.is_file():
        raise SourceError("no such file of prompts", value=str(path))
    rows = _read(path)
    stem = path.name.split(".json")[0]
    if task is None:
        task = task_of(rows[0]) if rows else "prompt"
        if task is None:
            raise SourceError("unknown fields in a file of prompts", value=sorted(rows[0]), allowed=MARKS)
    return PromptSet(stem, _prompts(task, "", rows, str(path), stem), False, str(path))


def _read(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file or a JSON list, gzipped or not."""
    where = str(path)
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
        if ".jsonl" not in path.name:
            rows = json.loads(text)
        else:
            rows = []
            for number, line in enumerate(text.split("\n"), 1):
                where = f"line {number} of {path}"
                rows += [json.loads(line)] if line.strip() else []
    except (OSError, EOFError, ValueError) as error:
        raise SourceError("a data file cannot be read as JSON", value=where, remedy="repair or replace it") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SourceError("a data file must hold JSON objects", value=str(path))
    return rows


def _prompts(
    task: str, split: str, rows: Sequence[Mapping[str, Any]], source: str, prefix: str | None = None
) -> list[Prompt]:
    items = []
    if skipped := sum(not said(row) for row in rows):
        log.warning("%d of %d rows of %s have no prompt and are left out", skipped, len(rows), source)
    for index, row in enumerate(rows):
        if not said(row):
            continue
        try:
            text = TEMPLATES[task](row)
            if not isinstance(text, str) or not text.strip():
                raise TypeError("no text")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            what = f"row {index} of {source} is not a row of {task}"
            raise SourceError(f"{what} ({error!r})", value=sorted(row)) from error
        items.append(Prompt(_id(task, split, index, row, prefix), task, text, row))
    return items


def _id(task: str, split: str, index: int, row: Item, prefix: str | None) -> str:
    if prefix is not None:
        return f"{prefix}-{index}"
    if task == "humaneval":
        return str(row["task_id"]).replace("/", "-")
    if task == "mbpp":
        return f"mbpp-{row['task_id']}"
    return f"{task}-{split}-{index}"


def _with_shots(found: PromptSet, data_dir: Path | str | None, count: int) -> PromptSet:
    """Worked examples come from train, never from what is measured; a train prompt is not its own example."""
    if {prompt.task for prompt in found.items} != {"gsm8k"}:
        raise ConfigError("few_shot is for gsm8k", value=found.name)
    train = _load_named("gsm8k", "train", data_dir).items[: count + 1]
    items = []
    for prompt in found.items:
        pairs = [(shot.text, str(shot.item["answer"])) for shot in train if shot.text != prompt.text][:count]
        if len(pairs) < count:
            raise ConfigError("few_shot is more than the train split has", value=count)
        items.append(replace(prompt, shots=tuple(pairs)))
    return replace(found, items=items)


def encode(prompt: Prompt | str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The prompt's token ids: in the tokenizer's chat template where it has one, else plain text after BOS."""
    text, shots = (prompt, ()) if isinstance(prompt, str) else (prompt.text, prompt.shots)
    if tokenizer.chat_template:
        turns = [{"role": role, "content": words} for pair in shots for role, words in zip(ROLES, pair, strict=True)]
        turns.append({"role": "user", "content": text})
        ids: Any = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
        return list(ids)
    if shots:
        text = "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in shots) + f"Question: {text}\nAnswer:"
    plain: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    return list(plain) if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *plain]
