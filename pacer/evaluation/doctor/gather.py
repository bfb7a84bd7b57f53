"""What the checks look at: models, the target's own text on benchmark prompts, the corpus, the trained parts.

Nothing is built: what earlier runs left under ``paths.runs`` is used, what is not there is not checked, and said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pacer.assemble import Models, checkpoint_folder, load_draft_model
from pacer.data.corpus import Text, read_corpus, read_files, split_texts
from pacer.data.labels import Rounds, simulate
from pacer.data.prompts import Prompt, encode
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request
from pacer.errors import ConfigError
from pacer.evaluation.runner import load_benchmarks
from pacer.files import plain, stable_hash
from pacer.models.stack import Stack
from pacer.settings import Settings

PROMPTS, TOKENS = 8, 64  # enough for differences of a few hundredths
CORPUS_TEXTS = 8
BATCH = 4


@dataclass
class Case:
    """What is examined. ``draft_folder``: the checkpoint of a draft of layers; None: untrained, or a model."""

    settings: Settings
    cache: Path
    models: Models
    prompts: list[Prompt] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)  # the target's own, greedy
    corpus: list[Text] = field(default_factory=list)  # what parts learned from
    longest: int | None = None  # tokens of the longest text the draft was trained on
    draft_folder: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)  # of the draft's checkpoint

    @property
    def untrained(self) -> bool:
        return self.settings.model.draft.kind == "layers" and self.draft_folder is None


def latest(settings: Settings, kind: str, wanted: Mapping[str, Any]) -> list[Path]:
    """Folders of finished stages whose key holds what is wanted, newest first."""
    found = []
    for path in (Path(settings.paths.runs) / "stages" / kind).glob("*/manifest.json"):
        key = json.loads(path.read_text())["key"]
        parts = [key.get(name) for name in wanted]
        if all(_holds(part, plain(value)) for part, value in zip(parts, wanted.values(), strict=True)):
            found.append(path)
    return [path.parent for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]


def _holds(part: Any, wanted: Any) -> bool:
    if isinstance(part, dict) and isinstance(wanted, dict):
        return all(part.get(name) == value for name, value in wanted.items())
    return bool(part == wanted)


def choose_prompts(settings: Settings) -> list[Prompt]:
    """A few prompts of each benchmark set."""
    benchmarks = load_benchmarks(settings.benchmark, settings.paths.data_dir)
    each = max(1, PROMPTS // len(benchmarks))
    return [prompt for benchmark in benchmarks for prompt in benchmark.prompts[:each]]


def budget(settings: Settings) -> int:
    return min(TOKENS, settings.benchmark.max_new_tokens)


def write(case: Case, prompts: Sequence[tuple[str, str, list[int]]]) -> list[Text]:
    """The target's greedy continuations of (id, task, ids); prompts that fill its context are left out."""
    stops, target = frozenset(case.models.stop_ids), case.models.target
    new = budget(case.settings)
    rows = [row for row in prompts if 0 < len(row[2]) < target.context - 1]
    if not rows:
        raise ConfigError("no prompt fits the target's context", value=target.context, remedy="choose benchmark.sets")
    decoder = Decoder(target)
    requests = [Request(name, ids, new, stops) for name, _, ids in rows]
    results = [r for i in range(0, len(rows), BATCH) for r in decoder.generate(requests[i : i + BATCH])]
    return [
        Text(name, task, list(ids), result.ids, result.finish != "eos")
        for (name, task, ids), result in zip(rows, results, strict=True)
    ]


def templated(case: Case) -> list[tuple[str, str, list[int]]]:
    return [(p.id, p.task, encode(p, case.models.tokenizer)) for p in case.prompts]


def without_template(case: Case) -> list[tuple[str, str, list[int]]]:
    """The same prompts as plain text after BOS."""
    tokenizer = case.models.tokenizer
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [(p.id, p.task, [*bos, *tokenizer(p.text, add_special_tokens=False)["input_ids"]]) for p in case.prompts]


def find_draft(case: Case) -> None:
    """The checkpoint of a draft of layers: the named one, else the latest of these settings."""
    model = case.settings.model
    if model.draft.kind != "layers":
        return
    if model.draft.source is not None:
        case.draft_folder = checkpoint_folder(model.draft.source)
    else:
        drafted = asdict(model.draft)
        made_of = {name: drafted[name] for name in ("layers", "head_size", "copying")}
        stages = latest(case.settings, "draft", {"target": asdict(model.target), "draft": made_of})
        case.draft_folder = stages[0] / "draft" if stages else None
    if case.draft_folder is not None and (case.draft_folder / "config.json").is_file():
        case.config = json.loads((case.draft_folder / "config.json").read_text())


def name(case: Case) -> str:
    """The draft in a few words."""
    chosen = case.settings.model.draft
    if case.draft_folder is not None:
        return str(case.draft_folder)
    if chosen.kind == "skip":
        return f"the target with its layers {chosen.layers} alone"
    return str(chosen.source) if chosen.kind == "model" else f"untrained layers {chosen.layers}"


def load_draft(case: Case, *, exact: bool = False, full_head: bool = False) -> Stack:
    """The draft, in float32 and not quantised or with the whole vocabulary's head if asked; untrained layers without a
    checkpoint.

    Raises:
        MismatchError: it is another target's, or its tokenizer is another.
    """
    draft = case.settings.model.draft
    if case.untrained:
        draft = replace(draft, kind="skip")  # layers of the target as they are
    if exact:
        draft = replace(draft, dtype="float32", quantise=None)
    model = replace(case.settings.model, draft=draft)
    return load_draft_model(model, case.models, case.cache, case.draft_folder, full_head=full_head)


def rounds(case: Case, gamma: int) -> list[tuple[Text, Rounds]]:
    """Simulated rounds of the draft on the target's texts, those too short for one left out."""
    draft, models = case.models.draft, case.models
    assert draft is not None
    chosen = replace(case.settings.labels, starts="uniform", gamma=gamma)
    found = [(t, simulate(draft, t, chosen, models.stop_ids, models.target.vocab_size)) for t in case.texts]
    return [(text, rounds) for text, rounds in found if rounds is not None]


def find_corpus(case: Case) -> None:
    """A few texts of the corpus, those that made no draft first; and the length of the longest training text."""
    chosen, stops = case.settings.corpus, case.models.stop_ids
    texts, _ = read_files(chosen, stops)
    for name in [*([] if chosen.file else chosen.prompts), *chosen.extend]:
        stages = latest(case.settings, "corpus", {"target": asdict(case.settings.model.target), "set": name})
        shards = sorted(stages[0].glob("shard-*.jsonl")) if stages else []
        texts += [text for file in shards for text in read_corpus(file, stops)]
    parts = split_texts(texts, chosen.parts)
    order = sorted((part == "draft", stable_hash(t.id), i) for part, rows in parts.items() for i, t in enumerate(rows))
    by_hash = {stable_hash(text.id): text for text in texts}
    case.corpus = [by_hash[name] for _, name, _ in order[:CORPUS_TEXTS]]
    case.longest = case.config.get("longest")
    own = case.settings.model.draft.source is None and parts.get("draft")
    if case.longest is None and own and not case.untrained:
        case.longest = max(len(text.prompt_ids) + len(text.output_ids) for text in parts["draft"])
