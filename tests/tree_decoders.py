"""Decoders of trees by a script on tiny models, and requests for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pacer.decoding.lane import Lane
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request, Row
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings
from tests.tiny import near, plain_greedy, prompts, tiny_model, tiny_stack
from tests.trees import Nodes, Scripted

NEW = 18
PROMPTS = prompts([5, 14, 8, 1])
TARGET, DRAFT = tiny_stack(layers=2), Stack(near(tiny_model(layers=2)))
SHAPE = [-1, -1, -1, 0, 0, 1, 3, 5, 5, 8]  # nine branches; the last of the deepest is 1, 5, 8, 9


def _requests(new: int = NEW, **options: Any) -> list[Request]:
    return [Request(f"r{i}", prompt, new, **options) for i, prompt in enumerate(PROMPTS)]


def _hash(row: Row, node: int) -> int:
    return (7 * len(row.committed) + 13 * node + row.committed[-1]) % 97


def _texts(new: int, model: Any = None) -> Callable[[Row], list[int]]:
    """What the target itself writes after a row's text."""
    model = TARGET.model if model is None else model
    whole = {tuple(prompt): [*prompt, *plain_greedy(model, prompt, new)] for prompt in PROMPTS}
    return lambda row: whole[tuple(row.request.prompt_ids)][len(row.committed) :]


def _decoder(grow: Callable[[Row], Nodes], stack: Stack = TARGET, block: int | None = None, **options: Any) -> Decoder:
    sampling = options.pop("sampling", SamplingSettings())
    proposer = Scripted(grow, stack.context, stack.vocab_size, **options)
    return Decoder(stack, proposer, sampling, None, Lane(stack, block=block), shares_prefixes=block is not None)
