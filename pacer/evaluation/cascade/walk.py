"""The rounds of LayerSkip and HiSpec along each text, and what they run. LayerSkip is the walk with one exit.

Stage 1 drafts ``N_1`` tokens at the first exit; each stage above keeps what it would have written itself, adds a token
of its own, and passes its buffer on once it holds ``N_k`` tokens; the whole model is the last stage and its answer is
the text. With ``agrees(k, k + 1)`` at every place this is plain pointer chasing, for all places at once:

    shown(t)  = what the stage below has gathered from t on            (drafts: N_1, or the room there is)
    taken(t)  = the leading run of agreement from t on, at most shown(t)
    gained(t) = taken(t) + 1        (without bonus: taken(t) where all was taken)

Passes are those of the ladder: a token passes each group of layers once. When a round begins, one token is new to all
groups. Drafting feeds it and all drafts but the last, which follows alone before the next group reads them together
(an intermediate stage without bonus has no use for it); so does the last token of a buffer.
Once a draft has left the text, the exits are taken to agree as at the same places on it; that changes costs, not
tokens. Requests end with their texts: nothing is drafted beyond a text's end.

Shapes: N places of all texts, T texts, K stages = groups of layers (exits and the whole model), W widths of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pacer.errors import ConfigError
from pacer.evaluation.cascade.table import ExitTable, Ints, leading_runs

WIDTHS = 64  # passes over more tokens are counted as this many less one


@dataclass(frozen=True)
class Cascade:
    """A setting: ``exits`` L_1 < L_2 < …, and ``buffers`` N_1, N_2, …: how many tokens each gathers for the next stage.

    HiSpec has two exits: (L_d, L_i) and (N_d, N_i). ``bonus``: intermediate stages add a token after full acceptance
    too. N_1 = 0 (one exit) is plain decoding.

    Raises:
        ConfigError: exits and buffers that do not fit together.
    """

    exits: tuple[int, ...]
    buffers: tuple[int, ...]
    bonus: bool = True

    def __post_init__(self) -> None:
        fits = len(self.exits) == len(self.buffers) > 0 and all(a < b for a, b in pairwise((0, *self.exits)))
        if not fits or min(self.buffers) < (0 if len(self.exits) == 1 else 1):
            allowed = "as many buffers as exits; exits ascending from 1; buffers ≥ 1 (one exit: ≥ 0)"
            raise ConfigError("exits and buffers", value=f"{self.exits}, {self.buffers}", allowed=allowed)

    @property
    def arm(self) -> str:
        """Its name as `pacer.evaluate` reads it."""
        exits = f"exits=[{','.join(map(str, self.exits))}] gamma={self.buffers[0]}"
        if len(self.exits) == 1:
            return f"layerskip {exits}"
        more = ",".join(map(str, self.buffers[1:]))
        n = more if len(self.exits) == 2 else f"[{more}]"
        return f"hispec {exits} n={n}" + ("" if self.bonus else " bonus=false")


@dataclass(frozen=True)
class Stage:
    """A verifying stage at every place ``(N,)``: tokens it is ``shown``, ``taken`` of them, ``gained`` with its own."""

    shown: Ints
    taken: Ints
    gained: Ints


@dataclass(frozen=True)
class Usage:
    """What the texts took.

    ``passes (T, K, W)``: of each group of layers by the tokens it reads. ``reads (T, K, W)``: of each stage's head by
    the rows it answers; of the first stage they are the drafting steps. ``verified``, ``shown``, ``taken (T, K − 1)``:
    verifications by each stage above the first that were shown something, the tokens they were shown, and took.
    ``emitted``, ``rounds (T,)``: tokens of the text after the first, target passes.
    """

    passes: Ints
    reads: Ints
    verified: Ints
    shown: Ints
    taken: Ints
    emitted: Ints
    rounds: Ints

    @property
    def tokens_per_verify(self) -> float:
        """τ: emitted tokens / target passes, the prefill left out."""
        return float(self.emitted.sum() / max(1, self.rounds.sum()))

    @property
    def acceptance(self) -> list[float | None]:
        """Taken / shown tokens of each stage above the first."""
        shown, taken = self.shown.sum(0).tolist(), self.taken.sum(0).tolist()
        return [t / s if s else None for s, t in zip(shown, taken, strict=True)]

    def layer_tokens(self, cascade: Cascade, n_layers: int) -> float:
        """Layers × tokens run per emitted token; plain decoding: ``n_layers``."""
        depths = np.diff([0, *cascade.exits, n_layers])
        tokens = (self.passes * np.arange(WIDTHS)).sum((0, 2))
        return float((tokens * depths).sum() / max(1, self.emitted.sum()))


def stages(table: ExitTable, cascade: Cascade) -> list[Stage]:
    """Every verifying stage at every place, from the second on."""
    depths, left = [*cascade.exits, table.n_layers], table.left
    ended = ~table.cut[table.text]  # a stop id may be buffered: nothing follows it

    def room(number: int) -> Ints:
        """Tokens that this exit may gather: each stage above adds one of its own."""
        return np.maximum(left - (len(cascade.exits) - number) + ended, 0)

    shown, found = np.minimum(cascade.buffers[0], room(0)), []
    for number, (below, above) in enumerate(pairwise(depths)):
        taken = np.minimum(leading_runs(table.agrees(below, above), left), shown)
        if number == len(cascade.exits) - 1:
            found.append(Stage(shown, taken, np.minimum(taken + 1, left)))
            break
        own = cascade.bonus | (taken < shown) | (shown == 0)
        gained = np.minimum(taken + own, room(number + 1))
        found.append(Stage(shown, taken, gained))
        shown = _filled(gained, cascade.buffers[number + 1], room(number + 1))
    return found


def _filled(gained: Ints, size: int, room: Ints) -> Ints:
    """Tokens in the buffer that is filled from each place on."""
    place, filled = np.arange(len(gained)), np.zeros_like(gained)
    for _ in range(size):  # a round gains at least one token
        step = gained[np.minimum(place + filled, len(gained) - 1)]
        filled = np.where((filled < size) & (filled < room), filled + step, filled)
    return filled


def usage(table: ExitTable, cascade: Cascade) -> Usage:
    """Follow the rounds through every text; the first output token comes from the prefill."""
    found = stages(table, cascade)
    texts, text, count = len(table.rows), table.text, len(cascade.exits) + 1
    passes, reads = (np.zeros((texts, count, WIDTHS), dtype=np.int64) for _ in range(2))
    verified, shown, taken = (np.zeros((texts, count - 1), dtype=np.int64) for _ in range(3))
    starts = _target_starts(table, found[-1].gained)
    rounds = np.bincount(text[starts], minlength=texts)
    emitted = np.bincount(text[starts], found[-1].gained[starts], texts).astype(np.int64)
    for number in range(count - 2, -1, -1):
        offered, of = found[number].shown[starts], text[starts]
        # the last token passes the groups below alone; without bonus nothing is asked after it
        last = np.ones_like(offered) if number == count - 2 or cascade.bonus else (offered == 0).astype(np.int64)
        passes[:, number + 1] += _counted(of, offered + last, texts)
        passes[:, : number + 1, 1] += np.bincount(of, last, texts).astype(np.int64)[:, None]
        reads[:, number + 1] += _counted(of, offered + 1, texts)
        verified[:, number] = np.bincount(of, offered > 0, texts)
        shown[:, number] = np.bincount(of, offered, texts)
        taken[:, number] = np.bincount(of, found[number].taken[starts], texts)
        if number > 0:
            starts = _inner_starts(starts, found[number - 1].gained, offered)
    for counts in (passes, reads):
        counts[:, 0, 1] += shown[:, 0]
    return Usage(passes, reads, verified, shown, taken, emitted, rounds)


def _target_starts(table: ExitTable, gained: Ints) -> Ints:
    """Places where the target's rounds begin, text by text."""
    following = (np.arange(len(gained)) + gained).tolist()
    places: list[int] = []
    for first, end in pairwise(table.first.tolist()):
        place = first + 1
        while place < end:
            places.append(place)
            place = following[place]
    return np.array(places, dtype=np.int64)


def _inner_starts(starts: Ints, gained: Ints, gathered: Ints) -> Ints:
    """Places where the stage below verifies while each start's buffer grows to what it ``gathered``."""
    at, ends, found = starts, starts + gathered, []
    while (going := at < ends).any():
        at, ends = at[going], ends[going]
        found.append(at)
        at = at + gained[at]
    return np.concatenate(found) if found else starts[:0]


def _counted(text: Ints, width: Ints, texts: int) -> Ints:
    """How often each width occurs in each text ``(T, W)``."""
    place = text * WIDTHS + np.minimum(width, WIDTHS - 1)
    return np.bincount(place, minlength=texts * WIDTHS).reshape(texts, WIDTHS)
