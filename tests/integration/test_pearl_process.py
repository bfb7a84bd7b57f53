"""Drafting beside the target in a process of its own: its core, its weights, its end; and where none can run."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pacer.decoding import concurrent, contention
from pacer.decoding.build import beside, speculative
from pacer.decoding.concurrent import Beside
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request
from pacer.errors import DecodingError
from pacer.settings import SamplingSettings
from tests.pearls import DRAFT, NEW, PROMPTS, TARGET, WANTED, in_turn, pearl, requests, rounds, skip_measuring, thread
from tests.tiny import generate


@pytest.fixture
def measured() -> None:
    """For tests that measure both sides."""


@pytest.fixture(autouse=True)
def unmeasured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_measuring(request, monkeypatch)


def test_where_nothing_can_run_beside_it_drafts_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrent, "cores", lambda: 1)
    decoder = beside(TARGET, DRAFT, 3)
    with pytest.warns(UserWarning, match="pearl drafts in turn, not beside the target: .*one core") as caught:
        results = decoder.generate(requests())
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    in_threads = beside(TARGET, DRAFT, 3, worker=thread)
    others = in_threads.generate(requests())
    assert [(r.ids, rounds(r)) for r in results] == [(r.ids, rounds(r)) for r in others]
    assert [r.ids for r in decoder.generate(requests())] == WANTED, "no second warning: it would be an error here"
    assert pearl(decoder).report()["worker"] == "in turn"
    pearl(in_threads).close()


@pytest.mark.parametrize(("threads", "cores", "left"), [(2, 2, 1), (1, 2, 1), (8, 8, 7), (4, 8, 4), (2, 1, 1)])
def test_a_process_of_its_own_has_a_core_of_its_own(
    threads: int, cores: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contention, "cores", lambda: cores)
    assert contention.spare_threads(threads) == left


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pid: int, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


@pytest.fixture(scope="module")
def process() -> Iterator[Decoder]:
    """A decoder whose draft is written in a process of its own: it takes seconds to start, so tests share it."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (concurrent, contention):
            patch.setattr(module, "cores", lambda: 2)
        decoder = beside(TARGET, DRAFT, 3)
        decoder.generate(requests())  # starts it
        yield decoder


@pytest.mark.slow
def test_in_a_process_of_its_own(process: Decoder, measured: None) -> None:
    for batch in (1, 4):
        assert [r.ids for r in generate(process, requests(), batch)] == WANTED
    stream = process.generate([*requests(), Request("again", PROMPTS[1], NEW)], slots=2)
    in_thread = beside(TARGET, DRAFT, 3, worker=thread)
    others = in_thread.generate([*requests(), Request("again", PROMPTS[1], NEW)], slots=2)
    assert [(r.ids, rounds(r)) for r in stream] == [(r.ids, rounds(r)) for r in others]
    pearl(in_thread).close()
    assert torch.get_num_threads() == 1
    report = pearl(process).report()
    assert report["worker"] == "process" and report["rows"] == 2


def test_its_weights_are_shared_and_signals_to_the_group_do_not_end_it(process: Decoder) -> None:
    """A draft that is changed here changes there."""
    worker = pearl(process).worker
    assert isinstance(worker, Beside) and worker.pid is not None and alive(worker.pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, number)
    before = DRAFT.head.weight.clone()
    assert DRAFT.head.weight.is_shared()
    DRAFT.head.weight.copy_(-before)
    try:
        results = process.generate(requests())
        turned = beside(TARGET, DRAFT, 3, worker=in_turn).generate(requests())
        assert [r.ids for r in results] == WANTED
        assert [rounds(r) for r in results] == [rounds(r) for r in turned]
    finally:
        DRAFT.head.weight.copy_(before)
    assert [rounds(r) for r in process.generate(requests())] != [rounds(r) for r in turned]


def test_it_ends_when_it_is_killed_and_with_its_decoder(process: Decoder) -> None:
    worker = pearl(process).worker
    assert isinstance(worker, Beside) and worker.pid is not None
    pid = worker.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DecodingError, match=r"the draft's process ended: 'exit code -9'"):
        process.generate(requests())
    assert gone(pid) and worker.pid is None
    assert not [p for p in concurrent.multiprocessing.active_children() if p.pid == pid]


ENDLESS = """
from pacer.decoding import concurrent, contention
from pacer.decoding.build import beside
from pacer.decoding.request import Request
from tests.tiny import near, tiny_model, tiny_stack
from pacer.models.stack import Stack

if __name__ == "__main__":
    concurrent.cores = contention.cores = lambda: 2
    decoder = beside(tiny_stack(layers=2), Stack(near(tiny_model(layers=2))), 4)
    decoder.generate([Request("r", [1, 2], 20)])
    print(decoder.proposer.worker.pid, flush=True)
    while True:
        decoder.generate([Request("r", [1, 2], 100)])
"""


@pytest.mark.slow
def test_it_does_not_outlive_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    parent = subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        pid = int(parent.stdout.readline())
        time.sleep(0.5)
        assert alive(pid)
    finally:
        parent.kill()
        parent.communicate(timeout=60)
    assert gone(pid)


def test_the_draft_of_an_ordinary_loop_is_the_same_model() -> None:
    """Sharing moves weights; whoever else decodes with them sees no difference."""
    from pacer.decoding.controllers.fixed import Fixed

    drafter = ModelDrafter(DRAFT, TARGET.vocab_size, SamplingSettings())
    results = speculative(TARGET, drafter, Fixed(3)).generate(requests())
    assert [r.ids for r in results] == WANTED and any(sum(line["accepted"]) for r in results for line in r.rounds)
    gc.collect()
