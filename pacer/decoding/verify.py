"""The probability core: which drafted tokens survive, and the next token. Pure functions of p, q, draft and uniforms.

Source: speculative sampling, arXiv 2211.17192 algorithm 1. Shapes: B rows, g drafted tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pacer.decoding.distributions import draw


def leading(ok: Tensor) -> Tensor:
    """Length of the leading run of True: ``(B, g)`` → ``(B,)``."""
    return ok.long().cumprod(-1).sum(-1)


def verify_greedy(target: Tensor, draft: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix that equals the target's own argmax.

    Args:
        target: ``(B, g + 1)`` argmax ids after the prefix and after each draft. draft: ``(B, g)``. counts: ``(B,)``
            drafted tokens per row; the rest of a row is padding.

    Returns:
        accepted ``(B,)`` and the next token ``(B,)`` (correction, or bonus after full acceptance).
    """
    inside = torch.arange(draft.shape[1], device=draft.device) < counts[:, None]
    accepted = leading((target[:, :-1] == draft) & inside)
    return accepted, target.gather(1, accepted[:, None]).squeeze(1)


def residual(p: Tensor, q: Tensor | None, token: Tensor) -> Tensor:
    """What is left of p after the draft's share was taken: ``norm((p − q)+)``, ``(B, V)``.

    Args:
        p: ``(B, V)``. q: ``(B, V)``, or None for a draft that was certain (one-hot at ``token (B,)``).

    Where nothing is left (p = q, a rejection by rounding alone) the answer is p itself.
    """
    left = p.scatter(1, token[:, None], 0.0) if q is None else (p - q).clamp_min(0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def verify(
    p: Tensor, q: Tensor | None, draft: Tensor, counts: Tensor, accept_uniforms: Tensor, next_uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Speculative sampling: the committed tokens are distributed as p, whatever q is.

    Args:
        p: ``(B, g + 1, V)`` target distributions after the prefix and after each draft.
        q: ``(B, g, V)`` the distributions the drafts were really drawn from; None: one-hot at the draft.
        draft: ``(B, g)``; counts: ``(B,)`` drafted tokens per row.
        accept_uniforms: ``(B, g)``; next_uniforms: ``(B,)``, in [0, 1).

    Returns:
        accepted ``(B,)`` and the next token ``(B,)``: from the residual at the first rejection, else from p.
    """
    g = draft.shape[1]
    p_draft = p[:, :g].gather(2, draft[..., None]).squeeze(2).double()
    q_draft = 1.0 if q is None else q.gather(2, draft[..., None]).squeeze(2).double()
    inside = torch.arange(g, device=draft.device) < counts[:, None]
    accepted = leading((accept_uniforms * q_draft < p_draft) & inside)  # strict: p = 0 is never accepted
    row = torch.arange(len(draft), device=draft.device)
    p_next = p[row, accepted]
    if g == 0:
        return accepted, draw(p_next, next_uniforms)
    at = accepted.clamp_max(g - 1)
    left = residual(p_next, None if q is None else q[row, at], draft[row, at])
    rejected = (accepted < counts)[:, None]
    return accepted, draw(torch.where(rejected, left, p_next), next_uniforms)
