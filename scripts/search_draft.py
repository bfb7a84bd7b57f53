"""Drafts tried on small budgets: which layers, where from, how large a head, which data and loss.

Each variant trains for MINUTES (default 4) with everything else as in ``experiment=draft/smollm2``; a variant is a
stage, so the same command goes on where it was stopped. All are judged on the same texts, which none has seen: up to
TEXTS of the corpus without what extends it, of the part for tuning (the split is by row, so it is nobody's draft part).
Printed per variant:

- agreement with the target's greedy text, per task;
- ``weights``: what one draft pass reads, in weights of a target pass (layers and head of both; of a draft that copies
  also projection and gates). It stands for c, which ``pacer.profile`` measures;
- the fixed window of the highest simulated speed at that c and the other costs of the settings, how many of its tokens
  are accepted per round, and the speed over plain decoding. Rounds start at every place of the texts, and a greedy
  draft is accepted up to its first disagreement, so nothing is sampled. ``best`` is the variant of the highest speed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pacer.artifacts import stable_hash, write_json
from pacer.assemble import Models, load_target
from pacer.command.app import load_settings, program
from pacer.data.corpus import Text, split_texts
from pacer.errors import ConfigError
from pacer.evaluation.doctor.measure import agreement, share
from pacer.evaluation.simulate import best_fixed
from pacer.models.draft import load_draft
from pacer.models.stack import Stack
from pacer.reporting.tables import markdown
from pacer.settings import Settings
from pacer.stages.draft import draft_checkpoint
from pacer.stages.texts import corpus
from pacer.work.stopping import check_stop

TEXTS, WINDOWS = 96, 16
VARIANTS: dict[str, list[str]] = {
    "first 2 layers": [],
    "no copying": ["model.draft.copying=false"],
    "the first and the last": ["model.draft.layers=[0,29]"],
    "first layer alone": ["model.draft.layers=[0]"],
    **{f"first {n}": [f"model.draft.layers=[{','.join(map(str, range(n)))}]"] for n in (3, 4, 6, 8)},
    **{f"head of {size:,}": [f"model.draft.head_size={size}"] for size in (2048, 8192, 16384)},
    "ready corpus alone": ["corpus.extend=[]"],
    "prompts not learned from": ["trainer.prompt_weight=0"],
    "half of the loss is KL": ["trainer.kl_weight=0.5"],
}


def judged_on(settings: Settings, models: Models) -> list[Text]:
    """The texts that all variants are judged on, a mix of all tasks.

    Raises:
        ConfigError: the corpus is too small for a part for tuning.
    """
    ready = replace(settings, corpus=replace(settings.corpus, extend=[]))
    texts = split_texts(corpus(ready, models)[0], ready.corpus.parts).get("tuning", [])
    if not texts:
        raise ConfigError("no texts in part tuning of the corpus", remedy="use more prompts")
    return sorted(texts, key=lambda text: stable_hash(text.id))[:TEXTS]


def weights(stack: Stack) -> int:
    """Weights that a pass over one token reads; of an embedding it reads a row."""
    read: list[nn.Parameter | Tensor] = [
        *getattr(stack.decoder, stack.family.layers).parameters(), *stack.norm.parameters(), *stack.head.parameters()
    ]  # fmt: skip
    if stack.copying is not None:
        read += [*stack.copying.parameters(), stack.copying.shared[2]]  # gates; the projection of the candidate's row
    return sum(weight.numel() for weight in read)


def runs(texts: Iterable[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Rounds from every place: tokens accepted of a greedy draft ``(S,)``, and tokens to the text's end ``(S,)``.

    Args:
        texts: where the draft agrees with a text ``(n,)`` each.
    """
    accepted, counts = [], []
    for hits in texts:
        place = np.arange(len(hits))
        misses = np.where(hits.numpy(), len(hits), place)
        accepted.append(np.minimum.accumulate(misses[::-1])[::-1] - place)
        counts.append(len(hits) - place)
    return np.concatenate(accepted), np.concatenate(counts)


def judge(draft: Stack, target: Stack, texts: Sequence[Text], settings: Settings) -> dict[str, Any]:
    """Agreement, cost and simulated speed of a draft."""
    hits = agreement(draft, texts, target.vocab_size).split([len(text.output_ids) for text in texts])
    tasks = {text.task: [h for t, h in zip(texts, hits, strict=True) if t.task == text.task] for text in texts}
    cost = weights(draft) / weights(target)
    gamma, found = best_fixed(*runs(hits), replace(settings.costs, draft=cost), WINDOWS)
    return {
        "all": share(torch.cat(hits)), **{task: share(torch.cat(own)) for task, own in sorted(tasks.items())},
        "weights": round(cost, 4), "gamma": gamma, "accepted": round(found.accepted, 3),
        "speed": round(found.speedup, 4),
    }  # fmt: skip


def row(name: str, settings: Settings, models: Models, texts: Sequence[Text]) -> dict[str, Any]:
    """Train one variant, or find it trained, and judge it."""
    folder = draft_checkpoint(settings)
    steps = json.loads((folder / "config.json").read_text())["steps"]
    draft = load_draft(folder, models.target).merged()
    return {"variant": name, "steps": steps, **judge(draft, models.target, texts, settings)}


def table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for found in rows for key in found))
    return markdown([columns, ["---"] * len(columns), *([str(found.get(c, "–")) for c in columns] for found in rows)])


@program
def main(words: list[str]) -> int:
    names = [word for word in words if "=" not in word] or list(VARIANTS)
    if unknown := [name for name in names if name not in VARIANTS]:
        raise ConfigError("unknown variants", value=", ".join(unknown), allowed=", ".join(VARIANTS))
    given = [word for word in words if "=" in word] or ["+experiment=draft/smollm2"]
    budget = [*given, f"trainer.max_minutes={os.environ.get('MINUTES', '4')}"]
    settings, rows = load_settings(budget), []
    models = load_target(settings.model, settings.paths.cache_folder)
    texts = judged_on(settings, models)
    for name in names:
        rows.append(row(name, load_settings([*budget, *VARIANTS[name]]), models, texts))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
        check_stop()
    path = write_json(Path(settings.paths.runs) / "search_draft.json", {"rows": rows, "budget": budget})
    print(table(rows))
    print(json.dumps({"best": max(rows, key=lambda found: found["speed"]), "written": str(path), "ok": True}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(None))
