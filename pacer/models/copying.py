"""Copying: a draft that sees n-grams of its context.

Small models repeat their prompt and themselves, and a draft of few layers is weak at it. The longest earlier match of
the text's last tokens, the most recent of equals, names a *candidate*: the token that followed there. A gate on the
draft's state, one per match length, adds to the candidate's logit; a candidate that a reduced head lacks gets a row of
its own, the last. A whole pass of the draft is thereby unchanged but for one more dot product.

Shapes: B rows, T places, n queried places, K longest match told apart, H width, V ids in the head.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

GATE_SCALE = 10.0  # gates move in logits, weights in steps of the learning rate
LONGEST_MATCH = 8  # longer ones count as this
NO_ID = -1


class Copied(NamedTuple):
    """Per place: the candidate's id and the length of its match (0: none, the id has no meaning)."""

    ids: Tensor
    match: Tensor


def copied_last(ids: Tensor, lengths: Tensor, longest: int = LONGEST_MATCH) -> Copied:
    """Candidates for the token at place ``lengths`` of each row, from the text before it.

    Args:
        ids: ``(B, T)``; what lies at or beyond a row's length is not looked at.
        lengths: ``(B,)`` ≥ 1.

    Returns:
        ``(B,)`` each.
    """
    places = ids.shape[1]
    windows = torch.nn.functional.pad(ids, (longest - 1, 0), value=NO_ID).unfold(1, longest, 1)  # ending at each place
    last = (lengths - 1)[:, None]
    own = windows.gather(1, last[..., None].expand(-1, 1, longest))
    equal = ((windows == own) & (windows != NO_ID)).flip(-1)
    match = equal.to(torch.int32).cumprod(-1).sum(-1)
    here = torch.arange(places, device=ids.device)
    best = (torch.where(here < last, match, 0) * places + here).argmax(-1, keepdim=True)  # longest, then most recent
    found = match.gather(1, best).where(best < last, 0)
    return Copied(ids.gather(1, (best + 1).clamp_max(places - 1)).squeeze(1), found.squeeze(1))


def copied_all(ids: Tensor, longest: int = LONGEST_MATCH) -> Copied:
    """Candidates for the token after each place of a whole text ``(T,)``, from the text up to that place: ``(T,)``."""
    places = len(ids)
    here = torch.arange(places, device=ids.device)
    run = (ids[:, None] == ids[None, :]) & (here[None, :] < here[:, None])  # (query place, earlier place)
    equal, match = run, run.to(torch.int32)
    for _ in range(longest - 1):
        run = torch.nn.functional.pad(run[:-1, :-1], (1, 0, 1, 0)) & equal
        match += run
    best = (match * places + here).argmax(-1)
    found = match.gather(1, best[:, None]).squeeze(1)
    return Copied(ids[(best + 1).clamp_max(places - 1)], found)


def token_of(row: Tensor, head_ids: Tensor | None, copied: Copied | None) -> Tensor:
    """Rows of logits ``(…)`` → token ids; the row after a reduced head's is the candidate's."""
    if head_ids is None or copied is None:
        return row if head_ids is None else head_ids[row]
    return torch.where(row == len(head_ids), copied.ids, head_ids[row.clamp_max(len(head_ids) - 1)])


def supported(token: Tensor, copied: Copied) -> Tensor:
    """Length of the context's n-gram that ``token (…)`` continues, 0 where it is not the candidate."""
    return torch.where(copied.ids == token, copied.match, 0)


class CopyHead(nn.Module):
    """Gates, and the candidate's logit.

    Args:
        rows: the target's head ``(vocabulary, H)``, shared. head_of: token id → row of the reduced head, V where the
            head lacks it ``(vocabulary,)``. projection: in front of the head ``(H, H)``, shared.
    """

    def __init__(self, rows: Tensor, head_of: Tensor, projection: Tensor) -> None:
        super().__init__()
        self.gate = nn.Linear(rows.shape[1], LONGEST_MATCH, dtype=rows.dtype, device=rows.device)
        nn.init.zeros_(self.gate.weight)
        with torch.no_grad():
            self.gate.bias.copy_(torch.arange(LONGEST_MATCH).clamp_max(4) / GATE_SCALE)
        self.shared = (rows, head_of, projection)  # in a tuple: neither trained nor saved here

    def sharing(self, rows: Tensor, head_of: Tensor, projection: Tensor) -> CopyHead:
        """The same gates over another head."""
        other = copy.copy(self)
        other.shared = (rows, head_of, projection)
        return other

    def forward(self, normed: Tensor, logits: Tensor, copied: Copied) -> Tensor:
        """States after the norm ``(…, H)``, logits ``(…, V)`` and candidates ``(…)`` → logits ``(…, V + 1)``.

        The last row is the candidate's where the head lacks it, else −∞.
        """
        rows, head_of, projection = self.shared
        place = (copied.match - 1).clamp_min(0)[..., None]
        gate = self.gate(normed).gather(-1, place).squeeze(-1) * GATE_SCALE
        own = (rows[copied.ids] * nn.functional.linear(normed, projection)).sum(-1) + gate
        wider = nn.functional.pad(logits, (0, 1), value=-torch.inf)
        where = head_of[copied.ids].clamp_max(logits.shape[-1])[..., None]
        own = torch.where(copied.match > 0, own, wider.gather(-1, where).squeeze(-1))
        return wider.scatter(-1, where, own[..., None].to(wider.dtype))  # autocast leaves them in two dtypes
