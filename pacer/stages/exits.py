"""The stages that make exits: heads of the frozen target, or a model that was tuned to exit early."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pacer.artifacts import Stage
from pacer.assemble import Models, checkpoint_folder, load_target, needed_ids
from pacer.choices import HEADS
from pacer.data.corpus import Text, split_texts
from pacer.files import stable_hash
from pacer.methods.exits import wanted_exits, wanted_judges
from pacer.methods.rules import Judge
from pacer.models.checkpoint import digest
from pacer.models.exit_stack import ExitStack
from pacer.models.exits import ExitHead, check_layers, check_wanted, load_exits, reduced_ids, shared_exits
from pacer.models.preverifier import load_preverifier, tuned_values
from pacer.settings import ExitSettings, MethodSettings, Settings
from pacer.stages.preverifier import preverifier_checkpoint
from pacer.stages.texts import corpus, stage_of
from pacer.stages.training import command_line, train_once, trainer_key, trainer_of

log = logging.getLogger(__name__)


def attach_exits(settings: Settings, models: Models, methods: Sequence[MethodSettings]) -> None:
    """The exits that these methods need; heads of another kind than the settings' are trained by the same settings."""
    exits = settings.model.exits
    models.exit_kind, models.exit_layers = exits.kind, exits.layers
    for kind, layers in wanted_exits(methods, exits).items():
        heads = exit_heads(of_kind(settings, kind), models, layers)
        models.exits.update({(kind, layer): head for layer, head in heads.items()})
    attach_judges(settings, models, methods)


def of_kind(settings: Settings, kind: str) -> Settings:
    """The settings for exits of this kind: those of another than their own are in no checkpoint that they name."""
    exits = settings.model.exits
    own = exits if kind == exits.kind else replace(exits, kind=kind, source=None, layers=[], weights=[])
    return replace(settings, model=replace(settings.model, exits=own))


def attach_judges(settings: Settings, models: Models, methods: Sequence[MethodSettings]) -> None:
    """The pre-verifiers on exits' states that these methods need, each trained where it is missing.

    To a pre-verifier an exit is a draft model, and what accepts its tokens another exit or the target.
    """
    wanted = [
        (part, *judge)
        for part in ("preverifier", *HEADS)
        for judge in sorted(wanted_judges(methods, settings.model.exits, part), key=str)
    ]
    for part, kind, layer, by in wanted:
        exits = {at: ExitStack(models.target, models.exits[kind, at]) for at in (layer, by) if at is not None}
        pair = replace(models, draft=exits[layer], judge=None if by is None else exits[by])
        weights = {at: digest([w for w in exit.exit.parameters()] or [exit.norm.weight]) for at, exit in exits.items()}
        # not of the dtype: what rounding changes in an exit's words is no reason to label and train anew
        key = stable_hash([kind, layer, by, weights, asdict(settings.model.target)])
        models.judges[part, kind, layer, by] = judge_on(settings, pair, key, part)


def judge_on(settings: Settings, pair: Models, key: str, part: str) -> Judge:
    """What reads the states of ``pair.draft``, which is no draft model: trained by these settings where it is missing.

    Args:
        key: a hash of what drafts and what accepts. part: "preverifier", or an acceptance head (`pacer.choices.HEADS`).
    """
    assert pair.draft is not None
    own = replace(settings, **{part: replace(getattr(settings, part), source=None)})
    folder = preverifier_checkpoint(own, pair, key, part)
    return load_preverifier(folder, pair.target, pair.draft)[0], tuned_values(folder)


def exit_heads(settings: Settings, models: Models, layers: Sequence[int]) -> dict[int, ExitHead]:
    """Exits of the target after so many layers, ready to decode: those of the checkpoint that is named, the target's
    own norm and head (``shared``), or heads trained by these settings.

    Raises:
        MismatchError: an exit that is not among those named or trained, or a checkpoint of another target.
        ConfigError: layers that the target has not.
    """
    exits = settings.model.exits
    if exits.source is not None:
        return load_exits(checkpoint_folder(exits.source), models.target, layers)
    if exits.kind != "shared":
        return load_exits(exits_checkpoint(settings, models, layers), models.target, layers)
    check_layers(models.target, layers)
    ids = None
    if 0 < exits.head_size < models.target.vocab_size:  # the most frequent ids of what a trained head would learn from
        texts = split_texts(corpus(settings, models)[0], settings.corpus.parts).get("draft", [])
        every = (t.prompt_ids + t.output_ids for t in texts)
        ids = reduced_ids(every, exits.head_size, needed_ids(models), models.target.vocab_size)
    return shared_exits(models.target, layers, ids)


