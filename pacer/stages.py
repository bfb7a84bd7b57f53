"""What a verb builds when it lacks it: corpus → labels → trained part, each in a folder named by what made it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pacer.artifacts import Stage, stable_hash
from pacer.assemble import (
    Models,
    attach_head,
    attach_preverifier,
    checkpoint_folder,
    checkpoint_hash,
    load_draft_model,
    load_target,
    needed_ids,
)
from pacer.choices import DRAFTERS, HEADS
from pacer.data.corpus import Text, read_corpus, read_files, split_texts, wanted_prompts
from pacer.data.labels import Rounds, from_line, simulate, to_line
from pacer.data.prompts import Prompt, encode
from pacer.data.sampled import sampled_rounds
from pacer.decoding.drafters.base import drafter_class
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request
from pacer.errors import ConfigError
from pacer.exit_methods import EXIT_DRAFTERS
from pacer.exit_stage import attach_exits
from pacer.feature_methods import FEATURE_DRAFTER
from pacer.feature_stage import attach_feature
from pacer.files import sha256
from pacer.progress import progress
from pacer.provenance import command_text
from pacer.resources import resource
from pacer.rules import needed_by
from pacer.settings import MethodSettings, Settings, TrainerSettings
from pacer.shards import pieces, shard_of
from pacer.stopping import PATIENCE, check_stop
from pacer.teacher_stage import teacher_labels, teacher_stage
from pacer.train_stage import train_once, trainer_key

log = logging.getLogger(__name__)


def _stage(settings: Settings, kind: str, key: dict[str, Any]) -> Stage:
    return Stage(Path(settings.paths.runs) / "stages", kind, key)


def corpus(settings: Settings, models: Models) -> tuple[list[Text], str]:
    """The target's own texts, and a hash of where they come from: ready files, and what is generated beside them."""
    texts, wanted, key = corpus_stages(settings, models.stop_ids)
    for stage, prompts in wanted:
        _continue(settings, models, stage, prompts)
        shards = sorted(stage.folder.glob("shard-*.jsonl"))
        texts += [text for shard in shards for text in read_corpus(shard, models.stop_ids)]
    return texts, key


def corpus_stages(
    settings: Settings, stop_ids: Sequence[int]
) -> tuple[list[Text], list[tuple[Stage, list[Prompt]]], str]:
    """The ready texts, the stages beside them with what each continues, and the hash of where all come from."""
    chosen = settings.corpus
    texts, files = read_files(chosen, stop_ids)
    limit = None if chosen.limit is None else {"per task": chosen.limit}
    keys = [stable_hash([*map(sha256, files), limit])] if files else []
    wanted = wanted_prompts(chosen, settings.paths.data_dir, texts)
    found = [(_continued_stage(settings, name, prompts), prompts) for name, prompts in wanted.items() if prompts]
    keys += [stage.hash for stage, _ in found]
    return texts, found, keys[0] if len(keys) == 1 else stable_hash(keys)


def continued(settings: Settings, models: Models, name: str, prompts: Sequence[Prompt]) -> Stage:
    """The finished stage with the target's continuations of a prompt set: a set that is added leaves the others be."""
    return _continue(settings, models, _continued_stage(settings, name, prompts), prompts)


def _continued_stage(settings: Settings, name: str, prompts: Sequence[Prompt]) -> Stage:
    key = {
        "target": asdict(settings.model.target), "dtype": settings.model.dtype, "set": name,
        "prompts": stable_hash([[prompt.id, prompt.text] for prompt in prompts]),
        "max_new_tokens": settings.corpus.max_new_tokens, "shard_size": settings.corpus.shard_size,
    }  # fmt: skip
    return _stage(settings, "corpus", key)


def _continue(settings: Settings, models: Models, stage: Stage, prompts: Sequence[Prompt]) -> Stage:
    if not stage.complete:
        _generate_corpus(settings, models, stage, prompts)
    return stage


def _generate_corpus(settings: Settings, models: Models, stage: Stage, prompts: Sequence[Prompt]) -> None:
    log.info("continuing %d prompts of %s by the target in %s", len(prompts), stage.key["set"], stage.folder)
    shards, own = pieces(prompts, settings.corpus.shard_size, shard_of(settings.shard), lambda prompt: prompt.id)
    made = len(prompts) - sum(len(shards[i]) for i in stage.missing(len(shards)))
    tokens = [0]
    with progress(len(prompts), "corpus", "text", initial=made) as bar:

        def make(index: int) -> str:
            lines: list[dict[str, Any]] = []
            for start in range(0, len(shards[index]), settings.corpus.batch_size):
                batch = shards[index][start : start + settings.corpus.batch_size]
                lines += _continuations(settings, models, batch)
                tokens[0] += sum(len(line["output_ids"]) for line in lines[-len(batch) :])
                bar.set_postfix_str(f"{tokens[0] / max(bar.format_dict['elapsed'], 1e-9):.1f} tok/s", refresh=False)
                bar.update(len(batch))
            return "".join(json.dumps(line) + "\n" for line in lines)

        stage.fill(len(shards), make, first=own, extra={"texts": len(prompts)})


