"""An exit seen as a draft model: simulated rounds are those that decoding makes, with and without an adapter."""

from __future__ import annotations

import pytest
import torch

from pacer.data.corpus import Text
from pacer.data.labels import draft_rounds, judged_by
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.request import Request
from pacer.models.exit_stack import ExitStack
from pacer.models.stack import Stack
from tests.exits import early_model, heads, self_speculative
from tests.tiny import prompts

TARGET = Stack(early_model())
PROMPT, GAMMA = prompts([7])[0], 4


@pytest.mark.parametrize("kind", ["shared", "adapter"])
def test_simulated_rounds_are_what_decoding_makes(kind: str) -> None:
    """T82: drafts and their fate, for LayerSkip; for HiSpec the first inner round and its exit's verdict."""
    found = heads(TARGET, kind=kind)
    (skip,) = self_speculative(TARGET, found[:1], Fixed(GAMMA), ()).generate([Request("r", PROMPT, 30)])
    text = Text("r", "gsm8k", PROMPT, skip.ids, True)
    low, high = (ExitStack(TARGET, head) for head in found)
    lines = [line for line in skip.rounds[1:] if len(line["drafted"]) == GAMMA]
    starts = torch.tensor([line["committed"] for line in lines])
    rounds = draft_rounds(low, text, starts, GAMMA, ())
    assert rounds.tokens.tolist() == [line["drafted"] for line in lines]
    assert rounds.accepted.tolist() == [line["accepted"][-1] for line in lines]
    (spec,) = self_speculative(TARGET, found, Fixed(GAMMA), (4,)).generate([Request("r", PROMPT, 30)])
    first = [line for line in spec.rounds[1:] if line["inner"] and len(line["inner"][0]["drafted"]) == GAMMA]
    starts = torch.tensor([line["committed"] for line in first])
    judged = judged_by(*(draft_rounds(exit, text, starts, GAMMA, ()) for exit in (low, high)))
    assert judged.tokens.tolist() == [line["inner"][0]["drafted"] for line in first]
    assert judged.accepted.tolist() == [line["inner"][0]["accepted"] for line in first]
    assert len(first) > 3 and len(set(judged.accepted.tolist())) > 1
