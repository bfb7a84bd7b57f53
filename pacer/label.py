"""``python -m pacer.label``: write what a part learns from."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from pacer.assemble import load_target
from pacer.choices import HEADS
from pacer.command.app import verb
from pacer.methods.arms import method_settings
from pacer.settings import Settings


@verb
def main(settings: Settings) -> None:
    """Writes what `trainer.part` learns from: the corpus, and for a pre-verifier or an acceptance head the draft's
    simulated rounds on it.

    Killed and started again, it goes on where it was; `pacer.train` with the same words finds all of it ready.
    """
    from pacer.data.corpus import split_texts
    from pacer.stages.build import build
    from pacer.stages.draft import draft_checkpoint, draft_key
    from pacer.stages.texts import corpus, labels

    judges = settings.trainer.part in ("preverifier", *HEADS)
    if not judges:
        models = load_target(settings.model, settings.paths.cache_folder)
    else:
        models = build(settings, [method_settings("sd")])
    texts, _ = corpus(settings, models)
    for part, members in split_texts(texts, settings.corpus.parts).items():
        tokens = sum(len(text.output_ids) for text in members)
        tasks = ", ".join(f"{task} {count}" for task, count in sorted(Counter(t.task for t in members).items()))
        print(f"{part:12} {len(members):6} texts {tokens:8} tokens ({tasks})")
    if judges:
        settings = replace(settings, preverifier=getattr(settings, settings.trainer.part))
        folder = draft_checkpoint(settings) if settings.model.draft.kind == "layers" else None
        for part in ("preverifier", "tuning"):
            pairs, _ = labels(settings, models, part, draft_key(settings, folder))
            rounds = sum(len(found.starts) for _, found in pairs)
            accepted = sum(int(found.accepted.sum()) for _, found in pairs)
            print(f"{part:12} {len(pairs):6} texts {rounds:8} rounds, {accepted / rounds:.2f} tokens accepted a round")


if __name__ == "__main__":
    main()
