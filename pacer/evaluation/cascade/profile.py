"""What the groups of layers between exits, adapters and heads cost on this machine: a short profile.

Groups and heads are timed one after the other in the order of a pass, so each finds its weights where decoding finds
them; drafting steps are timed several in a row, as they come. All parts take turns, and a time is the median.

Shapes: n tokens of a pass, H width, V ids of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pacer.decoding.lane import Lane
from pacer.evaluation.profiler import timed
from pacer.models.exits import ExitHead
from pacer.models.stack import Stack
from pacer.work.progress import progress
from pacer.work.stopping import check_stop

IN_A_ROW = 4  # drafting steps
Key = tuple[str, int, int, int]  # part, a, b, n


@dataclass(frozen=True)
class RungPoint:
    """Milliseconds of one pass over layers ``a … b − 1`` with n tokens: median and quartiles.

    ``part``: rung (the layers alone) | adapter, head (of the exit at b; of all layers: the model's own head) |
    draft (a drafting step at b) | whole (plain decoding's pass with its head).
    """

    part: str
    a: int
    b: int
    n: int
    median_ms: float
    low_ms: float
    high_ms: float


class _Parts:
    """Everything that is timed, on one row with ``context`` tokens in every cache."""

    def __init__(self, stack: Stack, depths: Sequence[int], heads: Mapping[int, ExitHead], context: int, most: int):
        self.stack, self.heads, self.context = stack, heads, context
        edges = [0, *(depth for depth in depths if depth < stack.n_layers), stack.n_layers]
        self.rungs = {edge: _lane(Lane(stack, *edge), context + most) for edge in pairwise(edges)}
        self.drafts = {layer: _lane(Lane(stack, 0, layer), context + most) for layer in sorted(heads)}
        own = {layer: head.adapter for layer, head in heads.items() if head.adapter is not None}
        self.adapters = {layer: _lane(Lane(adapter), context + most) for layer, adapter in own.items()}
        self.whole = _lane(Lane(stack), context + most)
        self.states = torch.randn(1, most, stack.width, dtype=stack.dtype, device=stack.device)

    def runs(self, widths: Sequence[int]) -> list[tuple[Key, Callable[[], Tensor], int]]:
        """What to time, in order, with how many times in a row."""
        found: list[tuple[Key, Callable[[], Tensor], int]] = []
        for number, n in enumerate(widths):
            for (a, b), lane in self.rungs.items():
                found.append((("rung", a, b, n), self._feed(lane, n), 1))
                if b in self.adapters:
                    found.append((("adapter", a, b, n), self._feed(self.adapters[b], n), 1))
                if b in self.heads or b == self.stack.n_layers:
                    found.append((("head", a, b, n), self._read(b, n), 1))
            found.append((("whole", 0, self.stack.n_layers, 1), self._whole, 1))  # the unit: timed most often
            if number % 6 == 0:
                found += [(("draft", 0, layer, 1), self._draft(layer), IN_A_ROW) for layer in self.drafts]
        return found

    def _feed(self, lane: Lane, n: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            lane.lengths = [self.context]
            return lane.feed(self.states[:, :n], [n])

        return run

    def _read(self, layer: int, n: int) -> Callable[[], Tensor]:
        readout = self.heads[layer].readout if layer in self.heads else self.stack.readout
        return lambda: readout(self.states[:, :n]).max(-1).indices

    def _draft(self, layer: int) -> Callable[[], Tensor]:
        rung, adapter = self._feed(self.drafts[layer], 1), self.adapters.get(layer)

        def run() -> Tensor:
            states = rung()
            if adapter is not None:
                adapter.lengths = [self.context]
                states = adapter.feed(states, [1])
            return self.heads[layer].readout(states).argmax(-1)

        return run

    def _whole(self) -> Tensor:
        self.whole.lengths = [self.context]
        return self.stack.readout(self.whole.feed(self.states[:, :1], [1])).max(-1).indices


def _lane(lane: Lane, capacity: int) -> Lane:
    lane.reset(1, capacity)
    return lane


@torch.inference_mode()
def profile_rungs(
    stack: Stack, depths: Sequence[int], heads: Mapping[int, ExitHead], *, context: int = 256,
    widths: Sequence[int] = tuple(range(1, 18)), repeats: int = 8,
) -> list[RungPoint]:  # fmt: skip
    """Measure the groups between ``depths`` (and to the last layer), every head, a drafting step at every exit.

    Args:
        heads: exit → head; each exit is one of the depths.
        context: tokens in the caches. widths: tokens of a pass. repeats: beside one that warms up.
    """
    runs = _Parts(stack, depths, heads, context, max(widths)).runs(widths)
    times: dict[Key, list[float]] = {key: [] for key, _, _ in runs}
    for repeat in progress(range(repeats + 1), "profiling", "repeat"):
        for key, run, in_a_row in runs:
            spent = timed(run, stack.device, in_a_row, warm=in_a_row > 1)
            if repeat > 0:
                times[key].append(spent)
        check_stop()
    points = []
    for key, values in times.items():
        low, median, high = np.percentile(values, [25, 50, 75]).tolist()
        points.append(RungPoint(*key, median, low, high))
    return points
