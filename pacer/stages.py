"""What a verb builds when it lacks it: corpus → labels → trained part, each in a folder named by what made it."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pacer.artifacts import Stage, stable_hash, write_atomic
from pacer.assemble import (
    Models,
    attach_preverifier,
    checkpoint_folder,
    checkpoint_hash,
    load_draft_model,
    load_target,
    needed_ids,
)
from pacer.data.corpus import Text, read_corpus, read_files, split_texts, wanted_prompts
from pacer.data.labels import Rounds, from_line, simulate, to_line
from pacer.data.prompts import Prompt, encode
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request
from pacer.errors import ConfigError
from pacer.exit_methods import EXIT_DRAFTERS
from pacer.exit_stage import attach_exits
from pacer.files import sha256
from pacer.progress import progress
from pacer.resources import resource
from pacer.settings import MethodSettings, Settings, TrainerSettings
from pacer.stopping import check_stop
from pacer.teacher_stage import teacher_labels, teacher_stage

log = logging.getLogger(__name__)


def _stage(settings: Settings, kind: str, key: dict[str, Any]) -> Stage:
    return Stage(Path(settings.paths.runs) / "stages", kind, key)


def _cache(settings: Settings) -> Path:
    return Path(settings.paths.cache).expanduser()


def corpus(settings: Settings, models: Models) -> tuple[list[Text], str]:
    """The target's own texts, and a hash of where they come from: ready files, and what is generated beside them."""
    chosen = settings.corpus
    texts, files = read_files(chosen, models.stop_ids)
    limit = None if chosen.limit is None else {"per task": chosen.limit}
    keys = [stable_hash([*map(sha256, files), limit])] if files else []
    wanted = wanted_prompts(chosen, settings.paths.data_dir, texts)
    for name, prompts in wanted.items():
        if prompts:
            stage = continued(settings, models, name, prompts)
            shards = sorted(stage.folder.glob("shard-*.jsonl"))
            texts += [text for shard in shards for text in read_corpus(shard, models.stop_ids)]
            keys.append(stage.hash)
    return texts, keys[0] if len(keys) == 1 else stable_hash(keys)


def continued(settings: Settings, models: Models, name: str, prompts: Sequence[Prompt]) -> Stage:
    """The finished stage with the target's continuations of a prompt set: a set that is added leaves the others be."""
    key = {
        "target": asdict(settings.model.target), "dtype": settings.model.dtype, "set": name,
        "prompts": stable_hash([[prompt.id, prompt.text] for prompt in prompts]),
        "max_new_tokens": settings.corpus.max_new_tokens, "shard_size": settings.corpus.shard_size,
    }  # fmt: skip
    stage = _stage(settings, "corpus", key)
    if not stage.complete:
        with stage.lock():
            if not stage.complete:
                _generate_corpus(settings, models, stage, prompts)
    return stage


def _generate_corpus(settings: Settings, models: Models, stage: Stage, prompts: Sequence[Prompt]) -> None:
    log.info("continuing %d prompts of %s by the target in %s", len(prompts), stage.key["set"], stage.folder)
    size = settings.corpus.shard_size
    shards = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    missing = stage.missing(len(shards))
    with progress(len(prompts), "corpus", "text", initial=len(prompts) - sum(len(shards[i]) for i in missing)) as bar:
        for index in missing:
            lines = []
            for start in range(0, len(shards[index]), settings.corpus.batch_size):
                batch = shards[index][start : start + settings.corpus.batch_size]
                lines += _continuations(settings, models, batch)
                bar.update(len(batch))
            write_atomic(stage.shard(index), "".join(lines))
            check_stop()
    stage.finish({"texts": len(prompts)})


def _continuations(settings: Settings, models: Models, batch: Sequence[Prompt]) -> list[str]:
    """JSON lines of greedy continuations of a batch."""
    decoder = Decoder(models.target)
    budget, stops = settings.corpus.max_new_tokens, frozenset(models.stop_ids)
    requests = [Request(p.id, encode(p, models.tokenizer), budget, stops) for p in batch]
    return [
        json.dumps({"id": p.id, "task": p.task, "prompt_ids": list(r.request.prompt_ids), "output_ids": r.ids}) + "\n"
        for p, r in zip(batch, decoder.generate(requests), strict=True)
    ]


