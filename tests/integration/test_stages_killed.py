"""Stages that are killed or asked to stop go on where they were, and show how far they are."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pacer import artifacts
from pacer.artifacts import Stage
from pacer.assemble import Models
from pacer.data.corpus import read_corpus
from pacer.data.labels import simulate
from pacer.evaluation.replay.stage import _build as build_table
from pacer.settings import CorpusSettings
from pacer.stages import texts as text_stages
from pacer.stages.teacher import teacher_labels
from pacer.training.states import store_states
from pacer.work import stopping
from pacer.work.stopping import PATIENCE, Stopped
from tests.homes import GAMMA, PROMPTS, files, killed_after, make


@pytest.mark.parametrize("calls", [1, 3, 5])
def test_a_killed_corpus_goes_on(
    home: Path, built: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Finished shards are not made again, and the texts are those of a run that was not killed."""
    settings = make(home, tmp_path)
    first: list[Any] = []
    real = text_stages._continuations
    monkeypatch.setattr(text_stages, "_continuations", killed_after(calls, real, first, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        text_stages.corpus(settings, built)
    kept = files(tmp_path)
    finished = {t.id for shard in tmp_path.rglob("shard-*") for t in read_corpus(shard, built.stop_ids)}
    assert len(finished) == 5 * (calls // 2)  # a shard is two batches
    assert not list(tmp_path.rglob("manifest.json"))
    second: list[Any] = []
    monkeypatch.setattr(text_stages, "_continuations", killed_after(99, real, second, KeyboardInterrupt()))
    texts, _ = text_stages.corpus(settings, built)
    assert all(files(tmp_path)[path] == state for path, state in kept.items() if path.name.startswith("shard-"))
    redone = {prompt.id for batch in second for prompt in batch}
    assert not redone & finished and redone | finished == {text.id for text in texts}
    monkeypatch.setattr(text_stages, "_continuations", real)
    assert texts == text_stages.corpus(make(home), built)[0]


def test_a_stop_request_is_heeded_between_shards(
    home: Path, built: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise Stopped("SIGTERM")

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(artifacts, "check_stop", stop)
        text_stages.corpus(make(home, tmp_path), built)
    assert len(list(tmp_path.rglob("shard-*"))) == 1
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        text_stages.corpus(make(home, tmp_path), built)
        patch.setattr(artifacts, "check_stop", stop)
        text_stages.labels(make(home, tmp_path), built, "preverifier", "x")
    assert len(list((tmp_path / "stages" / "labels").rglob("shard-*"))) == 1


@pytest.mark.parametrize(("ago", "shards"), [(0.0, 1), (1.5 * PATIENCE, 0)])
@pytest.mark.parametrize("kind", ["corpus", "labels", "tables", "teacher", "states"])
def test_a_unit_that_takes_long_after_a_stop_request_is_given_up(
    home: Path, built: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ago: float, shards: int
) -> None:
    """Slurm kills a minute after it asked; a unit that ends soon is finished."""
    settings, texts = make(home, tmp_path), text_stages.corpus(make(home), built)[0]
    draft, stage = built.draft, Stage(tmp_path, kind, {"k": 4, "shard_size": 5, "target": "tiny", "dtype": "float32"})
    assert draft is not None
    size = built.target.vocab_size
    pairs = [(text, simulate(draft, text, settings.labels, built.stop_ids, size)) for text in texts]
    rounds = [(text, found) for text, found in pairs if found is not None]
    work: dict[str, Callable[[], object]] = {
        "corpus": lambda: text_stages.corpus(settings, built),
        "labels": lambda: text_stages._simulate(settings, built, stage, texts),
        "tables": lambda: build_table(built, texts, 9, GAMMA, None, stage),
        "teacher": lambda: teacher_labels(stage, built.target, texts),
        "states": lambda: store_states(tmp_path, draft, rounds),
    }
    monkeypatch.setattr(stopping, "_requested", [(signal.SIGTERM, time.monotonic() - ago)])
    with pytest.raises(Stopped):
        work[kind]()
    assert len(list(tmp_path.rglob("shard-*"))) == shards
    monkeypatch.setattr(stopping, "_requested", [])
    work[kind]()
    assert len(list(tmp_path.rglob("manifest.json"))) == 1


def test_killed_labels_go_on(home: Path, built: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = CorpusSettings(["gsm8k/train"], max_new_tokens=9, shard_size=2, parts=make(home).corpus.parts)
    settings = make(home, tmp_path, corpus=corpus)
    seen: list[Any] = []
    real = text_stages.simulate

    def simulate(draft: Any, text: Any, *rest: Any) -> Any:
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(text.id)
        return real(draft, text, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(text_stages, "simulate", simulate)
        text_stages.labels(settings, built, "preverifier", "key")
    pairs, _ = text_stages.labels(settings, built, "preverifier", "key")
    whole, _ = text_stages.labels(replace(settings, paths=make(home).paths), built, "preverifier", "key")
    assert [text for text, _ in pairs] == [text for text, _ in whole]
    for (_, one), (_, other) in zip(pairs, whole, strict=True):
        assert all(torch.equal(value, getattr(other, name)) for name, value in vars(one).items() if value is not None)


def test_labelling_shows_its_figures(
    home: Path, built: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pacer.work.progress.LINE_SECONDS", 0.0)
    text_stages.labels(make(home, tmp_path), built, "preverifier", "key")
    lines = capsys.readouterr().err.splitlines()
    corpus, labels = ([line for line in lines if line.startswith(f"{what}: ")][-1] for what in ("corpus", "labels"))
    assert f" {PROMPTS}/{PROMPTS} text [" in corpus and "<00:00" in corpus and corpus.endswith(" tok/s]")
    assert "<00:00" in labels and labels.endswith(" tokens accepted a round]")
