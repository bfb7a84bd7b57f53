"""The one way a part is fitted: progress, CSV and wandb, early stopping, and a state that survives a kill.

``folder/last.ckpt`` is the resumable state (every ``checkpoint_every`` optimiser steps and at SIGTERM / Ctrl-C),
``folder/best.ckpt`` the best so far by ``monitor``. A run that starts over in the folder goes on from ``last.ckpt``
and ends with the same parameters: the data order comes from the seed, the loader's position is part of the state, the
random state of a step depends on the step alone, and no validation is lost or made twice.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO

from pacer.data.batching import Loader
from pacer.errors import PacerError
from pacer.settings import LoggerSettings, TrainerSettings
from pacer.stopping import Stopped, stop_requested

log = logging.getLogger(__name__)


class AtomicCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it, so a kill never leaves half a file."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        temporary = Path(f"{path}.part")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.save(checkpoint, temporary)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise PacerError(f"cannot write {path} ({error})", remedy="free disk space and run again") from error
        os.replace(temporary, path)


class Steps(Checkpoint):
    """Per step: a fresh random state that depends on the step alone; state saved on time, on signals, at the deadline.

    Where a validation is due the state is saved after it: Lightning never makes up for one that a resumed run has yet
    to make. (A ``Checkpoint``, so that its hooks come after those that keep the best parameters and the patience.)

    Args:
        last: file of the state. interval: batches between validations.
    """

    def __init__(self, settings: TrainerSettings, last: Path, interval: int) -> None:
        self.settings, self.last, self.interval = settings, last, interval
        self.spent, self._saved, self._began = 0.0, -1, time.monotonic()
        self._late = self._after_validation = False
        self._sigterm = signal.getsignal(signal.SIGTERM)

    def state_dict(self) -> dict[str, Any]:
        return {"spent": self.spent + time.monotonic() - self._began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.spent = state["spent"]

    def on_train_start(self, *_: Any) -> None:
        # Lightning's own answer to SIGTERM ends the process at the next batch, state saved or not
        if threading.current_thread() is threading.main_thread() and self._sigterm is not None:
            signal.signal(signal.SIGTERM, self._sigterm)

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        torch.manual_seed(self.settings.seed * 1_000_003 + trainer.fit_loop.epoch_loop.total_batch_idx)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._saved or trainer.fit_loop._should_accumulate():
            return  # inside an accumulation: gradients are not part of the state
        minutes = self.settings.max_minutes
        self._late = minutes is not None and self.spent + time.monotonic() - self._began > 60 * minutes
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
        stop = stop_requested()
        if stop or self._late or trainer.global_step % self.settings.checkpoint_every == 0:
            self._saved = trainer.global_step
            trainer.save_checkpoint(self.last)
        if stop:
            raise Stopped(f"state saved in {self.last}")


def loggers(settings: LoggerSettings, folder: Path) -> list[Logger]:
    """CSV beside the checkpoints, wandb if asked for (``offline`` writes a folder that ``wandb sync`` uploads)."""
    found: list[Logger] = []
    if settings.csv:
        found.append(CSVLogger(folder, name="metrics"))  # a version per start: it would delete what is there
    if settings.wandb != "disabled":
        found.append(
            WandbLogger(
                project=settings.project, group=settings.group, save_dir=folder, offline=settings.wandb == "offline",
                name=folder.name,
            )
        )  # fmt: skip
    return found


def optimiser_steps(batches: int, accumulate: int, max_steps: int | None = None) -> int:
    """ceil(batches / accumulate), no more than ``max_steps``."""
    steps = math.ceil(batches / accumulate)
    return min(steps, max_steps) if max_steps else steps


@contextmanager
def memory_errors(settings: TrainerSettings) -> Iterator[None]:
    """Says which setting makes a step smaller when the device or the machine has no memory left for it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # PyTorch: OutOfMemoryError on a device, a RuntimeError on a CPU
        known = isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error)
        if not known:
            raise
        raise PacerError(
            "out of memory in a training step: trainer.tokens_per_batch", value=settings.tokens_per_batch,
            remedy="set it lower (and trainer.accumulate higher)",
        ) from error  # fmt: skip


def fit(
    module: lightning.LightningModule,
    train: Loader,
    validation: Loader,
    settings: TrainerSettings,
    logger: LoggerSettings,
    folder: Path,
    *,
    maximise: bool = True,
    stored: torch.dtype | None = None,
) -> dict[str, float]:
    """Train to the end, or go on from where a killed run was; the module ends with the best parameters.

    Args:
        stored: the dtype that the part is saved in: its parameters are rounded to it before the last validation, so
            that the metrics are those of the file.

    Returns:
        The validation metrics of the best parameters, and the optimiser steps made.

    Raises:
        Stopped: a signal came; the state is saved and the same call goes on from it.
    """
    total = optimiser_steps(len(train), settings.accumulate, settings.max_steps)
    if total == 0 or len(validation) == 0:
        raise PacerError("nothing to train or validate on", value=f"{len(train)} batches", remedy="use more texts")
    checks = max(1, round(total / settings.val_every))
    last = folder / "last.ckpt"
    mode = "max" if maximise else "min"
    interval = max(1, min(len(train), total // checks * settings.accumulate))  # batches
    best = ModelCheckpoint(
        folder, "best", monitor=settings.monitor, mode=mode, save_weights_only=True, enable_version_counter=False,
        save_on_train_epoch_end=False,
    )  # fmt: skip
    callbacks: list[Callback] = [best, Steps(settings, last, interval), TQDMProgressBar(refresh_rate=5)]
    if settings.patience:
        callbacks.append(
            EarlyStopping(settings.monitor, mode=mode, patience=settings.patience, check_on_train_epoch_end=False)
        )
    trainer = lightning.Trainer(
        accelerator="auto", devices=1, max_epochs=1, max_steps=total,
        precision="bf16-mixed" if settings.precision == "bf16" else "32-true",
        accumulate_grad_batches=settings.accumulate, gradient_clip_val=settings.clip,
        val_check_interval=interval, num_sanity_val_steps=0,
        logger=loggers(logger, folder), callbacks=callbacks, plugins=[AtomicCheckpoints()],
        log_every_n_steps=10, enable_model_summary=False, default_root_dir=folder, use_distributed_sampler=False,
    )  # fmt: skip
    log.info("%d batches, %d optimiser steps, warm-up %d", len(train), total, max(1, round(settings.warmup * total)))
    with warnings.catch_warnings():  # Lightning's advice on workers and intervals does not apply to our loaders
        warnings.filterwarnings("ignore", module="lightning")
        try:
            with memory_errors(settings):
                trainer.fit(module, train, validation, ckpt_path=last if last.is_file() else None, weights_only=False)
        except SystemExit as ended:
            if isinstance(ended.__context__, KeyboardInterrupt):  # Lightning exits with 1, the verb has its own code
                raise KeyboardInterrupt from None
            raise
    state = torch.load(best.best_model_path or last, map_location="cpu", weights_only=True)
    module.load_state_dict(state["state_dict"])
    if stored is not None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(parameter.to(stored))
    with memory_errors(settings):
        metrics = trainer.validate(module, validation, verbose=False)[0]
    return {**metrics, "steps": float(state["global_step"])}
