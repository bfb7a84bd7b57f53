"""Drafting beside the target: the target's own greedy text, round by round as PEARL has it, wherever the draft runs."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pacer.decoding import concurrent, contention
from pacer.decoding.build import beside, speculative
from pacer.decoding.concurrent import Beside, InTurn, Worker
from pacer.decoding.contention import Costs
from pacer.decoding.drafters import pearl as pearl_module
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.drafters.pearl import Pearl
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request, Result
from pacer.decoding.writer import Draftsman
from pacer.errors import DecodingError, UnsupportedError
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings
from tests.tiny import generate, make_decoder, near, plain_greedy, prompts, table_model, tiny_model, tiny_stack

LAYERS, NEW = 2, 22
PROMPTS = prompts([5, 14, 8, 1])
TARGET, DRAFT = tiny_stack(layers=LAYERS), Stack(near(tiny_model(layers=LAYERS), 0.005))
WANTED = [plain_greedy(TARGET.model, prompt, NEW) for prompt in PROMPTS]
COSTS = Costs("in turn", 1, 4, 4e-3, 5e-3, 1e-3, 1.25e-3)
Make = Callable[[Draftsman], Worker]


def in_turn(draftsman: Draftsman) -> Worker:
    return InTurn(draftsman)


def thread(draftsman: Draftsman) -> Worker:
    return Beside(draftsman, own_process=False)


@pytest.fixture
def measured() -> None:
    """For tests that measure both sides."""


@pytest.fixture(autouse=True)
def unmeasured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes longer than the rest of a test."""
    if "measured" not in request.fixturenames:
        monkeypatch.setattr(pearl_module, "measure", lambda *_: COSTS)


def requests(new: int = NEW, **options: Any) -> list[Request]:
    return [Request(f"r{i}", prompt, new, **options) for i, prompt in enumerate(PROMPTS)]


def pearl(decoder: Decoder) -> Pearl:
    assert isinstance(decoder.proposer, Pearl)
    return decoder.proposer


def rounds(result: Result) -> list[tuple[int, int, int]]:
    return [(len(line["drafted"]), line["accepted"][0], len(line["emitted"])) for line in result.rounds[1:]]


def simulated(
    target: Sequence[int], draft: Sequence[int], prompt: Sequence[int], gamma: int, new: int
) -> list[tuple[int, int, int]]:
    """PEARL by its definition, on two table models (the next token of each): drafted, accepted, emitted per round."""
    text, chunk, found, left = list(prompt), list[int](), list[tuple[int, int, int]](), new
    while left > 0:
        ahead, last = list[int](), [*text, *chunk][-1]
        for _ in range(min(gamma, left - len(chunk) - 1)):
            ahead.append(last := draft[last])
        accepted, emitted, last = 0, list[int](), text[-1]
        while accepted < len(chunk) and chunk[accepted] == target[last]:
            emitted.append(last := chunk[accepted])
            accepted += 1
        emitted.append(target[last])
        whole = accepted == len(chunk) and len(ahead) > 1 and ahead[0] == emitted[-1]
        found.append((len(chunk), accepted, len(emitted)))
        text, left, chunk = text + emitted, left - len(emitted), ahead[1:] if whole else []
    return found[1:]


def one_hot(table: Sequence[int]) -> Stack:
    return Stack(table_model(8.0 * torch.nn.functional.one_hot(torch.tensor(table), len(table)).float()))


CYCLE = [1, 2, 3, 4, 5, 6, 7, 0]
DRAFTS = {
    "always right": CYCLE,
    "never right": [2, 3, 4, 5, 6, 7, 0, 1],
    "right every other time": [1, 3, 3, 5, 5, 7, 7, 1],
    "wrong once in a while": [1, 2, 3, 4, 5, 6, 0, 0],
}


