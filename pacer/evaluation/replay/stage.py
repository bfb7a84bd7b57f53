"""Which texts are replayed, and their dense table as a stage: built once, shard by shard, resumable."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pacer.artifacts import Stage, stable_hash
from pacer.assemble import Models
from pacer.data.corpus import Text, read_corpus, split_texts
from pacer.data.labels import Rounds, draft_rounds
from pacer.data.packing import pack
from pacer.errors import ConfigError
from pacer.evaluation.replay.table import Floats, Table, join, load, one_text, save
from pacer.evaluation.runner import load_benchmarks
from pacer.files import sha256
from pacer.models.preverifier import Preverifier
from pacer.settings import Settings
from pacer.stages.draft import draft_checkpoint, draft_key
from pacer.stages.texts import continued, corpus, stage_of
from pacer.work.progress import progress
from pacer.work.stopping import PATIENCE, check_stop

log = logging.getLogger(__name__)

PER_SHARD = 8  # texts: the unit of resuming
PACKED = 768  # drafted tokens scored at a time: attention is quadratic


def texts_of(settings: Settings, models: Models) -> tuple[list[Text], int, str]:
    """The texts to replay, the budget of a request, and a hash of where they come from.

    ``benchmark``: the target's continuations of the prompts that `pacer.evaluate` measures; ``corpus``: the part of the
    corpus that neither draft nor pre-verifier learnt from.
    """
    chosen = settings.replay
    if chosen.texts == "corpus":
        texts, key = corpus(settings, models)
        found = split_texts(texts, settings.corpus.parts).get("tuning", [])
        found = sorted(found, key=lambda text: stable_hash(text.id))[: chosen.limit]
        key, budget = stable_hash([key, settings.corpus.parts, chosen.limit]), settings.corpus.max_new_tokens
    else:
        wanted = replace(settings.benchmark, split=chosen.split, limit=chosen.limit)
        budget = wanted.max_new_tokens
        writing = replace(settings, corpus=replace(settings.corpus, max_new_tokens=budget))
        found, keys = [], []
        for benchmark in load_benchmarks(wanted, settings.paths.data_dir):
            stage = continued(writing, models, f"{benchmark.name}/{chosen.split}", benchmark.prompts)
            shards = sorted(stage.folder.glob("shard-*.jsonl"))
            found += [text for shard in shards for text in read_corpus(shard, models.stop_ids)]
            keys.append(stage.hash)
        key = stable_hash(keys)
    if not found:
        raise ConfigError("no texts to replay", value=chosen.texts, remedy="use more prompts")
    return found, budget, key


def dense_table(settings: Settings, models: Models, texts: Sequence[Text], budget: int, key: str) -> tuple[Table, str]:
    """The table of these texts and its hash; built if it is not there.

    Args:
        budget: new tokens a request may have. key: hash of where the texts come from.
    """
    assert models.draft is not None
    chosen = settings.replay
    folder = draft_checkpoint(settings) if settings.model.draft.kind == "layers" else None
    weights = models.preverifier_folder / "model.safetensors" if models.preverifier_folder else None
    label = models.preverifier.settings.label if models.preverifier else None
    made_of = {
        "texts": key, "draft": draft_key(settings, folder), "budget": budget,
        "preverifier": sha256(weights) if weights else None, "label": label, "gamma_max": chosen.gamma_max,
        "tail": chosen.tail,
    }  # fmt: skip
    stage = stage_of(settings, "tables", made_of)
    if not stage.complete:
        _build(models, texts, budget, chosen.gamma_max, chosen.tail, stage)
    return join([load(file) for file in sorted(stage.folder.glob("shard-*.npz"))]), stage.hash


def _build(models: Models, texts: Sequence[Text], budget: int, gamma: int, tail: int | None, stage: Stage) -> None:
    log.info("dense table of %d texts in %s", len(texts), stage.folder)
    shards = [texts[i : i + PER_SHARD] for i in range(0, len(texts), PER_SHARD)]
    missing = stage.missing(len(shards), ".npz")
    with progress(len(texts), "table", "text", initial=len(texts) - sum(len(shards[i]) for i in missing)) as bar:

        def make(index: int) -> Callable[[Path], None]:
            tables = []
            for text in shards[index]:
                tables.append(text_table(models, text, budget, gamma, tail))
                bar.update()
                check_stop(PATIENCE)
            return functools.partial(save, join(tables))

        stage.fill(len(shards), make, suffix=".npz", extra={"texts": len(texts)})


def text_table(models: Models, text: Text, budget: int, gamma: int, tail: int | None) -> Table:
    """The table of one text: all its starts are drafted side by side."""
    draft, module = models.draft, models.preverifier
    assert draft is not None
    if len(text.output_ids) > budget:
        text = Text(text.id, text.task, text.prompt_ids, text.output_ids[:budget], True)
    first, end = len(text.prompt_ids) + 1, len(text.prompt_ids) + len(text.output_ids)
    rounds, scores = None, None
    width = min(module.settings.gamma_max, gamma) if module else 0
    if first < end:
        rounds = draft_rounds(draft, text, torch.arange(first, end), gamma, models.stop_ids, models.target.vocab_size)
        scores = estimates(module, text, rounds, width, tail) if module else None
    elif module:
        scores = np.zeros((0, gamma), np.float32)
    made: dict[str, Any] = {"contexts": (models.target.context, draft.context)}
    if module:
        own = module.settings
        made |= {"score_width": own.gamma_max, "reads_prefix": module.sees_prefix, "label": own.label}
    return one_text(text, rounds, scores, budget=budget, gamma=gamma, tail=tail, **made)


@torch.inference_mode()
def estimates(module: Preverifier, text: Text, rounds: Rounds, width: int, tail: int | None) -> Floats:
    """The pre-verifier's estimates ``(S, g)`` of drafts up to ``width`` tokens, in packed forwards; NaN elsewhere."""
    from pacer.training.preverify import packed_logits  # Lightning takes seconds to import

    counts = rounds.counts.clamp_max(width)
    counts = counts if tail is None else torch.minimum(counts, rounds.accepted + 1 + tail)
    wanted = replace(rounds, counts=counts)
    scores = np.full(tuple(rounds.tokens.shape), np.nan, np.float32)
    path = len(text.prompt_ids) + len(text.output_ids)
    at = 0
    while at < len(counts):
        fits = int((counts[at:].cumsum(0) <= PACKED).sum())
        rows = torch.arange(at, at + max(1, fits))
        packed = pack([[(text, wanted.pick(rows))]], "survival").to(module.draft.device)
        found = packed_logits(module, packed).float().sigmoid()[0, path:].cpu().numpy()
        real = np.arange(scores.shape[1]) < counts[rows, None].numpy()
        block = scores[rows.numpy()]
        block[real] = found
        scores[rows.numpy()] = block
        at += len(rows)
    return scores
