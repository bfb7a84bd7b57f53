"""Are the draft's layers the right ones, in the right order?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pacer.data.corpus import Text
from pacer.evaluation.doctor.findings import Evidence, Finding, gain
from pacer.evaluation.doctor.measure import agreement, share
from pacer.models.stack import Stack

ALIKE = 0.5  # cosine of a trained layer's weights with those it began as; unrelated layers are near 0


def _weights(stack: Stack, index: int) -> Tensor:
    """The matrices of a layer as one vector; norms are alike in all layers."""
    layer = getattr(stack.decoder, stack.family.layers)[index]
    return torch.cat([w.detach().float().flatten() for w in layer.parameters() if w.dim() > 1])


def origins(draft: Stack, target: Stack) -> list[tuple[int, float]]:
    """For each layer of the draft: the target layer whose weights are most like its own, and the cosine."""
    found = []
    for index in range(draft.n_layers):
        own = _weights(draft, index)
        alike = [float(torch.cosine_similarity(own, _weights(target, i), dim=0)) for i in range(target.n_layers)]
        best = max(range(target.n_layers), key=lambda i: alike[i])
        found.append((best, alike[best]))
    return found


def order(draft: Stack, target: Stack, layers: Sequence[int], texts: Sequence[Text]) -> list[Finding]:
    """A trained draft: do its weights stem from the layers it names, and would another order agree better?"""
    vocab, count = target.vocab_size, draft.n_layers
    own = agreement(draft, texts, vocab)
    stem = origins(draft, target)
    orders = [[*range(i), i + 1, i, *range(i + 2, count)] for i in range(count - 1)]
    orders += [list(reversed(range(count))), sorted(range(count), key=lambda i: stem[i][0])]
    best, gained, there = [], 0.0, own
    for other in orders:
        hits = agreement(draft, texts, vocab, order=other)
        if gain(own, hits) > gained:
            best, gained, there = other, gain(own, hits), hits
    wrong = [(named, i) for named, (i, alike) in zip(layers, stem, strict=True) if alike > ALIKE and i != named]
    if not gained and not wrong:
        return []
    evidence: Evidence = {
        "named": str(list(layers)), "stem_from": str([i for i, _ in stem]),
        "least_cosine": round(min(alike for _, alike in stem), 3), "agreement": share(own),
    }  # fmt: skip
    if gained:
        evidence |= {"order": str(best), "agreement_other_order": share(there)}
        what = (
            f"the draft's layers agree with {share(own):.0%} of the text, in the order {best} with {share(there):.0%}"
        )
    else:
        named, i = wrong[0]
        what = f"the checkpoint says it was made of layers {list(layers)}; the weights of layer {named} stem from {i}"
    return [Finding("layers", what, evidence, gained, "save the layers under the places they were trained at")]


def choice(target: Stack, layers: Sequence[int], texts: Sequence[Text]) -> list[Finding]:
    """An untrained draft: do neighbouring choices of target layers agree better?"""
    vocab, count, last = target.vocab_size, len(layers), target.n_layers - 1
    candidates = [[i + by for i in layers] for by in (-1, 1)] + [list(range(count)), [*range(count - 1), last]]
    for place, layer in enumerate(layers):
        candidates += [[*layers[:place], layer + by, *layers[place + 1 :]] for by in (-1, 1)]
    own = agreement(target, texts, vocab, order=layers)
    best, gained, there = list(layers), 0.0, own
    for other in candidates:
        if other == sorted(set(other)) and other[0] >= 0 and other[-1] <= last and other != list(layers):
            hits = agreement(target, texts, vocab, order=other)
            if gain(own, hits) > gained:
                best, gained, there = other, gain(own, hits), hits
    if not gained:
        return []
    what = f"untrained, layers {best} agree with {share(there):.0%} of the text, {list(layers)} with {share(own):.0%}"
    evidence: Evidence = {"layers": str(best), "agreement": share(own), "agreement_other": share(there)}
    return [Finding("layers", what, evidence, gained, f"start from them: model.draft.layers={best}".replace(" ", ""))]
