"""What a training shows while it runs: steps, rate, time left, the loss and the last validation's figures."""

from __future__ import annotations

import time
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from pacer.work.progress import progress

READ_SECONDS = 1.0  # reading figures waits for the device


class Shown(Callback):
    """A bar on a terminal, lines elsewhere: of what modules log with ``prog_bar``.

    Args:
        steps: optimiser steps of the whole training. minutes: after which it ends in any case.
    """

    def __init__(self, steps: int, minutes: float | None) -> None:
        self.steps, self.what = steps, "training" if minutes is None else f"training, at most {minutes:g} min"
        self.bar: Any = None
        self._read = 0.0

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.bar = progress(self.steps, self.what, "step", initial=trainer.global_step)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if time.monotonic() - self._read > READ_SECONDS:
            self._figures(trainer)
        self.bar.update(trainer.global_step - self.bar.n)

    def on_train_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._figures(trainer)
        self.bar.close()

    def on_exception(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.close()

    def _figures(self, trainer: lightning.Trainer) -> None:
        self._read = time.monotonic()
        found = trainer.progress_bar_metrics
        self.bar.set_postfix_str(", ".join(f"{name} {value:.3g}" for name, value in found.items()), refresh=False)
