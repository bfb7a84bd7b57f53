"""What the choices in a pre-verifier are worth: small variants, one after the other, on the same held-out rounds.

Each variant is trained within ``trainer.max_minutes``; finished ones are kept, a killed one goes on where it was. The
speed is simulated at the costs of the ``costs`` block, once with a free call and once with the call as measured here;
the gap is the one between the best fixed window and the oracle. The first row has no layer: the product of the draft's
own probabilities, on the same rounds, under a rule that is tuned in the same way.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pacer.artifacts import Stage, write_atomic, write_json
from pacer.assemble import Models, attach_preverifier
from pacer.choices import BLOCK_RULES, FEATURES
from pacer.command.app import describe_run, load_settings, program, run_folder
from pacer.data.batching import Loader
from pacer.evaluation.profiler import costs, profile
from pacer.files import disk_errors
from pacer.methods.arms import method_settings
from pacer.reporting.tables import markdown
from pacer.settings import CostSettings, ProfileSettings, Settings
from pacer.stages.build import build
from pacer.stages.draft import draft_checkpoint, draft_key
from pacer.stages.texts import labels
from pacer.stages.training import command_line, trainer_key
from pacer.training.preverifier_run import Pair, packed_batches, packed_loader, prepared, train_preverifier
from pacer.training.preverify import RoundScores, packed_logits, quality
from pacer.training.states import States, store_states

log = logging.getLogger("pacer.ablate")
COLUMNS = ("auc", "ece", "call", "speed_free", "speed", "best_fixed", "oracle", "gap_free", "gap")


@dataclass(frozen=True)
class Variant:
    """Changes against the settings: of the pre-verifier, of where simulated rounds start, of how many texts."""

    name: str
    preverifier: dict[str, Any] = field(default_factory=dict)
    starts: str | None = None
    share: float = 1.0


def variants(width: int) -> list[Variant]:
    """One choice at a time, around the settings at a base width."""
    base = {"width": width}
    return [
        Variant("as set", base),
        Variant("states only", {**base, "features": []}),
        Variant("logprob, entropy", {**base, "features": ["logprob", "entropy"]}),
        Variant("… margin, match", {**base, "features": ["logprob", "entropy", "margin", "match"]}),
        Variant("… cumulative", {**base, "features": list(FEATURES)}),
        Variant("conditional labels", {**base, "label": "conditional"}),
        Variant("survival labels", {**base, "label": "survival"}),
        Variant("labels of the next token", {**base, "label": "next"}),
        Variant("sees the prefix", {**base, "attention": "prefix"}),
        Variant("sees the draft alone", {**base, "attention": "block"}),
        Variant("no index embedding", {**base, "index_embedding": False}),
        Variant("before the norm", {**base, "state": "before_norm"}),
        Variant("after the norm", {**base, "state": "after_norm"}),
        Variant("starts: uniform", base, "uniform"),
        Variant("starts: rounds", base, "rounds"),
        Variant("half the texts", base, share=0.5),
        Variant("a quarter of the texts", base, share=0.25),
        Variant("two layers", {**base, "depth": 2}),
        *(Variant(f"width {other}", {"width": other}) for other in (96, 192, 384, 576)),
    ]


def measured_call(models: Models, context: int) -> float:
    """A call's time in target passes."""
    points = profile(models, ProfileSettings(contexts=[context], batches=[1], gamma_max=2, repeats=5))
    return costs(points).preverify


def held_out_scores(models: Models, held_out: Sequence[Pair], settings: Settings) -> RoundScores:
    """The loaded pre-verifier's estimates of the held-out rounds."""
    module = models.preverifier
    assert module is not None and models.draft is not None
    pairs = prepared(held_out, settings)
    stored = store_states(Path(settings.paths.runs) / "stages", models.draft, pairs)
    scores = RoundScores(module.settings.gamma_max, BLOCK_RULES[module.settings.label][0])
    with torch.inference_mode():
        for batch in batches_of(pairs, settings, module.settings.label, models.draft.device, stored):
            scores.add(batch, packed_logits(module, batch).float().sigmoid())
    return scores


def batches_of(
    pairs: Sequence[Pair], settings: Settings, label: str, device: torch.device, stored: States | None
) -> Loader:
    """Held-out rounds, packed; always in the same order."""
    return packed_loader(pairs, packed_batches(pairs, settings.trainer.tokens_per_batch, seed=0), label, device, stored)


