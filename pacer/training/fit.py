"""The one way a part is fitted: progress, CSV and wandb, early stopping, and a state that survives a kill.

``folder/last.ckpt`` is the resumable state (every ``checkpoint_every`` optimiser steps and at SIGTERM / Ctrl-C),
``folder/best.ckpt`` the best so far by ``monitor``. A run that starts over in the folder goes on from ``last.ckpt``
and ends with the same parameters: the data order comes from the seed, the loader's position and the random state of a
step are part of the state.
"""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO

from pacer.app import Stopped, stop_requested
from pacer.data.batching import Loader
from pacer.errors import PacerError
from pacer.settings import LoggerSettings, TrainerSettings

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


class Steps(Callback):
    """Per step: a fresh random state that depends on the step alone; state saved on time, on signals, at the deadline."""

    def __init__(self, settings: TrainerSettings, last: Path) -> None:
        self.settings, self.last = settings, last
        self.interrupted, self.spent, self._saved, self._began = False, 0.0, -1, time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return {"spent": self.spent + time.monotonic() - self._began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.spent = state["spent"]

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        torch.manual_seed(self.settings.seed * 1_000_003 + trainer.fit_loop.epoch_loop.total_batch_idx)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step == self._saved or trainer.fit_loop._should_accumulate():
            return  # inside an accumulation: gradients are not part of the state
        self.interrupted = stop_requested()
        late = self.settings.max_minutes is not None and (
            self.spent + time.monotonic() - self._began > 60 * self.settings.max_minutes
        )
        if self.interrupted or late or step % self.settings.checkpoint_every == 0:
            self._saved = step
            trainer.save_checkpoint(self.last)
        if self.interrupted or late:
            trainer.should_stop = True


def loggers(settings: LoggerSettings, folder: Path) -> list[Logger]:
    """CSV beside the checkpoints, wandb if asked for (``offline`` writes a folder that ``wandb sync`` uploads)."""
    found: list[Logger] = []
    if settings.csv:
        found.append(CSVLogger(folder, name="", version="metrics"))
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


def fit(
    module: lightning.LightningModule,
    train: Loader,
    validation: Loader,
    settings: TrainerSettings,
    logger: LoggerSettings,
    folder: Path,
    *,
    maximise: bool = True,
) -> dict[str, float]:
    """Train to the end, or go on from where a killed run was; the module ends with the best parameters.

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
    best = ModelCheckpoint(folder, "best", monitor=settings.monitor, mode=mode, save_weights_only=True, enable_version_counter=False)
    steps = Steps(settings, last)
    callbacks: list[Callback] = [best, steps, TQDMProgressBar(refresh_rate=5)]
    if settings.patience:
        callbacks.append(EarlyStopping(settings.monitor, mode=mode, patience=settings.patience))
    trainer = lightning.Trainer(
        accelerator="auto", devices=1, max_epochs=1, max_steps=total,
        precision="bf16-mixed" if settings.precision == "bf16" else "32-true",
        accumulate_grad_batches=settings.accumulate, gradient_clip_val=settings.clip,
        val_check_interval=max(1, min(len(train), total // checks * settings.accumulate)), num_sanity_val_steps=0,
        logger=loggers(logger, folder), callbacks=callbacks, plugins=[AtomicCheckpoints()],
        log_every_n_steps=10, enable_model_summary=False, default_root_dir=folder, use_distributed_sampler=False,
    )  # fmt: skip
    log.info("%d batches, %d optimiser steps, warm-up %d", len(train), total, max(1, round(settings.warmup * total)))
    with warnings.catch_warnings():  # Lightning's advice on workers and intervals does not apply to our loaders
        warnings.filterwarnings("ignore", module="lightning")
        trainer.fit(module, train, validation, ckpt_path=last if last.is_file() else None, weights_only=False)
    if steps.interrupted:
        raise Stopped(f"state saved in {last}")
    state = torch.load(best.best_model_path or last, map_location="cpu", weights_only=True)
    module.load_state_dict(state["state_dict"])
    metrics = trainer.validate(module, validation, verbose=False)[0]
    return {**metrics, "steps": float(state["global_step"])}
