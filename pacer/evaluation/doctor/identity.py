"""Do the parts belong together: tokenizers, head, layers, what was measured when the draft was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pacer.data.corpus import Text
from pacer.errors import MismatchError
from pacer.evaluation.doctor.findings import LEAST, REFUSED, Evidence, Finding, drop, gain
from pacer.evaluation.doctor.measure import agreement, share
from pacer.models.stack import Stack
from pacer.models.tokenizers import REMEDY, check_same_tokenizer
from pacer.settings import DraftSettings


def tokenizer(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, sizes: tuple[int, int], texts: Sequence[Text]
) -> list[Finding]:
    """Ids that mean something else to the draft.

    Args:
        sizes: vocabulary sizes of the two models.
    """
    try:
        check_same_tokenizer(target, draft, *sizes)
    except MismatchError as error:
        left, right = target.get_vocab(), draft.get_vocab()
        differing = {id for _, id in left.items() ^ right.items()}
        written = [id for text in texts for id in text.output_ids]
        evidence: Evidence = {
            "ids_that_differ": len(differing), "target_vocabulary": len(target), "draft_vocabulary": len(draft),
            "share_of_written_tokens": round(sum(id in differing for id in written) / max(len(written), 1), 4),
        }  # fmt: skip
        return [Finding("tokenizer", error.what, evidence, REFUSED, error.remedy or REMEDY)]
    return []


def head(draft: Stack, full: Stack | None, texts: Sequence[Text], needed: Sequence[int], vocab: int) -> list[Finding]:
    """What the target writes and a reduced head cannot say.

    Args:
        full: the same draft with the whole vocabulary's head. needed: stop ids, special tokens, the template's ids.
    """
    if draft.head_ids is None:
        return []
    known = torch.zeros(vocab, dtype=torch.bool)
    known[draft.head_ids.cpu()] = True
    written = torch.tensor([id for text in texts for id in text.output_ids])
    outside = float((~known[written]).float().mean())
    more = 0.0
    evidence: Evidence = {
        "head_ids": len(draft.head_ids),
        "share_outside": round(outside, 4),
    }
    if full is not None:
        own, whole = agreement(draft, texts, vocab), agreement(full, texts, vocab)
        evidence |= {"agreement": share(own), "agreement_whole_head": share(whole)}
        more = gain(own, whole)
    found = []
    if more or outside > 0.1:
        what = f"{outside:.0%} of what the target writes is not among the draft's {len(draft.head_ids)} head ids"
        remedy = "train the draft on texts like these or with a larger model.draft.head_size; full_head=true meanwhile"
        found.append(Finding("head", what, evidence, more, remedy))
    lacking = [id for id in needed if not known[id]]
    if lacking:
        lost = float(torch.isin(written, torch.tensor(lacking)).float().mean())
        what = f"the draft's head lacks {len(lacking)} stop ids, special or template tokens, first {lacking[0]}"
        remedy = "train the draft again for this tokenizer"
        found.append(Finding("head", what, {"lacking": len(lacking), "share_outside": round(lost, 4)}, lost, remedy))
    return found


def declared(config: Mapping[str, Any], head_size: int, settings: DraftSettings, vocab: int) -> list[Finding]:
    """Settings that a checkpoint overrules; nothing is lost by that, but the run is not what its settings say."""
    found = []
    remedy = "set it to the checkpoint's value, or train a draft of these settings (model.draft.source=null)"
    if list(config["layers"]) != list(settings.layers):
        what = f"model.draft.layers says {list(settings.layers)}, the checkpoint was made of {list(config['layers'])}"
        found.append(Finding("settings", what, {"layers": len(config["layers"])}, 0.0, remedy))
    copying = bool(config.get("copying", False))
    if copying != settings.copying:
        what = f"model.draft.copying says {settings.copying}, the checkpoint copies: {copying}"
        found.append(Finding("settings", what, {"copying": copying}, 0.0, remedy))
    wanted = settings.head_size if 0 < settings.head_size < vocab else vocab
    if head_size != wanted:
        what = f"model.draft.head_size says {wanted}, the checkpoint's head has {head_size} ids"
        found.append(Finding("settings", what, {"head_ids": head_size}, 0.0, remedy))
    return found


def recorded(config: Mapping[str, Any], texts: Sequence[Text], own: Tensor, explained: float) -> list[Finding]:
    """Agreement here against what was measured, per task, when the draft was trained.

    Args:
        own: agreement with the texts ``(N,)``. explained: effect of the largest other finding, which is no news here.
    """
    figures = config.get("validation") or {}
    parts = own.split([len(text.output_ids) for text in texts])
    by_task: dict[str, list[Tensor]] = {}
    for text, hits in zip(texts, parts, strict=True):
        by_task.setdefault(text.task, []).append(hits)
    found: list[Finding] = []
    for task, hits in by_task.items():
        before = float(figures.get(f"val/agreement_{task}", "nan"))  # NaN: this task was not in its training
        here = torch.cat(hits)
        lost = drop(before, here)
        if lost - explained > LEAST:
            what = (
                f"agreement with the target's {task} texts is {share(here):.0%}, in the draft's training {before:.0%}"
            )
            evidence: Evidence = {"agreement": share(here), "recorded": round(before, 4), "tokens": len(here)}
            remedy = "look for what changed since: the target, its dtype, the prompts; else train the draft again"
            found.append(Finding("stale", what, evidence, lost * len(here) / len(own), remedy))
    return found
