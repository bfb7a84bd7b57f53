"""Simulated rounds: what the draft would propose on the target's own text, and how much of it would be accepted.

Greedy speculative decoding emits the target's own greedy text, so no target pass is needed: a draft started anywhere
on that text is accepted up to its first mismatch. The rounds of a text are drafted side by side, one packed forward
per draft step, each round seeing the text up to its start and itself (the mask that training uses).

Drafts drawn at a temperature need the target's opinion: :mod:`pacer.data.sampled`.

Shapes: S rounds of a text, g drafted tokens, P tokens of the text (prompt + output).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pacer.data.corpus import Text
from pacer.decoding.distributions import draw, probabilities, signals
from pacer.decoding.uniforms import DRAFT, uniforms
from pacer.decoding.verify import leading
from pacer.errors import ConfigError
from pacer.models.copying import copied_last, supported, token_of
from pacer.models.stack import Stack, causal_mask
from pacer.settings import LabelSettings, SamplingSettings

STARTS = ("uniform", "rounds", "all")


@dataclass
class Rounds:
    """The simulated rounds of one text, as tensors on the CPU.

    ``starts (S,)``: committed tokens before the round. ``tokens``, ``logprob``, ``entropy``, ``margin (S, g)``: the
    draft and its signals at temperature 1. ``match (S, g)``: length of the context's n-gram that the token continues
    (:mod:`pacer.models.copying`; 0: none). ``counts (S,)``: drafted tokens, up to and with a stop id. ``accepted
    (S,)``: leading tokens that equal the text. ``known (S,)``: leading tokens whose fate the text tells (a text cut by
    length ends before the target's verdict on what lies beyond).

    In sampling ``accepted`` is what a simulated verification accepted, and all of it is known. ``logq``, ``logp (S,
    g)``: log-probability of the token at that temperature, of the draft and of the target; None: greedy, where both
    are one-hot.
    """

    starts: Tensor
    tokens: Tensor
    logprob: Tensor
    entropy: Tensor
    margin: Tensor
    match: Tensor
    counts: Tensor
    accepted: Tensor
    known: Tensor
    logq: Tensor | None = None
    logp: Tensor | None = None

    def pick(self, rows: Tensor) -> Rounds:
        """The rounds at these places."""
        return Rounds(**{name: value[rows] for name, value in vars(self).items() if value is not None})

    def trimmed(self, tail: int) -> Rounds:
        """The same rounds, no longer than ``tail`` tokens past the first rejection: what follows teaches little."""
        return replace(self, counts=torch.minimum(self.counts, self.accepted + 1 + tail))

    def labels(self, kind: str) -> tuple[Tensor, Tensor]:
        """Labels and which of them count ``(S, g)``.

        *survival*: this and all earlier tokens accepted. *conditional*: the chance to be accepted, given that all
        earlier ones were: min(1, p/q), in greedy decoding whether p and q agree; it has no meaning after the first
        rejection. *certain*: likewise, whether that chance is 1: q(x) ≤ p(x) (SPRINTER, arXiv 2502.04557). *next*:
        this, all earlier and the following token accepted: what the draw would bring that is decided about after this
        token.
        """
        place = torch.arange(self.tokens.shape[1]) + (kind == "next")
        label = (place < self.accepted[:, None]).float()
        used = place < torch.minimum(self.counts, self.known)[:, None]
        if kind in ("conditional", "certain"):
            used = used & (place <= self.accepted[:, None])
            if self.logp is not None and self.logq is not None:
                ratio = self.logp - self.logq
                label = ratio.clamp_max(0.0).exp() if kind == "conditional" else (ratio >= 0).float()
        return label, used


@torch.inference_mode()
def draft_rounds(
    draft: Stack,
    text: Text,
    starts: Tensor,
    gamma: int,
    stop_ids: Sequence[int],
    vocab_size: int | None = None,
    temperature: float = 0.0,
    key: int = 0,
) -> Rounds:
    """Draft ``gamma`` tokens from each start, and accept what the text says.

    Args:
        starts: ``(S,)`` ascending committed lengths, each in [1, P − 1].
        vocab_size: the target's; a draft's padded rows beyond it are no tokens.
        temperature: 0: the likeliest token. key: above 0, of the random numbers.
    """
    device = draft.device
    path = torch.tensor([[*text.prompt_ids, *text.output_ids]], device=device)
    length, count = path.shape[1], len(starts)
    starts = starts.to(device)
    cache = draft.new_cache(1, length + count * max(gamma - 1, 1))
    places = torch.arange(length, device=device)[None]
    cache.at(places, length)
    mask = causal_mask(places, length)
    states = draft.run(draft.text_entries(path, places, mask), 0, draft.n_layers, places, mask, cache)
    last = states[:, starts - 1]
    head_ids = None if draft.head_ids is None else draft.head_ids.to(device)
    context = torch.nn.functional.pad(path, (0, gamma)).repeat(count, 1)  # (S, P + g): a round's text and its draft
    steps: list[tuple[Tensor, ...]] = []
    for step in range(gamma):
        if step > 0:
            extent = length + step * count
            slots = torch.arange(extent - count, extent, device=device)[None]
            mask = _segment_mask(starts, length, step, extent)
            x = draft.next_entries(steps[-1][0][None], last)
            last = draft.run(x, 0, draft.n_layers, (starts + step - 1)[None], mask, cache.at(slots, extent))
        copied = copied_last(context, starts + step)
        logits = draft.readout(last[0], copied)
        if draft.head_ids is None:
            logits = logits[..., :vocab_size]
        row, *logq = _draw(logits, temperature, key, starts, step)
        token = token_of(row, head_ids, copied)
        context.scatter_(1, (starts + step)[:, None], token[:, None])
        steps.append((token, *signals(logits, row), supported(token, copied), *logq))
    return _judged(text, path[0], starts, [torch.stack(column, 1) for column in zip(*steps, strict=True)], stop_ids)


def _draw(logits: Tensor, temperature: float, key: int, starts: Tensor, step: int) -> tuple[Tensor, ...]:
    """A token of each round, as a row of the head ``(S,)``, and at a temperature the log of its q."""
    if temperature == 0:
        return (logits.argmax(-1),)
    q = probabilities(logits, SamplingSettings(temperature))
    place = torch.tensor([step], device=logits.device)
    row = draw(q, uniforms(torch.full_like(starts, key), starts, place, DRAFT).squeeze(1))
    return row, q.gather(1, row[:, None]).squeeze(1).log()


def _segment_mask(starts: Tensor, length: int, step: int, extent: int) -> Tensor:
    """``(1, 1, S, extent)``: round s sees the text before its start and its own earlier tokens."""
    count = len(starts)
    slot = torch.arange(extent, device=starts.device)
    on_path = slot[None] < torch.minimum(starts, torch.tensor(length, device=starts.device))[:, None]
    own = (slot[None] >= length) & ((slot[None] - length) % count == torch.arange(count, device=starts.device)[:, None])
    return (on_path | own)[None, None]


def _judged(text: Text, path: Tensor, starts: Tensor, drawn: list[Tensor], stop_ids: Sequence[int]) -> Rounds:
    tokens, logprob, entropy, margin, match, *logq = drawn
    gamma, length = tokens.shape[1], len(path)
    place = starts[:, None] + torch.arange(gamma, device=path.device)
    inside = place < length
    equal = (path[place.clamp_max(length - 1)] == tokens) & inside
    stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=path.device)
    counts = (leading(~torch.isin(tokens, stops)) + 1).clamp_max(gamma)
    accepted = torch.minimum(leading(equal), counts)
    cut_short = accepted == (length - starts)  # all the text there is agreed: only an ended text tells the rest
    known = torch.where(cut_short & text.cut, length - starts, torch.full_like(starts, gamma))
    found = (starts, tokens, logprob, entropy, margin, match, counts, accepted, known, *logq)
    return Rounds(*(value.cpu() for value in found))


def choose_starts(text: Text, settings: LabelSettings) -> Tensor:
    """Where rounds may start: after the first output token (it comes from the prefill), before the last."""
    first, end = len(text.prompt_ids) + 1, len(text.prompt_ids) + len(text.output_ids)
    every = torch.arange(first, end)
    if settings.starts not in STARTS:
        raise ConfigError("unknown labels.starts", value=settings.starts, allowed=STARTS)
    if settings.starts != "uniform" or len(every) <= settings.starts_per_text:
        return every
    # a generator of the text's own: the same starts whatever else is in the corpus
    rng = np.random.default_rng([settings.seed, len(text.prompt_ids), *text.id.encode()])
    return every[np.sort(rng.choice(len(every), settings.starts_per_text, replace=False))]


def simulate(
    draft: Stack,
    text: Text,
    settings: LabelSettings,
    stop_ids: Sequence[int],
    vocab_size: int | None = None,
    judge: Stack | None = None,
) -> Rounds | None:
    """Greedy rounds of a text by the start policy; None where the output is too short for one.

    Args:
        judge: what accepts the draft in place of the target.
    """
    starts = choose_starts(text, settings)
    if len(starts) == 0:
        return None
    rounds = draft_rounds(draft, text, starts, settings.gamma, stop_ids, vocab_size)
    if judge is not None:
        rounds = judged_by(rounds, draft_rounds(judge, text, starts, settings.gamma, stop_ids, vocab_size))
    return rounds.pick(walk(rounds)) if settings.starts == "rounds" else rounds


def judged_by(rounds: Rounds, judge: Rounds) -> Rounds:
    """The same drafts with another model's verdict: accepted as long as they are what it would write from there on."""
    accepted = torch.minimum(leading(rounds.tokens == judge.tokens), rounds.counts)
    return replace(rounds, accepted=accepted, known=torch.full_like(rounds.known, rounds.tokens.shape[1]))


def walk(rounds: Rounds) -> Tensor:
    """Of rounds at every place: those a decoder with a fixed window would really make, one after the other."""
    by_start = {int(s): i for i, s in enumerate(rounds.starts)}
    chosen, start = [], int(rounds.starts[0])
    while start in by_start:
        chosen.append(by_start[start])
        start += int(rounds.accepted[chosen[-1]]) + 1
    return torch.tensor(chosen)


def to_line(text_id: str, rounds: Rounds) -> str:
    """A JSON line of the label shard."""
    record: dict[str, Any] = {"id": text_id}
    for name, value in vars(rounds).items():
        if value is not None:
            record[name] = value.tolist() if not value.is_floating_point() else np.round(value.numpy(), 5).tolist()
    return json.dumps(record, allow_nan=False)


def from_line(line: str) -> tuple[str, Rounds]:
    """The reverse of :func:`to_line`."""
    record = json.loads(line)
    return record.pop("id"), Rounds(**{name: torch.tensor(value) for name, value in record.items()})
