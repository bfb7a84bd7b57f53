"""What the parts learned from: is the corpus the target's own greedy text, in the template that decoding uses?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pacer.data.corpus import Text
from pacer.data.prompts import encode
from pacer.decoding.distributions import signals
from pacer.evaluation.doctor.findings import REFUSED, SURE, UNMEASURED, Evidence, Finding, excess
from pacer.evaluation.doctor.measure import share, states
from pacer.models.stack import Stack
from pacer.models.tokenizers import decode

OWN = 0.97  # greedy agreement of a target with its own text; rounding parts it at near-ties alone


@torch.inference_mode()
def own_text(target: Stack, corpus: Sequence[Text], greedy: bool) -> list[Finding]:
    """The share of the corpus that the target itself would have written, by one teacher-forced pass per text.

    Args:
        greedy: whether decoding is; a corpus that was sampled is a fault only then.
    """
    highest = max(max([*text.prompt_ids, *text.output_ids]) for text in corpus)
    if highest >= target.vocab_size:
        what = f"the corpus has ids up to {highest}, the target's vocabulary ends at {target.vocab_size - 1}"
        remedy = "write the corpus with this target: corpus.file=null"
        return [Finding("data", what, {"highest_id": highest}, REFUSED, remedy)]
    hits, surprise, entropy = [], [], []
    for text in corpus:
        logits = target.readout(states(target, text))
        right = torch.tensor(text.output_ids, device=logits.device)
        said = signals(logits, right)
        hits.append((logits.argmax(-1) == right).cpu())
        surprise.append(-said.logprob.cpu())
        entropy.append(said.entropy.cpu())
    own, cost, chance = torch.cat(hits), torch.cat(surprise), torch.cat(entropy)
    # the target's own samples cost its entropy on average; another's text costs more
    sampled = float((cost - chance).mean()) < SURE * float((cost - chance).std(unbiased=False)) / sqrt(len(cost))
    if float(own.float().mean()) >= OWN or (sampled and not greedy):
        return []
    evidence: Evidence = {
        "own_share": share(own), "texts": len(corpus), "tokens": len(own),
        "nats_per_token": round(float(cost.mean()), 3), "target_entropy": round(float(chance.mean()), 3),
    }  # fmt: skip
    if sampled:
        what = f"the corpus looks sampled: the target's greedy choice is {share(own):.0%} of it, the rest likely too"
    else:
        what = f"the corpus is not the target's own text: it would have chosen {share(own):.0%} of the tokens"
    remedy = "let the target write it greedily (corpus.file=null), then train draft and pre-verifier again"
    return [Finding("data", what, evidence, 1 - share(own), remedy)]


def frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids that every rendered prompt begins and ends with."""
    rendered = [encode(text, tokenizer) for text in ("How many?", "the fox", "7")]
    prefix = _common(rendered)
    suffix = _common([ids[len(prefix) :][::-1] for ids in rendered])[::-1]
    return prefix, suffix


def _common(rows: Sequence[Sequence[int]]) -> list[int]:
    """What all rows begin with."""
    return [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))]


def corpus_template(
    tokenizer: PreTrainedTokenizerBase, corpus: Sequence[Text], own: Tensor, on_corpus: Tensor
) -> list[Finding]:
    """Were the corpus' prompts rendered as decoding renders them?

    Args:
        own, on_corpus: the draft's agreement with target text here ``(N,)`` and with the corpus ``(M,)``.
    """
    prefix, suffix = frame(tokenizer)
    other = [
        text for text in corpus
        if text.prompt_ids[: len(prefix)] != prefix or text.prompt_ids[len(text.prompt_ids) - len(suffix) :] != suffix
    ]  # fmt: skip
    off = len(other) / len(corpus)
    if off < 0.05:
        return []
    begins = decode(tokenizer, other[0].prompt_ids[: max(len(prefix), 6)], skip_special=False)
    what = f"{off:.0%} of the corpus' prompts are not in the tokenizer's template: one begins {begins!r}"
    evidence: Evidence = {
        "share": round(off, 4), "agreement": share(own), "agreement_corpus": share(on_corpus),
        "expected_begin": decode(tokenizer, prefix, skip_special=False),
        "expected_end": decode(tokenizer, suffix, skip_special=False),
    }  # fmt: skip
    effect = max(off * UNMEASURED, excess(own, on_corpus))
    remedy = "write the corpus again with this tokenizer (corpus.file=null), then train again"
    return [Finding("template", what, evidence, effect, remedy)]


def plain_text(own: Tensor, plain: Tensor) -> list[Finding]:
    """Does the draft agree better where the prompts are plain text? Then it never learned the chat template.

    Args:
        own, plain: agreement with what the target writes after templated ``(N,)`` and after plain prompts ``(M,)``.
    """
    lost = excess(own, plain)
    if not lost:
        return []
    what = f"the draft agrees with {share(plain):.0%} after plain prompts, with {share(own):.0%} in the chat template"
    evidence: Evidence = {"agreement": share(own), "agreement_plain": share(plain)}
    return [Finding("template", what, evidence, lost, "train the draft on texts in the chat template")]
