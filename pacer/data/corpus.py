"""Texts of the target's own making: reading, and the split that keeps draft, pre-verifier and tuning texts apart."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pacer.data.splits import part_of
from pacer.errors import SourceError


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
    with _open(path) as lines:
        return list(_parse(lines, path, frozenset(stop_ids)))


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


def split_texts(texts: Iterable[Text], parts: Mapping[str, float]) -> dict[str, list[Text]]:
    """Texts by part (stable hash of the id): what made the draft never makes labels, what is tuned on is neither."""
    found: dict[str, list[Text]] = {name: [] for name in parts}
    for text in texts:
        if text.output_ids:
            found[part_of(text.id, dict(parts))].append(text)
    return found
