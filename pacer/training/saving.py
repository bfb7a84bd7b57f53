"""States of a training: whole or not there, after each so many steps, when asked to stop, at the deadline."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from pacer.errors import PacerError
from pacer.files import write_atomic
from pacer.settings import TrainerSettings
from pacer.training.ranks import rank, world
from pacer.work.stopping import Stopped, stop_requested


class AtomicCheckpoints(TorchCheckpointIO):
    """A kill never leaves half a file, and a full disk is one line."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_atomic(Path(path), partial(torch.save, checkpoint))


class Steps(Checkpoint):
    """Per step: a fresh random state that depends on the step alone; state saved on time, on signals, at the deadline.

    Where a validation is due the state is saved after it: Lightning never makes up for one that a resumed run has yet
    to make. (A ``Checkpoint``, so that its hooks come after those that keep the best parameters and the patience.)

    Args:
        last: file of the state. interval: batches between validations. batches: to train on, of all processes.
    """

    def __init__(self, settings: TrainerSettings, last: Path, interval: int, batches: int) -> None:
        self.settings, self.last, self.interval, self.batches = settings, last, interval, batches
        self.batch = 0  # among those of all processes
        self.spent, self._saved, self._began = 0.0, -1, time.monotonic()
        self._late = self._after_validation = False
        self._sigterm = signal.getsignal(signal.SIGTERM)

    def state_dict(self) -> dict[str, Any]:
        return {"spent": self.spent + time.monotonic() - self._began, "ranks": world()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.spent, there = state["spent"], state.get("ranks", 1)
        if there != world():
            raise PacerError(
                "this training was begun by another number of processes", value=world(), allowed=str(there),
                remedy=f"set trainer.devices and trainer.nodes as then, or delete {self.last} to begin anew",
            )  # fmt: skip

    def on_train_start(self, *_: Any) -> None:
        # Lightning's own answer to SIGTERM ends the process at the next batch, state saved or not
        if threading.current_thread() is threading.main_thread() and self._sigterm is not None:
            signal.signal(signal.SIGTERM, self._sigterm)

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.batch = trainer.fit_loop.epoch_loop.total_batch_idx * world() + rank()
        torch.manual_seed(self.settings.seed * 1_000_003 + self.batch)

    def on_before_backward(self, trainer: lightning.Trainer, module: lightning.LightningModule, loss: Tensor) -> None:
        if self.batch >= self.batches:
            loss.mul_(0.0)  # what fills up the last round of the processes (Loader.share) teaches nothing

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._saved or trainer.fit_loop._should_accumulate():
            return  # inside an accumulation: gradients are not part of the state
        minutes = self.settings.max_minutes
        late = minutes is not None and self.spent + time.monotonic() - self._began > 60 * minutes
        self._late = trainer.strategy.reduce_boolean_decision(late, all=False)
        if self._late:
            trainer.should_stop = True  # Lightning validates once more and ends
        if self._late or (batch_idx + 1) % self.interval == 0:
            self._after_validation = True
        else:
            self._save(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self._after_validation:
            self._after_validation = False
            # at the end of the patience nothing is saved: a state does not say that training is over
            if self._late or not trainer.should_stop:
                self._save(trainer)

    def _save(self, trainer: lightning.Trainer) -> None:
        stop = trainer.strategy.reduce_boolean_decision(stop_requested(), all=False)  # of any process
        if stop or self._late or trainer.global_step % self.settings.checkpoint_every == 0:
            self._saved = trainer.global_step
            trainer.save_checkpoint(self.last)
        if stop:
            raise Stopped(f"state saved in {self.last}")
