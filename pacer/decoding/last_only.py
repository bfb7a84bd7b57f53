"""SPRINTER's verification, which is lossy: of a draft the target checks the last token alone (arXiv 2502.04557).

All of a draft is read in one pass, but only the last token meets the target's opinion: accepted by the ordinary rule,
or replaced by a token of the residual. Those before it are committed unchecked, so the output is not the target's.
After an accepted token the target adds one of its own, which the same pass holds (our reading).

Shapes: B rows that are verified, g drafted tokens (of the longest row), H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pacer.decoding.distributions import probabilities, seen_before, spread
from pacer.decoding.propose import Draft, Proposes
from pacer.decoding.request import Row
from pacer.decoding.verifier import Verdict, Verifier, chain_counts, read_verdict
from pacer.decoding.verify import leading, verify, verify_greedy
from pacer.errors import UnsupportedError


class LastOnly(Verifier):
    """Reads a draft as any verifier does, and judges its last token."""

    def logits(self, rows: Sequence[Row], draft: Draft, chosen: Sequence[int], last: bool = True) -> Tensor:
        """The states ``(B, g + 1, H)``: which two of them are read out, :meth:`judge` says."""
        return self.states(rows, draft, chosen, last)

    def judge(
        self,
        rows: Sequence[Row],
        draft: Draft,
        logits: Tensor,
        stop_ids: Tensor,
        seen: Tensor | None,
        choices: bool = False,
    ) -> Verdict:
        """The verdict on the last token of each draft, by the states; arguments as :meth:`Verifier.judge`."""
        g = draft.tokens.shape[1]
        if g == 0:
            verdict = super().judge(rows, draft, self.readout(logits), stop_ids, seen, choices)
            return replace(verdict, unchecked=[0] * len(rows))
        counts = chain_counts(draft, stop_ids)
        last, checked = (counts - 1).clamp_min(0), counts.clamp_max(1)
        after = torch.stack([last, (last + 1).clamp_max(g)], 1)  # (B, 2) what is read out: before and after the token
        answers = self.readout(logits.gather(1, after[..., None].expand(-1, -1, logits.shape[2])))
        if seen is not None:
            before = seen_before(seen, draft.tokens).gather(1, after[..., None].expand(-1, -1, seen.shape[1]))
            answers = self._penalised(answers, before)
        top, argmax = answers.max(-1)
        finite = torch.isfinite(top) | (torch.arange(2, device=top.device) > checked[:, None])
        bad = torch.where(finite.all(1), -1, last + leading(finite))
        token = draft.tokens.gather(1, last[:, None])
        if self.greedy:
            accepted, following = verify_greedy(self.ids_of(argmax), token, checked)
        else:
            accepted, following = self._sampled(rows, draft, answers, token, last, checked)
        numbers = torch.stack([torch.where(counts > 0, last + accepted, 0), following, counts, bad], 1)
        verdict = read_verdict(draft, numbers, None, None, None)
        return replace(verdict, unchecked=[max(0, len(drafted) - 1) for drafted in verdict.drafted])

    def _sampled(
        self, rows: Sequence[Row], draft: Draft, answers: Tensor, token: Tensor, last: Tensor, checked: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Speculative sampling on one token: accepted (0 or 1) and the next token, ``(B,)`` each."""
        accept, chance = self._uniforms(rows, draft.tokens.shape[1], token.device)
        p = spread(probabilities(answers, self.sampling), self.head_ids, self.vocab_size)
        q = draft.probs
        if q is not None:
            q = q.gather(1, last[:, None, None].expand(-1, 1, q.shape[2]))
        return verify(p, q, token, checked, accept.gather(1, last[:, None]), chance)


def check_last_only(proposer: Proposes) -> None:
    """Raises:
    UnsupportedError: drafts that branch, or a drafter that wants to know the target's mind after every token.
    """
    if proposer.spare or proposer.sees:
        raise UnsupportedError(
            "the target checks the last token alone, of drafts that are chains", allowed="a drafter of chains"
        )
