"""Which layers of the target can be left out of it, so that the rest drafts for it untrained (model.draft.kind=skip).

Greedy: in each round every remaining layer is left out in turn, and the one whose absence costs the least agreement
with the target's own texts goes (``--at-once`` of them, never neighbours). Each round is a line; the last lines are
the settings to use. Scores are of a few hundred tokens: a choice, not a measurement.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from pacer.assemble import load_target
from pacer.command.app import load_settings, program
from pacer.data.corpus import Text, split_texts
from pacer.evaluation.doctor.measure import agreement
from pacer.files import stable_hash
from pacer.models.stack import Stack
from pacer.stages.texts import corpus
from pacer.work.stopping import check_stop


def kept(target: Stack, layers: Sequence[int], texts: Sequence[Text]) -> float:
    """Share of output tokens that these layers alone, read by the target's norm and head, would write greedily."""
    return float(agreement(target, texts, target.vocab_size, order=layers).float().mean())


def leave_out(scores: dict[int, float], number: int) -> list[int]:
    """The layers whose absence costs least, no two of them neighbours."""
    chosen: list[int] = []
    for layer in sorted(scores, key=lambda i: (-scores[i], i)):
        if len(chosen) < number and all(abs(layer - other) > 1 for other in chosen):
            chosen.append(layer)
    return chosen


@program
def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=int, default=20, help="layers that stay")
    parser.add_argument("--at-once", type=int, default=2, help="layers left out per round")
    parser.add_argument("--texts", type=int, default=6)
    arguments, words = parser.parse_known_args(argv)
    settings = load_settings(words)
    models = load_target(settings.model, settings.paths.cache_folder)
    texts, _ = corpus(settings, models)
    unseen = sorted(split_texts(texts, settings.corpus.parts).get("tuning", []), key=lambda t: stable_hash(t.id))
    unseen = sorted(unseen[: 8 * arguments.texts], key=lambda t: len(t.prompt_ids))[: arguments.texts]
    layers = list(range(models.target.n_layers))
    while len(layers) > arguments.keep:
        scores: dict[int, float] = {}
        for layer in layers:
            scores[layer] = kept(models.target, [i for i in layers if i != layer], unseen)
            check_stop()
        gone = leave_out(scores, min(arguments.at_once, len(layers) - arguments.keep))
        layers = [i for i in layers if i not in gone]
        figure = kept(models.target, layers, unseen)
        print(json.dumps({"layers": len(layers), "left_out": sorted(gone), "agreement": round(figure, 4)}), flush=True)
    print(f"model.draft.kind=skip 'model.draft.layers={layers}'")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(None))
