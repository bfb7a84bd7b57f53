"""Reading the target's texts, and the split that keeps their uses apart."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pacer.checks import check
from pacer.command.app import load_settings
from pacer.data.corpus import Text, read_corpus, read_files, split_texts, wanted_prompts
from pacer.data.splits import part_of, row_of
from pacer.errors import ConfigError, SourceError
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


def test_a_limit_is_of_each_task(tmp_path: Path) -> None:
    files = []
    for name, rows in (("one", ROWS[:3]), ("two", [{**row, "id": row["id"] * 2} for row in ROWS])):
        files.append(str(tmp_path / f"{name}.jsonl"))
        Path(files[-1]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for limit, wanted in ((None, "a b c aa bb cc dd"), (2, "a b c aa dd"), (1, "a b dd")):
        texts, _ = read_files(CorpusSettings(file=files, limit=limit), [9])
        assert [text.id for text in texts] == wanted.split()


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


def test_ready_corpora_are_joined(tmp_path: Path) -> None:
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for file, rows in zip(files, (ROWS[:2], ROWS[2:]), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_files(CorpusSettings(file=[str(file) for file in files]), [9, 8]) == (TEXTS, files)
    assert read_files(CorpusSettings(file=str(files[0])), [9, 8]) == (TEXTS[:2], files[:1])
    assert read_files(CorpusSettings(), [9, 8]) == ([], [])
    with pytest.raises(SourceError, match="two texts of the ready corpus have one id: 'a'"):
        read_files(CorpusSettings(file=[str(files[0])] * 2), [9])


@pytest.fixture
def articles(tmp_path: Path) -> str:
    """Three articles of three, two and one parts as either task; and questions."""
    for name, row in (
        ("cnn_dm", lambda i: {"article": f"a{i} " * (900 - 305 * i), "highlights": "h"}),
        ("gsm8k", lambda i: {"question": f"q{i}", "answer": "#### 1"}),
    ):
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps(row(i)) + "\n" for i in range(3))
        (tmp_path / name / "validation.jsonl").write_text(lines)
    return str(tmp_path)


def test_what_is_ready_is_not_wanted_again(articles: str) -> None:
    """Without a file: prompts and extend. With one: extend alone, less the texts that the file has."""
    more = ["cnn_dm/validation", "cnn_dm/validation>xsum"]
    settings = CorpusSettings(["gsm8k/validation"], extend=more, chunks=2)
    found = wanted_prompts(settings, articles)
    cnn = [f"cnn_dm-validation-{i}" for i in ("0", "0#1", "1", "1#1", "2")]
    xsum = [f"cnn_dm-validation-{i}" for i in ("0>xsum", "0>xsum#1", "1>xsum", "1>xsum#1", "2>xsum")]
    assert [sorted(prompt.id for prompt in prompts) for prompts in found.values()] == [
        [f"gsm8k-validation-{i}" for i in range(3)], cnn, xsum
    ]  # fmt: skip
    for prompts in found.values():
        assert [len(prompt.text) for prompt in prompts] == sorted(len(prompt.text) for prompt in prompts)
    settings.file = "ready.jsonl"
    ready = [Text(id, "cnn_dm", [1], [2], False) for id in ("cnn_dm-validation-0", "cnn_dm-validation-1>xsum#1")]
    rest = wanted_prompts(settings, articles, ready)
    assert list(rest) == more
    for name in more:
        assert rest[name] == [prompt for prompt in found[name] if prompt.id not in {text.id for text in ready}]
    settings.limit = 1
    assert [len(prompts) for prompts in wanted_prompts(settings, articles, ready).values()] == [1, 2]


def test_two_sets_with_the_same_ids(articles: str) -> None:
    copy = Path(articles) / "copy" / "mine.jsonl"
    first = Path(articles) / "mine.jsonl"
    copy.parent.mkdir()
    for path in (copy, first):
        path.write_text('{"prompt": "x"}\n')
    with pytest.raises(ConfigError, match=r"two prompts of the corpus have one id: 'mine-0'.*different names"):
        wanted_prompts(CorpusSettings([str(first)], extend=[str(copy)]), articles)
    assert len(wanted_prompts(CorpusSettings([str(first)], extend=[str(first)]), articles)) == 1  # named twice


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"file": 3}, "corpus.file: 3; allowed: a path"), ({"file": ["a", None]}, "corpus.file"), ({"chunks": 0}, "≥ 1")],
)
def test_values_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    settings = load_settings(["data=real"])
    settings.corpus = replace(settings.corpus, **changes)
    with pytest.raises(ConfigError, match=message):
        check(settings)


def test_more_text_from_the_same_rows(real_data: Path) -> None:
    """What data=extended asks for is there, is new, and shares its rows' parts with the ready corpus."""
    settings = load_settings(["data=extended", f"paths.data_dir={real_data}"]).corpus
    texts, _ = read_files(settings, [2])
    wanted = wanted_prompts(settings, str(real_data), texts)
    assert list(wanted) == settings.extend and all(wanted.values())
    new = {prompt.id for prompts in wanted.values() for prompt in prompts}
    assert len(new) > 3000 and not new & {text.id for text in texts}
    parts = {text.id: part_of(text.id, settings.parts) for text in texts}
    related = [id for id in new if row_of(id) in parts]
    assert len(related) > 1000
    assert all(part_of(id, settings.parts) == parts[row_of(id)] for id in related)
