"""What each part costs on this machine: time of a pass by tokens, batch and context.

Shapes: B rows, n tokens of a pass.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pacer.assemble import Models
from pacer.decoding.distributions import signals
from pacer.decoding.lane import Lane
from pacer.decoding.record import Record
from pacer.errors import ConfigError
from pacer.models.copying import Copied, copied_last, supported
from pacer.models.stack import Stack
from pacer.settings import CostSettings, ProfileSettings
from pacer.work.progress import progress
from pacer.work.stopping import check_stop

Parts = dict[tuple[str, int], Callable[[], Tensor]]
# Passes timed in a row: a draft model runs several times between target passes, so its weights are warm as often.
IN_A_ROW = {"draft": 4}


@dataclass(frozen=True)
class Point:
    """Milliseconds of one pass: median and the quartiles."""

    part: str  # target | draft | signals | head | draft_head | preverifier
    n: int
    batch: int
    context: int
    median_ms: float
    low_ms: float
    high_ms: float


def target_pass(stack: Stack, n: int, batch: int, context: int) -> Callable[[], Tensor]:
    """A verification pass as decoding does it: n tokens after ``context`` cached ones, logits and argmax of all."""
    lane = Lane(stack)
    lane.reset(batch, context + n)
    ids = torch.randint(0, min(1000, stack.vocab_size), (batch, n), device=stack.device)

    def run() -> Tensor:
        lane.lengths = [context] * batch
        return stack.readout(lane.feed_ids(ids, [n] * batch)).max(-1).indices

    return run


def draft_pass(stack: Stack, n: int, batch: int, context: int) -> Callable[[], Tensor]:
    """A draft pass as decoding does it: the candidate for copying is looked up in the context, the last place is read.

    Without copying there is nothing to look up."""
    lane = Lane(stack)
    lane.reset(batch, context + n)
    ids = torch.randint(0, min(1000, stack.vocab_size), (batch, context + n), device=stack.device)
    length = torch.full((batch,), context + n, device=stack.device)

    def run() -> Tensor:
        lane.lengths = [context] * batch
        copied = Copied(*(part[:, None] for part in copied_last(ids, length))) if stack.copying else None
        return stack.readout(lane.feed_ids(ids[:, -n:], [n] * batch)[:, -1:], copied).argmax(-1)

    return run


def _signals(stack: Stack, batch: int, context: int) -> Callable[[], Tensor]:
    """What a drawn token takes more where a controller looks at its signals: they are made and written down."""
    logits = stack.readout(torch.randn(batch, 1, stack.width, dtype=stack.dtype, device=stack.device))
    ids = torch.zeros(batch, context + 2, dtype=torch.long, device=stack.device)
    record, places = Record(ids, stack), torch.full((batch, 1), context, device=stack.device)
    length = torch.full((batch,), context, device=stack.device)
    known = copied_last(ids, length)

    def run() -> Tensor:
        found = known if stack.copying else copied_last(ids, length)  # a draft that copies has looked it up already
        token = logits.argmax(-1)
        record.drew(places, signals(logits, token), supported(token, Copied(*(part[:, None] for part in found))))
        return token

    return run


def _head(stack: Stack, n: int, batch: int) -> Callable[[], Tensor]:
    states = torch.randn(batch, n, stack.width, dtype=stack.dtype, device=stack.device)
    return lambda: stack.readout(states)


def _preverifier(models: Models, n: int, batch: int, context: int) -> Callable[[], Tensor]:
    """One call on n entries."""
    module = models.preverifier
    assert module is not None
    lane = Lane(module.stack)
    lane.reset(batch, context + n)
    states = torch.randn(batch, n, module.draft.width, dtype=module.draft.dtype, device=module.draft.device)
    ids = torch.zeros(batch, n, dtype=torch.long, device=states.device)
    index = torch.ones_like(ids)
    signal = torch.zeros(batch, n, device=states.device)

    def run() -> Tensor:
        lane.lengths = [context if module.sees_prefix else 0] * batch
        features = module.select(lambda name: signal, index)
        hidden = lane.feed(module.entries(states, ids, index, features), [n] * batch)
        return module.logits(hidden, features).float().sigmoid()

    return run


def _parts(models: Models, settings: ProfileSettings, batch: int, context: int) -> Parts:
    parts: Parts = {}
    parts["head", 1] = _head(models.target, 1, batch)
    for n in range(1, settings.gamma_max + 2):
        parts["target", n] = target_pass(models.target, n, batch, context)
    if models.draft is not None:
        for n in (1, 2):
            parts["draft", n] = draft_pass(models.draft, n, batch, context)
        parts["signals", 1] = _signals(models.draft, batch, context)
        parts["draft_head", 1] = _head(models.draft, 1, batch)
    if models.preverifier is not None:
        for n in range(1, min(8, settings.gamma_max) + 1):
            parts["preverifier", n] = _preverifier(models, n, batch, context)
    return parts


def timed(run: Callable[[], Tensor], device: torch.device, times: int, warm: bool = True) -> float:
    """Milliseconds of a pass, over ``times`` in a row.

    Args:
        warm: after one untimed, since other parts have just used the caches.
    """
    if warm:
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / times


@torch.inference_mode()
def profile(models: Models, settings: ProfileSettings) -> list[Point]:
    """Measure all parts; each repeat goes through all of them, so drift of the machine meets all alike."""
    points = []
    cells = list(itertools.product(settings.batches, settings.contexts))
    with progress(len(cells) * (settings.repeats + 1), "profiling", "repeat") as bar:
        for batch, context in cells:
            parts = _parts(models, settings, batch, context)
            times: dict[tuple[str, int], list[float]] = {key: [] for key in parts}
            for repeat in range(settings.repeats + 1):
                for key, run in parts.items():
                    spent = timed(run, models.target.device, IN_A_ROW.get(key[0], 1))
                    if repeat > 0:  # the first one warms up
                        times[key].append(spent)
                bar.update()
                check_stop()
            for (part, n), values in times.items():
                low, median, high = np.percentile(values, [25, 50, 75]).tolist()
                points.append(Point(part, n, batch, context, median, low, high))
    return points


def costs(points: Sequence[Point], rest: float = CostSettings().rest) -> CostSettings:
    """Costs in units of a one-token target pass, from the smallest batch and the middle context."""
    batch = min(p.batch for p in points)
    contexts = sorted({p.context for p in points})
    context = contexts[len(contexts) // 2]
    table = {(p.part, p.n): p.median_ms for p in points if p.batch == batch and p.context == context}
    one = table["target", 1]
    widths = sorted(n for part, n in table if part == "target")
    slope = float(np.polyfit(widths, [table["target", n] / one for n in widths], 1)[0]) if len(widths) > 1 else 0.0
    calls = [value for (part, _), value in table.items() if part == "preverifier"]
    return CostSettings(
        draft=table.get(("draft", 1), 0.0) / one, preverify=float(np.median(calls)) / one if calls else 0.0,
        token=max(0.0, slope), rest=rest,
    )  # fmt: skip


def points_of(path: Path, name: str, *others: str) -> list[Point]:
    """The points of a profile that `pacer.profile` wrote.

    Args:
        name: the setting that names the file. others: what that setting may be instead.

    Raises:
        ConfigError: there is none, or it is something else.
    """
    try:
        return [Point(**point) for point in json.loads(path.read_text())["points"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        allowed = ", ".join(["a profile.json of python -m pacer.profile", *others])
        raise ConfigError(f"{name} is no profile ({error})", value=str(path), allowed=allowed) from error


def as_json(points: Sequence[Point]) -> dict[str, Any]:
    """Points and the costs that follow from them, as plain data."""
    return {"points": [asdict(point) for point in points], "costs": asdict(costs(points))}
