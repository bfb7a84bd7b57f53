"""Simulated rounds in sampling: p and q of every drafted token, and a verdict drawn by them.

In greedy decoding the text itself says what is accepted. At a temperature the draft draws its tokens, one packed
forward of the target over text and rounds, under the mask that training uses, gives what it thinks of each, and
speculative sampling's own rule decides. Rounds start on the text at hand, which may be the target's greedy one.

Shapes: S rounds of a text, g drafted tokens, V vocabulary, H width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pacer.data.corpus import Text
from pacer.data.labels import Rounds, choose_starts, draft_rounds
from pacer.data.packing import pack, produced_states
from pacer.decoding.distributions import LEAST, probabilities, spread
from pacer.decoding.uniforms import ACCEPT, request_key, uniforms
from pacer.decoding.verify import leading
from pacer.errors import ConfigError
from pacer.models.stack import Stack
from pacer.settings import LabelSettings, SamplingSettings

TOGETHER = 768  # drafted tokens read at a time: attention is quadratic


@torch.inference_mode()
def target_logprobs(
    target: Stack, text: Text, rounds: Rounds, temperature: float, vocab_size: int | None = None
) -> Tensor:
    """log p of each drafted token ``(S, g)`` at a temperature, given the text up to the round's start and the draft
    before it; tokens after a stop id are left at 0.

    Args:
        target: or the exit that verifies. vocab_size: of the ids, where padded rows are no tokens.
    """
    sampling, path = SamplingSettings(temperature), len(text.prompt_ids) + len(text.output_ids)
    found = torch.zeros(rounds.tokens.shape)
    real = torch.arange(found.shape[1]) < rounds.counts[:, None]
    ids = None if target.head_ids is None else target.head_ids.to(target.device)
    at = 0
    while at < len(found):
        rows = slice(at, at + max(1, int((rounds.counts[at:].cumsum(0) <= TOGETHER).sum())))
        part = rounds.pick(torch.arange(len(found))[rows])
        packed = pack([[(text, part)]], "survival").to(target.device)
        logits = target.readout(produced_states(target, packed)[0, path:])
        if ids is None:
            logits = logits[..., :vocab_size]
        p = spread(probabilities(logits, sampling), ids, vocab_size or target.vocab_size)
        chosen = p.gather(1, packed.ids[0, path:, None]).squeeze(1)
        found[rows] = found[rows].masked_scatter(real[rows], chosen.log().clamp_min(LEAST).cpu())
        at = rows.stop
    return found


def sampled_rounds(
    draft: Stack,
    target: Stack,
    text: Text,
    settings: LabelSettings,
    stop_ids: Sequence[int],
    vocab_size: int | None = None,
) -> Rounds | None:
    """Rounds of a text by the start policy, drawn and verified at ``settings.temperature``; None where the output is
    too short for one. Numbers follow from the seed and the text's id.

    Raises:
        ConfigError: ``starts: rounds``, which follows the text, and sampling does not.
    """
    if settings.starts == "rounds":
        raise ConfigError("labels.starts in sampling", value=settings.starts, allowed=("uniform", "all"))
    starts = choose_starts(text, settings)
    if len(starts) == 0:
        return None
    temperature, key = settings.temperature, request_key(settings.seed, text.id)
    rounds = draft_rounds(draft, text, starts, settings.gamma, stop_ids, vocab_size, temperature, key)
    assert rounds.logq is not None, "drawn at a temperature"
    logp = target_logprobs(target, text, rounds, temperature, vocab_size)
    places = torch.arange(settings.gamma)
    chance = uniforms(torch.full_like(starts, key), starts, places, ACCEPT)
    kept = chance * rounds.logq.double().exp() < logp.double().exp()
    accepted = torch.minimum(leading(kept), rounds.counts)
    return replace(rounds, logp=logp, accepted=accepted, known=torch.full_like(rounds.known, settings.gamma))
