"""``python -m pacer.train``: train a draft model, a pre-verification layer, exits, or the model to exit early."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from pacer.app import verb
from pacer.arms import method_settings
from pacer.assemble import checkpoint_folder
from pacer.choices import CHOICES
from pacer.errors import ConfigError
from pacer.settings import Settings

log = logging.getLogger(__name__)


@verb
def main(settings: Settings) -> None:
    """Trains what `trainer.part` names: draft, preverifier, exits or layerskip (the model itself, tuned to exit early).

    Builds the corpus and labels it lacks, and says so. Killed and started again, it goes on where it was and ends with
    the same result.
    """
    from pacer.models.exits import RECORD
    from pacer.models.preverifier import tuned_values

    folder = _trained(settings)
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
    from pacer.exit_stage import exits_checkpoint, layerskip_checkpoint
    from pacer.stages import build, draft_checkpoint

    part = settings.trainer.part
    trained = {
        "preverifier": ("preverifier.source", settings.preverifier.source),
        "exits": ("model.exits.source", settings.model.exits.source),
    }
    key, named = trained.get(part, ("", None))
    if named is not None:
        raise ConfigError(f"{key} names a trained one", value=named, remedy="drop it")
    if part == "draft":
        return draft_checkpoint(settings)
    if part == "preverifier":
        return build(settings, [method_settings("pacer")]).preverifier_folder
    if part == "exits":
        return exits_checkpoint(settings)
    if part == "layerskip":
        return layerskip_checkpoint(settings)
    raise ConfigError("unknown trainer.part", value=part, allowed=CHOICES["trainer.part"])


if __name__ == "__main__":
    main()
