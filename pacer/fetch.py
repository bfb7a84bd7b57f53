"""``python -m pacer.fetch``: bring models and check them; nothing else."""

from __future__ import annotations

from pacer.command.app import verb
from pacer.settings import Settings, SourceSettings


@verb
def main(settings: Settings) -> None:
    """Downloads the target (and a draft that is a model of its own) and verifies every file. Decodes nothing."""
    from pacer.models.sources import fetch

    cache = settings.paths.cache_folder
    sources = [settings.model.target]
    if settings.model.draft.kind == "model" and settings.model.draft.source is not None:
        sources.append(SourceSettings(id=settings.model.draft.source))
    for source in sources:
        print(f"{source.id}: verified in {fetch(source, cache, verify=True)}")


if __name__ == "__main__":
    main()
