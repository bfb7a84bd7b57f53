"""Several texts and their simulated rounds as one row: ``[path + segments]``, first-fit, one mask.

A segment (a simulated round) sees the path of its own text up to its start and itself causally; its positions go on
from the start. The same mask serves the frozen draft and the pre-verifier.

Shapes: B rows, N places of a row, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from pacer.data.corpus import Text
from pacer.data.labels import Rounds
from pacer.errors import PacerError
from pacer.models.stack import Stack

PAD = -1


@dataclass
class Packed:
    """A packed batch, ``(B, N)`` each.

    ``source``: the place whose draft state produced the token (−1: none). ``index``: place in the draft from 1, 0 on
    the path. ``document``: text (−1: padding). ``segment``: 0 on the path, else the round's number in the row.
    ``start``: for segments, the committed length. ``used``: labels that count. ``survived``, ``known``: whether
    this and all earlier tokens were accepted, and where that is known. ``logprob`` … ``cumulative``: the draft's
    signals, 0 on the path. ``produced (B, N, H)``: the states at ``source``, where they were stored before.
    """

    ids: Tensor
    positions: Tensor
    source: Tensor
    index: Tensor
    document: Tensor
    segment: Tensor
    start: Tensor
    logprob: Tensor
    entropy: Tensor
    margin: Tensor
    match: Tensor
    cumulative: Tensor
    labels: Tensor
    used: Tensor
    survived: Tensor
    known: Tensor
    produced: Tensor | None = None

    def to(self, device: torch.device) -> Packed:
        moved: dict[str, Any] = {
            name: None if value is None else value.to(device) for name, value in vars(self).items()
        }
        return Packed(**moved)


def packed_length(text: Text, rounds: Rounds) -> int:
    """Places that a text and its rounds take."""
    return len(text.prompt_ids) + len(text.output_ids) + int(rounds.counts.sum())


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Items into bins of ``capacity``, longest first, each into the first bin with room; a longer item gets its own."""
    bins: list[tuple[int, list[int]]] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for number, (room, members) in enumerate(bins):
            if lengths[item] <= room:
                bins[number] = (room - lengths[item], [*members, item])
                break
        else:
            bins.append((capacity - lengths[item], [item]))
    return [members for _, members in bins]


def _document(
    text: Text, rounds: Rounds, label: str, number: int, offset: int, first_segment: int
) -> dict[str, Tensor]:
    """One text as columns; ``offset`` is its first place in the row."""
    path = torch.tensor([*text.prompt_ids, *text.output_ids])
    length = len(path)
    (labels, used), (survived, known) = rounds.labels(label), rounds.labels("survival")
    place = torch.arange(rounds.tokens.shape[1])
    real = place < rounds.counts[:, None]  # (S, g)
    segment = torch.arange(len(rounds.starts))[:, None].expand_as(real)[real]
    step = place.expand_as(real)[real]
    here = offset + length + torch.arange(len(step))
    first = step == 0

    def both(on_path: Tensor, in_segments: Tensor) -> Tensor:
        return torch.cat([on_path, in_segments.to(on_path.dtype)])

    zeros = torch.zeros(length)
    order = torch.arange(length)
    return {
        "ids": both(path, rounds.tokens[real]),
        "positions": both(order, rounds.starts[segment] + step),
        "source": both(
            torch.where(order > 0, offset + order - 1, PAD),
            torch.where(first, offset + rounds.starts[segment] - 1, here - 1),
        ),
        "index": both(torch.zeros(length, dtype=torch.long), step + 1),
        "document": torch.full((length + len(step),), number),
        "segment": both(torch.zeros(length, dtype=torch.long), segment + first_segment),
        "start": both(torch.zeros(length, dtype=torch.long), rounds.starts[segment]),
        "logprob": both(zeros, rounds.logprob[real]),
        "entropy": both(zeros, rounds.entropy[real]),
        "margin": both(zeros, rounds.margin[real]),
        "match": both(zeros, rounds.match[real]),
        "cumulative": both(zeros, rounds.logprob.cumsum(1)[real]),
        "labels": both(zeros, labels[real]),
        "used": both(zeros.bool(), used[real]),
        "survived": both(zeros, survived[real]),
        "known": both(zeros.bool(), known[real]),
    }  # fmt: skip


def pack(
    rows: Sequence[Sequence[tuple[Text, Rounds]]], label: str, produced: Sequence[Sequence[Tensor]] | None = None
) -> Packed:
    """Rows of texts with their rounds → one batch, padded to the longest row.

    Args:
        produced: the draft states of each text ``(n, H)``, if they are at hand.

    Raises:
        PacerError: a text without a supervised token; it is named.
    """
    columns: list[dict[str, Tensor]] = []
    for members in rows:
        parts: list[dict[str, Tensor]] = []
        offset, segments = 0, 1
        for number, (text, rounds) in enumerate(members):
            part = _document(text, rounds, label, number, offset, segments)
            if not bool(part["used"].any()):
                raise PacerError("a text without supervised tokens", value=text.id, remedy="leave it out of the labels")
            parts.append(part)
            offset, segments = offset + len(part["ids"]), segments + len(rounds.starts)
        columns.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        if produced is not None:
            columns[-1]["produced"] = torch.cat(list(produced[len(columns) - 1]))
    padding = {"document": PAD, "source": PAD}

    def padded(name: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([c[name] for c in columns], True, padding.get(name, 0))

    return Packed(**{name: padded(name) for name in columns[0]})


def sees(batch: Packed, prefix: bool = True) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule of the mask as ``(row, head, query, key) → bool``: FlexAttention's form, and the dense mask's too.

    Args:
        prefix: a segment sees the path up to its start; else itself alone.
    """
    document, segment, position, start = batch.document, batch.segment, batch.positions, batch.start

    def rule(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = document[row, query] == document[row, key]
        key_on_path = segment[row, key] == 0
        query_on_path = segment[row, query] == 0
        earlier = position[row, key] <= position[row, query]
        before_start = position[row, key] < start[row, query]
        from_path = key_on_path & torch.where(query_on_path, earlier, before_start & prefix)
        return same & (from_path | ((segment[row, query] == segment[row, key]) & earlier & ~key_on_path))

    return rule


def dense_mask(batch: Packed, prefix: bool = True) -> Tensor:
    """``(B, 1, N, N)`` bool. A padding place sees the other padding of its row, so no query is left without a key."""
    rows, n = batch.ids.shape
    place = torch.arange(n, device=batch.ids.device)
    row = torch.arange(rows, device=batch.ids.device)[:, None, None]
    return sees(batch, prefix)(row, row, place[None, :, None], place[None, None, :])[:, None]


def attention_mask(batch: Packed, prefix: bool = True) -> Tensor | BlockMask:
    """FlexAttention's block mask on a GPU (no N × N memory), the dense mask elsewhere."""
    if batch.ids.device.type != "cuda":
        return dense_mask(batch, prefix)
    rows, n = batch.ids.shape
    return create_block_mask(sees(batch, prefix), rows, None, n, n, device=batch.ids.device)


@torch.no_grad()
def produced_states(model: Stack, batch: Packed) -> Tensor:
    """A model's states before the norm that produced each place of a packed batch ``(B, N, H)``; 0 without one."""
    states = model.read_packed(batch.ids, batch.positions, attention_mask(batch), batch.source, batch.index)
    source = batch.source.clamp_min(0)[..., None].expand_as(states)
    return torch.where((batch.source >= 0)[..., None], states.gather(1, source), 0.0)