def labels(settings: Settings, models: Models, part: str, draft_key: str) -> tuple[list[tuple[Text, Rounds]], str]:
    """Texts of a part of the corpus with their simulated rounds, and the stage's hash."""
    assert models.draft is not None
    texts, corpus_key = corpus(settings, models)
    key = {
        "corpus": corpus_key, "parts": settings.corpus.parts, "part": part, "draft": draft_key,
        "labels": {**asdict(settings.labels), "tail": None},
    }  # fmt: skip
    chosen = sorted(split_texts(texts, settings.corpus.parts).get(part, []), key=lambda t: stable_hash(t.id))
    chosen = chosen[: settings.labels.texts]
    if not chosen:
        raise ConfigError(f"no texts in part {part} of the corpus", value=len(texts), remedy="use more prompts")
    stage = _stage(settings, "labels", key)
    if not stage.complete:
        with stage.lock():
            if not stage.complete:
                _simulate(settings, models, stage, chosen)
    by_id = {text.id: text for text in chosen}
    pairs: list[tuple[Text, Rounds]] = []
    for file in sorted(stage.folder.glob("shard-*.jsonl")):
        for line in file.read_text().splitlines():
            name, rounds = from_line(line)
            if bool(rounds.labels(settings.preverifier.label)[1].any()):
                pairs.append((by_id[name], rounds))
    if not pairs:
        remedy = "use more prompts, or longer outputs (corpus.max_new_tokens)"
        raise ConfigError(f"no text in part {part} of the corpus yields a round", value=len(chosen), remedy=remedy)
    return pairs, stage.hash


def _simulate(settings: Settings, models: Models, stage: Stage, texts: Sequence[Text]) -> None:
    assert models.draft is not None
    log.info("simulating rounds on %d texts in %s", len(texts), stage.folder)
    size = settings.corpus.shard_size
    shards = [texts[i : i + size] for i in range(0, len(texts), size)]
    missing = stage.missing(len(shards))
    drafted = accepted = 0
    with progress(len(texts), "labels", "text", initial=len(texts) - sum(len(shards[i]) for i in missing)) as bar:
        for index in missing:
            lines = []
            for text in shards[index]:
                rounds = simulate(
                    models.draft, text, settings.labels, models.stop_ids, models.target.vocab_size, models.judge
                )  # fmt: skip
                bar.update()
                if rounds is not None:
                    lines.append(to_line(text.id, rounds) + "\n")
                    drafted, accepted = drafted + len(rounds.starts), accepted + int(rounds.accepted.sum())
                    bar.set_postfix({"accepted/round": f"{accepted / drafted:.2f}"}, refresh=False)
            write_atomic(stage.shard(index), "".join(lines))
            check_stop()
    stage.finish({"texts": len(texts)})


def command_line() -> str:
    """The command of this process, for cards, tables and plots."""
    program = Path(sys.argv[0])
    name = f"scripts/{program.name}" if program.parent.name == "scripts" else f"-m pacer.{program.stem}"
    return shlex.join(["python", *name.split(), *sys.argv[1:]])


def trainer_of(settings: Settings, part: str) -> TrainerSettings:
    """How a part is trained: by the settings if they are that part's, else by conf/trainer within their limits."""
    given = settings.trainer
    if given.part == part:
        return given
    file = OmegaConf.load(resource("conf") / "trainer" / f"{part}.yaml")
    found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainerSettings), file))
    assert isinstance(found, TrainerSettings)
    return replace(
        found, max_steps=given.max_steps, max_minutes=given.max_minutes, precision=given.precision, seed=given.seed
    )  # fmt: skip


