"""A draft model that verifies, as a stage before the target: with a memory, a context and perhaps a head of its own.

Shapes: B rows, g drafted tokens (of the longest row), n of those that were kept, V vocabulary, T places of a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pacer.decoding.lane import Lane, padded
from pacer.decoding.propose import Draft
from pacer.decoding.request import Row
from pacer.decoding.tree import lineages
from pacer.decoding.verdict import Verdict
from pacer.decoding.verifier import Verifier
from pacer.models.copying import Copied, copied_last, token_of
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings


class DraftVerifier(Verifier):
    """Keeps of a draft what the draft model would have written. Greedy where the model copies.

    Args:
        vocab_size: the target's. block: tokens to a block of its paged memory; None: contiguous.
    """

    phase = "draft"

    def __init__(self, stack: Stack, vocab_size: int, sampling: SamplingSettings, block: int | None = None) -> None:
        lane = Lane(stack, block=block)
        super().__init__(lane, stack.readout, sampling, vocab_size, stack.device, stack.head_ids)
        assert self.greedy or stack.copying is None, "a copied id has no row in the distributions"
        self.stack = stack
        self._copied: Copied | None = None

    def reset(self, rows: int, capacity: int, spare: int) -> None:
        self.reader.reset(rows, min(capacity, self.stack.context) + spare)

    def admit(self, index: int) -> None:
        self.reader.release(index)

    def prefill(self, rows: Sequence[Row], chosen: Sequence[int]) -> None:
        if chosen:
            ids, counts = padded([rows[i].committed for i in chosen], self.device)
            self.reader.feed_ids(ids, counts, chosen)

    def logits(self, rows: Sequence[Row], draft: Draft, chosen: Sequence[int], last: bool = True) -> Tensor:
        """As the base class; with a copy head, the last row is a candidate's."""
        states = self.states(rows, draft, chosen, last)
        if self.stack.copying is not None:
            self._copied = candidates([rows[i].committed for i in chosen], draft)
        logits = self.stack.readout(states, self._copied)
        return logits if self.head_ids is not None else logits[..., : self.vocab_size]

    def ids_of(self, rows: Tensor) -> Tensor:
        return token_of(rows, self.head_ids, self._copied)

    def shown(self, verdict: Verdict, logits: Tensor) -> Tensor:
        """Logits over the vocabulary, −∞ for what the head lacks, of what was kept ``(B, n + 1, V)``."""
        kept = verdict.along(logits)
        if self.head_ids is None:
            return kept
        whole = kept.new_full((*kept.shape[:-1], self.vocab_size), -torch.inf)
        whole = whole.index_copy(-1, self.head_ids, kept[..., : len(self.head_ids)])
        if self._copied is None:
            return whole
        ids = verdict.along(self._copied.ids[..., None])
        return whole.scatter_reduce(-1, ids, kept[..., len(self.head_ids) :], "amax")


def candidates(texts: Sequence[Sequence[int]], draft: Draft) -> Copied:
    """What copying names after each text and each token of its draft ``(B, g + 1)``, from that token's own branch."""
    (rows, g), device = draft.tokens.shape, draft.tokens.device
    prefix, sizes = padded(texts, device)
    parents = torch.arange(-1, g - 1, device=device).expand(rows, -1) if draft.parents is None else draft.parents
    lineage, nowhere = lineages(parents), prefix.shape[1] + g
    ends = torch.tensor(sizes, device=device)[:, None] + torch.nn.functional.pad(lineage.sum(-1), (1, 0))
    whole = torch.nn.functional.pad(prefix, (0, g + 1))[:, None].repeat(1, g + 1, 1)  # (B, g + 1, T): a text for each
    places = torch.where(lineage, ends[:, None, 1:] - 1, nowhere)
    whole[:, 1:].scatter_(2, places, draft.tokens[:, None].expand(-1, g, -1))
    found = copied_last(whole.flatten(0, 1), ends.flatten())
    return Copied(*(part.view(rows, g + 1) for part in found))
