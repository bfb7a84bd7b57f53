"""Draft models made of the target: some of its layers, its frozen embedding, a reduced head.

What is trained: the copied layers, the final norm, a square ``projection`` in front of the head and the gates of
copying. The head's rows are the target's own (only the most frequent ids), so a checkpoint needs to hold none of them;
for decoding the projection is multiplied into the rows once.

Shapes: H width, V ids in the head.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pacer.errors import ConfigError, MismatchError
from pacer.models.checkpoint import check_identity, identity, load_checkpoint, load_exactly, save_checkpoint
from pacer.models.copying import Copied, CopyHead
from pacer.models.placed import own_copy
from pacer.models.stack import Stack

KIND = "draft_layers"


def frequent_ids(texts: Iterable[Sequence[int]], size: int, always: Iterable[int], vocab_size: int) -> Tensor:
    """The ids of a reduced head, ascending: ``always`` (EOS, chat template), the most frequent, then the lowest.

    Args:
        texts: token ids to count. size: V; 0 or ≥ vocab_size gives every id.
    """
    if size <= 0 or size >= vocab_size:
        return torch.arange(vocab_size)
    always = list(always)
    counts = Counter(i for text in texts for i in text)
    order = [*dict.fromkeys([*always, *(i for i, _ in counts.most_common()), *range(vocab_size)])]
    return torch.tensor(sorted(order[: max(size, len(set(always)))]))


class TrainableDraft(nn.Module):
    """Copied layers + norm + projection, over the target's frozen embedding and head rows.

    Args:
        target: the model it is cut from. layers: which of its layers. head_ids: ids of the reduced head ``(V,)``.
        copying: with gates that copy from the context.
    """

    def __init__(self, target: Stack, layers: Sequence[int], head_ids: Tensor, copying: bool = False) -> None:
        super().__init__()
        if not layers or any(not 0 <= i < target.n_layers for i in layers):
            raise ConfigError("no such target layers", value=list(layers), allowed=f"0 … {target.n_layers - 1}")
        config = copy.deepcopy(target.config)
        config.num_hidden_layers, config.tie_word_embeddings = len(layers), False
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[i] for i in layers]
        with torch.device("meta"):
            model = type(target.model)(config)
        source = getattr(target.decoder, target.family.layers)
        copies = [own_copy(source[i], target.device) for i in layers]
        for index, layer in enumerate(copies):
            getattr(layer, target.family.attention).layer_idx = index
        self.layers, self.norm = nn.ModuleList(copies), own_copy(target.norm, target.device)
        self.projection = nn.Linear(target.width, target.width, bias=False, dtype=target.dtype, device=target.device)
        nn.init.eye_(self.projection.weight)
        self.copying: CopyHead | None = None
        if copying:
            self.copying = self._copy_head(target, head_ids.to(target.device))
        self.requires_grad_(True)
        decoder = attrgetter(target.family.decoder)(model)
        setattr(decoder, target.family.layers, self.layers)
        setattr(decoder, target.family.norm, self.norm)
        setattr(decoder, target.family.embed, target.embedding)
        for name, child in target.decoder._modules.items():  # rotary tables and other untrained parts; or None
            if name not in (target.family.layers, target.family.norm, target.family.embed):
                setattr(decoder, name, None if child is None else own_copy(child, target.device))
        rows = target.head.weight.detach()
        rows = rows[head_ids.to(rows.device)].to(target.device)
        head = nn.Linear(target.width, len(head_ids), bias=False, device="meta")
        head.weight = nn.Parameter(rows.clone(), requires_grad=False)
        setattr(model, target.family.head, head)
        # in a list: not a child, its tensors are registered above
        self._stack = [Stack(model.eval(), head_ids, self.copying)]

    def _copy_head(self, target: Stack, head_ids: Tensor) -> CopyHead:
        rows = target.head.weight.detach().to(target.device)
        head_of = torch.full((len(rows),), len(head_ids), device=rows.device)
        head_of[head_ids] = torch.arange(len(head_ids), device=rows.device)
        return CopyHead(rows, head_of, self.projection.weight)

    @property
    def stack(self) -> Stack:
        return self._stack[0]

    def logits(self, states: Tensor, copied: Copied | None = None) -> Tensor:
        """States before the norm ``(…, H)`` → logits over the head's ids ``(…, V)``, in training form.

        With candidates ``(…)``: ``(…, V + 1)``, as :meth:`pacer.models.stack.Stack.readout`.
        """
        normed = self.norm(states)
        logits = self.stack.head(self.projection(normed))
        return logits if copied is None or self.copying is None else self.copying(normed, logits, copied)

    @torch.no_grad()
    def merged(self, *, full: bool = False, target: Stack | None = None) -> Stack:
        """The stack for decoding: projection multiplied into the head's rows (of the whole vocabulary if ``full``)."""
        stack = self.stack
        weight = stack.head.weight
        if full:
            assert target is not None, "the whole vocabulary's rows come from the target"
            weight = target.head.weight.to(target.device)
        head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        rows = (weight.float() @ self.projection.weight.float()).to(weight.dtype)
        head.weight = nn.Parameter(rows, requires_grad=False)
        setattr(stack.model, stack.family.head, head)
        self.requires_grad_(False)
        whole = full or stack.head_ids is None or len(stack.head_ids) == stack.vocab_size
        copying = self.copying
        if whole and copying is not None:
            rows, head_of, projection = copying.shared
            copying = copying.sharing(rows, torch.arange(len(head_of), device=head_of.device), projection)
        return Stack(stack.model, None if whole else stack.head_ids, copying)


def save_draft(folder: Path, draft: TrainableDraft, target: Stack, extra: dict[str, Any], card: str) -> Path:
    """Save what was trained, in bfloat16, with the head's ids and the target's identity."""
    tensors = {k: v.to(torch.bfloat16) for k, v in draft.named_parameters()}
    assert draft.stack.head_ids is not None
    tensors["head_ids"] = draft.stack.head_ids.to(torch.int32)
    return save_checkpoint(
        folder, tensors, {"kind": KIND, "target": identity(target), "copying": draft.copying is not None, **extra}, card
    )


def load_draft(folder: Path, target: Stack) -> TrainableDraft:
    """A draft made of this target's layers.

    Raises:
        MismatchError: made for another model, or keys that do not fit.
    """
    tensors, config = load_checkpoint(folder, KIND)
    check_identity(config["target"], target, f"draft {folder.name}")
    if "head_ids" not in tensors:
        raise MismatchError(f"draft {folder.name} does not fit", value={"missing": ["head_ids"]})
    draft = TrainableDraft(target, config["layers"], tensors.pop("head_ids").long(), config.get("copying", False))
    load_exactly(draft, tensors, f"draft {folder.name}")
    return draft
