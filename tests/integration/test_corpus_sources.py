"""Where the texts of a corpus come from: a ready file, prompts of one's own, both; and texts that are too few."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pacer.assemble import Models
from pacer.errors import ConfigError
from pacer.settings import CorpusSettings, Settings
from pacer.stages import texts as text_stages
from pacer.stages.build import build
from pacer.training import draft_run
from pacer.work.stopping import Stopped
from tests.homes import METHODS, PROMPTS, killed_after, make


def test_the_corpus_is_written_in_the_dtype_that_decodes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels are true of that text; only the masters that are trained are float32."""
    settings = make(home, tmp_path)
    settings.model.dtype = "bfloat16"
    dtypes: dict[str, torch.dtype] = {}
    real = text_stages.corpus

    def corpus(chosen: Settings, models: Models) -> Any:
        dtypes["corpus"] = models.target.dtype
        return real(chosen, models)

    def train_draft(target: Any, *_: object, **__: object) -> None:
        dtypes["masters"] = target.dtype
        raise Stopped

    monkeypatch.setattr("pacer.stages.draft.corpus", corpus)
    monkeypatch.setattr(draft_run, "train_draft", train_draft)
    with pytest.raises(Stopped):
        build(settings, METHODS)
    assert dtypes == {"corpus": torch.bfloat16, "masters": torch.float32}


def test_a_given_corpus_is_read(home: Path, built: Models, tmp_path: Path) -> None:
    _, hash = text_stages.corpus(make(home), built)
    folder = home / "runs" / "stages" / "corpus" / hash[:16]
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(shard.read_text() for shard in sorted(folder.glob("shard-*"))))
    settings = make(home, tmp_path, corpus=CorpusSettings(file=str(file), limit=7))
    texts, key = text_stages.corpus(settings, built)
    assert len(texts) == 7 and not (tmp_path / "stages").exists()
    file.write_text(file.read_text().replace("gsm8k-train-0", "gsm8k-train-900"))
    assert text_stages.corpus(settings, built)[1] != key


def test_prompts_from_a_file_of_ones_own(home: Path, built: Models, tmp_path: Path) -> None:
    own = tmp_path / "mine" / "some.jsonl"
    own.parent.mkdir()
    own.write_text('{"prompt": "How"}\n{"prompt": "the fox"}\n')
    for name, task in ((str(own), "prompt"), (f"gsm8k/{home / 'data/gsm8k/train.jsonl'}", "gsm8k")):
        settings = make(home, tmp_path, corpus=CorpusSettings([name], limit=2, max_new_tokens=3))
        texts, _ = text_stages.corpus(settings, built)
        assert [text.task for text in texts] == [task] * 2


def test_too_few_texts(home: Path, built: Models, tmp_path: Path) -> None:
    parts = {"draft": 1.0, "preverifier": 0.0, "tuning": 0.0}
    settings = make(home, tmp_path, corpus=CorpusSettings(["gsm8k/train"], limit=2, max_new_tokens=3, parts=parts))
    for part in ("preverifier", "tuning"):
        with pytest.raises(ConfigError, match=f"no texts in part {part} of the corpus: 2; use more prompts"):
            text_stages.labels(settings, built, part, "x")


def test_texts_without_a_round(home: Path, built: Models, tmp_path: Path) -> None:
    """Outputs of one token come from the prefill: there is nothing to draft."""
    corpus = replace(make(home).corpus, max_new_tokens=1)
    for part in ("preverifier", "tuning"):
        with pytest.raises(ConfigError, match=rf"no text in part {part} .* yields a round: \d+; .*max_new_tokens"):
            text_stages.labels(make(home, tmp_path, corpus=corpus), built, part, "x")


def test_a_ready_corpus_is_extended(home: Path, built: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file has is not generated again, and a set that is added later leaves the finished ones alone."""
    whole, made_as = text_stages.corpus(make(home), built)
    file, own = tmp_path / "corpus.jsonl", tmp_path / "own.jsonl"
    stages_here = home / "runs" / "stages" / "corpus"  # other tests have made others
    shards = sorted(stages_here.glob(f"{made_as[:16]}/shard-*"))
    lines = [line for shard in shards for line in shard.read_text().splitlines(keepends=True)]
    file.write_text("".join(lines[:7]))
    own.write_text('{"prompt": "How"}\n{"prompt": "the fox"}\n')
    made: list[Any] = []
    monkeypatch.setattr(
        text_stages, "_continuations", killed_after(99, text_stages._continuations, made, KeyboardInterrupt())
    )
    corpus = replace(make(home).corpus, file=str(file), extend=["gsm8k/train"])
    texts, key = text_stages.corpus(make(home, tmp_path, corpus=corpus), built)
    assert [text.id for text in texts[:7]] == [json.loads(line)["id"] for line in lines[:7]]
    assert len(texts) == PROMPTS and {text.id for text in texts} == {text.id for text in whole}
    assert {prompt.id for batch in made for prompt in batch} == {text.id for text in texts[7:]}
    made.clear()
    corpus.extend.append(str(own))
    more, other = text_stages.corpus(make(home, tmp_path, corpus=corpus), built)
    assert more[:PROMPTS] == texts and [text.task for text in more[PROMPTS:]] == ["prompt"] * 2 and other != key
    assert {prompt.id for batch in made for prompt in batch} == {"own-0", "own-1"}


def test_a_limit_cuts_ready_texts_before_they_count_as_ready(home: Path, built: Models, tmp_path: Path) -> None:
    whole, _ = text_stages.corpus(make(home), built)
    rows = {text.id: text for text in whole}
    file = tmp_path / "corpus.jsonl"
    names = [f"gsm8k-train-{i}" for i in (6, 5, 4, 2, 1, 0)]
    file.write_text("".join(json.dumps(vars(rows[name])) + "\n" for name in names))
    corpus = replace(make(home).corpus, file=str(file), extend=["gsm8k/train"], limit=3)
    texts, _ = text_stages.corpus(make(home, tmp_path, corpus=corpus), built)
    assert [text.id for text in texts[:3]] == names[:3]
    assert sorted(text.id for text in texts[3:]) == sorted(names[3:])  # the set's first three rows are made anew
