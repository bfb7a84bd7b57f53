"""What a pass of the target and a pass of the draft take, each with the machine to itself and while both run.

Parallel drafting counts on the draft's time being free. It is not where both want the same cores or the same memory
bus, so the slow-down of each side is measured and kept beside the results (PACER's argument against PEARL).

Shapes: R rows, n tokens of a target pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from pacer.decoding.concurrent import Beside, InTurn, Worker, cores
from pacer.decoding.lane import Lane
from pacer.decoding.writer import Draftsman, Job, Room
from pacer.models.stack import Stack

TEXT, DRAWS, PASSES = 64, 48, 5  # tokens of the text, draws timed (so the longest chunk), target passes timed
LEAST = 2  # of a chunk of one token nothing is ever gained


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass for ``rows`` rows; the target's is over a chunk of ``width`` tokens.

    ``alone``: with all threads of the run. ``beside``: as they are while both run; in turn, that is alone.
    """

    worker: str  # process | thread | in turn
    rows: int
    width: int
    target_alone: float
    target_beside: float
    draft_alone: float
    draft_beside: float

    @property
    def gamma(self) -> int:
        """Draft passes to a target pass: round(1/c), c measured while both run (arXiv 2408.11850)."""
        return min(DRAWS, max(LEAST, round(self.target_beside / self.draft_beside)))


def spare_threads(threads: int) -> int:
    """Threads that are left to the target beside a process that has one core."""
    return max(1, min(threads, cores() - 1))


@torch.inference_mode()
def measure(target: Stack, draftsman: Draftsman, worker: Worker, rows: int, gamma: int | None) -> Costs:
    """Measure both sides on a made-up text; seconds, outside any measured time.

    Args:
        gamma: tokens of the target's pass; None: as many as balance, found by measuring twice.
    """
    width, found = gamma or LEAST, None
    for _ in range(1 if gamma is not None else 2):
        found = _measure(target, draftsman, worker, rows, width)
        width = found.gamma
    assert found is not None
    return found


def _measure(target: Stack, draftsman: Draftsman, worker: Worker, rows: int, width: int) -> Costs:
    context = min(target.context, draftsman.stack.context)
    length = min(TEXT, context // 2)
    width = min(width, context - length)
    text = [i % min(target.vocab_size, draftsman.stack.vocab_size) for i in range(length)]
    draws = min(DRAWS, context - length) + 1  # the first reads the text
    room, job = Room(rows, length + draws), Job([0] * rows, [text] * rows, [draws] * rows)
    run = _target_pass(target, rows, length, width, draftsman.block)
    run(), run()  # warm
    alone = [run() for _ in range(PASSES)]
    draft_alone = _draft_alone(draftsman, room, job)
    if not isinstance(worker, Beside):
        return Costs(worker.kind, rows, width, *[median(alone)] * 2, *[draft_alone] * 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(spare_threads(threads) if worker.own_process else threads)
    try:
        beside, draft_beside = _both(worker, room, job, run)
    finally:
        torch.set_num_threads(threads)
    return Costs(worker.kind, rows, width, median(alone), beside, draft_alone, draft_beside)


def _target_pass(target: Stack, rows: int, length: int, width: int, block: int | None) -> Callable[[], float]:
    """A verification pass as decoding does it, ``(R, n)`` after ``length`` cached tokens; it returns its seconds."""
    lane = Lane(target, block=block)
    lane.reset(rows, length + width)
    lane.feed_ids(torch.zeros(rows, length, dtype=torch.long, device=target.device), [length] * rows)
    ids = torch.zeros(rows, width, dtype=torch.long, device=target.device)

    def run() -> float:
        lane.lengths = [length] * rows
        start = time.perf_counter()
        target.readout(lane.feed_ids(ids, [width] * rows)).argmax(-1).tolist()  # read by the host: it has passed
        return time.perf_counter() - start

    return run


def _draft_alone(draftsman: Draftsman, room: Room, job: Job) -> float:
    """Seconds of a draft pass in this process, with all its threads."""
    worker = InTurn(draftsman)
    worker.reset(room)
    worker.start(job)
    spent = []
    for _ in range(max(job.draws)):
        worker.next()
        spent.append(worker.spent)
    return median(spent[1:])


def _both(worker: Beside, room: Room, job: Job, run: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a target pass and of a draft pass, while the target runs as long as the draft does."""
    worker.reset(room)
    worker.start(job)
    worker.next()
    passes: list[float] = []
    spent: list[float] = []
    while len(spent) < max(job.draws) - 1:
        passes.append(run())
        while len(spent) < max(job.draws) - 1 and worker.ready():
            worker.next()
            spent.append(worker.spent)
    return median(passes[:-1] or passes), median(spent)  # the draft ended during the last of several passes