@pytest.mark.parametrize("make", [in_turn, thread])
@pytest.mark.parametrize("gamma", [2, 4])
@pytest.mark.parametrize("name", DRAFTS)
def test_rounds_are_those_of_the_definition(name: str, gamma: int, make: Make) -> None:
    decoder = beside(one_hot(CYCLE), one_hot(DRAFTS[name]), gamma, worker=make)
    starts = ([0], [3, 3, 1], [6], [2, 5])
    texts = [Request(str(i), start, 21 + i) for i, start in enumerate(starts)]
    for batch in (1, 4):
        for result, start in zip(generate(decoder, texts, batch), starts, strict=True):
            own = [(start[-1] + 1 + k) % 8 for k in range(result.request.max_new_tokens)]
            assert result.ids == own
            assert rounds(result) == simulated(CYCLE, DRAFTS[name], start, gamma, len(own))
            if name == "always right":
                assert all(r == (gamma - 1, gamma - 1, gamma) for r in rounds(result)[:-2])
            if name == "never right":
                assert all(r == (0, 0, 1) for r in rounds(result))
    pearl(decoder).close()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_greedy_identity_for_any_tables(data: st.DataObject) -> None:
    """Any agreement, prompts, budgets, stop ids, rows and γ; one decoder used for two batches."""
    ids = st.integers(0, 4)
    target, draft = (data.draw(st.lists(ids, min_size=5, max_size=5)) for _ in range(2))
    if data.draw(st.booleans()):
        draft = [data.draw(st.sampled_from([t, d])) for t, d in zip(target, draft, strict=True)]
    gamma, slots = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3))
    decoder = beside(one_hot(target), one_hot(draft), gamma, worker=data.draw(st.sampled_from([in_turn, thread])))
    for _ in range(2):
        batch = [
            Request(str(i), data.draw(st.lists(ids, min_size=1, max_size=6)), data.draw(st.integers(1, 14)),
                    data.draw(st.frozensets(ids, max_size=1)))
            for i in range(data.draw(st.integers(1, 4)))
        ]  # fmt: skip
        for result in decoder.generate(batch, slots=slots):
            request, last, own = result.request, result.request.prompt_ids[-1], list[int]()
            while len(own) < request.max_new_tokens and last not in (request.stop_ids if own else ()):
                own.append(last := target[last])
            assert result.ids == own
            if not request.stop_ids:
                assert rounds(result) == simulated(target, draft, request.prompt_ids, gamma, len(own))
    pearl(decoder).close()


@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("make", [in_turn, thread])
def test_output_is_the_targets_own(make: Make, block: int | None) -> None:
    decoder = beside(TARGET, DRAFT, 3, block=block, worker=make)
    for batch in (1, 4):
        assert [r.ids for r in generate(decoder, requests(), batch)] == WANTED
    results = decoder.generate([*requests(), Request("again", PROMPTS[1], NEW)], slots=2)
    assert [r.ids for r in results] == [*WANTED, WANTED[1]]
    assert any(drafted for r in results for drafted, _, _ in rounds(r)), "some chunks were verified"
    for result in results:
        assert [t for line in result.rounds for t in line["emitted"]] == result.ids
        assert {line["stop"] for line in result.rounds} <= {"prefill", "preverify", "postverify", "budget"}
        assert result.seconds == pytest.approx(sum(sum(line["time"].values()) for line in result.rounds))
    pearl(decoder).close()


def test_a_draft_that_is_the_target_fills_every_round() -> None:
    """C18, C20: full acceptance all along, whatever was rolled back."""
    decoder = beside(TARGET, TARGET, 4, worker=thread)
    (result,) = decoder.generate([Request("r", PROMPTS[0], 100)])
    assert result.ids == plain_greedy(TARGET.model, PROMPTS[0], 100)
    assert set(rounds(result)[:-1]) == {(3, 3, 4)} and result.rounds[1]["stop"] == "postverify"
    pearl(decoder).close()


@pytest.mark.parametrize("make", [in_turn, thread])
def test_ends(make: Make) -> None:
    """S29, S33, S34, S37: stop ids inside a chunk, budgets, stop strings, the target's context."""
    stop = WANTED[0][6]
    decoder = beside(TARGET, TARGET, 4, decode=lambda ids: "".join(chr(65 + i % 26) for i in ids), worker=make)
    plain = make_decoder(TARGET, decode=decoder.decode)
    word = decoder.decode(WANTED[1][5:7]) if decoder.decode else ""
    for budget in (1, 2, 5, 200):
        batch = [Request("a", PROMPTS[0], budget, frozenset({stop})), Request("b", PROMPTS[1], budget, stop=(word,)),
                 Request("c", PROMPTS[2], budget), Request("d", [3] * (TARGET.context - 3), budget)]  # fmt: skip
        found, own = decoder.generate(batch), plain.generate(batch)
        assert [(r.ids, r.finish) for r in found] == [(r.ids, r.finish) for r in own]
    assert found[2].finish == found[3].finish == "context"
    pearl(decoder).close()


