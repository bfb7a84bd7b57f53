"""Texts that a tiny target really wrote, a draft that agrees now and then, and simulated rounds on them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from pacer.data.corpus import Text
from pacer.data.labels import Rounds, draft_rounds
from pacer.decoding.request import Request, Result
from pacer.models.draft import TrainableDraft
from pacer.models.stack import Stack
from tests.tiny import generate, make_decoder, near, prompts, tiny_model

NEW = 36


@functools.cache
def target() -> Stack:
    return Stack(tiny_model())


@functools.cache
def draft() -> Stack:
    return Stack(near(tiny_model(), scale=0.012))


@functools.cache
def reduced_draft(size: int = 40) -> Stack:
    """Two layers of the target under a head of every id below ``size``."""
    return TrainableDraft(target(), [0, 1], torch.arange(size)).merged()


def requests(count: int, new: int = NEW, stop_ids: Sequence[int] = (), seed: int = 0) -> list[Request]:
    lengths = [3 + (5 * i) % 11 for i in range(count)]
    return [Request(f"text-{i}", ids, new, frozenset(stop_ids)) for i, ids in enumerate(prompts(lengths, seed=seed))]


def as_text(result: Result) -> Text:
    return Text(result.request.id, f"task{len(result.request.prompt_ids) % 2}", list(result.request.prompt_ids),
                result.ids, result.finish != "eos")  # fmt: skip


@functools.cache
def written(count: int, new: int = NEW, stop_ids: tuple[int, ...] = (), seed: int = 0) -> tuple[Text, ...]:
    """The target's own greedy texts."""
    return tuple(map(as_text, generate(make_decoder(target()), requests(count, new, stop_ids, seed), 4)))


def path(text: Text) -> list[int]:
    return [*text.prompt_ids, *text.output_ids]


def rounds_at(
    text: Text, starts: Sequence[int], gamma: int, stop_ids: Sequence[int] = (), by: Stack | None = None
) -> Rounds:
    """Rounds that start after so many output tokens."""
    first = len(text.prompt_ids)
    return draft_rounds(by or draft(), text, torch.tensor([first + s for s in starts]), gamma, stop_ids)