def draft_checkpoint(settings: Settings) -> Path:
    """The draft's checkpoint folder: the one that is named, else one trained by these settings."""
    if settings.model.draft.source is not None:
        return checkpoint_folder(settings.model.draft.source)
    from pacer.training.draft_run import train_draft  # Lightning takes seconds to import

    models = load_target(settings.model, _cache(settings))  # in the dtype that is to decode: it writes the corpus
    texts, corpus_key = corpus(settings, models)
    trainer = trainer_of(settings, "draft")
    made_of = {name: getattr(settings.model.draft, name) for name in ("layers", "head_size", "copying")}
    labelled = teacher_stage(settings, trainer, corpus_key)
    start = {"start_from": checkpoint_hash(trainer.start_from) if trainer.start_from else None, "teacher_top_k": None}
    key = {
        "corpus": corpus_key, "parts": settings.corpus.parts, "draft": made_of,
        "target": asdict(settings.model.target), "trainer": {**asdict(trainer), **start},
        "teacher": labelled.hash if labelled else None,
    }  # fmt: skip
    stage = _stage(settings, "draft", key)
    if not stage.complete:
        with stage.lock():
            if not stage.complete:
                parts = split_texts(texts, settings.corpus.parts)
                teacher = teacher_labels(labelled, models.target, parts.get("draft", [])) if labelled else None
                log.info("training a draft of layers %s in %s", settings.model.draft.layers, stage.folder)
                masters = load_target(settings.model, _cache(settings), dtype="float32")
                train_draft(
                    masters.target, parts.get("draft", []), parts.get("tuning", []), settings.model.draft, trainer,
                    settings.logger, stage.folder, always=needed_ids(models), command=command_line(),
                    teacher=teacher,
                )  # fmt: skip
                finish_training(stage)
    return stage.folder / "draft"


def preverifier_checkpoint(settings: Settings, models: Models, draft_key: str) -> Path:
    """The pre-verifier's checkpoint folder: the one that is named, else one trained by these settings."""
    if settings.preverifier.source is not None:
        return checkpoint_folder(settings.preverifier.source)
    from pacer.training.preverifier_run import train_preverifier  # Lightning takes seconds to import

    pairs, labels_key = labels(settings, models, "preverifier", draft_key)
    held_out, held_out_key = labels(settings, models, "tuning", draft_key)
    settings = replace(settings, trainer=trainer_of(settings, "preverifier"))
    key = {
        "labels": [labels_key, held_out_key], "preverifier": asdict(settings.preverifier),
        "trainer": {**asdict(settings.trainer), "cache_states": None}, "costs": asdict(settings.costs),
        "tail": settings.labels.tail,
    }  # fmt: skip
    stage = _stage(settings, "preverifier", key)
    if not stage.complete:
        with stage.lock():
            if not stage.complete:
                log.info("training the pre-verifier on %d texts in %s", len(pairs), stage.folder)
                train_preverifier(models, pairs, held_out, settings, stage.folder, command=command_line())
                finish_training(stage)
    return stage.folder / "preverifier"


def finish_training(stage: Stage) -> None:
    """The resumable state (optimiser moments and all) has served; the rest stays."""
    (stage.folder / "last.ckpt").unlink(missing_ok=True)
    stage.finish()


def build(settings: Settings, methods: Sequence[MethodSettings], *, full_head: bool = False) -> Models:
    """Models for these methods; what is missing is built first, and said.

    Args:
        full_head: also load the draft with the whole vocabulary's head.
    """
    models = load_target(settings.model, _cache(settings))
    attach_exits(settings, models, methods)
    drafters = {method.drafter for method in methods}
    if drafters <= {None, *EXIT_DRAFTERS} and not full_head:
        return models
    folder = draft_checkpoint(settings) if settings.model.draft.kind == "layers" else None
    models.draft = load_draft_model(settings.model, models, _cache(settings), folder)
    if full_head or "model_full" in drafters:
        models.draft_full = models.draft
        if models.draft.head_ids is not None:
            models.draft_full = load_draft_model(settings.model, models, _cache(settings), folder, full_head=True)
    if any((method.controller or {}).get("kind") == "preverifier" for method in methods):
        attach_preverifier(models, preverifier_checkpoint(settings, models, draft_key(settings, folder)))
    return models


def draft_key(settings: Settings, folder: Path | None) -> str:
    """A hash of all that decides what the draft says, and of the target that it is made of or checked against.

    Args:
        folder: the draft's checkpoint, whose weights then stand for ``model.draft.source``.
    """
    draft = asdict(settings.model.draft)
    weights = sha256(folder / "model.safetensors") if folder else None
    return stable_hash({
        "weights": weights, "draft": {**draft, "source": None} if folder else draft,
        "target": asdict(settings.model.target), "dtype": settings.model.dtype,
    })  # fmt: skip
