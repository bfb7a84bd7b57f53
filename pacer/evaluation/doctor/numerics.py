"""Rounding and readout: is the draft as good as its weights?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from pacer.data.corpus import Text
from pacer.evaluation.doctor.findings import Evidence, Finding, gain
from pacer.evaluation.doctor.measure import Read, agreement, chosen, share, states
from pacer.models.stack import Stack


@torch.inference_mode()
def dtype(
    low: Stack, high: Stack, texts: Sequence[Text], vocab: int, quantise: str | None = None, key: str = "model.dtype"
) -> list[Finding]:
    """The draft as it decodes against the same draft in float32.

    Non-finite logits are a finding whatever they cost; otherwise the agreement that rounding loses.

    Args:
        quantise: how the weights of ``low`` were rounded beyond its dtype. key: the setting that named that dtype.
    """
    own, exact, changed, broken = [], [], [], []
    for text in texts:
        ids, logits = chosen(low, text, states(low, text), vocab)
        ids32, _ = chosen(high, text, states(high, text), vocab)
        right = torch.tensor(text.output_ids)
        own.append(ids.cpu() == right)
        exact.append(ids32.cpu() == right)
        changed.append((ids != ids32).cpu())
        broken.append((logits.isnan().any(-1) | ~logits.max(-1).values.isfinite()).cpu())
    here, there, bad = torch.cat(own), torch.cat(exact), float(torch.cat(broken).float().mean())
    lost = gain(here, there)
    name = str(low.dtype).removeprefix("torch.")
    name = f"{quantise} in {name}" if quantise else name
    plain = "model.draft.quantise=null, " if quantise else ""
    evidence: Evidence = {
        "agreement": share(here), "agreement_float32": share(there), "choices_changed": share(torch.cat(changed)),
        "not_finite": round(bad, 4),
    }  # fmt: skip
    if bad > 0:
        what = f"the draft's logits are not finite at {bad:.0%} of the places in {name}"
        effect = max(lost, bad * share(there))
        return [Finding("dtype", what, evidence, effect, f"set {plain}{key}=bfloat16 or float32")]
    if lost:
        what = f"{name} costs the draft {lost:.1%} agreement: {share(here):.1%}, {share(there):.1%} in float32"
        remedy = "set model.draft.quantise=null" if quantise else f"set {key}=float32, or train the draft in this dtype"
        return [Finding("dtype", what, evidence, lost, remedy)]
    return []


def _readouts(draft: Stack, target: Stack) -> dict[str, Read]:
    """Other ways from states before the norm to logits over the draft's ids."""

    def head(states: Tensor) -> Tensor:
        return draft.head(states.to(draft.dtype))  # the target's norm may answer in another

    readouts: dict[str, Read] = {
        "without its final norm": head,
        "with its final norm twice": lambda x: head(draft.normed(draft.normed(x))),
    }
    if draft.width == target.width:
        rows = target.head.weight
        if draft.head_ids is not None:
            rows = rows[draft.head_ids.to(rows.device)]

        def target_head(states: Tensor) -> Tensor:
            return F.linear(states.to(rows.dtype), rows)

        readouts |= {
            "with the target's final norm": lambda x: head(target.normed(x)),
            "with the target's head, without a projection of its own": lambda x: target_head(draft.normed(x)),
            "with the target's final norm and head": lambda x: target_head(target.normed(x)),
            "with the target's head and no norm": target_head,
        }
    return readouts


def readout(draft: Stack, target: Stack, texts: Sequence[Text]) -> list[Finding]:
    """Would another readout of the same states agree better? Then norm or head are not those of its training."""
    vocab = target.vocab_size
    own = agreement(draft, texts, vocab)
    others = {name: agreement(draft, texts, vocab, read=read) for name, read in _readouts(draft, target).items()}
    most = max(others.values(), key=share)
    best, there = next((name, hits) for name, hits in others.items() if not gain(hits, most))  # the plainest of equals
    gained = gain(own, there)
    if not gained:
        return []
    what = f"the draft read {best} agrees with {share(there):.0%} of the target's text, as it is with {share(own):.0%}"
    evidence: Evidence = {"readout": best, "agreement": share(own), "agreement_other": share(there)}
    remedy = "save the draft with the norm and head it was trained with (states are normed once, at the readout)"
    return [Finding("readout", what, evidence, gained, remedy)]
