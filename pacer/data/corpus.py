"""Texts of the target's own making: what to continue, reading, and the split that keeps the uses of texts apart."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pacer.data.prompts import NAMES, Prompt, load_prompts
from pacer.data.renderings import parts as parts_of
from pacer.data.splits import part_of
from pacer.errors import ConfigError, SourceError
from pacer.settings import CorpusSettings


@dataclass(frozen=True)
class Text:
    """A prompt and the target's greedy continuation, as token ids. ``cut``: it ended by length, not by a stop id."""

    id: str
    task: str
    prompt_ids: list[int]
    output_ids: list[int]
    cut: bool


def read_corpus(path: Path, stop_ids: Sequence[int]) -> list[Text]:
    """All texts of a JSON-lines file (``.gz`` allowed) with fields id, task, prompt_ids, output_ids.

    Raises:
        SourceError: the file is absent, or a line is not such a record; the line is named.
    """
    if not path.is_file():
        raise SourceError("no corpus file", value=str(path), remedy="set corpus.file=null to generate one")
    try:
        with _open(path) as lines:
            return list(_parse(lines, path, frozenset(stop_ids)))
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise SourceError(f"the corpus file is damaged ({error})", value=str(path), remedy="fetch it again") from error


def _open(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _parse(lines: Iterable[str], path: Path, stop_ids: frozenset[int]) -> Iterator[Text]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            output = [int(i) for i in row["output_ids"]]
            prompt = [int(i) for i in row["prompt_ids"]]
            yield Text(row["id"], row["task"], prompt, output, not output or output[-1] not in stop_ids)
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(
                f"line {number} of {path} is not a corpus record ({error!r})",
                allowed="id, task, prompt_ids, output_ids",
                remedy="repair or delete the file",
            ) from error


def read_files(settings: CorpusSettings, stop_ids: Sequence[int]) -> tuple[list[Text], list[Path]]:
    """The texts of the ready corpora one after the other, and their files; nothing where none is named.

    A limit keeps the first so many texts of each task.

    Raises:
        SourceError: a file that is absent or damaged, or two texts with one id.
    """
    named = settings.file if isinstance(settings.file, list) else [settings.file] if settings.file else []
    files = [Path(name).expanduser() for name in named]
    texts = [text for file in files for text in read_corpus(file, stop_ids)]
    if twice := _twice(text.id for text in texts):
        remedy = "leave one of them out: ids tell texts apart"
        raise SourceError("two texts of the ready corpus have one id", value=twice, remedy=remedy)
    return _first_of_each(texts, settings.limit), files


def _first_of_each(texts: Sequence[Text], limit: int | None) -> list[Text]:
    """The first so many texts of each task, in their order."""
    seen: Counter[str] = Counter()
    kept = []
    for text in texts:
        seen[text.task] += 1
        if limit is None or seen[text.task] <= limit:
            kept.append(text)
    return kept


def wanted_prompts(
    settings: CorpusSettings, data_dir: str | None, ready: Iterable[Text] = ()
) -> dict[str, list[Prompt]]:
    """Prompts to continue, by set, in order of length: batches hold neighbours. What is ready is left out.

    Raises:
        ConfigError: two prompts with one id.
    """
    done = {text.id for text in ready}
    found: dict[str, list[Prompt]] = {}
    for name in [*([] if settings.file else settings.prompts), *settings.extend]:
        task, _, split = name.partition("/") if name.split("/")[0] in NAMES else (name, "", "")  # a file's path
        rows = load_prompts(task, split=split or "train", data_dir=data_dir, limit=settings.limit).items
        prompts = [prompt for row in rows for prompt in parts_of(row, settings.chunks) if prompt.id not in done]
        found[name] = sorted(prompts, key=lambda prompt: (len(prompt.text), prompt.id))
    if twice := _twice(prompt.id for prompts in found.values() for prompt in prompts):
        remedy = "name each set once, and give files of your own different names"
        raise ConfigError("two prompts of the corpus have one id", value=twice, remedy=remedy)
    return found


def _twice(ids: Iterable[str]) -> str | None:
    """The first id that occurs a second time."""
    seen: set[str] = set()
    for id in ids:
        if id in seen:
            return id
        seen.add(id)
    return None


def split_texts(texts: Iterable[Text], parts: Mapping[str, float]) -> dict[str, list[Text]]:
    """Texts by part (stable hash of the id): what made the draft never makes labels, what is tuned on is neither."""
    found: dict[str, list[Text]] = {name: [] for name in parts}
    for text in texts:
        if text.output_ids:
            found[part_of(text.id, dict(parts))].append(text)
    return found
