"""Decoders from parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pacer.decoding.clock import Clock
from pacer.decoding.concurrent import Beside, Worker
from pacer.decoding.controllers.base import Controller
from pacer.decoding.controllers.buffer import BufferRule
from pacer.decoding.drafters.base import Drafter
from pacer.decoding.drafters.pearl import Pearl
from pacer.decoding.ladder import Ladder
from pacer.decoding.lane import Lane, Reader
from pacer.decoding.loop import Decoder
from pacer.decoding.propose import Proposer, Proposes
from pacer.decoding.staged import Staged
from pacer.decoding.verifier import Verifier
from pacer.decoding.writer import Draftsman
from pacer.errors import ConfigError
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings

Decode = Callable[[Sequence[int]], str]


@dataclass
class Stage:
    """An exit that verifies before the target does.

    Args:
        exit: the exit seen as a model; the first stage reads the second rung of the ladder, and so on.
        rule: when its buffer is full.
        bonus: it adds its own token after full acceptance too.
    """

    exit: Stack
    rule: BufferRule
    bonus: bool = True


def speculative(
    target: Stack,
    drafter: Drafter,
    controller: Controller,
    sampling: SamplingSettings | None = None,
    decode: Decode | None = None,
    ladder: Ladder | None = None,
    stages: Sequence[Stage] = (),
    share: float = 1.0,
    block: int | None = None,
    reader: Reader | None = None,
    last_only: bool = False,
) -> Decoder:
    """Draft, then verify: by the stages in order, then by the target.

    Args:
        ladder: whose rungs the drafter and the stages read; the target is its top. None: nothing is shared.
        share: of the rows that are drafting, how many must have a full buffer before these are verified. 1: all
            (lockstep); the smallest: each as soon as it is full.
        block: tokens to a block of the target's paged memory where no ladder has one; None: contiguous.
        reader: of the target, where the drafter listens to it; None: one that is made here.
        last_only: of a draft the target checks the last token alone (lossy).

    Raises:
        ConfigError: parts that do not fit together.
    """
    sampling = sampling or SamplingSettings()
    if drafter.sampling != sampling:
        raise ConfigError("the drafter samples otherwise than the decoder", value=drafter.sampling)
    if controller.reads_record and not drafter.keeps_record:
        raise ConfigError("the controller reads the drafter's record", remedy="build the drafter with record=True")
    if not 0 < share <= 1:
        raise ConfigError("share of full buffers", value=share, allowed="in (0, 1]")
    if reader is None:
        reader = ladder.rungs[-1] if ladder is not None else Lane(target, block=block)
    paged = block if ladder is None else ladder.lanes[0].block
    readers = (reader, *(ladder.rungs if ladder is not None else ()))
    listened = any(one.heard is not None for one in readers)
    shares = paged is not None and not listened  # who listens must hear the whole prompt
    if controller.gamma_max == 0:  # plain decoding
        for one in readers:  # the drafter that listens never decodes
            one.heard = None
        return Decoder(target, None, sampling, decode, reader, shares_prefixes=shares)
    clock = Clock(target.device)
    proposer: Proposes = Proposer(drafter, controller, target.context - len(stages), clock)
    for k, stage in enumerate(stages):
        assert ladder is not None, "exits are read from the target's ladder"
        check = Verifier(
            ladder.rungs[k + 1], stage.exit.readout, sampling, target.vocab_size, target.device, stage.exit.head_ids
        )  # fmt: skip
        context = target.context - (len(stages) - 1 - k)
        proposer = Staged(proposer, check, stage.rule, context, clock, bonus=stage.bonus, share=share)
    return Decoder(target, proposer, sampling, decode, reader, clock, shares, last_only=last_only)


def beside(
    target: Stack,
    draft: Stack,
    gamma: int | None = None,
    sampling: SamplingSettings | None = None,
    decode: Decode | None = None,
    block: int | None = None,
    worker: Callable[[Draftsman], Worker] | None = None,
) -> Decoder:
    """Draft while the target verifies.

    Args:
        gamma: tokens drawn beside a target pass; None: measured. worker: where the draft runs; None: in a process of
            its own, on a GPU on a stream of its own, and where neither can be, in turn.

    Raises:
        UnsupportedError: sampling is wanted.
    """
    sampling, clock = sampling or SamplingSettings(), Clock(target.device)
    draftsman = Draftsman(draft, target.vocab_size, sampling, block)
    pearl = Pearl(target, draftsman, (worker or Beside)(draftsman), clock, gamma)
    reader = Lane(target, block=block)
    return Decoder(target, pearl, sampling, decode, reader, clock, block is not None, pearl.session)
