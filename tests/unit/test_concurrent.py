"""The worker's protocol: what a writer draws whatever it was told before, orders that void each other, ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pacer.decoding import concurrent
from pacer.decoding.concurrent import Beside, CannotRun, InTurn, Worker
from pacer.decoding.serve import one_line
from pacer.decoding.writer import Draftsman, Job, Room, Writer
from pacer.errors import DecodingError
from pacer.models.draft import TrainableDraft
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings
from tests.tiny import VOCAB, plain_greedy, table_model, tiny_stack

STACK = tiny_stack(layers=1)
TEXT = [5, 17, 40, 17]


def copying_stack() -> Stack:
    draft = TrainableDraft(tiny_stack(layers=2), [0, 1], torch.arange(0, VOCAB, 2), copying=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.copying.parameters() if draft.copying else ():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return draft.merged()


COPYING = copying_stack()


def draftsman(stack: Stack = STACK, **sampling: Any) -> Draftsman:
    return Draftsman(stack, VOCAB, SamplingSettings(**sampling))


def thread(stack: Stack = STACK) -> Beside:
    return Beside(draftsman(stack), own_process=False)


def workers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if "in_thread" in t.name]


def drawn(worker: Worker | Writer, draws: int) -> list[list[int]]:
    return [worker.next() if not isinstance(worker, Writer) else worker.draw() for _ in range(draws)]


@pytest.mark.parametrize("make", [lambda d: InTurn(d), lambda d: Beside(d, own_process=False)])
def test_rows_have_their_own_texts_and_lengths(make: Callable[[Draftsman], Worker]) -> None:
    worker = make(draftsman())
    worker.reset(Room(3, 40))
    worker.start(Job([0, 0, 0], [TEXT, [9], []], [4, 2, 0]))
    ids = drawn(worker, 4)
    assert [row[0] for row in ids] == plain_greedy(STACK.model, TEXT, 4)
    assert [row[1] for row in ids] == [*plain_greedy(STACK.model, [9], 2), 0, 0] and [row[2] for row in ids] == [0] * 4
    assert worker.spent > 0
    worker.rest()
    worker.close()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_what_a_writer_was_told_before_changes_nothing(data: st.DataObject) -> None:
    """Rollback is a length, also where the draft looks back at its text to copy from it, and under a penalty."""
    stack = data.draw(st.sampled_from([STACK, COPYING]))
    man = draftsman(stack, repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])))
    writer = man.writer()
    writer.reset(Room(2, 60))
    texts: list[list[int]] = [[], []]
    for _ in range(data.draw(st.integers(1, 4))):
        keep = [data.draw(st.integers(0, len(text))) for text in texts]
        fresh = [data.draw(st.lists(st.integers(0, 6), min_size=k == 0, max_size=5)) for k in keep]
        draws = [data.draw(st.integers(0, 4)) for _ in texts]
        texts = [text[:k] + new for text, k, new in zip(texts, keep, fresh, strict=True)]
        new = man.writer()
        new.reset(Room(2, 60))
        writer.begin(Job(keep, fresh, draws))
        new.begin(Job([0, 0], texts, draws))
        for step in range(max(draws)):
            ids = writer.draw()
            assert ids == new.draw()
            texts = [t + [i] * (n > step) for t, i, n in zip(texts, ids, draws, strict=True)]


def test_another_text_in_a_row_is_not_reached_by_what_was_there() -> None:
    """A masked NaN would still reach it."""
    stack = tiny_stack(layers=1)
    stack.embedding.weight[7] = float("nan")
    writer = draftsman(stack).writer()
    long = [*range(10, 20)]  # another row, for which both are read up to there
    writer.reset(Room(2, 20))
    writer.begin(Job([0, 0], [[3, *[7] * 8], long], [1, 1]))
    writer.draw()
    writer.begin(Job([0, 10], [[3, 4], [5]], [3, 3]))
    assert [ids[0] for ids in drawn(writer, 3)] == plain_greedy(stack.model, [3, 4], 3)


def test_an_order_voids_the_one_before_it() -> None:
    worker = thread()
    worker.reset(Room(1, 60))
    for text in (TEXT, [1, 2], [3]):
        worker.start(Job([0], [text], [30]))
    assert [ids[0] for ids in drawn(worker, 5)] == plain_greedy(STACK.model, [3], 5)
    worker.start(Job([3], [[8]], [2]))
    kept = [3, *plain_greedy(STACK.model, [3], 2)]
    assert [ids[0] for ids in drawn(worker, 2)] == plain_greedy(STACK.model, [*kept, 8], 2)
    worker.start(Job([0], [TEXT], [50]))
    worker.rest()
    assert not worker.ready(), "nothing runs on"
    worker.reset(Room(2, 10))
    worker.start(Job([0, 0], [[3], [4]], [1, 1]))
    assert worker.next() == [plain_greedy(STACK.model, [t], 1)[0] for t in (3, 4)]
    worker.close()


def test_a_worker_ends_with_its_owner_and_begins_anew() -> None:
    before = len(workers())
    worker = thread()
    assert len(workers()) == before, "it starts with its first batch"
    for _ in range(2):
        worker.reset(Room(1, 10))
        assert len(workers()) == before + 1
        worker.close()
        worker.close()
        assert len(workers()) == before
    worker.rest()  # of nothing
    worker.reset(Room(1, 10))
    worker.start(Job([0], [TEXT], [6]))
    del worker
    gc.collect()
    assert len(workers()) == before, "collected while it drafts"


def test_an_error_there_is_one_line_here_and_the_worker_is_gone() -> None:
    before = len(workers())
    worker = thread()
    worker.reset(Room(1, 6))
    worker.start(Job([0], [TEXT], [9]))
    with pytest.raises(DecodingError, match="the draft beside the target failed: 'DecodingError: cache is") as error:
        drawn(worker, 9)
    assert "\n" not in str(error.value) and len(workers()) == before
    worker.reset(Room(1, 20))
    worker.start(Job([0], [TEXT], [2]))
    assert [ids[0] for ids in drawn(worker, 2)] == plain_greedy(STACK.model, TEXT, 2)
    worker.close()
    assert one_line(ValueError("a\n  b")) == "ValueError: a b"


def test_the_other_end_closed_is_an_error_here() -> None:
    worker = thread()
    worker.reset(Room(1, 20))
    body, real = worker._body, worker._pipe
    assert real is not None
    worker._pipe = concurrent.multiprocessing.Pipe()[0]  # its other end is closed at once
    with pytest.raises(DecodingError, match="the draft's process ended"):
        worker.start(Job([0], [TEXT], [1]))
        worker.next()
    body.join(5)
    assert not body.is_alive() and real.closed


class Unshareable(Stack):
    """Cannot be handed to a process."""

    def __init__(self) -> None:
        super().__init__(table_model(torch.eye(4)))
        self.local = lambda: None


def test_where_no_process_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrent, "cores", lambda: 1)
    with pytest.raises(CannotRun, match="one core"):
        Beside(draftsman()).reset(Room(1, 10))
    monkeypatch.setattr(concurrent, "cores", lambda: 2)
    worker = Beside(draftsman(Unshareable()))
    with pytest.raises(CannotRun, match=r"\w+Error: .*lambda"):
        worker.reset(Room(1, 10))
    assert worker.pid is None
    worker.rest()
    worker.close()


def test_cores() -> None:
    assert concurrent.cores() >= 1
