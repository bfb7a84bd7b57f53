"""Context beyond training, windows longer than acceptance carries, costs that cannot be earned, sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pacer.data.corpus import Text
from pacer.data.labels import Rounds
from pacer.evaluation.doctor.findings import LEAST, Evidence, Finding, excess
from pacer.evaluation.doctor.measure import share
from pacer.evaluation.simulate import best_fixed, fixed
from pacer.settings import CostSettings, SamplingSettings

BUCKETS = (128, 256, 512, 1024, 2048, 4096)
FASTER = 1.05  # of another window, to be worth a finding


def lengths(texts: Sequence[Text]) -> Tensor:
    """Tokens before each output token ``(N,)``."""
    return torch.cat([len(text.prompt_ids) + torch.arange(len(text.output_ids)) for text in texts])


def by_length(own: Tensor, before: Tensor) -> dict[str, float]:
    """Agreement by context length: ``≤ 128``, ``≤ 256`` … (each bucket without the smaller ones)."""
    found, low = {}, 0
    for high in BUCKETS:
        inside = (before > low) & (before <= high)
        if inside.any():
            found[f"≤ {high}"] = share(own[inside])
        low = high
    if (before > low).any():
        found[f"> {low}"] = share(own[before > low])
    return found


def context(own: Tensor, before: Tensor, limit: int, longest: int | None) -> list[Finding]:
    """Places the draft cannot reach, and those longer than any text it was trained on.

    Args:
        own: agreement ``(N,)``. before: tokens before each place ``(N,)``. limit: the draft's context.
        longest: tokens of the longest training text; None: not known.
    """
    found = []
    out = before > limit
    within = own[~out]
    buckets: dict[str, Any] = {f"agreement {name}": value for name, value in by_length(own, before).items()}
    if out.any():
        beyond = float(out.float().mean())
        reachable = share(within) if len(within) else share(own)
        what = f"{beyond:.0%} of the places lie beyond the draft's context of {limit} tokens: nothing is drafted there"
        remedy = "shorten the prompts, or use a draft with a longer context"
        found.append(
            Finding("context", what, {"share": round(beyond, 4), **buckets}, beyond * max(reachable, LEAST), remedy)
        )
    far = before >= longest if longest else torch.zeros_like(out)
    far &= ~out
    near = ~far & ~out
    if longest and far.any() and near.any() and (lost := excess(own[far], own[near])):
        beyond = float(far.float().mean())
        what = (
            f"{beyond:.0%} of the places lie beyond the {longest} tokens of the longest training text: agreement there "
            f"{share(own[far]):.0%}, before {share(own[near]):.0%}"
        )
        remedy = "train the draft on longer texts (corpus.max_new_tokens, longer prompts)"
        found.append(
            Finding("context", what, {"share": round(beyond, 4), "longest": longest, **buckets}, lost * beyond, remedy)
        )
    return found


def window(rounds: Sequence[Rounds], gamma: int | None, costs: CostSettings, gamma_max: int) -> list[Finding]:
    """Can speculation pay at these costs, and is the fixed window too long for the runs that are accepted?

    Args:
        rounds: simulated rounds on the target's text. gamma: the window; None: another rule decides.
    """
    accepted = np.concatenate([r.accepted.numpy() for r in rounds])
    counts = np.concatenate([r.counts.numpy() for r in rounds])
    known = np.concatenate([(r.known >= r.counts).numpy() | (r.accepted < r.known).numpy() for r in rounds])
    accepted, counts = accepted[known], counts[known]
    if not len(accepted):
        return []
    first = float((accepted > 0).mean())
    needed = costs.draft + costs.token + costs.rest  # 1 + acceptance tokens against 1 + these costs, at γ = 1
    best, outcome = best_fixed(accepted, counts, costs, gamma_max)
    evidence: Evidence = {
        "first_token_accepted": round(first, 4), "break_even": round(needed, 4), "best_gamma": best,
        "best_speedup": round(outcome.speedup, 3), "accepted_per_round": round(float(accepted.mean()), 3),
    }  # fmt: skip
    if best == 0 or first < needed:
        what = f"speculation cannot pay: {first:.0%} of first tokens are accepted, the costs need {needed:.0%}"
        remedy = "use a cheaper or a better draft; measure costs with python -m pacer.profile"
        return [Finding("costs", what, evidence, min(max(needed - first, 0.0), 1.0), remedy)]
    if gamma is None or gamma <= best:
        return []
    chosen = fixed(accepted, counts, gamma, costs)
    if outcome.speedup < FASTER * chosen.speedup:
        return []
    rates = [o.accepted / o.drafted for o in (chosen, outcome)]
    evidence |= {"gamma": gamma, "speedup": round(chosen.speedup, 3), "acceptance": round(rates[0], 4)}
    what = (
        f"γ = {gamma} is too long: {chosen.drafted:.1f} tokens drafted and {chosen.tokens_per_verify:.2f} emitted per "
        f"target pass; γ = {best} would accept {rates[1]:.0%} instead of {rates[0]:.0%}"
    )
    return [Finding("window", what, evidence, rates[1] - rates[0], f"set method.controller.gamma={best}")]


def sampling(settings: SamplingSettings, accept: Callable[[SamplingSettings], Tensor]) -> list[Finding]:
    """What each sampling setting costs: acceptance of real one-token drafts with it, and with its neutral value.

    Args:
        accept: decodes with these settings and says which drafted tokens were accepted ``(N,)``.
    """
    neutral = SamplingSettings()
    changed = ["repetition_penalty"] if settings.temperature == 0 else ["temperature", "repetition_penalty"]
    changed = [name for name in changed if getattr(settings, name) != getattr(neutral, name)]
    own = accept(settings) if changed else torch.empty(0)
    found = []
    for name in changed:
        other = accept(replace(settings, **{name: getattr(neutral, name)}))
        if lost := excess(own, other):
            value = getattr(settings, name)
            what = f"sampling.{name}={value} costs acceptance: {share(own):.0%} with it, {share(other):.0%} without"
            evidence: Evidence = {"acceptance": share(own), "acceptance_without": share(other), name: value}
            remedy = f"lower it towards {getattr(neutral, name)}, or expect shorter drafts"
            found.append(Finding("sampling", what, evidence, lost, remedy))
    return found
