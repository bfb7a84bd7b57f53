"""Losses of a draft's tokens: hard labels, and the distance from the target's stored predictions.

The target's predictions are its k most probable ids and the log of the mass left out (`pacer.data.teacher`). What the
draft's head lacks cannot be matched, and is not made to look as if it could: the ids that both know stand for
themselves, everything else (mass outside the head, mass outside the top k) is one bucket, whose counterpart is the
draft's mass on all its other ids. Nothing is renormalised away: where the target's choice is outside the head, the
draft learns that it does not know it, which is what a controller that reads its probabilities needs.

Shapes: N tokens, V ids in the draft's head, k stored ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pacer.errors import ConfigError
from pacer.settings import TrainerSettings

IGNORE = -100  # a label, or a stored id, that the head lacks


def rows_of(head_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Token id → its row of a head over ``head_ids`` (None: all), IGNORE where the head lacks it ``(vocabulary,)``."""
    if head_ids is None:
        return torch.arange(vocab_size)
    rows = torch.full((vocab_size,), IGNORE)
    rows[head_ids.cpu()] = torch.arange(len(head_ids))
    return rows


def check_stored(trainer: TrainerSettings, head_size: int, whose: str = "head's") -> None:
    """Refuse predictions of as many ids as the head has: none would be left for the bucket.

    Args:
        whose: ids these are, for the error.

    Raises:
        ConfigError: the trainer's ``teacher_top_k`` is too large.
    """
    if trainer.kl_weight and trainer.teacher_top_k >= head_size:
        allowed = f"less than the {whose} {head_size} ids"
        raise ConfigError("trainer.teacher_top_k", value=trainer.teacher_top_k, allowed=allowed)


def token_losses(logits: Tensor, labels: Tensor, teacher: Sequence[Tensor] | None, weight: float) -> Tensor:
    """(1 − weight) · hard + weight · KL(teacher ‖ draft) of every token ``(N,)``.

    Args:
        logits: ``(N, V)``. labels: rows of the head ``(N,)``; the hard part is 0 where the head lacks the label.
        teacher: stored ids as rows of the head ``(N, k)``, their log-probabilities ``(N, k)``, the log of the mass
            left out ``(N,)``; None: hard labels alone, whatever the weight.
    """
    hard = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    return hard if teacher is None else (1 - weight) * hard + weight * bucket_kl(logits, *teacher)


def bucket_kl(logits: Tensor, rows: Tensor, logprobs: Tensor, rest: Tensor) -> Tensor:
    """KL divergence over the stored ids that the head has and one bucket for everything else ``(N,)``.

    The head must have an id that is not stored (V > k). The draft's mass in the bucket is summed, not taken as 1 − Σ:
    it keeps its precision, and its gradient, where the draft is nearly sure.
    """
    vocabulary, inside = logits.shape[-1], rows != IGNORE
    places = rows.where(inside, vocabulary)
    stored = torch.zeros(len(rows), vocabulary + 1, dtype=torch.bool, device=rows.device).scatter_(1, places, True)
    other = logits.masked_fill(stored[:, :-1], -torch.inf).logsumexp(-1, keepdim=True)
    draft = torch.cat([logits.gather(1, rows.clamp_min(0)), other], 1) - logits.logsumexp(-1, keepdim=True)
    outside = torch.cat([logprobs.masked_fill(inside, -torch.inf), rest[:, None]], 1).logsumexp(1, keepdim=True)
    teacher = torch.cat([logprobs.masked_fill(~inside, -torch.inf), outside], 1)
    teacher = teacher - teacher.logsumexp(1, keepdim=True)  # what rounding for the disk left above or below 1
    return torch.where(teacher > -torch.inf, teacher.exp() * (teacher - draft), 0.0).sum(1)


def chunked(losses: Callable[..., Tensor], rows: int, *tensors: Tensor) -> Tensor:
    """``losses(*tensors)``, at most ``rows`` rows at a time, so that no more rows' logits are held at once.

    Args:
        losses: of rows, each on its own: tensors ``(n, …)`` → ``(n,)``. tensors: ``(N, …)``, split along axis 0.

    With several chunks each is computed once more for its gradient.
    """
    if len(tensors[0]) <= rows:
        return losses(*tensors)
    parts = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
    return torch.cat([checkpoint(losses, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])
