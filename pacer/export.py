"""``python -m pacer.export``: a trained part as files that others read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pacer.command.app import verb
from pacer.errors import ConfigError
from pacer.provenance import command_text
from pacer.settings import Settings, SourceSettings

_Made = tuple[Callable[[Path], object], list[str]]  # what fills a folder, and lines that say what is in it


@verb
def main(settings: Settings) -> None:
    """Writes the part that export.part names into the folder export.to: draft (a whole model for AutoModelForCausalLM),
    feature (the drafter fed by the target), exits (the model's folder where its own head reads them), preverifier.

    Trains what it lacks, as other verbs do. The folder must be new or empty, and appears when it is complete.
    """
    if settings.export.to is None:
        raise ConfigError(
            "export.to is not set", allowed="a folder that is new or empty", remedy="add export.to=FOLDER"
        )
    from pacer.models.export import check_free, write_folder

    to = Path(settings.export.to).expanduser()
    check_free(to)  # before anything is trained
    made = {"draft": _draft, "feature": _feature, "exits": _exits, "preverifier": _preverifier}
    write, card = made[settings.export.part](settings)
    write_folder(to, write, [*card, f"made by: {command_text(sys.argv)}"])
    for line in card:
        print(line)
    print(f"written: {to}")


def _draft(settings: Settings) -> _Made:
    from pacer.assemble import load_draft_model, load_target
    from pacer.models.export import write_draft
    from pacer.stages.draft import draft_checkpoint

    draft = settings.model.draft
    if draft.kind != "layers":
        raise ConfigError("export.part=draft with this model.draft.kind", value=draft.kind, allowed="layers")
    cache, checkpoint = settings.paths.cache_folder, draft_checkpoint(settings)
    models = load_target(settings.model, cache)
    plain = replace(settings.model, draft=replace(draft, quantise=None))
    reduced = load_draft_model(plain, models, cache, checkpoint)
    whole = load_draft_model(plain, models, cache, checkpoint, full_head=True)
    card = [f"draft of {whole.n_layers} layers, {draft.dtype or settings.model.dtype}, from {checkpoint}"]
    if reduced.head_ids is not None:
        missing = whole.vocab_size - len(reduced.head_ids)
        card.append(f"{missing} ids that its head was not trained on are read out by the target's rows")
    if reduced.copying is not None:
        card.append("what it learnt to copy from its context is left out: no transformers model does that")
    return lambda folder: write_draft(folder, whole, models.tokenizer), card


def _feature(settings: Settings) -> _Made:
    from pacer.assemble import load_target
    from pacer.models.export import write_feature
    from pacer.models.feature import load_feature
    from pacer.stages.feature import feature_checkpoint

    models = load_target(settings.model, settings.paths.cache_folder)
    checkpoint = feature_checkpoint(settings, models)
    draft = load_feature(checkpoint, models.target)
    return lambda folder: write_feature(folder, draft), [
        f"drafter fed by the target, {settings.model.dtype}, from {checkpoint}",
        "it is not EAGLE-1 as speculators and vLLM read it: config.json says how a LlamaDecoderLayer runs it",
    ]


def _exits(settings: Settings) -> _Made:
    from pacer.assemble import checkpoint_folder
    from pacer.models.exits import KIND, check_layers
    from pacer.models.export import copy_checkpoint, copy_model
    from pacer.models.sizes import read_config, skeleton
    from pacer.models.sources import fetch
    from pacer.stages.exits import exits_checkpoint

    exits = settings.model.exits
    if exits.kind == "shared" and exits.source is None:
        source = fetch(settings.model.target, settings.paths.cache_folder)
        config = read_config(SourceSettings(id=str(source)), source)
        check_layers(skeleton(config, settings.model.dtype), exits.layers)
        return lambda folder: copy_model(folder, source), [
            f"{settings.model.target.id}, whose own norm and head read its exits, after {exits.layers} layers",
            f"in transformers: model.generate(…, assistant_early_exit={exits.layers[0]})",
        ]
    found = checkpoint_folder(exits.source) if exits.source else exits_checkpoint(settings)
    card = [f"exits from {found}", "load them: model.exits.source=FOLDER"]
    return lambda folder: copy_checkpoint(folder, found, KIND), card


def _preverifier(settings: Settings) -> _Made:
    from pacer.methods.arms import method_settings
    from pacer.models.export import copy_checkpoint
    from pacer.models.preverifier import KIND
    from pacer.stages.build import build

    found = build(settings, [method_settings("pacer")]).preverifier_folder
    assert found is not None
    card = [f"pre-verifier from {found}", "load it: preverifier.source=FOLDER"]
    return lambda folder: copy_checkpoint(folder, found, KIND), card


if __name__ == "__main__":
    main()
