"""What tests of drafting beside the target share: models, what the target writes, ways to run the draft."""

from __future__ import annotations

from typing import Any

import pytest

from pacer.decoding.concurrent import Beside, InTurn, Worker
from pacer.decoding.contention import Costs
from pacer.decoding.drafters import pearl as pearl_module
from pacer.decoding.drafters.pearl import Pearl
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request, Result
from pacer.decoding.writer import Draftsman
from pacer.models.stack import Stack
from tests.tiny import near, plain_greedy, prompts, tiny_model, tiny_stack

LAYERS, NEW = 2, 22
PROMPTS = prompts([5, 14, 8, 1])
TARGET, DRAFT = tiny_stack(layers=LAYERS), Stack(near(tiny_model(layers=LAYERS), 0.005))
WANTED = [plain_greedy(TARGET.model, prompt, NEW) for prompt in PROMPTS]
COSTS = Costs("in turn", 1, 4, 4e-3, 5e-3, 1e-3, 1.25e-3)


def in_turn(draftsman: Draftsman) -> Worker:
    return InTurn(draftsman)


def thread(draftsman: Draftsman) -> Worker:
    return Beside(draftsman, own_process=False)


def skip_measuring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
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
