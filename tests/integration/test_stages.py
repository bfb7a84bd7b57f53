"""From prompts to a decoder through every stage, built once, resumed where it was killed, never mixing texts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pacer import artifacts, stages
from pacer.arms import method_settings
from pacer.assemble import Models, load_target, make_decoder
from pacer.data.corpus import read_corpus
from pacer.data.splits import part_of
from pacer.decoding.request import Request
from pacer.errors import ConfigError, MismatchError
from pacer.models.checkpoint import load_checkpoint
from pacer.settings import (
    CorpusSettings,
    DraftSettings,
    LabelSettings,
    LoggerSettings,
    ModelSettings,
    PathSettings,
    PreverifierSettings,
    SamplingSettings,
    Settings,
    SourceSettings,
    TrainerSettings,
)
from pacer.stopping import Stopped
from pacer.training import draft_run
from tests.folders import tiny_folder

PROMPTS = 18
ARMS = ("ar", "sd gamma=3", "sd_full gamma=2", "pacer", "pacer b=1 t0=0.3")
METHODS = [method_settings(arm) for arm in ARMS]
GAMMA = 4


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target and prompts."""
    home = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target")
    (home / "data" / "gsm8k").mkdir(parents=True)
    rows = [{"question": f"How many? {i} + {3 * i}", "answer": f"#### {4 * i}"} for i in range(PROMPTS)]
    (home / "data" / "gsm8k" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def make(home: Path, runs: Path | None = None, **changes: Any) -> Settings:
    """Settings for one training step of each part; ``changes`` replace whole sections."""
    draft = DraftSettings(kind="layers", source=None, layers=[0, 1], head_size=150)
    parts = {"draft": 0.4, "preverifier": 0.4, "tuning": 0.2}
    found = Settings(
        model=ModelSettings("tiny", SourceSettings(str(home / "target")), draft, dtype="float32", device="cpu"),
        preverifier=PreverifierSettings(gamma_max=GAMMA, width=16),
        corpus=CorpusSettings(["gsm8k/train"], max_new_tokens=9, batch_size=4, shard_size=5, parts=parts),
        labels=LabelSettings(gamma=GAMMA, starts_per_text=3),
        trainer=TrainerSettings(max_steps=1, precision="fp32", patience=0),
        logger=LoggerSettings(csv=False),
        paths=PathSettings(str(runs or home / "runs"), str(home / "cache"), str(home / "data")),
        name="test",
    )
    return replace(found, **changes)


def with_draft(settings: Settings, **changes: Any) -> Settings:
    return replace(settings, model=replace(settings.model, draft=replace(settings.model.draft, **changes)))


@pytest.fixture(scope="module")
def built(home: Path) -> Models:
    return stages.build(make(home), METHODS)


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    """All files with their times of change and sizes."""
    return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*") if p.is_file()}


def folders(home: Path) -> dict[str, list[Path]]:
    """The finished stages by kind."""
    kinds = (home / "runs" / "stages").iterdir()
    return {kind.name: sorted(record.parent for record in kind.glob("*/manifest.json")) for kind in kinds}


def test_from_prompts_to_exact_decoding(home: Path, built: Models) -> None:
    """One training step of each part, and every method still writes the target's own text."""
    assert built.draft is not None and built.draft.head_ids is not None and len(built.draft.head_ids) == 150
    assert built.draft_full is not None and built.draft_full.head_ids is None
    assert built.tuned is not None and set(built.tuned) == {"b", "t0", "rho", "rule"}
    requests = [Request(f"r{i}", [1, 20 + i, 30, 7 * i + 3], 24, frozenset(built.stop_ids)) for i in range(4)]
    found: dict[str, list[list[int]]] = {}
    drafted: dict[str, int] = {}
    for arm, method in zip(ARMS, METHODS, strict=True):
        results = make_decoder(method, built, SamplingSettings()).generate(requests)
        found[arm] = [result.ids for result in results]
        lines: list[dict[str, Any]] = [line for result in results for line in result.rounds]
        drafted[arm] = max(len(line["drafted"]) for line in lines)
    assert all(ids == found["ar"] for ids in found.values())
    assert [drafted[arm] for arm in ARMS[:3]] == [0, 3, 2]
    assert all(0 < drafted[arm] <= GAMMA for arm in ARMS[3:])  # longer drafts were never trained on


def test_each_stage_has_a_folder_and_a_record(home: Path, built: Models) -> None:
    found = folders(home)
    assert {kind: len(members) for kind, members in found.items()} == {
        "corpus": 1, "labels": 2, "draft": 1, "preverifier": 1
    }  # fmt: skip
    for folder in (folder for members in found.values() for folder in members):
        manifest = json.loads((folder / "manifest.json").read_text())
        assert folder.name == manifest["hash"][:16] and manifest["files"]
        assert not list(folder.rglob(".part-*")) and not list(folder.rglob("*.part"))
    assert built.preverifier_folder == found["preverifier"][0] / "preverifier"


def test_a_draft_on_the_way_is_trained_as_a_draft(home: Path, built: Models) -> None:
    """With trainer=preverifier the draft follows conf/trainer/draft.yaml, within the run's limits."""
    _, config = load_checkpoint(folders(home)["draft"][0] / "draft", "draft_layers")
    assert config["trainer"]["part"] == "draft" and config["trainer"]["monitor"] == "val/agreement"
    assert config["trainer"]["max_steps"] == config["steps"] == 1 and config["trainer"]["precision"] == "fp32"
    given = make(home, trainer=TrainerSettings(part="draft", epochs=2))
    assert stages.trainer_of(given, "draft") is given.trainer
    assert stages.trainer_of(given, "preverifier").monitor == "val/sim_speedup"


def test_the_second_time_nothing_is_written(home: Path, built: Models, caplog: pytest.LogCaptureFixture) -> None:
    before = files(home / "runs")
    with caplog.at_level(logging.INFO, "pacer"):
        again = stages.build(make(home), METHODS)
    assert files(home / "runs") == before
    assert not caplog.text
    assert again.tuned == built.tuned and again.preverifier is not None and built.preverifier is not None
    for (name, value), (_, other) in zip(
        built.preverifier.named_parameters(), again.preverifier.named_parameters(), strict=True
    ):
        assert torch.equal(value, other), name


def test_no_text_has_two_uses(home: Path, built: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """What made the draft makes no labels, and what settings are tuned on is neither."""
    settings = make(home)
    folder = folders(home)["corpus"][0]
    everything = {t.id for shard in folder.glob("shard-*") for t in read_corpus(shard, built.stop_ids)}
    assert len(everything) == PROMPTS
    used: dict[str, set[str]] = {}
    for labelled in folders(home)["labels"]:
        part = json.loads((labelled / "manifest.json").read_text())["key"]["part"]
        used[part] = {json.loads(line)["id"] for f in labelled.glob("shard-*") for line in f.read_text().splitlines()}

    def note(target: object, texts: list[Any], held_out: list[Any], *_: object, **__: object) -> None:
        used["draft"] = {text.id for text in texts}
        used["held out of the draft"] = {text.id for text in held_out}
        raise Stopped

    monkeypatch.setattr(draft_run, "train_draft", note)
    with pytest.raises(Stopped):
        stages.draft_checkpoint(with_draft(settings, head_size=151))
    for part in ("draft", "preverifier", "tuning"):
        assert used[part] and {part_of(name, settings.corpus.parts) for name in used[part]} == {part}
    assert used["held out of the draft"] == used["tuning"]
    assert used["draft"] | used["preverifier"] | used["tuning"] == everything
    assert len(used["draft"]) + len(used["preverifier"]) + len(used["tuning"]) == PROMPTS


def test_other_settings_have_other_folders(home: Path, built: Models) -> None:
    settings = make(home)
    keys: dict[str, str] = {}
    for name, changed in {
        "same": settings,
        "batch size": replace(settings, corpus=replace(settings.corpus, batch_size=3)),
        "tokens": replace(settings, corpus=replace(settings.corpus, max_new_tokens=8)),
        "limit": replace(settings, corpus=replace(settings.corpus, limit=6)),
    }.items():
        texts, keys[name] = stages.corpus(changed, built)
        assert max(len(text.output_ids) for text in texts) == (8 if name == "tokens" else 9)
        assert len(texts) == (6 if name == "limit" else PROMPTS)
    assert keys["same"] == keys["batch size"]  # greedy text in float32 does not depend on it
    assert len(set(keys.values())) == 3
    found = {
        name: stages.labels(changed, built, part, key)[1]
        for name, changed, part, key in (
            ("same", settings, "tuning", "a draft"),
            ("part", settings, "preverifier", "a draft"),
            ("draft", settings, "tuning", "another"),
            ("gamma", replace(settings, labels=replace(settings.labels, gamma=3)), "tuning", "a draft"),
            ("starts", replace(settings, labels=replace(settings.labels, starts="all")), "tuning", "a draft"),
        )
    }
    assert len(set(found.values())) == 5
    before = files(home / "runs")
    whole_head = with_draft(settings, full_head=True)  # the same draft, decoded otherwise
    assert stages.draft_checkpoint(whole_head) == folders(home)["draft"][0] / "draft"
    assert files(home / "runs") == before
    models = stages.build(whole_head, [method_settings("sd")])
    assert models.draft is not None and models.draft.head_ids is None


def killed_after(calls: int, function: Callable[..., Any], seen: list[Any], end: BaseException) -> Callable[..., Any]:
    """The function, ending everything at a later call; notes the last argument of each."""

    def wrapped(*arguments: Any) -> Any:
        if len(seen) == calls:
            raise end
        seen.append(arguments[-1])
        return function(*arguments)

    return wrapped


@pytest.mark.parametrize("calls", [1, 3, 5])
def test_a_killed_corpus_goes_on(
    home: Path, built: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Finished shards are not made again, and the texts are those of a run that was not killed."""
    settings = make(home, tmp_path)
    first: list[Any] = []
    real = stages._continuations
    monkeypatch.setattr(stages, "_continuations", killed_after(calls, real, first, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        stages.corpus(settings, built)
    kept = files(tmp_path)
    finished = {t.id for shard in tmp_path.rglob("shard-*") for t in read_corpus(shard, built.stop_ids)}
    assert len(finished) == 5 * (calls // 2)  # a shard is two batches
    assert not list(tmp_path.rglob("manifest.json"))
    second: list[Any] = []
    monkeypatch.setattr(stages, "_continuations", killed_after(99, real, second, KeyboardInterrupt()))
    texts, _ = stages.corpus(settings, built)
    assert all(files(tmp_path)[path] == state for path, state in kept.items() if path.name.startswith("shard-"))
    redone = {prompt.id for batch in second for prompt in batch}
    assert not redone & finished and redone | finished == {text.id for text in texts}
    monkeypatch.setattr(stages, "_continuations", real)
    assert texts == stages.corpus(make(home), built)[0]


def test_a_stop_request_is_heeded_between_shards(
    home: Path, built: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise Stopped("SIGTERM")

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(artifacts, "check_stop", stop)
        stages.corpus(make(home, tmp_path), built)
    assert len(list(tmp_path.rglob("shard-*"))) == 1
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stages.corpus(make(home, tmp_path), built)
        patch.setattr(artifacts, "check_stop", stop)
        stages.labels(make(home, tmp_path), built, "preverifier", "x")
    assert len(list((tmp_path / "stages" / "labels").rglob("shard-*"))) == 1


def test_killed_labels_go_on(home: Path, built: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = CorpusSettings(["gsm8k/train"], max_new_tokens=9, shard_size=2, parts=make(home).corpus.parts)
    settings = make(home, tmp_path, corpus=corpus)
    seen: list[Any] = []
    real = stages.simulate

    def simulate(draft: Any, text: Any, *rest: Any) -> Any:
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(text.id)
        return real(draft, text, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stages, "simulate", simulate)
        stages.labels(settings, built, "preverifier", "key")
    pairs, _ = stages.labels(settings, built, "preverifier", "key")
    whole, _ = stages.labels(replace(settings, paths=make(home).paths), built, "preverifier", "key")
    assert [text for text, _ in pairs] == [text for text, _ in whole]
    for (_, one), (_, other) in zip(pairs, whole, strict=True):
        assert all(torch.equal(value, getattr(other, name)) for name, value in vars(one).items() if value is not None)


def test_labelling_shows_its_figures(
    home: Path, built: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pacer.progress.LINE_SECONDS", 0.0)
    stages.labels(make(home, tmp_path), built, "preverifier", "key")
    lines = capsys.readouterr().err.splitlines()
    corpus, labels = ([line for line in lines if line.startswith(f"{what}: ")][-1] for what in ("corpus", "labels"))
    assert f" {PROMPTS}/{PROMPTS} text [" in corpus and "<00:00" in corpus and corpus.endswith(" tok/s]")
    assert "<00:00" in labels and labels.endswith(" tokens accepted a round]")


def test_the_corpus_is_written_in_the_dtype_that_decodes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels are true of that text; only the masters that are trained are float32."""
    settings = make(home, tmp_path)
    settings.model.dtype = "bfloat16"
    dtypes: dict[str, torch.dtype] = {}
    real = stages.corpus

    def corpus(chosen: Settings, models: Models) -> Any:
        dtypes["corpus"] = models.target.dtype
        return real(chosen, models)

    def train_draft(target: Any, *_: object, **__: object) -> None:
        dtypes["masters"] = target.dtype
        raise Stopped

    monkeypatch.setattr(stages, "corpus", corpus)
    monkeypatch.setattr(draft_run, "train_draft", train_draft)
    with pytest.raises(Stopped):
        stages.build(settings, METHODS)
    assert dtypes == {"corpus": torch.bfloat16, "masters": torch.float32}


def test_a_given_corpus_is_read(home: Path, built: Models, tmp_path: Path) -> None:
    _, hash = stages.corpus(make(home), built)
    folder = home / "runs" / "stages" / "corpus" / hash[:16]
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(shard.read_text() for shard in sorted(folder.glob("shard-*"))))
    settings = make(home, tmp_path, corpus=CorpusSettings(file=str(file), limit=7))
    texts, key = stages.corpus(settings, built)
    assert len(texts) == 7 and not (tmp_path / "stages").exists()
    file.write_text(file.read_text().replace("gsm8k-train-0", "gsm8k-train-900"))
    assert stages.corpus(settings, built)[1] != key


def test_prompts_from_a_file_of_ones_own(home: Path, built: Models, tmp_path: Path) -> None:
    own = tmp_path / "mine" / "some.jsonl"
    own.parent.mkdir()
    own.write_text('{"prompt": "How"}\n{"prompt": "the fox"}\n')
    for name, task in ((str(own), "prompt"), (f"gsm8k/{home / 'data/gsm8k/train.jsonl'}", "gsm8k")):
        settings = make(home, tmp_path, corpus=CorpusSettings([name], limit=2, max_new_tokens=3))
        texts, _ = stages.corpus(settings, built)
        assert [text.task for text in texts] == [task] * 2


def test_too_few_texts(home: Path, built: Models, tmp_path: Path) -> None:
    parts = {"draft": 1.0, "preverifier": 0.0, "tuning": 0.0}
    settings = make(home, tmp_path, corpus=CorpusSettings(["gsm8k/train"], limit=2, max_new_tokens=3, parts=parts))
    for part in ("preverifier", "tuning"):
        with pytest.raises(ConfigError, match=f"no texts in part {part} of the corpus: 2; use more prompts"):
            stages.labels(settings, built, part, "x")


def test_texts_without_a_round(home: Path, built: Models, tmp_path: Path) -> None:
    """Outputs of one token come from the prefill: there is nothing to draft."""
    corpus = replace(make(home).corpus, max_new_tokens=1)
    for part in ("preverifier", "tuning"):
        with pytest.raises(ConfigError, match=rf"no text in part {part} .* yields a round: \d+; .*max_new_tokens"):
            stages.labels(make(home, tmp_path, corpus=corpus), built, part, "x")


def test_what_a_draft_says_has_a_key(tmp_path: Path) -> None:
    """Everything that changes the draft changes it; how a checkpoint is named does not."""
    target, other = SourceSettings("one"), SourceSettings("one", revision="2")
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")

    def key(folder: Path | None = None, target: SourceSettings = target, whole: str = "float32", **draft: Any) -> str:
        return stages.draft_key(Settings(model=ModelSettings("t", target, DraftSettings(**draft), whole)), folder)

    for where, kinds in ((None, ("model", "skip")), (folder, ("layers",))):
        found = [
            key(where, **{"kind": kind, **change})
            for kind in kinds
            for change in (
                {}, {"quantise": "int4"}, {"dtype": "bfloat16"}, {"full_head": True}, {"target": other},
                {"dtype": "float16"}, {"layers": [0, 2]}, {"whole": "bfloat16"},
            )
        ]  # fmt: skip
        assert len(set(found)) == len(found)
    assert key(folder, kind="layers", source="a") == key(folder, kind="layers", source="b")
    assert key(None, kind="model", source="a") != key(None, kind="model", source="b")
    before = key(folder, kind="layers")
    (folder / "model.safetensors").write_bytes(b"others")
    assert key(folder, kind="layers") != before


def test_a_draft_of_another_target_is_refused(home: Path, built: Models, tmp_path: Path) -> None:
    """V60, by the source that a user names."""
    tiny_folder(tmp_path / "other", seed=5)
    settings = with_draft(make(home), source=str(folders(home)["draft"][0] / "draft"))
    assert stages.build(settings, [method_settings("sd")]).draft is not None
    settings.model.target = SourceSettings(str(tmp_path / "other"))
    with pytest.raises(MismatchError, match="draft draft belongs to another model: fingerprint"):
        stages.build(settings, [method_settings("sd")])


def test_plain_decoding_builds_nothing(home: Path, tmp_path: Path) -> None:
    models = stages.build(make(home, tmp_path), [method_settings("ar")])
    assert models.draft is None and not list(tmp_path.iterdir())
    again = load_target(make(home).model, home / "cache")
    assert again.stop_ids == models.stop_ids == (2,)


def test_a_ready_corpus_is_extended(home: Path, built: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file has is not generated again, and a set that is added later leaves the finished ones alone."""
    whole, made_as = stages.corpus(make(home), built)
    file, own = tmp_path / "corpus.jsonl", tmp_path / "own.jsonl"
    stages_here = home / "runs" / "stages" / "corpus"  # other tests have made others
    shards = sorted(stages_here.glob(f"{made_as[:16]}/shard-*"))
    lines = [line for shard in shards for line in shard.read_text().splitlines(keepends=True)]
    file.write_text("".join(lines[:7]))
    own.write_text('{"prompt": "How"}\n{"prompt": "the fox"}\n')
    made: list[Any] = []
    monkeypatch.setattr(stages, "_continuations", killed_after(99, stages._continuations, made, KeyboardInterrupt()))
    corpus = replace(make(home).corpus, file=str(file), extend=["gsm8k/train"])
    texts, key = stages.corpus(make(home, tmp_path, corpus=corpus), built)
    assert [text.id for text in texts[:7]] == [json.loads(line)["id"] for line in lines[:7]]
    assert len(texts) == PROMPTS and {text.id for text in texts} == {text.id for text in whole}
    assert {prompt.id for batch in made for prompt in batch} == {text.id for text in texts[7:]}
    made.clear()
    corpus.extend.append(str(own))
    more, other = stages.corpus(make(home, tmp_path, corpus=corpus), built)
    assert more[:PROMPTS] == texts and [text.task for text in more[PROMPTS:]] == ["prompt"] * 2 and other != key
    assert {prompt.id for batch in made for prompt in batch} == {"own-0", "own-1"}


def test_a_limit_cuts_ready_texts_before_they_count_as_ready(home: Path, built: Models, tmp_path: Path) -> None:
    whole, _ = stages.corpus(make(home), built)
    rows = {text.id: text for text in whole}
    file = tmp_path / "corpus.jsonl"
    names = [f"gsm8k-train-{i}" for i in (6, 5, 4, 2, 1, 0)]
    file.write_text("".join(json.dumps(vars(rows[name])) + "\n" for name in names))
    corpus = replace(make(home).corpus, file=str(file), extend=["gsm8k/train"], limit=3)
    texts, _ = stages.corpus(make(home, tmp_path, corpus=corpus), built)
    assert [text.id for text in texts[:3]] == names[:3]
    assert sorted(text.id for text in texts[3:]) == sorted(names[3:])  # the set's first three rows are made anew
