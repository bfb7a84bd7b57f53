"""Methods that draft from the target's own states: a decoder for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pacer.choices import HEADS
from pacer.decoding.build import speculative
from pacer.decoding.drafters.feature import FeatureDrafter
from pacer.decoding.lane import Lane
from pacer.decoding.loop import Decoder
from pacer.errors import UnsupportedError
from pacer.methods.rules import draft_rule, price_key
from pacer.settings import MethodSettings, SamplingSettings

if TYPE_CHECKING:
    from pacer.assemble import Models

FEATURE_DRAFTER = "feature"


def feature_decoder(method: MethodSettings, models: Models, sampling: SamplingSettings) -> Decoder:
    """A decoder for a method whose drafter is fed by the target, over shared models; its caches are its own.

    Raises:
        UnsupportedError: there is no such drafter, or none of what the length rule needs.
    """
    target, stack, block = models.target, models.feature, models.block
    if stack is None:
        raise UnsupportedError(f"method {method.name} needs a drafter fed by the target", remedy="set model.feature")
    reader = Lane(target, block=block)
    judges = {name: models.judges.get((name, FEATURE_DRAFTER)) for name in ("preverifier", *HEADS)}
    parts = {**judges, "draft": stack, "prices": models.prices.get(price_key(method))}
    controller = draft_rule(method.name, method.controller, parts)
    if controller is None:
        return Decoder(target, None, sampling, models.text, reader, shares_prefixes=block is not None)
    record = controller.reads_record
    drafter = FeatureDrafter(stack, target.vocab_size, sampling, reader, record=record, block=block)
    return speculative(target, drafter, controller, sampling, models.text, block=block, reader=reader)
