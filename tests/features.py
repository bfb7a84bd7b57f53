"""Toys for drafting from the target's features: random drafters, one that is the target, and decoders over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pacer.decoding.build import speculative
from pacer.decoding.controllers.base import Controller
from pacer.decoding.drafters.feature import FeatureDrafter, FeatureLane
from pacer.decoding.lane import Lane
from pacer.decoding.loop import Decoder
from pacer.models.feature import FeatureDraft
from pacer.models.feature_stack import FeatureStack
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings
from tests.tiny import proposer, tiny_model


def disturbed(draft: FeatureDraft, scale: float = 0.2, seed: int = 4) -> FeatureDraft:
    """With noise on every part of it: nothing can be left out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return draft.eval().requires_grad_(False)


def random_draft(target: Stack, head_ids: Tensor | None = None, **options: Any) -> FeatureDraft:
    """A drafter that knows nothing."""
    torch.manual_seed(0)
    return disturbed(FeatureDraft(target, head_ids, **options))


def mirror(layers: int = 1, **config: Any) -> PreTrainedModel:
    """A random Llama whose embeddings have a root mean square of 1, which is how a drafter reads them."""
    model = tiny_model("llama", layers, **config)
    with torch.no_grad():
        rows = model.model.embed_tokens.weight
        rows.div_(rows.square().mean(-1, keepdim=True).sqrt())
    return model


def oracle(target: Stack, head_ids: Tensor | None = None, **options: Any) -> FeatureDraft:
    """What drafts as its target of one layer does: that layer, on tokens alone."""
    draft = FeatureDraft(target, head_ids, layer=0, **options)
    with torch.no_grad():
        draft.inputs.weight.copy_(torch.eye(target.width).repeat(1, 2))
        draft.inputs.weight[:, : target.width] = 0
    return draft.eval().requires_grad_(False)


def now_and_then(target: Stack, head_ids: Tensor | None = None, **options: Any) -> FeatureDraft:
    """A drafter that agrees with its target of one layer now and then, and looks at features too."""
    return disturbed(oracle(target, head_ids, **options), 0.06)


def feature_decoder(
    draft: FeatureDraft,
    controller: Controller,
    sampling: SamplingSettings | None = None,
    block: int | None = None,
) -> Decoder:
    """A decoder that drafts from its target's features."""
    sampling, target = sampling or SamplingSettings(), draft.target
    reader = Lane(target, block=block)
    drafter = FeatureDrafter(
        FeatureStack(draft), target.vocab_size, sampling, reader, record=controller.reads_record, block=block
    )
    return speculative(target, drafter, controller, sampling, block=block, reader=reader)


def lane_of(decoder: Decoder) -> FeatureLane:
    """The drafter's memory."""
    drafter = proposer(decoder).drafter
    assert isinstance(drafter, FeatureDrafter) and isinstance(drafter.lane, FeatureLane)
    return drafter.lane
