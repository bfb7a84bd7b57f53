"""Which stages of work are there, which would be made: from settings and the records of finished stages alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pacer.artifacts import Stage
from pacer.assemble import checkpoint_folder
from pacer.choices import HEADS
from pacer.command.app import run_folder
from pacer.methods.exits import EXIT_DRAFTERS, wanted_exits, wanted_judges
from pacer.methods.feature import FEATURE_DRAFTER
from pacer.planning.wanted import Wanted, named
from pacer.settings import Settings
from pacer.stages.draft import draft_key, draft_stage
from pacer.stages.exits import exits_key, layerskip_key, of_kind, stage_on
from pacer.stages.feature import feature_key
from pacer.stages.preverifier import preverifier_stage
from pacer.stages.texts import corpus_stages, labels_stage
from pacer.stages.training import trainer_of

THERE, BEGUN, MISSING, LATER = "there", "begun", "to make", "later"


@dataclass(frozen=True)
class Step:
    """A stage of work: what it is, whether it is there, and its folder or a note."""

    what: str
    state: str
    where: str = ""


def steps(settings: Settings, found: Wanted) -> Iterator[Step]:
    """The stages in the order in which they are made."""
    for name, source in (sources := _sources(settings, found)).items():
        if source is not None:
            named(name, source)
            yield Step(name, THERE, source)
    own = [name for name in ("preverifier", *HEADS) if name in sources and sources[name] is None]
    trained, makes_draft = list(_on_the_corpus(settings, found)), "draft" in sources and sources["draft"] is None
    if not (trained or own or makes_draft or found.part == "labels" or _judges(settings, found)):
        return
    ready, stages, key = corpus_stages(settings, ())
    if ready:
        yield Step(f"corpus: {len(ready)} ready texts", THERE, str(settings.corpus.file))
    for stage, prompts in stages:
        what = f"corpus: {stage.key['set']}, {len(prompts)} prompts"
        yield _pieces(what, stage, len(prompts), settings.corpus.shard_size)
    for what, kind, made_of in trained:
        yield _trained(what, stage_on(settings, key, kind, made_of))
    if makes_draft:
        stage, teacher = draft_stage(settings, key)
        if teacher is not None:
            yield _trained("the target's predictions", teacher)
        yield _trained(f"draft of layers {settings.model.draft.layers}", stage)
    if own or (found.part == "labels" and found.draft):
        yield from _labelled(settings, own, key)
    yield from _judges(settings, found)


def _sources(settings: Settings, found: Wanted) -> dict[str, str | None]:
    """The parts that are needed and can be named, with the checkpoint that is named; None: made by these settings."""
    sources = {name: getattr(settings, name).source for name in ("preverifier", *HEADS) if found.needs(name)}
    if any(method.drafter in EXIT_DRAFTERS for method in found.methods):
        sources["exits"] = settings.model.exits.source
    if any(method.drafter == FEATURE_DRAFTER for method in found.methods):
        sources["feature draft"] = settings.model.feature.source
    if found.draft and settings.model.draft.kind == "layers":
        sources["draft"] = settings.model.draft.source
    return sources


def _on_the_corpus(settings: Settings, found: Wanted) -> Iterator[tuple[str, str, dict[str, object]]]:
    """What is trained on the corpus alone, but the draft: what it is, its stage's kind and key."""
    exits = settings.model.exits
    if found.part == "exits":
        yield f"exits after {exits.layers} layers ({exits.kind})", "exits", exits_key(settings, [])
    if found.part == "layerskip":
        yield "the model tuned to exit early", "layerskip", layerskip_key(settings)
    if settings.model.feature.source is None and found.feature:
        yield "a drafter fed by the target", "feature", feature_key(settings)
    for kind, layers in wanted_exits(found.methods, exits).items():
        chosen = of_kind(settings, kind)
        if kind != "shared" and chosen.model.exits.source is None:
            yield f"exits after {layers} layers ({kind})", "exits", exits_key(chosen, layers)


def _labelled(settings: Settings, parts: Sequence[str], corpus_key: str) -> Iterator[Step]:
    """Simulated rounds, and what learns from them; their names follow from the draft's weights."""
    draft, folder = settings.model.draft, None
    if draft.kind == "layers":
        stage, _ = draft_stage(settings, corpus_key)
        folder = stage.folder / "draft" if draft.source is None else checkpoint_folder(draft.source)
        if draft.source is None and not stage.complete:
            yield from (Step(what, LATER, "after the draft") for what in ("labels", *parts))
            return
    key = draft_key(settings, folder)
    stages = [labels_stage(settings, corpus_key, part, key) for part in ("preverifier", "tuning")]
    for stage in stages:
        yield _trained(f"labels: part {stage.key['part']}", stage)
    for part in parts:
        own = replace(settings, preverifier=getattr(settings, part), trainer=trainer_of(settings, part))
        yield _trained(part, preverifier_stage(own, [stage.hash for stage in stages], part))


def _judges(settings: Settings, found: Wanted) -> list[Step]:
    """Pre-verifiers on exits' states: their names follow from the exits' weights."""
    pairs = [
        (part, judge)
        for part in ("preverifier", *HEADS)
        for judge in sorted(wanted_judges(found.methods, settings.model.exits, part), key=str)
    ]
    return [
        Step(f"{part} on exit {layer}, for {'the target' if by is None else f'exit {by}'}", LATER, "with the weights")
        for part, (_, layer, by) in pairs
    ]


def _trained(what: str, stage: Stage) -> Step:
    begun = stage.folder.is_dir() and any(not path.name.startswith(".") for path in stage.folder.iterdir())
    return Step(what, THERE if stage.complete else BEGUN if begun else MISSING, str(stage.folder))


def _pieces(what: str, stage: Stage, count: int, size: int) -> Step:
    step, whole = _trained(what, stage), -(-count // size)
    if step.state != BEGUN:
        return step
    return replace(step, where=f"{step.where}: {whole - len(stage.missing(whole))} of {whole} pieces")


def measured(settings: Settings) -> Step:
    """How far the run of `evaluate` is."""
    from pacer.evaluation.runner import load_benchmarks

    folder = run_folder(settings, "evaluate")
    prompts = sum(len(benchmark.prompts) for benchmark in load_benchmarks(settings.benchmark, settings.paths.data_dir))
    total = prompts * len(settings.benchmark.arms)
    lines = (line for file in folder.glob("trace*.jsonl") for line in file.read_text().splitlines())
    done = sum(json.loads(line)["kind"] == "request" for line in lines)
    state = THERE if done >= total else BEGUN if done else MISSING
    return Step(f"run: {done} of {total} requests measured", state, str(folder))
