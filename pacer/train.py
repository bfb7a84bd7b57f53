"""``python -m pacer.train``: train a draft model or a pre-verification layer."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from pacer.app import verb
from pacer.arms import method_settings
from pacer.assemble import checkpoint_folder
from pacer.errors import ConfigError
from pacer.settings import Settings

log = logging.getLogger(__name__)


@verb
def main(settings: Settings) -> None:
    """Trains what `trainer.part` names (draft or preverifier). Builds the corpus and labels it lacks, and says so.

    Killed and started again, it goes on where it was and ends with the same result.
    """
    from pacer.models.preverifier import tuned_values
    from pacer.stages import build, draft_checkpoint

    if settings.trainer.part == "draft":
        folder: Path | None = draft_checkpoint(settings)
    elif settings.trainer.part == "preverifier":
        if settings.preverifier.source is not None:
            named = settings.preverifier.source
            raise ConfigError("preverifier.source names a trained one", value=named, remedy="drop it")
        folder = build(settings, [method_settings("pacer")]).preverifier_folder
    else:
        raise ConfigError("unknown trainer.part", value=settings.trainer.part, allowed=("draft", "preverifier"))
    saved = checkpoint_folder(str(folder))
    config = json.loads((saved / "config.json").read_text())
    for name, value in sorted(config["validation"].items()):
        print(f"{name:28} {value:.4f}")
    if tuned := tuned_values(saved):
        print("tuned controller            ", tuned)
    print(f"saved in {folder}")


if __name__ == "__main__":
    main()
