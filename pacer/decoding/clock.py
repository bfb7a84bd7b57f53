"""Time by phase. On a GPU events are recorded and read once per round, so measuring does not stop the queue."""

from __future__ import annotations

import time

import torch

PHASES = ("draft", "preverify", "intermediate", "target", "rest")


class Clock:
    """``lap(phase)`` books the time since the last lap under ``phase``; :meth:`read` returns seconds and restarts."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._laps: list[tuple[str, object]] = []
        self.start()

    def start(self) -> None:
        self._laps = [("start", self._now())]

    def lap(self, phase: str) -> None:
        self._laps.append((phase, self._now()))

    def read(self) -> dict[str, float]:
        """Seconds per phase since the start. On a GPU call it after a host read, when all laps have passed."""
        seconds = dict.fromkeys(PHASES, 0.0)
        if self.cuda:
            torch.cuda.current_stream().synchronize()  # not the device: a draft may run on a stream of its own
        for (_, before), (phase, after) in zip(self._laps, self._laps[1:], strict=False):
            seconds[phase] += self._between(before, after)
        self._laps = [("start", self._laps[-1][1])]
        return seconds

    def _now(self) -> object:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, before: object, after: object) -> float:
        if isinstance(before, float) and isinstance(after, float):
            return after - before
        return before.elapsed_time(after) / 1000.0  # type: ignore[attr-defined]  # torch.cuda.Event is untyped
