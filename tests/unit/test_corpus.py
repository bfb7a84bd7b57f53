"""Reading the target's texts, and the split that keeps their uses apart."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from pacer.data.corpus import Text, read_corpus, split_texts
from pacer.data.splits import part_of
from pacer.errors import SourceError
from pacer.settings import CorpusSettings

ROWS = [
    {"id": "a", "task": "gsm8k", "prompt_ids": [1, 2], "output_ids": [3, 9]},
    {"id": "b", "task": "xsum", "prompt_ids": [1], "output_ids": [9, 3], "more": "is ignored"},
    {"id": "c", "task": "xsum", "prompt_ids": [1], "output_ids": []},
    {"id": "d", "task": "mbpp", "prompt_ids": [9], "output_ids": [4, 8]},
]
TEXTS = [
    Text("a", "gsm8k", [1, 2], [3, 9], False),
    Text("b", "xsum", [1], [9, 3], True),
    Text("c", "xsum", [1], [], True),
    Text("d", "mbpp", [9], [4, 8], False),
]


def test_lines_and_gzip(tmp_path: Path) -> None:
    """A text is cut unless it ends in a stop id, whichever it is."""
    content = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "c.jsonl").write_text(content)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    assert read_corpus(tmp_path / "c.jsonl", [9, 8]) == TEXTS
    assert read_corpus(tmp_path / "c.jsonl.gz", [8, 9]) == TEXTS
    assert all(text.cut for text in read_corpus(tmp_path / "c.jsonl", []))


BAD = (
    "{",
    '{"id": "x", "task": "t", "prompt_ids": [1]}',
    '{"id": "x", "task": "t", "prompt_ids": 3, "output_ids": [1]}',
    '{"id": "x", "task": "t", "prompt_ids": [], "output_ids": [null]}',
    "[]",
)


@pytest.mark.parametrize("bad", BAD)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + bad + "\n")
    with pytest.raises(SourceError, match=r"line 2 of .*c\.jsonl is not a corpus record.*prompt_ids"):
        read_corpus(path, [9])


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no corpus file.*set corpus\.file=null"):
        read_corpus(tmp_path / "none.jsonl", [])


def test_parts_share_no_text() -> None:
    texts = [Text(f"gsm8k-train-{i}", "gsm8k", [1], [2], False) for i in range(2000)]
    parts = CorpusSettings().parts
    found = split_texts(texts, parts)
    assert list(found) == list(parts)
    names = [text.id for members in found.values() for text in members]
    assert sorted(names) == sorted(text.id for text in texts)  # each once
    for name, share in parts.items():
        assert abs(len(found[name]) / len(texts) - share) < 0.03
    for text in split_texts(reversed(texts[:50]), parts)["tuning"]:  # whatever else is there
        assert text in found["tuning"] and part_of(text.id, parts) == "tuning"


def test_empty_outputs_are_left_out() -> None:
    found = split_texts(TEXTS, {"draft": 1.0})
    assert [text.id for text in found["draft"]] == ["a", "b", "d"]
