"""The stage that turns labelled rounds into a pre-verifier with tuned controller values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pacer.assemble import Models
from pacer.data.batching import Loader
from pacer.data.corpus import Text
from pacer.data.labels import Rounds
from pacer.data.packing import first_fit, pack, packed_length
from pacer.errors import ConfigError
from pacer.models.preverifier import Preverifier, save_preverifier
from pacer.settings import Settings
from pacer.training.fit import fit, optimiser_steps
from pacer.training.preverify import PreverifierModule

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


def _loader(pairs: Sequence[Pair], batches: list[list[list[int]]], label: str, device: torch.device) -> Loader:
    return Loader(batches, lambda rows: pack([[pairs[i] for i in row] for row in rows], label).to(device))


def train_preverifier(
    models: Models, pairs: Sequence[Pair], held_out: Sequence[Pair], settings: Settings, folder: Path, *, command: str
) -> Path:
    """Train, tune (b, t0, ρ) on the held-out rounds, save; returns ``folder/preverifier``."""
    assert models.draft is not None
    if settings.labels.gamma != settings.preverifier.gamma_max:
        raise ConfigError(
            "labels.gamma and preverifier.gamma_max differ", value=settings.labels.gamma,
            allowed=str(settings.preverifier.gamma_max), remedy="label drafts as long as the longest to be judged",
        )  # fmt: skip
    torch.manual_seed(settings.trainer.seed)
    module = Preverifier(models.draft, settings.preverifier)
    label = settings.preverifier.label
    pairs = [(text, rounds.trimmed(settings.labels.tail)) for text, rounds in pairs]
    batches = packed_batches(
        pairs, settings.trainer.tokens_per_batch, seed=settings.trainer.seed, epochs=settings.trainer.epochs
    )
    checks = packed_batches(held_out, settings.trainer.tokens_per_batch, seed=0)
    steps = optimiser_steps(len(batches), settings.trainer.accumulate, settings.trainer.max_steps)
    trained = PreverifierModule(module, settings.trainer, steps, settings.costs)
    device = models.draft.device
    figures = fit(
        trained, _loader(pairs, batches, label, device), _loader(held_out, checks, label, device),
        settings.trainer, settings.logger, folder,
    )  # fmt: skip
    extra: dict[str, Any] = {
        "label": label, "tuned": trained.tuned, "texts": len(pairs),
        "rounds": sum(len(r.starts) for _, r in pairs), "steps": int(figures.pop("steps")),
        "costs": asdict(settings.costs), "validation": figures, "command": command,
    }  # fmt: skip
    return save_preverifier(folder / "preverifier", module, models.target, extra, card(extra))


def card(extra: dict[str, Any]) -> str:
    """The model card: what it is, how it was made, what was measured."""
    lines = "\n".join(f"- {name}: {value:.4f}" for name, value in sorted(extra["validation"].items()))
    return (
        "# Pre-verification layer\n\n"
        f"Trained on {extra['rounds']} simulated rounds of {extra['texts']} texts ({extra['steps']} optimiser steps), "
        f"{extra['label']} labels.\nTuned on held-out rounds at the costs {extra['costs']}: {extra['tuned']}.\n\n"
        f"Made by:\n\n    {extra['command']}\n\nValidation (held-out texts):\n{lines}\n"
    )
