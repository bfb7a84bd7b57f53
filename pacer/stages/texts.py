"""The stages before any training: the target's own texts, and a draft's simulated rounds on them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pacer.artifacts import Stage, stable_hash
from pacer.assemble import Models
from pacer.data.corpus import Text, read_corpus, read_files, split_texts, wanted_prompts
from pacer.data.labels import Rounds, from_line, simulate, to_line
from pacer.data.prompts import Prompt, encode
from pacer.data.sampled import sampled_rounds
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request
from pacer.errors import ConfigError
from pacer.files import sha256
from pacer.settings import Settings
from pacer.work.progress import progress
from pacer.work.shards import pieces, shard_of
from pacer.work.stopping import PATIENCE, check_stop

log = logging.getLogger(__name__)


def stage_of(settings: Settings, kind: str, key: dict[str, Any]) -> Stage:
    """A stage of these runs."""
    return Stage(Path(settings.paths.runs) / "stages", kind, key)


def corpus(settings: Settings, models: Models) -> tuple[list[Text], str]:
    """The target's own texts, and a hash of where they come from: ready files, and what is generated beside them."""
    texts, wanted, key = corpus_stages(settings, models.stop_ids)
    for stage, prompts in wanted:
        _continue(settings, models, stage, prompts)
        shards = sorted(stage.folder.glob("shard-*.jsonl"))
        texts += [text for shard in shards for text in read_corpus(shard, models.stop_ids)]
    return texts, key


def corpus_stages(
    settings: Settings, stop_ids: Sequence[int]
) -> tuple[list[Text], list[tuple[Stage, list[Prompt]]], str]:
    """The ready texts, the stages beside them with what each continues, and the hash of where all come from."""
    chosen = settings.corpus
    texts, files = read_files(chosen, stop_ids)
    limit = None if chosen.limit is None else {"per task": chosen.limit}
    keys = [stable_hash([*map(sha256, files), limit])] if files else []
    wanted = wanted_prompts(chosen, settings.paths.data_dir, texts)
    found = [(_continued_stage(settings, name, prompts), prompts) for name, prompts in wanted.items() if prompts]
    keys += [stage.hash for stage, _ in found]
    return texts, found, keys[0] if len(keys) == 1 else stable_hash(keys)


def continued(settings: Settings, models: Models, name: str, prompts: Sequence[Prompt]) -> Stage:
    """The finished stage with the target's continuations of a prompt set: a set that is added leaves the others be."""
    return _continue(settings, models, _continued_stage(settings, name, prompts), prompts)


def _continued_stage(settings: Settings, name: str, prompts: Sequence[Prompt]) -> Stage:
    key = {
        "target": asdict(settings.model.target), "dtype": settings.model.dtype, "set": name,
        "prompts": stable_hash([[prompt.id, prompt.text] for prompt in prompts]),
        "max_new_tokens": settings.corpus.max_new_tokens, "shard_size": settings.corpus.shard_size,
    }  # fmt: skip
    return stage_of(settings, "corpus", key)


def _continue(settings: Settings, models: Models, stage: Stage, prompts: Sequence[Prompt]) -> Stage:
    if not stage.complete:
        _generate_corpus(settings, models, stage, prompts)
    return stage


def _generate_corpus(settings: Settings, models: Models, stage: Stage, prompts: Sequence[Prompt]) -> None:
    log.info("continuing %d prompts of %s by the target in %s", len(prompts), stage.key["set"], stage.folder)
    shards, own = pieces(prompts, settings.corpus.shard_size, shard_of(settings.shard), lambda prompt: prompt.id)
    made = len(prompts) - sum(len(shards[i]) for i in stage.missing(len(shards)))
    tokens = [0]
    with progress(len(prompts), "corpus", "text", initial=made) as bar:

        def make(index: int) -> str:
            lines: list[dict[str, Any]] = []
            for start in range(0, len(shards[index]), settings.corpus.batch_size):
                batch = shards[index][start : start + settings.corpus.batch_size]
                lines += _continuations(settings, models, batch)
                tokens[0] += sum(len(line["output_ids"]) for line in lines[-len(batch) :])
                bar.set_postfix_str(f"{tokens[0] / max(bar.format_dict['elapsed'], 1e-9):.1f} tok/s", refresh=False)
                bar.update(len(batch))
            return "".join(json.dumps(line) + "\n" for line in lines)

        stage.fill(len(shards), make, first=own, extra={"texts": len(prompts)})