def test_past_the_drafts_context_with_one_warning() -> None:
    draft = Stack(near(tiny_model(layers=LAYERS, context=24), 0.0))
    decoder = beside(TARGET, draft, 4, worker=in_turn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = decoder.generate(requests())
    assert [r.ids for r in results] == WANTED
    assert [str(w.message) for w in caught] == [
        "the draft model's context of 24 tokens is used up: going on without drafting"
    ]
    assert max(line["committed"] + len(line["drafted"]) for r in results for line in r.rounds if line["drafted"]) <= 25


def test_a_repetition_penalty() -> None:
    """L12."""
    sampling = SamplingSettings(repetition_penalty=1.3)
    own = [r.ids for r in make_decoder(TARGET, sampling=sampling).generate(requests())]
    decoder = beside(TARGET, TARGET, 3, sampling, worker=in_turn)
    results = decoder.generate(requests())
    assert own != WANTED and [r.ids for r in results] == own
    assert {r for result in results for r in rounds(result)[:-2]} == {(2, 2, 3)}, "the draft is penalised alike"


def test_the_loop_itself_never_runs_the_draft() -> None:
    """The loop itself never touches the draft: its tokens come as whole numbers."""
    decoder = beside(TARGET, DRAFT, 3, worker=thread)
    called: list[int] = []
    real = DRAFT.readout

    def readout(states: Any, copied: Any = None) -> Any:
        called.append(threading.get_ident())
        return real(states, copied)

    try:
        DRAFT.readout = readout  # type: ignore[method-assign]  # a spy
        decoder.generate(requests())
    finally:
        del DRAFT.readout
    pearl(decoder).close()
    assert called and threading.get_ident() not in called


def test_temperature_is_refused() -> None:
    """S39."""
    with pytest.raises(UnsupportedError, match=r"greedy.*temperature=0\.7.*allowed: sampling\.temperature=0"):
        beside(TARGET, DRAFT, 3, SamplingSettings(temperature=0.7))


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


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_whatever_ends_a_batch_ends_the_worker_and_gives_threads_back(error: type[BaseException]) -> None:
    decoder = beside(TARGET, DRAFT, 4, worker=thread)
    threads = torch.get_num_threads()

    def stop(*_: Any) -> None:
        torch.set_num_threads(threads + 1)  # as while a process of its own drafts
        raise error("stop")

    with pytest.raises(error):
        decoder.generate(requests(), on_commit=stop)
    assert torch.get_num_threads() == threads
    worker = pearl(decoder).worker
    assert isinstance(worker, Beside) and worker._body is None
    assert [r.ids for r in decoder.generate(requests())] == WANTED
    pearl(decoder).close()


def test_an_error_of_the_draft_names_itself() -> None:
    draft = Stack(near(tiny_model(layers=LAYERS), 0.005))
    decoder = beside(TARGET, draft, 3, worker=thread)
    draft.head = None  # type: ignore[assignment]
    with pytest.raises(DecodingError, match=r"the draft beside the target failed: .TypeError: .NoneType") as found:
        decoder.generate(requests())
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("make", [in_turn, thread])
def test_both_sides_are_measured(make: Make, measured: None) -> None:
    """Outside the batch's time, once for each number of rows; γ follows from it unless it is given."""
    decoder = beside(TARGET, DRAFT, worker=make)
    first = decoder.generate(requests()[:1])[0]
    assert first.ids == WANTED[0]
    costs = pearl(decoder).costs[1]
    assert costs.rows == 1 and min(costs.target_alone, costs.target_beside, costs.draft_alone, costs.draft_beside) > 0
    assert (costs.target_beside == costs.target_alone) == (make is in_turn)
    assert max(r[0] for r in rounds(first)) < costs.gamma
    assert pearl(decoder).report() == {**vars(costs), "gamma": costs.gamma}
    decoder.generate(requests()[:2])
    decoder.generate(requests()[:1])
    assert sorted(pearl(decoder).costs) == [1, 2] and pearl(decoder).costs[1] is costs
    given = beside(TARGET, DRAFT, 5, worker=make)
    given.generate(requests()[:1])
    assert pearl(given).costs[1].width == pearl(given).report()["gamma"] == 5
    for each in (decoder, given):
        pearl(each).close()


def test_gamma_is_the_ratio_of_costs_while_both_run() -> None:
    assert COSTS.gamma == 4 and replace(COSTS, draft_beside=2e-3).gamma == 2, "2.5 rounds to even"
    assert replace(COSTS, draft_beside=1.0).gamma == 2 and replace(COSTS, draft_beside=1e-9).gamma == contention.DRAWS


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