def _continuations(settings: Settings, models: Models, batch: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Greedy continuations of a batch."""
    decoder = Decoder(models.target)
    budget, stops = settings.corpus.max_new_tokens, frozenset(models.stop_ids)
    requests = [Request(p.id, encode(p, models.tokenizer), budget, stops) for p in batch]
    return [
        {"id": p.id, "task": p.task, "prompt_ids": list(r.request.prompt_ids), "output_ids": r.ids}
        for p, r in zip(batch, decoder.generate(requests, lambda row, line: check_stop(PATIENCE)), strict=True)
    ]


def labels(settings: Settings, models: Models, part: str, draft_key: str) -> tuple[list[tuple[Text, Rounds]], str]:
    """Texts of a part of the corpus with their simulated rounds, and the stage's hash."""
    assert models.draft is not None
    texts, corpus_key = corpus(settings, models)
    chosen = sorted(split_texts(texts, settings.corpus.parts).get(part, []), key=lambda t: stable_hash(t.id))
    chosen = chosen[: settings.labels.texts]
    if not chosen:
        raise ConfigError(f"no texts in part {part} of the corpus", value=len(texts), remedy="use more prompts")
    stage = labels_stage(settings, corpus_key, part, draft_key)
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


def labels_stage(settings: Settings, corpus_key: str, part: str, draft_key: str) -> Stage:
    """Where the simulated rounds of a part of the corpus go."""
    key = {
        "corpus": corpus_key, "parts": settings.corpus.parts, "part": part, "draft": draft_key,
        "labels": {**asdict(settings.labels), "tail": None},
    }  # fmt: skip
    return _stage(settings, "labels", key)


def _simulate(settings: Settings, models: Models, stage: Stage, texts: Sequence[Text]) -> None:
    assert models.draft is not None
    log.info("simulating rounds on %d texts in %s", len(texts), stage.folder)
    shards, own = pieces(texts, settings.corpus.shard_size, shard_of(settings.shard), lambda text: text.id)
    made = len(texts) - sum(len(shards[i]) for i in stage.missing(len(shards)))
    total = [0, 0]  # rounds, accepted tokens
    with progress(len(texts), "labels", "text", initial=made) as bar:

        def make(index: int) -> str:
            lines = []
            for text in shards[index]:
                rounds = _rounds(settings, models, text)
                if rounds is not None:
                    lines.append(to_line(text.id, rounds) + "\n")
                    total[:] = total[0] + len(rounds.starts), total[1] + int(rounds.accepted.sum())
                    bar.set_postfix_str(f"{total[1] / total[0]:.2f} tokens accepted a round", refresh=False)
                bar.update()
                check_stop(PATIENCE)
            return "".join(lines)

        stage.fill(len(shards), make, first=own, extra={"texts": len(texts)})


def _rounds(settings: Settings, models: Models, text: Text) -> Rounds | None:
    """The simulated rounds of a text."""
    assert models.draft is not None
    chosen, stops, size = settings.labels, models.stop_ids, models.target.vocab_size
    if chosen.temperature > 0:
        return sampled_rounds(models.draft, models.judge or models.target, text, chosen, stops, size)
    return simulate(models.draft, text, chosen, stops, size, models.judge)


def command_line() -> str:
    """The command of this process, for cards, tables and plots."""
    return command_text(sys.argv)


def trainer_of(settings: Settings, part: str) -> TrainerSettings:
    """How a part is trained: by the settings if they are that part's, else by conf/trainer within their limits."""
    given = settings.trainer
    if given.part == part:
        return given
    file = OmegaConf.load(resource("conf") / "trainer" / f"{part}.yaml")
    found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainerSettings), file))
    assert isinstance(found, TrainerSettings)
    return replace(
        found, max_steps=given.max_steps, max_minutes=given.max_minutes, precision=given.precision, seed=given.seed,
        devices=given.devices, nodes=given.nodes,
    )  # fmt: skip


def draft_checkpoint(settings: Settings) -> Path:
    """The draft's checkpoint folder: the one that is named, else one trained by these settings."""
    if settings.model.draft.source is not None:
        return checkpoint_folder(settings.model.draft.source)
    from pacer.training.draft_run import train_draft  # Lightning takes seconds to import

    models = load_target(settings.model, settings.paths.cache_folder)  # in the dtype that decodes: it writes the corpus
    texts, corpus_key = corpus(settings, models)
    stage, labelled = draft_stage(settings, corpus_key)
    trainer = trainer_of(settings, "draft")

    def train() -> None:
        parts = split_texts(texts, settings.corpus.parts)
        own, shard = parts.get("draft", []), shard_of(settings.shard)
        teacher = teacher_labels(labelled, models.target, own, shard) if labelled else None
        log.info("training a draft of layers %s in %s", settings.model.draft.layers, stage.folder)
        masters = load_target(settings.model, settings.paths.cache_folder, dtype="float32")
        train_draft(
            masters.target, own, parts.get("tuning", []), settings.model.draft, trainer, settings.logger, stage.folder,
            always=needed_ids(models), command=command_line(), teacher=teacher,
        )  # fmt: skip

    train_once(stage, train)
    return stage.folder / "draft"


