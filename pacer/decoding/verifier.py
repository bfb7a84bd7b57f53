"""A link of the verifier chain: a model, or an exit of it, reads a draft and says what survives.

Shapes: B rows that are verified, g drafted tokens (of the longest row), H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pacer.decoding.distributions import penalised, probabilities, seen_before, spread
from pacer.decoding.lane import Reader, padded
from pacer.decoding.propose import Draft, is_stop
from pacer.decoding.request import Row
from pacer.decoding.uniforms import ACCEPT, NEXT, uniforms
from pacer.decoding.verify import leading, verify, verify_greedy
from pacer.settings import SamplingSettings


@dataclass
class Verdict:
    """What became of a draft, as one read from the device: plain numbers per row."""

    drafted: list[list[int]]  # the drafted ids, up to and with a stop id
    accepted: list[int]
    following: list[int]  # the verifier's own next token: correction or bonus
    scores: list[list[float]]  # the controller's estimates
    bad: list[int]  # first place whose logits are not finite, or −1
    probs: Tensor | None  # (B, g + 1, V) what the emitted tokens are distributed as; None: greedy


class Verifier:
    """Verifies drafts.

    Args:
        reader: reads tokens up to the states that are read out. readout: states ``(…, H)`` → logits.
        head_ids: ids of the logits' rows, None: the whole vocabulary.
        vocab_size: V, of the ids.
    """

    def __init__(
        self,
        reader: Reader,
        readout: Callable[[Tensor], Tensor],
        sampling: SamplingSettings,
        vocab_size: int,
        device: torch.device,
        head_ids: Tensor | None = None,
    ) -> None:
        self.reader, self.readout, self.sampling, self.vocab_size = reader, readout, sampling, vocab_size
        self.device, self.head_ids = device, None if head_ids is None else head_ids.to(device)
        self.greedy = sampling.temperature == 0

    def logits(self, rows: Sequence[Row], draft: Draft, chosen: Sequence[int], last: bool = True) -> Tensor:
        """Logits ``(B, g + 1, V or the head's)`` after the prefix and each draft of the chosen rows.

        Args:
            draft: of the chosen rows. last: read each row's last drafted token too; without it the logits after it
                have no meaning, and nobody asks for them.
        """
        fresh = [rows[i].committed[self.reader.lengths[i] :] for i in chosen]
        prefix, sizes = padded(fresh, self.device)
        g = draft.tokens.shape[1]
        if g == 0:
            ids = prefix
        elif max(sizes) == min(sizes):
            ids = torch.cat([prefix, draft.tokens], 1)
        else:  # ragged: drafts start where each row's prefix ends
            ids = torch.nn.functional.pad(prefix, (0, g))
            starts = torch.tensor(sizes, device=ids.device)[:, None]
            ids.scatter_(1, starts + torch.arange(g, device=ids.device), draft.tokens)
        counts = [size + max(0, count - (not last)) for size, count in zip(sizes, draft.counts, strict=True)]
        states = self.reader.feed_ids(ids[:, : max(counts)], counts, None if len(chosen) == len(rows) else chosen)
        if states.shape[1] != g + 1 or max(sizes) > 1:
            at = torch.tensor(sizes, device=states.device)[:, None] - 1
            places = (at + torch.arange(g + 1, device=states.device)).clamp_max(states.shape[1] - 1)
            states = states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))
        return self.readout(states)

    def judge(
        self, rows: Sequence[Row], draft: Draft, logits: Tensor, stop_ids: Tensor, seen: Tensor | None
    ) -> Verdict:
        """The verdict on the drafts of these rows, by what ``logits`` says.

        Args:
            stop_ids: ``(B, K)``. seen: ``(B, V)`` ids of the committed prefix, where a penalty asks for them.
        """
        device, g = logits.device, draft.tokens.shape[1]
        counts = torch.tensor(draft.counts, device=device)
        if g:  # nothing after a stop id can matter: accepted, it ends the output; rejected, the rest falls with it
            counts = torch.minimum(counts, leading(~is_stop(draft.tokens, stop_ids)) + 1)
        if seen is not None:
            before = seen_before(seen, draft.tokens)
            before = before if self.head_ids is None else before[..., self.head_ids]
            logits = penalised(logits, before, self.sampling.repetition_penalty)
        top, argmax = logits.max(-1)
        inside = torch.arange(g + 1, device=device) <= counts[:, None]  # padding may hold anything
        finite = torch.isfinite(top) | ~inside
        bad = torch.where(finite.all(1), -1, leading(finite))
        p: Tensor | None = None
        if self.greedy:
            choice = argmax if self.head_ids is None else self.head_ids[argmax]
            accepted, following = verify_greedy(choice, draft.tokens, counts)
        else:
            keys = torch.tensor([[row.key, row.rounds] for row in rows], device=device)
            place = torch.arange(g + 1, device=device)
            accept = uniforms(keys[:, 0], keys[:, 1], place[:g], ACCEPT)
            chance = uniforms(keys[:, 0], keys[:, 1], place[:1], NEXT).squeeze(1)
            p = spread(probabilities(logits, self.sampling), self.head_ids, self.vocab_size)
            accepted, following = verify(p, draft.probs, draft.tokens, counts, accept, chance)
        return _read(draft, torch.stack([accepted, following, counts, bad], 1), p)


def _read(draft: Draft, numbers: Tensor, probs: Tensor | None) -> Verdict:
    """One host read of all that is known of a round. ``numbers (B, 4)``: accepted, following, counts, bad."""
    g = draft.tokens.shape[1]
    scores = draft.scores if draft.scores is not None else torch.empty(len(numbers), 0, device=numbers.device)
    values = torch.cat([numbers.double(), draft.tokens.double(), scores.double()], 1).tolist()
    heads = [[int(v) for v in row[:4]] for row in values]
    return Verdict(
        drafted=[[int(v) for v in row[4 : 4 + head[2]]] for row, head in zip(values, heads, strict=True)],
        accepted=[head[0] for head in heads],
        following=[head[1] for head in heads],
        scores=[row[4 + g :] for row in values],
        bad=[head[3] for head in heads],
        probs=probs,
    )  # fmt: skip
