"""What stages of training share: who trains (each is finished once), by which settings, what they are named by."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from omegaconf import OmegaConf

from pacer.artifacts import Stage
from pacer.provenance import command_text
from pacer.resources import resource
from pacer.settings import Settings, TrainerSettings
from pacer.training.ranks import AnotherWrites, agreed, rank
from pacer.work.stopping import check_stop


def trainer_key(trainer: TrainerSettings) -> dict[str, Any]:
    """What a trained part depends on of how it was trained: two processes do what one does that accumulates twice."""
    key = asdict(trainer)
    devices, nodes, _ = (key.pop(name) for name in ("devices", "nodes", "strategy"))
    return {**key, "accumulate": trainer.accumulate * devices * nodes}


def train_once(stage: Stage, train: Callable[[], None]) -> None:
    """Finish a stage, unless it is finished.

    Args:
        train: trains and writes; where several processes train together, all call it and rank 0 writes.
    """
    if rank():
        _follow(stage, train)
    elif not agreed(not stage.complete):
        return
    else:
        with stage.lock():
            if agreed(not stage.complete):  # another job may have finished it meanwhile
                train()
                (stage.folder / "last.ckpt").unlink(missing_ok=True)  # the optimiser's moments and all have served
                stage.finish()
                agreed()


def _follow(stage: Stage, train: Callable[[], None]) -> None:
    """What rank 0 decides."""
    if agreed() and agreed():
        with contextlib.suppress(AnotherWrites):
            train()
        agreed()
    while not stage.complete:  # another machine may see the files a little later
        check_stop()
        time.sleep(0.2)


def command_line() -> str:
    """The command of this process, for cards, tables and plots."""
    return command_text(sys.argv)


def trainer_of(settings: Settings, part: str) -> TrainerSettings:
    """How a part is trained: by the settings if they are that part's, else by conf/trainer within their limits."""
    given = settings.trainer
    if given.part == part:
        return given
    file = OmegaConf.load(resource("conf") / "trainer" / f"{part}.yaml")
    found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainerSettings), file))
    assert isinstance(found, TrainerSettings)
    return replace(
        found, max_steps=given.max_steps, max_minutes=given.max_minutes, precision=given.precision, seed=given.seed,
        devices=given.devices, nodes=given.nodes,
    )  # fmt: skip
