"""The stage that turns labelled rounds into a pre-verifier with tuned controller values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from pacer.assemble import Models
from pacer.choices import HEADS
from pacer.data.batching import Loader
from pacer.data.corpus import Text
from pacer.data.labels import Rounds
from pacer.data.packing import Packed, first_fit, pack, packed_length
from pacer.errors import ConfigError
from pacer.models.preverifier import Preverifier, save_preverifier
from pacer.settings import Settings
from pacer.training.fit import fit, steps_of
from pacer.training.preverify import PreverifierModule, calibrate
from pacer.training.states import States, read_states, store_states

Pair = tuple[Text, Rounds]
PACK_LENGTH = 1024  # places of a packed row: attention grows with its square, padding shrinks with it


def packed_batches(pairs: Sequence[Pair], budget: int, *, seed: int, epochs: int = 1) -> list[list[list[int]]]:
    """Batches of packed rows of item indices, shuffled by the seed alone; all epochs one after the other."""
    lengths = [packed_length(*pair) for pair in pairs]
    batches: list[list[list[int]]] = []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(seed * 1000 + epoch)
        order = torch.randperm(len(pairs), generator=generator).tolist()
        rows = [[order[i] for i in row] for row in first_fit([lengths[i] for i in order], min(PACK_LENGTH, budget))]
        rows.sort(key=lambda row: sum(lengths[i] for i in row))  # rows of a batch are alike in length
        groups: list[list[list[int]]] = []
        for row in rows:
            longest = sum(lengths[i] for i in row)
            if groups and longest * (len(groups[-1]) + 1) <= budget:
                groups[-1].append(row)
            else:
                groups.append([row])
        batches += [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
    return batches


def in_pieces(pairs: Sequence[Pair], longest: int) -> list[Pair]:
    """Texts that take more than ``longest`` places as several, each with some of the rounds and no more path than they
    see. A round that does not fit with its own path stays alone: nothing is left out."""
    found: list[Pair] = []
    for text, rounds in pairs:
        if packed_length(text, rounds) <= longest:
            found.append((text, rounds))
            continue
        groups: list[list[int]] = []
        for i in torch.argsort(rounds.starts).tolist():
            places = int(rounds.starts[i] + rounds.counts[[*groups[-1], i]].sum()) if groups else longest + 1
            if places <= longest:
                groups[-1].append(i)
            else:
                groups.append([i])
        for group in groups:
            seen = int(rounds.starts[group[-1]]) - len(text.prompt_ids)
            found.append((replace(text, output_ids=text.output_ids[:seen]), rounds.pick(torch.tensor(group))))
    return found


def packed_loader(
    pairs: Sequence[Pair], batches: list[list[list[int]]], label: str, device: torch.device, states: States | None
) -> Loader:
    """Packed batches on the device, with the draft's stored states where there are some."""

    def collate(rows: list[list[int]]) -> Packed:
        produced = None if states is None else [[read_states(states, i) for i in row] for row in rows]
        return pack([[pairs[i] for i in row] for row in rows], label, produced).to(device)

    return Loader(batches, collate)


def prepared(pairs: Sequence[Pair], settings: Settings, tail: int | None = None) -> list[Pair]:
    """What is packed: rounds no longer than ``tail`` past the rejection (None: all), in pieces that fit a batch."""
    if tail is not None:
        pairs = [(text, rounds.trimmed(tail)) for text, rounds in pairs]
    pieces = in_pieces(pairs, settings.trainer.tokens_per_batch)
    return [pair for pair in pieces if bool(pair[1].labels(settings.preverifier.label)[1].any())]


def train_preverifier(
    models: Models, pairs: Sequence[Pair], held_out: Sequence[Pair], settings: Settings, folder: Path, *, command: str
) -> Path:
    """Train, tune (b, t0, ρ) on the held-out rounds, save; returns ``folder/preverifier``.

    Args:
        settings: ``settings.preverifier`` is what is trained, a head too; ``trainer.part`` says which.
    """
    assert models.draft is not None
    own, part = settings.preverifier, settings.trainer.part
    placeless = own.attention == "none" and not own.index_embedding  # what it says does not depend on the place
    longest = settings.labels.gamma
    if longest > own.gamma_max or (longest < own.gamma_max and not placeless):
        raise ConfigError(
            f"labels.gamma and {part}.gamma_max differ", value=longest,
            allowed=f"up to {own.gamma_max}" if placeless else str(own.gamma_max),
            remedy="label drafts as long as the longest to be judged",
        )  # fmt: skip
    torch.manual_seed(settings.trainer.seed)
    module = Preverifier(models.draft, settings.preverifier)
    trainer = settings.trainer
    texts, rounds = len(pairs), sum(len(r.starts) for _, r in pairs)
    learned = prepared(pairs, settings, settings.labels.tail)
    checked = prepared(held_out, settings)
    calibrate(module, [rounds for _, rounds in learned])
    batches = packed_batches(learned, trainer.tokens_per_batch, seed=trainer.seed, epochs=trainer.epochs)
    checks = packed_batches(checked, trainer.tokens_per_batch, seed=0)

    def loader(part: Sequence[Pair], order: list[list[list[int]]]) -> Loader:
        stages, draft = Path(settings.paths.runs) / "stages", module.draft
        states = store_states(stages, draft, part) if trainer.cache_states else None
        return packed_loader(part, order, settings.preverifier.label, draft.device, states)

    steps = steps_of(trainer, len(batches))
    trained = PreverifierModule(module, trainer, steps, settings.costs)
    figures = fit(trained, loader(learned, batches), loader(checked, checks), trainer, settings.logger, folder)
    extra: dict[str, Any] = {
        "part": part, "label": own.label, "temperature": settings.labels.temperature,
        "tuned": trained.tuned, "texts": texts, "rounds": rounds,
        "steps": int(figures.pop("steps")), "costs": asdict(settings.costs), "validation": figures, "command": command,
    }  # fmt: skip
    return save_preverifier(folder / "preverifier", module, models.target, extra, card(extra))


def card(extra: dict[str, Any]) -> str:
    """The model card: what it is, how it was made, what was measured."""
    lines = "\n".join(f"- {name}: {value:.4f}" for name, value in sorted(extra["validation"].items()))
    title = f"Acceptance head {extra['part']}" if extra["part"] in HEADS else "Pre-verification layer"
    tuned = f"Tuned on held-out rounds at the costs {extra['costs']}: {extra['tuned']}.\n" if extra["tuned"] else ""
    return (
        f"# {title}\n\n"
        f"Trained on {extra['rounds']} simulated rounds of {extra['texts']} texts ({extra['steps']} optimiser steps), "
        f"{extra['label']} labels at temperature {extra['temperature']}.\n{tuned}\n"
        f"Made by:\n\n    {extra['command']}\n\nValidation (held-out texts):\n{lines}\n"
    )
