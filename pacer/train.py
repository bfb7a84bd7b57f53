"""``python -m pacer.train``: train a draft model, a pre-verification layer, exits, or the model to exit early."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from pacer.assemble import checkpoint_folder
from pacer.choices import CHOICES, HEADS
from pacer.command.app import verb
from pacer.errors import ConfigError
from pacer.methods.arms import method_settings
from pacer.settings import MethodSettings, Settings

log = logging.getLogger(__name__)


@verb
def main(settings: Settings) -> None:
    """Trains what `trainer.part` names: draft, preverifier, exits, feature_draft, layerskip (the model itself, tuned to
    exit early), or an acceptance head: probe, specdecpp.

    Builds the corpus and labels it lacks, and says so. Killed and started again, it goes on where it was and ends with
    the same result.
    """
    from pacer.models.exits import RECORD
    from pacer.models.preverifier import tuned_values
    from pacer.training.ranks import rank, together

    with together(settings.trainer, [sys.executable, "-m", "pacer.train", *sys.argv[1:]]):
        folder = _trained(settings)
        if rank():
            return
    saved = checkpoint_folder(str(folder))
    record = saved / RECORD
    config = json.loads((record if record.is_file() else saved / "config.json").read_text())
    for name, value in sorted(config["validation"].items()):
        print(f"{name:28} {value:.4f}")
    if tuned := tuned_values(saved):
        print("tuned controller            ", tuned)
    print(f"saved in {folder}")


def _trained(settings: Settings) -> Path | None:
    """The folder of the trained part."""
    from pacer.stages.build import build
    from pacer.stages.draft import draft_checkpoint
    from pacer.stages.exits import exits_checkpoint, layerskip_checkpoint
    from pacer.stages.feature import feature_checkpoint

    part = settings.trainer.part
    trained = {
        "preverifier": ("preverifier.source", settings.preverifier.source),
        "exits": ("model.exits.source", settings.model.exits.source),
        "feature_draft": ("model.feature.source", settings.model.feature.source),
    }
    trained |= {name: (f"{name}.source", getattr(settings, name).source) for name in HEADS}
    key, named = trained.get(part, ("", None))
    if named is not None:
        raise ConfigError(f"{key} names a trained one", value=named, remedy="drop it")
    if part == "draft":
        return draft_checkpoint(settings)
    if part == "preverifier":
        return build(settings, [method_settings("pacer")]).preverifier_folder
    if part in HEADS:
        return build(settings, [MethodSettings(part, controller={"kind": part})]).head_folders[part]
    if part == "exits":
        return exits_checkpoint(settings)
    if part == "feature_draft":
        return feature_checkpoint(settings)
    if part == "layerskip":
        return layerskip_checkpoint(settings)
    raise ConfigError("unknown trainer.part", value=part, allowed=CHOICES["trainer.part"])


if __name__ == "__main__":
    main()