def worth(scores: RoundScores, costs: CostSettings, call: float) -> dict[str, Any]:
    """What rounds that are stopped by these scores gain, with a free call and with one of that price."""
    found: dict[str, Any] = {"call": call}
    for suffix, price in (("_free", 0.0), ("", call)):
        rule, paced, gamma, window, best = scores.rounds(replace(costs, preverify=price))
        room = best.speedup - window.speedup
        found |= {
            f"speed{suffix}": paced.speedup, f"gap{suffix}": (paced.speedup - window.speedup) / room if room else 0.0,
            f"rule{suffix}": rule, "best_fixed": window.speedup, "gamma": gamma, "oracle": best.speedup,
        }  # fmt: skip
    return found


def without_layer(held_out: Sequence[Pair], settings: Settings) -> dict[str, Any]:
    """The row of the draft's own probabilities: their product estimates survival, for nothing."""
    scores = RoundScores(settings.preverifier.gamma_max)
    for batch in batches_of(prepared(held_out, settings), settings, "survival", torch.device("cpu"), None):
        scores.add(batch, batch.cumulative.exp())
    products, labels, used = scores.tables()
    found = {k: float(v) for k, v in quality(torch.tensor(products[used]), torch.tensor(labels[used])).items()}
    name = "no layer: the draft's probabilities"
    return {"variant": name, "texts": 0, **found, **worth(scores, settings.costs, 0.0)}


def judged(models: Models, held_out: Sequence[Pair], settings: Settings, folder: Path) -> dict[str, Any]:
    """The row of a trained variant."""
    attach_preverifier(models, folder)
    config = json.loads((folder / "config.json").read_text())
    scores = held_out_scores(models, held_out, settings)
    call = measured_call(models, settings.profile.contexts[0])
    return {
        "auc": config["validation"]["val/auc"], "ece": config["validation"]["val/ece"], "steps": config["steps"],
        "texts": config["texts"], "settings": config["settings"], **worth(scores, settings.costs, call),
    }  # fmt: skip


def row(variant: Variant, settings: Settings, models: Models, key: str, held_out: tuple[list[Pair], str]) -> Any:
    """Train and judge a variant, unless that was done."""
    chosen = replace(
        settings,
        preverifier=replace(settings.preverifier, **variant.preverifier),
        labels=replace(settings.labels, starts=variant.starts or settings.labels.starts),
    )
    pairs, labels_key = labels(chosen, models, "preverifier", key)
    pairs = pairs[: max(1, round(variant.share * len(pairs)))]
    trainer = {**trainer_key(chosen.trainer), "cache_states": None}
    made_of = {
        "labels": [labels_key, held_out[1]], "share": variant.share, "preverifier": asdict(chosen.preverifier),
        "trainer": trainer, "costs": asdict(chosen.costs), "tail": chosen.labels.tail,
    }  # fmt: skip
    stage = Stage(Path(settings.paths.runs) / "stages", "ablation", made_of)
    file = stage.folder / "row.json"
    if not stage.complete:
        with stage.lock():
            if not stage.complete:
                log.info("variant %s: %d texts, in %s", variant.name, len(pairs), stage.folder)
                folder = stage.folder / "preverifier"
                if not (folder / "config.json").is_file():
                    train_preverifier(models, pairs, held_out[0], chosen, stage.folder, command=command_line())
                write_json(file, judged(models, held_out[0], chosen, folder))
                (stage.folder / "last.ckpt").unlink(missing_ok=True)
                stage.finish()
    return {"variant": variant.name, **json.loads(file.read_text())}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    head = [["variant", *COLUMNS], ["---", *["---:"] * len(COLUMNS)]]
    return markdown([*head, *([r["variant"], *(f"{r[name]:.3f}" for name in COLUMNS)] for r in rows)]) + "\n"


@program
def main(words: list[str]) -> int:
    settings = load_settings(words)
    settings = replace(settings, trainer=replace(settings.trainer, cache_states=True))
    folder = run_folder(settings, "ablate")
    describe_run(settings, folder)
    with disk_errors(folder):
        models = build(settings, [method_settings("sd")])
        source = draft_checkpoint(settings) if settings.model.draft.kind == "layers" else None
        key = draft_key(settings, source)
        held_out = labels(settings, models, "tuning", key)
        rows = [without_layer(held_out[0], settings)]
        for variant in variants(settings.preverifier.width or 192):
            rows.append(row(variant, settings, models, key, held_out))
            write_json(folder / "ablation.json", {"costs": asdict(settings.costs), "rows": rows})
            write_atomic(folder / "ablation.md", table(rows))
    print(table(rows), end="")
    print(f"saved in {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(None))