def exits_checkpoint(settings: Settings, models: Models | None = None, layers: Sequence[int] = ()) -> Path:
    """The checkpoint folder of exits trained by these settings.

    Args:
        models: with the target, in the dtype that decodes; None: it is loaded.
        layers: exits that are needed; they are trained where ``model.exits.layers`` names none.

    Raises:
        MismatchError: an exit is needed that ``model.exits.layers`` does not name.
    """
    from pacer.training.exits_run import train_exits  # Lightning takes seconds to import

    exits, trainer = chosen_exits(settings.model.exits, layers), trainer_of(settings, "exits")
    models = models or load_target(settings.model, settings.paths.cache_folder)
    check_layers(models.target, exits.layers)

    def train(stage: Stage, texts: Sequence[Text], held_out: Sequence[Text]) -> None:
        log.info("training exits after %s layers in %s", exits.layers, stage.folder)
        train_exits(
            models.target, texts, held_out, exits, trainer, settings.logger, stage.folder, always=needed_ids(models),
            command=command_line(),
        )  # fmt: skip

    return trained_stage(settings, models, "exits", exits_key(settings, layers), train) / "exits"


def exits_key(settings: Settings, layers: Sequence[int]) -> dict[str, Any]:
    """What exits are made of, beside the corpus; arguments and errors as :func:`exits_checkpoint`."""
    exits = chosen_exits(settings.model.exits, layers)
    made_of = {name: getattr(exits, name) for name in ("kind", "layers", "head_size", "weights")}
    made_of["attention_only"] = exits.kind == "adapter" and exits.attention_only
    trainer = trainer_of(settings, "exits")
    return {"exits": made_of, "dtype": settings.model.dtype, "trainer": trainer_key(trainer)}


def chosen_exits(exits: ExitSettings, layers: Sequence[int]) -> ExitSettings:
    """The settings with the exits that will be trained: those they name, else those that are needed."""
    if exits.layers:
        check_wanted(layers, exits.layers, "model.exits.layers")
    return replace(exits, layers=list(exits.layers) or sorted(set(layers)))


def layerskip_checkpoint(settings: Settings) -> Path:
    """The folder of the target as LayerSkip's recipe tunes it; its exits ``model.exits.layers`` are judged."""
    from pacer.training.layerskip import train_layerskip  # Lightning takes seconds to import

    cache = settings.paths.cache_folder
    models = load_target(settings.model, cache)  # in the dtype that decodes: it writes the corpus
    trainer, exits = trainer_of(settings, "layerskip"), settings.model.exits.layers
    check_layers(models.target, exits)

    def train(stage: Stage, texts: Sequence[Text], held_out: Sequence[Text]) -> None:
        log.info("tuning the model by LayerSkip's recipe in %s", stage.folder)
        masters = load_target(settings.model, cache, dtype="float32")
        train_layerskip(
            masters, texts, held_out, exits, settings.layerskip, trainer, settings.logger, stage.folder,
            command=command_line(),
        )  # fmt: skip
        for name in ("last.ckpt", "best.ckpt"):  # as large as the model, which is saved
            (stage.folder / name).unlink(missing_ok=True)

    return trained_stage(settings, models, "layerskip", layerskip_key(settings), train) / "model"


def layerskip_key(settings: Settings) -> dict[str, Any]:
    """What a tuned model is made of, beside the corpus."""
    trainer, exits = trainer_of(settings, "layerskip"), settings.model.exits.layers
    return {"exits": exits, "layerskip": asdict(settings.layerskip), "trainer": trainer_key(trainer)}


def trained_stage(
    settings: Settings,
    models: Models,
    kind: str,
    key: dict[str, Any],
    train: Callable[[Stage, Sequence[Text], Sequence[Text]], None],
) -> Path:
    """The folder of a finished stage: trained on the draft's part of the corpus, judged on the tuning part."""
    texts, corpus_key = corpus(settings, models)
    stage = stage_on(settings, corpus_key, kind, key)
    parts = split_texts(texts, settings.corpus.parts)
    train_once(stage, lambda: train(stage, parts.get("draft", []), parts.get("tuning", [])))
    return stage.folder


def stage_on(settings: Settings, corpus_key: str, kind: str, key: dict[str, Any]) -> Stage:
    """Where a part goes that is made of ``key`` and learns from the corpus."""
    whole = {
        "corpus": corpus_key, "parts": settings.corpus.parts, "target": asdict(settings.model.target), **key,
    }  # fmt: skip
    return stage_of(settings, kind, whole)
