"""The one way a part is fitted: progress, CSV and wandb, early stopping, and a state that survives a kill.

``folder/last.ckpt`` is the resumable state (every ``checkpoint_every`` optimiser steps and at SIGTERM / Ctrl-C),
``folder/best.ckpt`` the best so far by ``monitor``. A run that starts over in the folder goes on from ``last.ckpt``
and ends with the same parameters: the data order comes from the seed, the loader's position is part of the state, the
random state of a step depends on the step alone, and no validation is lost or made twice.

Several processes (`pacer.training.ranks`) take one batch each where one process accumulates as many: the same batches
under the same random numbers, so the same parameters. Each validates on everything, and rank 0 writes.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy

from pacer.data.batching import Loader
from pacer.errors import PacerError
from pacer.reporting.wandb_runs import wandb_run
from pacer.settings import LoggerSettings, TrainerSettings
from pacer.training.ranks import AnotherWrites, rank, wanted, world
from pacer.training.saving import AtomicCheckpoints, Steps
from pacer.training.shown import Shown
from pacer.training.split import load_weights, split_strategy

log = logging.getLogger(__name__)


@contextmanager
def loggers(settings: LoggerSettings, folder: Path) -> Iterator[list[Logger]]:
    """CSV beside the checkpoints, wandb if asked for; its run is this training's alone."""
    found: list[Logger] = []
    if settings.csv:
        found.append(CSVLogger(folder, name="metrics"))  # a version per start: it would delete what is there
    with wandb_run(settings, folder, "train") if rank() == 0 else nullcontext() as run:
        if run is not None:
            run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
            found.append(WandbLogger(experiment=run, save_dir=folder))
        yield found


def strategy(settings: TrainerSettings) -> Strategy | str:
    """How the processes of a training work together, in Lightning's words."""
    if world() == 1:
        return "auto"
    return split_strategy() if settings.strategy == "fsdp" else DDPStrategy()


def optimiser_steps(batches: int, accumulate: int, max_steps: int | None = None) -> int:
    """ceil(batches / accumulate), no more than ``max_steps``."""
    steps = math.ceil(batches / accumulate)
    return min(steps, max_steps) if max_steps else steps


def steps_of(settings: TrainerSettings, batches: int) -> int:
    """Optimiser steps of a training on so many batches, by all its processes together."""
    return optimiser_steps(batches, settings.accumulate * wanted(settings), settings.max_steps)


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
        AnotherWrites: all is done, and another process has the same parameters and writes them.
    """
    if world() != wanted(settings):
        raise PacerError(
            "this part is trained by several processes: trainer.devices × trainer.nodes", value=wanted(settings),
            allowed=str(world()), remedy="train it by python -m pacer.train, which starts them, with the same settings",
        )  # fmt: skip
    if len(train) == 0 or len(validation) == 0:
        raise PacerError("nothing to train or validate on", value=f"{len(train)} batches", remedy="use more texts")
    total = steps_of(settings, len(train))
    log.info("%d batches, %d optimiser steps, warm-up %d", len(train), total, max(1, round(settings.warmup * total)))
    with loggers(logger, folder) as kept, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")  # its advice on workers does not apply to our loaders
        trainer, best = _trainer(settings, len(train), folder, kept, maximise)
        _run(trainer, module, train.share(rank(), world()), validation, settings, folder / "last.ckpt")
        state = torch.load(best.best_model_path or folder / "last.ckpt", map_location="cpu", weights_only=True)
        load_weights(module, state["state_dict"])
        if stored is not None:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.copy_(parameter.to(stored))
        with memory_errors(settings):
            metrics = trainer.validate(module, validation, verbose=False)[0]
    if rank():
        raise AnotherWrites
    return {**metrics, "steps": float(state["global_step"])}


def _trainer(
    settings: TrainerSettings, batches: int, folder: Path, kept: list[Logger], maximise: bool
) -> tuple[lightning.Trainer, ModelCheckpoint]:
    """Lightning's trainer for so many batches of all processes, and what keeps the best parameters."""
    total, share = steps_of(settings, batches), -(-batches // world())
    checks = max(1, round(total / settings.val_every))
    interval = max(1, min(share, total // checks * settings.accumulate))  # batches of a process
    mode = "max" if maximise else "min"
    best = ModelCheckpoint(
        folder, "best", monitor=settings.monitor, mode=mode, save_weights_only=True, enable_version_counter=False,
        save_on_train_epoch_end=False,
    )  # fmt: skip
    steps = Steps(settings, folder / "last.ckpt", interval, batches)
    callbacks: list[Callback] = [best, steps]
    if rank() == 0:
        callbacks.append(Shown(total, settings.max_minutes))
    if settings.patience:
        callbacks.append(
            EarlyStopping(settings.monitor, mode=mode, patience=settings.patience, check_on_train_epoch_end=False)
        )
    trainer = lightning.Trainer(
        accelerator="auto", devices=settings.devices, num_nodes=settings.nodes, strategy=strategy(settings),
        max_epochs=1, max_steps=total, precision="bf16-mixed" if settings.precision == "bf16" else "32-true",
        accumulate_grad_batches=settings.accumulate, gradient_clip_val=settings.clip,
        val_check_interval=interval, num_sanity_val_steps=0, logger=kept, callbacks=callbacks,
        # the environment is named: Lightning would take any job of Slurm for one that it is to requeue
        plugins=[AtomicCheckpoints(), LightningEnvironment() if world() == 1 else TorchElasticEnvironment()],
        log_every_n_steps=10, enable_model_summary=False, enable_progress_bar=False, default_root_dir=folder,
        use_distributed_sampler=False,
    )  # fmt: skip
    return trainer, best


def _run(
    trainer: lightning.Trainer,
    module: lightning.LightningModule,
    train: Loader,
    validation: Loader,
    settings: TrainerSettings,
    last: Path,
) -> None:
    try:
        with memory_errors(settings):
            trainer.fit(module, train, validation, ckpt_path=last if last.is_file() else None, weights_only=True)
    except SystemExit as ended:
        if isinstance(ended.__context__, KeyboardInterrupt):  # Lightning exits with 1, the verb has its own code
            raise KeyboardInterrupt from None
        raise
