"""A stage of training is finished once, by one process or by those that train together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pacer.artifacts import Stage
from pacer.settings import TrainerSettings
from pacer.stopping import check_stop
from pacer.training.ranks import AnotherWrites, agreed, rank


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
