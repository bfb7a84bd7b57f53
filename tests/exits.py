"""Toys for self-speculation: models whose exits often agree with them, and decoders over their exits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from pacer.decoding.build import Stage, speculative
from pacer.decoding.controllers.base import Controller
from pacer.decoding.controllers.buffer import BufferRule, Enough
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.drafters.exits import ConfidentExits
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.ladder import Ladder
from pacer.decoding.loop import Decoder
from pacer.models.exit_stack import ExitStack
from pacer.models.exits import ExitHead, make_exits
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings
from tests.tiny import tiny_model

LAYERS, DEPTHS = 6, (2, 4)
# What a layer adds to its input, by the names of each family.
WRITES = re.compile(r"\.(o_proj|down_proj|out_proj|fc2|attention\.dense|dense_4h_to_h)\.(weight|bias)$")


def early_model(family: str = "llama", layers: int = LAYERS, fade: float = 0.5, **options: Any) -> PreTrainedModel:
    """A random model whose later layers say less and less: its exits agree with it now and then."""
    model = tiny_model(family, layers, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if WRITES.search(name):
                parameter.mul_(fade ** int(name.partition("layers.")[2].partition(".")[0]))
    return model


def heads(target: Stack, depths: Sequence[int] = DEPTHS, kind: str = "shared", seed: int = 5) -> list[ExitHead]:
    """Exit heads, with a little noise on what is theirs."""
    found = list(make_exits(target, kind, depths).values())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for head in found:
            for parameter in head.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
            head.eval().requires_grad_(False)
    return found


def ladder_of(target: Stack, found: Sequence[ExitHead]) -> Ladder:
    """The target cut at these exits."""
    adapters = {head.layer: head.adapter for head in found if head.adapter is not None}
    return Ladder(target, (*(head.layer for head in found), target.n_layers), adapters)


def self_speculative(
    target: Stack,
    found: Sequence[ExitHead],
    controller: Controller | None = None,
    rules: Sequence[BufferRule | int] = (4,),
    sampling: SamplingSettings | None = None,
    bonus: bool = True,
    share: float = 1.0,
) -> Decoder:
    """LayerSkip with one head, HiSpec with two, more stages with more; ``rules``: N_i of the exits that verify."""
    sampling, controller = sampling or SamplingSettings(), controller or Fixed(2)
    ladder = ladder_of(target, found)
    exits = [ExitStack(target, head) for head in found]
    record = controller.reads_record
    drafter = ModelDrafter(exits[0], target.vocab_size, sampling, record=record, reader=ladder.rungs[0])
    stages = [
        Stage(own, Enough(rule) if isinstance(rule, int) else rule, bonus)
        for own, rule in zip(exits[1:], rules, strict=True)
    ]
    return speculative(target, drafter, controller, sampling, None, ladder, stages, share)


def confident(
    target: Stack, found: Sequence[ExitHead], t: float, gamma_max: int = 5, sampling: SamplingSettings | None = None
) -> Decoder:
    """AdaDecode."""
    sampling, ladder = sampling or SamplingSettings(), ladder_of(target, found)
    drafter = ConfidentExits([ExitStack(target, h) for h in found], ladder, target.vocab_size, sampling, t)
    return speculative(target, drafter, Fixed(gamma_max), sampling, None, ladder)
