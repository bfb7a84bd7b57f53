"""From logits to the distribution a token is really drawn from. Pure functions.

Shapes: … any leading dimensions, B rows, g drafted tokens, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pacer.errors import UnsupportedError
from pacer.settings import SamplingSettings

LEAST = -100.0  # a log-probability that is as good as none


def check_sampling(sampling: SamplingSettings) -> None:
    """Refuse values outside their ranges."""
    ranges = {
        "temperature": (sampling.temperature == 0 or sampling.temperature >= 1e-6, "0 (greedy) or ≥ 1e-6"),
        "top_k": (sampling.top_k >= 0, "≥ 0 (0: off)"),
        "top_p": (0 < sampling.top_p <= 1, "in (0, 1]"),
        "repetition_penalty": (sampling.repetition_penalty > 0, "> 0"),
    }
    for name, (ok, allowed) in ranges.items():
        if not ok:
            raise UnsupportedError(f"sampling.{name} out of range", value=getattr(sampling, name), allowed=allowed)


def penalised(logits: Tensor, seen: Tensor | None, penalty: float) -> Tensor:
    """Repetition penalty (CTRL, arXiv 1909.05858) on the ids in ``seen`` (bool, the shape of ``logits``)."""
    if seen is None or penalty == 1.0:
        return logits
    logits = logits.float()
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def seen_before(seen: Tensor, draft: Tensor, lineage: Tensor | None = None) -> Tensor:
    """Which ids precede each verified position.

    Args:
        seen: ``(B, V)`` bool, ids of the committed prefix. draft: ``(B, g)`` drafted ids.
        lineage: ``(B, g, g)`` of a tree (`pacer.decoding.tree.lineages`); None: a chain.

    Returns:
        ``(B, g + 1, V)`` bool: prefix and the drafts before the position; a rejected draft is in no other row.
    """
    (rows, size), g = seen.shape, draft.shape[1]
    new = torch.zeros(rows, g + 1, size, dtype=torch.int32, device=seen.device)
    if lineage is None:
        new[:, 1:].scatter_(2, draft[..., None], 1)
        return seen[:, None] | (new.cumsum(1) > 0)
    new[:, 1:].scatter_add_(2, draft[:, None].expand(-1, g, -1), lineage.int())
    return seen[:, None] | (new > 0)


def probabilities(logits: Tensor, sampling: SamplingSettings) -> Tensor:
    """Probabilities ``(…, V)`` in float32 after temperature, top-k and top-p; one-hot at temperature 0.

    Ties at the k-th value are all kept, as transformers does.
    """
    if sampling.temperature == 0:
        one_hot = torch.zeros_like(logits, dtype=torch.float32)
        return one_hot.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        drop[..., -1] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
    return logits.softmax(-1)


def spread(p: Tensor, head_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Probabilities over a head's rows ``(…, rows)`` → over the vocabulary ``(…, V)``; other ids have none."""
    if head_ids is None:
        return torch.nn.functional.pad(p, (0, vocab_size - p.shape[-1]))
    return p.new_zeros(*p.shape[:-1], vocab_size).index_copy(-1, head_ids, p[..., : len(head_ids)])


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw: ``probs (…, V)`` (any positive scale) and ``uniform (…)`` in [0, 1) → ids ``(…)``.

    An id of probability 0 is never drawn: its slice of the cumulative sum is empty, and rounding at the upper end
    falls back to the last id of positive probability. The sum runs in float64.
    """
    cumulative = probs.double().cumsum(-1)
    point = uniform[..., None].double() * cumulative[..., -1:]
    ids = (cumulative <= point).sum(-1)
    positions = torch.arange(probs.shape[-1], device=probs.device)
    last = torch.where(probs > 0, positions, 0).amax(-1)
    return torch.minimum(ids, last)


class Signals(NamedTuple):
    """What a draft says of its own token, at temperature 1 ``(…)`` each.

    ``logprob``: of the token. ``entropy``: in nats. ``margin``: log-probability of the likeliest over the second's.
    """

    logprob: Tensor
    entropy: Tensor
    margin: Tensor


def signals(logits: Tensor, ids: Tensor) -> Signals:
    """Signals of the tokens ``ids (…)`` under ``logits (…, V)``; −∞ is a row without probability."""
    logp = logits.float().log_softmax(-1)
    entropy = -(logp.exp() * logp.clamp_min(LEAST)).sum(-1)  # a one-hot row has entropy 0, not NaN
    first, second = logp.topk(min(2, logp.shape[-1]), dim=-1).values[..., (0, -1)].unbind(-1)
    return Signals(logp.gather(-1, ids[..., None]).squeeze(-1), entropy, (first - second).clamp_max(-LEAST))
