"""What every check measures with: a draft's greedy agreement with texts, by one teacher-forced pass per text.

The share of places where a draft's most likely token is the text's is the acceptance of greedy drafts, given that all
before was accepted.

Shapes: N output tokens of all texts, n of one, H width, V ids in the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pacer.data.corpus import Text
from pacer.models.copying import Copied, copied_all, token_of
from pacer.models.stack import Stack, causal_mask

Read = Callable[[Tensor], Tensor]


def states(stack: Stack, text: Text, order: Sequence[int] | None = None) -> Tensor:
    """States before the norm of the places that produce the output ``(n, H)``.

    Args:
        order: layers to run, one after the other, in place of all.
    """
    ids = torch.tensor([[*text.prompt_ids, *text.output_ids[:-1]]], device=stack.device)
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    mask = causal_mask(places, ids.shape[1])
    x = stack.embed(ids)
    x = stack.run(x, 0, stack.n_layers, places, mask) if order is None else stack.run_in_turn(x, order, places, mask)
    return x[0, len(text.prompt_ids) - 1 :]


def chosen(stack: Stack, text: Text, hidden: Tensor, vocab: int, read: Read | None = None) -> tuple[Tensor, Tensor]:
    """The most likely id of each place and its logits, ``(n,)`` and ``(n, V)``; ``read`` in place of the readout."""
    copied = None
    if read is None and stack.copying is not None:
        path = torch.tensor([*text.prompt_ids, *text.output_ids[:-1]], device=stack.device)
        copied = Copied(*(part[-len(hidden) :] for part in copied_all(path)))
    logits = stack.readout(hidden, copied) if read is None else read(hidden)
    if stack.head_ids is None:
        logits = logits[..., :vocab]
    row = logits.argmax(-1)
    return token_of(row, None if stack.head_ids is None else stack.head_ids.to(row.device), copied), logits


@torch.inference_mode()
def agreement(
    stack: Stack, texts: Sequence[Text], vocab: int, *, read: Read | None = None, order: Sequence[int] | None = None
) -> Tensor:
    """Where the stack's most likely token is the text's ``(N,)`` bool, on the CPU.

    Args:
        vocab: the target's vocabulary; padded rows beyond it are no tokens.
    """
    parts = []
    for text in texts:
        ids, _ = chosen(stack, text, states(stack, text, order), vocab, read)
        parts.append(ids.cpu() == torch.tensor(text.output_ids))
    return torch.cat(parts)


def share(hits: Tensor) -> float:
    return round(float(hits.float().mean()), 4)