def draft_stage(settings: Settings, corpus_key: str) -> tuple[Stage, Stage | None]:
    """Where a draft of the target's layers goes, and the target's predictions that it learns from, if any."""
    trainer = trainer_of(settings, "draft")
    made_of = {name: getattr(settings.model.draft, name) for name in ("layers", "head_size", "copying")}
    labelled = teacher_stage(settings, trainer, corpus_key)
    start = {"start_from": checkpoint_hash(trainer.start_from) if trainer.start_from else None, "teacher_top_k": None}
    key = {
        "corpus": corpus_key, "parts": settings.corpus.parts, "draft": made_of,
        "target": asdict(settings.model.target), "trainer": {**trainer_key(trainer), **start},
        "teacher": labelled.hash if labelled else None,
    }  # fmt: skip
    return _stage(settings, "draft", key), labelled


def preverifier_checkpoint(settings: Settings, models: Models, draft_key: str, part: str = "preverifier") -> Path:
    """The pre-verifier's checkpoint folder: the one that is named, else one trained by these settings.

    Args:
        part: or the section of the settings with an acceptance head (`pacer.choices.HEADS`).
    """
    settings = replace(settings, preverifier=getattr(settings, part))
    if settings.preverifier.source is not None:
        return checkpoint_folder(settings.preverifier.source)
    from pacer.training.preverifier_run import train_preverifier  # Lightning takes seconds to import

    pairs, labels_key = labels(settings, models, "preverifier", draft_key)
    held_out, held_out_key = labels(settings, models, "tuning", draft_key)
    settings = replace(settings, trainer=trainer_of(settings, part))
    stage = preverifier_stage(settings, [labels_key, held_out_key], part)

    def train() -> None:
        what = f"the head {part}" if part in HEADS else "the pre-verifier"
        log.info("training %s on %d texts in %s", what, len(pairs), stage.folder)
        train_preverifier(models, pairs, held_out, settings, stage.folder, command=command_line())

    train_once(stage, train)
    return stage.folder / "preverifier"


def preverifier_stage(settings: Settings, labels_keys: Sequence[str], part: str) -> Stage:
    """Where a pre-verifier or an acceptance head goes; the settings' ``preverifier`` and ``trainer`` are its own.

    Args:
        labels_keys: of what it learns from, and of what it is judged on.
    """
    key = {
        "labels": list(labels_keys), "preverifier": asdict(settings.preverifier),
        "trainer": {**trainer_key(settings.trainer), "cache_states": None}, "costs": asdict(settings.costs),
        "tail": settings.labels.tail,
    }  # fmt: skip
    return _stage(settings, part, key)


def build(settings: Settings, methods: Sequence[MethodSettings], *, full_head: bool = False) -> Models:
    """Models for these methods; what is missing is built first, and said.

    Args:
        full_head: also load the draft with the whole vocabulary's head.
    """
    models = _built(settings, methods, full_head).pack()
    if any("prices" in needed_by(method.controller) for method in methods):
        from pacer.price_stage import attach_prices

        attach_prices(settings, models, methods)
    return models


def _built(settings: Settings, methods: Sequence[MethodSettings], full_head: bool) -> Models:
    models = load_target(settings.model, settings.paths.cache_folder)
    attach_exits(settings, models, methods)
    attach_feature(settings, models, methods)
    drafters = {method.drafter for method in methods if drafts_with_a_model(method)}
    if not drafters and not full_head:
        return models
    folder = draft_checkpoint(settings) if settings.model.draft.kind == "layers" else None
    models.draft = load_draft_model(settings.model, models, settings.paths.cache_folder, folder)
    if full_head or "model_full" in drafters:
        models.draft_full = models.draft
        if models.draft.head_ids is not None:
            cache = settings.paths.cache_folder
            models.draft_full = load_draft_model(settings.model, models, cache, folder, full_head=True)
    if any("preverifier" in needed_by(method.controller) for method in methods if drafts_with_a_model(method)):
        attach_preverifier(models, preverifier_checkpoint(settings, models, draft_key(settings, folder)))
    for name in HEADS:
        if any(name in needed_by(method.controller) for method in methods if drafts_with_a_model(method)):
            key = draft_key(settings, folder)
            attach_head(models, name, preverifier_checkpoint(settings, models, key, name))
    return models


def drafts_with_a_model(method: MethodSettings) -> bool:
    """Whether a method needs the draft model."""
    if method.drafter in (None, FEATURE_DRAFTER, *EXIT_DRAFTERS):
        return False
    return method.drafter in DRAFTERS or "draft" in drafter_class(method.drafter).needs(method.drafting or {})


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
