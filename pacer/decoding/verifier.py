"""A link of the verifier chain: a model, or an exit of it, reads a draft and says what survives.

Shapes: B rows that are verified, g drafted tokens (of the longest row), H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pacer.decoding.distributions import penalised, probabilities, seen_before, spread
from pacer.decoding.lane import Reader, padded
from pacer.decoding.propose import Draft, Proposes, is_stop
from pacer.decoding.request import Row
from pacer.decoding.tree import Tree, lineages
from pacer.decoding.uniforms import ACCEPT, NEXT, uniforms
from pacer.decoding.verdict import Verdict, read_verdict
from pacer.decoding.verify import leading, verify, verify_greedy
from pacer.decoding.verify_tree import verify_tree, verify_tree_greedy
from pacer.errors import UnsupportedError
from pacer.settings import SamplingSettings


def check_trees(proposer: Proposes, reader: Reader) -> None:
    """Raises:
    UnsupportedError: drafts that branch, for a reader that reads chains alone.
    """
    if proposer.spare and not reader.reads_trees:
        raise UnsupportedError(
            "drafts that branch cannot be verified where exits share the target's layers",
            allowed="chains", remedy="use a drafter whose drafts are chains, or a verifier with a memory of its own",
        )  # fmt: skip


def chain_counts(draft: Draft, stop_ids: Tensor) -> Tensor:
    """Tokens of each draft that is a chain, up to and with a stop id ``(B,)``: nothing after one can matter; accepted,
    it ends the output, and rejected, the rest falls with it."""
    counts = torch.tensor(draft.counts, device=draft.tokens.device)
    if draft.tokens.shape[1] == 0:
        return counts
    return torch.minimum(counts, leading(~is_stop(draft.tokens, stop_ids)) + 1)


class Verifier:
    """Verifies drafts.

    Args:
        reader: reads tokens up to the states that are read out. readout: states ``(…, H)`` → logits.
        head_ids: ids of the logits' rows, None: the whole vocabulary.
        vocab_size: V, of the ids.

    Attributes:
        phase: what a stage's time is booked as.
    """

    phase = "intermediate"

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

    def reset(self, rows: int, capacity: int, spare: int) -> None:
        """A new batch; its reader belongs to others, who make room there.

        Args:
            spare: places that drafts take beyond ``capacity`` tokens.
        """

    def admit(self, index: int) -> None:
        """Another request takes a row; likewise."""

    def prefill(self, rows: Sequence[Row], chosen: Sequence[int]) -> None:
        """Read the prompts of the chosen rows; likewise."""

    def logits(self, rows: Sequence[Row], draft: Draft, chosen: Sequence[int], last: bool = True) -> Tensor:
        """Logits ``(B, g + 1, V or the head's)`` after the prefix and each draft of the chosen rows.

        Args:
            draft: of the chosen rows. last: read each row's last drafted token too; without it the logits after it
                have no meaning, and nobody asks for them. A tree is read whole.
        """
        return self.readout(self.states(rows, draft, chosen, last))

    def states(self, rows: Sequence[Row], draft: Draft, chosen: Sequence[int], last: bool = True) -> Tensor:
        """What :meth:`logits` reads out ``(B, g + 1, H)``."""
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
        tree = None if draft.parents is None or g == 0 else Tree(draft.parents, sizes)
        unread = int(not last and tree is None)
        counts = [size + max(0, count - unread) for size, count in zip(sizes, draft.counts, strict=True)]
        chosen_rows = None if len(chosen) == len(rows) else chosen
        states = self.reader.feed_ids(ids[:, : max(counts)], counts, chosen_rows, tree)
        if states.shape[1] != g + 1 or max(sizes) > 1:
            at = torch.tensor(sizes, device=states.device)[:, None] - 1
            places = (at + torch.arange(g + 1, device=states.device)).clamp_max(states.shape[1] - 1)
            states = states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))
        return states

    def ids_of(self, rows: Tensor) -> Tensor:
        """Rows of the logits ``(…)`` → ids."""
        return rows if self.head_ids is None else self.head_ids[rows]

    def judge(
        self,
        rows: Sequence[Row],
        draft: Draft,
        logits: Tensor,
        stop_ids: Tensor,
        seen: Tensor | None,
        choices: bool = False,
    ) -> Verdict:
        """The verdict on the drafts of these rows, by what ``logits`` says.

        Args:
            stop_ids: ``(B, K)``. seen: ``(B, V)`` ids of the committed prefix, where a penalty asks for them.
            choices: say the likeliest id after each draft, too.
        """
        device, g = logits.device, draft.tokens.shape[1]
        lineage = None if draft.parents is None or g == 0 else lineages(draft.parents)
        counts = torch.tensor(draft.counts, device=device) if lineage is not None else chain_counts(draft, stop_ids)
        if seen is not None:
            logits = self._penalised(logits, seen_before(seen, draft.tokens, lineage))
        top, argmax = logits.max(-1)
        inside = torch.arange(g + 1, device=device) <= counts[:, None]  # padding may hold anything
        finite = torch.isfinite(top) | ~inside
        bad = torch.where(finite.all(1), -1, leading(finite))
        branch, choice = None, self.ids_of(argmax)
        u = None if self.greedy else self._uniforms(rows, g, device)
        p = None if u is None else spread(probabilities(logits, self.sampling), self.head_ids, self.vocab_size)
        if lineage is not None:
            branch, following = self._descend(draft, counts, lineage, stop_ids, choice, p, u)
            accepted = branch.sum(1)
        elif p is None or u is None:
            accepted, following = verify_greedy(choice, draft.tokens, counts)
        else:
            accepted, following = verify(p, draft.probs, draft.tokens, counts, *u)
        numbers = torch.stack([accepted, following, counts, bad], 1)
        return read_verdict(draft, numbers, p, branch, choice if choices else None)

    def _penalised(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Logits under the repetition penalty; ``seen (…, V)`` bool, ids before each of their places."""
        seen = seen if self.head_ids is None else seen[..., self.head_ids]
        return penalised(logits, seen, self.sampling.repetition_penalty)

    def _uniforms(self, rows: Sequence[Row], g: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random numbers of a round: for each draft ``(B, g)``, and for the next token ``(B,)``."""
        keys = torch.tensor([[row.key, row.rounds] for row in rows], device=device)
        place = torch.arange(g + 1, device=device)
        accept = uniforms(keys[:, 0], keys[:, 1], place[:g], ACCEPT)
        return accept, uniforms(keys[:, 0], keys[:, 1], place[:1], NEXT).squeeze(1)

    def _descend(
        self,
        draft: Draft,
        counts: Tensor,
        lineage: Tensor,
        stop_ids: Tensor,
        choice: Tensor,
        p: Tensor | None,
        u: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """Which nodes of trees were accepted ``(B, g)`` bool, and the next tokens ``(B,)``."""
        tokens, parents, g = draft.tokens, draft.parents, draft.tokens.shape[1]
        assert parents is not None
        stop = is_stop(tokens, stop_ids)
        behind = (lineage & stop[:, None]).sum(-1) > stop.long()  # a stop id that is accepted ends the output
        alive = (torch.arange(g, device=tokens.device) < counts[:, None]) & ~behind
        if p is None or u is None:
            last = verify_tree_greedy(choice, tokens, parents, lineage, alive)
            following = choice.gather(1, last[:, None] + 1).squeeze(1)
        else:
            last, following = verify_tree(p, draft.probs, tokens, parents, lineage, alive, *u)
        branch = lineage.gather(1, last.clamp_min(0)[:, None, None].expand(-1, 1, g)).squeeze(1)
        return branch & (last >= 0)[:, None], following

    def shown(self, verdict: Verdict, logits: Tensor) -> Tensor:
        """What a rule for buffers looks at: the logits of the emitted tokens."""
        return verdict.along(logits)

    def settle(self, verdict: Verdict, chosen: Sequence[int], before: Sequence[int], verified: Sequence[int]) -> None:
        """Forget what was rejected; rollback is a length, and only a tree's accepted nodes are moved to where they
        belong.

        Args:
            chosen: the rows of the verdict. before, verified: as `pacer.decoding.propose.Proposes.end` has them.
        """
        if verdict.branches is not None:
            self.reader.keep([before[i] for i in chosen], verdict.branches, chosen)
        self.reader.truncate(verified)