def _continuations(settings: Settings, models: Models, batch: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Greedy continuations of a batch."""
    decoder = Decoder(models.target)
    budget, stops = settings.corpus.max_new_tokens, frozenset(models.stop_ids)
    requests = [Request(p.id, encode(p, models.tokenizer), budget, stops) for p in batch]
    return [
        {"id": p.id, "task": p.task, "prompt_ids": list(r.request.prompt_ids), "output_ids": r.ids}
        for p, r in zip(batch, decoder.generate(requests, lambda row, line: check_stop(PATIENCE)), strict=True)
    ]


def labels(settings: Settings, models: Models, part: str, draft_key: str) -> tuple[list[tuple[Text, Rounds]], str]:
    """Texts of a part of the corpus with their simulated rounds, and the stage's hash."""
    assert models.draft is not None
    texts, corpus_key = corpus(settings, models)
    chosen = sorted(split_texts(texts, settings.corpus.parts).get(part, []), key=lambda t: stable_hash(t.id))
    chosen = chosen[: settings.labels.texts]
    if not chosen:
        raise ConfigError(f"no texts in part {part} of the corpus", value=len(texts), remedy="use more prompts")
    stage = labels_stage(settings, corpus_key, part, draft_key)
    if not stage.complete:
        _simulate(settings, models, stage, chosen)
    by_id = {text.id: text for text in chosen}
    pairs: list[tuple[Text, Rounds]] = []
    for file in sorted(stage.folder.glob("shard-*.jsonl")):
        for line in file.read_text().splitlines():
            name, rounds = from_line(line)
            if bool(rounds.labels(settings.preverifier.label)[1].any()):
                pairs.append((by_id[name], rounds))
    if not pairs:
        remedy = "use more prompts, or longer outputs (corpus.max_new_tokens)"
        raise ConfigError(f"no text in part {part} of the corpus yields a round", value=len(chosen), remedy=remedy)
    return pairs, stage.hash


def labels_stage(settings: Settings, corpus_key: str, part: str, draft_key: str) -> Stage:
    """Where the simulated rounds of a part of the corpus go."""
    key = {
        "corpus": corpus_key, "parts": settings.corpus.parts, "part": part, "draft": draft_key,
        "labels": {**asdict(settings.labels), "tail": None},
    }  # fmt: skip
    return stage_of(settings, "labels", key)


def _simulate(settings: Settings, models: Models, stage: Stage, texts: Sequence[Text]) -> None:
    assert models.draft is not None
    log.info("simulating rounds on %d texts in %s", len(texts), stage.folder)
    shards, own = pieces(texts, settings.corpus.shard_size, shard_of(settings.shard), lambda text: text.id)
    made = len(texts) - sum(len(shards[i]) for i in stage.missing(len(shards)))
    total = [0, 0]  # rounds, accepted tokens
    with progress(len(texts), "labels", "text", initial=made) as bar:

        def make(index: int) -> str:
            lines = []
            for text in shards[index]:
                rounds = _rounds(settings, models, text)
                if rounds is not None:
                    lines.append(to_line(text.id, rounds) + "\n")
                    total[:] = total[0] + len(rounds.starts), total[1] + int(rounds.accepted.sum())
                    bar.set_postfix_str(f"{total[1] / total[0]:.2f} tokens accepted a round", refresh=False)
                bar.update()
                check_stop(PATIENCE)
            return "".join(lines)

        stage.fill(len(shards), make, first=own, extra={"texts": len(texts)})


def _rounds(settings: Settings, models: Models, text: Text) -> Rounds | None:
    """The simulated rounds of a text."""
    assert models.draft is not None
    chosen, stops, size = settings.labels, models.stop_ids, models.target.vocab_size
    if chosen.temperature > 0:
        return sampled_rounds(models.draft, models.judge or models.target, text, chosen, stops, size)
    return simulate(models.draft, text, chosen, stops, size, models.judge)
