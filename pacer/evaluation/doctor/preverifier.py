"""Is the pre-verifier the draft's own, and does it still see what it saw in training?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pacer.data.corpus import Text
from pacer.data.labels import Rounds
from pacer.data.packing import pack
from pacer.evaluation.doctor.findings import SURE, UNMEASURED, Evidence, Finding
from pacer.models.preverifier import Preverifier

LEAST = 0.1  # AUC; other prompts than those of its validation make smaller differences


def auc(module: Preverifier, pairs: Sequence[tuple[Text, Rounds]]) -> tuple[float, float]:
    """Area under the ROC curve on simulated rounds, and its standard error (Hanley and McNeil 1982).

    NaN where all labels are the same.
    """
    from torchmetrics.functional.classification import binary_auroc  # both take seconds to import

    from pacer.training.preverify import packed_logits

    scores, labels = [], []
    with torch.inference_mode():
        for pair in pairs:
            batch = pack([[pair]], module.settings.label).to(module.draft.device)
            scores.append(packed_logits(module, batch)[batch.used].float().cpu())
            labels.append(batch.labels[batch.used].long().cpu())
    score, label = torch.cat(scores), torch.cat(labels)
    good = int(label.sum())
    bad = len(label) - good
    if not good or not bad:
        return float("nan"), float("nan")
    area = float(binary_auroc(score.sigmoid(), label))
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (good - 1) * (q1 - area**2) + (bad - 1) * (q2 - area**2)
    return area, float((variance / (good * bad)) ** 0.5)


def judgement(
    module: Preverifier, config: Mapping[str, Any], pairs: Sequence[tuple[Text, Rounds]]
) -> tuple[float, list[Finding]]:
    """AUC here against the recorded one, and with the other kind of draft state; effects are AUC lost.

    Args:
        pairs: rounds of this draft on the target's own text.
    """
    found: list[Finding] = []
    area, error = auc(module, pairs)
    if area != area:  # all accepted or none: nothing to tell apart
        return area, found
    state = module.settings.state
    other = "before_norm" if state == "after_norm" else "after_norm"
    settings = module.settings
    module.settings = replace(settings, state=other)
    try:
        area_other, _ = auc(module, pairs)
    finally:
        module.settings = settings
    sure = max(LEAST, SURE * error)  # places of a round are no independent draws: the error alone is too small
    evidence: Evidence = {"auc": round(area, 4), f"auc_{other}": round(area_other, 4)}
    before = (config.get("validation") or {}).get("val/auc")
    # the other state explains it only where it brings back most of what was lost
    explains = area_other > 0.5 and (before is None or before - area_other < (before - area) / 2)
    if area_other - area > sure and explains:
        what = f"the pre-verifier's AUC is {area:.2f} on states {state}, {area_other:.2f} on states {other}"
        remedy = "train it again: its state setting is not the one it was trained with"
        found.append(Finding("pre-verifier", what, evidence, area_other - area, remedy))
    elif before is not None and before - area > sure:
        what = f"the pre-verifier's AUC is {area:.2f} here; in its training it was {before:.2f}"
        remedy = "train it again for this draft and these prompts: python -m pacer.train …"
        found.append(Finding("pre-verifier", what, {**evidence, "recorded": round(before, 4)}, before - area, remedy))
    if "layers" not in config["draft"]:
        what = "the pre-verifier does not record which draft's layers it was trained on: another's would go unseen"
        effect = 0.0 if before is not None and before - area <= sure else UNMEASURED
        found.append(Finding("pre-verifier", what, evidence, effect, "train it again, if in doubt"))
    return area, found
