"""Real parts with their batches, for trainings that take a second: texts, rounds, modules."""

from __future__ import annotations

import lightning
import torch

from pacer.data.batching import Loader, token_batches
from pacer.data.corpus import Text
from pacer.data.labels import Rounds
from pacer.data.packing import pack
from pacer.models.draft import TrainableDraft
from pacer.models.preverifier import Preverifier
from pacer.settings import CostSettings, PreverifierSettings, TrainerSettings
from pacer.training.distill import DistillModule, collate_texts
from pacer.training.fit import steps_of
from pacer.training.preverifier_run import packed_batches
from pacer.training.preverify import PreverifierModule
from tests.texts import draft, path, rounds_at, target, written

GAMMA = 4


def texts(count: int = 12) -> tuple[tuple[Text, ...], tuple[Text, ...]]:
    """To learn from, and held out."""
    return written(count, new=20), written(4, new=20, seed=9)


def pairs(of: tuple[Text, ...]) -> list[tuple[Text, Rounds]]:
    return [(text, rounds_at(text, [1, 4, 9, 15], GAMMA)) for text in of]


def part(name: str, settings: TrainerSettings) -> tuple[lightning.LightningModule, Loader, Loader]:
    """A real module, the same each time, with its batches."""
    learn, check = texts()
    if name == "draft":
        model = TrainableDraft(target(), [0, 1], torch.arange(97))
        sets = [token_batches([len(path(t)) for t in of], 70, seed=1, epochs=e) for of, e in ((learn, 2), (check, 1))]
        head = torch.arange(97)
        loaders = [
            Loader(b, lambda rows, of=of: collate_texts([of[i] for i in rows], head, 0.15))
            for of, b in zip((learn, check), sets, strict=True)
        ]
        steps = steps_of(settings, len(loaders[0]))
        return DistillModule(model, settings, steps), *loaders
    drafter = draft()
    torch.manual_seed(5)
    module = Preverifier(drafter, PreverifierSettings(gamma_max=GAMMA, width=16))
    groups = [pairs(of) for of in (learn, check)]
    sets = [packed_batches(of, 120, seed=1, epochs=e) for of, e in zip(groups, (2, 1), strict=True)]
    loaders = [
        Loader(b, lambda rows, of=of: pack([[of[i] for i in row] for row in rows], "survival"))
        for of, b in zip(groups, sets, strict=True)
    ]
    steps = steps_of(settings, len(loaders[0]))
    return PreverifierModule(module, settings, steps, CostSettings()), *loaders
