"""Our `heuristic` and `dynamic` make the decisions of transformers' own assisted generation, round by round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_curve
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from pacer.decoding.controllers.dynamic import Dynamic, refit
from pacer.decoding.controllers.heuristic import Heuristic
from pacer.decoding.request import Request
from pacer.models.stack import Stack
from tests.tiny import make_decoder, near, plain_greedy, prompts, tiny_model

NEW = 60
Round = tuple[int, int, float]  # drafted, accepted, threshold after it


def theirs(
    target: Any, draft: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[int], list[Round]]:
    """transformers' output, and what its candidate generator was told after each round."""
    rounds: list[Round] = []
    update = AssistedCandidateGenerator.update_candidate_strategy

    def noting(self: Any, input_ids: Any, scores: Any, num_matches: Any) -> None:
        update(self, input_ids, scores, num_matches)
        t = self.assistant_generation_config.assistant_confidence_threshold
        rounds.append((len(scores[0]) - 1, int(num_matches), float(t)))

    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", noting)
    draft.generation_config.update(**options)
    ids = torch.tensor([[0, *prompt]])  # a masked token in front: without a mask the assistant's cache goes wrong
    mask = torch.tensor([[0] + [1] * len(prompt)])
    config = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}
    out = target.generate(ids, attention_mask=mask, assistant_model=draft, **config)
    return out[0, ids.shape[1] :].tolist(), rounds


def ours(target: Stack, draft: Stack, rule: Heuristic | Dynamic, prompt: list[int]) -> tuple[list[int], list[Round]]:
    """Our output and rounds: the prompt's last token is what the target emits after the others, so our prefill, which
    emits a token before anything is drafted, is no round of theirs."""
    rounds: list[Round] = []

    def note(row: Any, line: Any) -> None:
        t = rule.states[0].t if isinstance(rule, Dynamic) else 0.0
        rounds.append((len(line["drafted"]), line["accepted"][0], t))

    decoder = make_decoder(target, draft, rule)
    result = decoder.generate([Request("r", prompt[:-1], NEW + 1)], on_commit=note)[0]
    assert result.ids[0] == prompt[-1]
    return result.ids[1:], rounds[1:]


PAIRS = [(0, 0.02), (1, 0.03), (2, 0.05), (3, 0.01)]  # seed and noise of the draft


@pytest.fixture(params=PAIRS, ids=lambda pair: f"seed {pair[0]}, noise {pair[1]}")
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel, list[int]]:
    seed, noise = request.param
    target = tiny_model(layers=2, seed=seed)
    begin = prompts([7], seed=seed)[0]
    return target, near(target, noise), [*begin, *plain_greedy(target, begin, 1)]


def test_heuristic_lengths_are_theirs(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, prompt = pair
    options = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic_transient"}
    text, expected = theirs(target, draft, prompt, monkeypatch, assistant_confidence_threshold=0.0, **options)
    found, rounds = ours(Stack(target), Stack(draft), Heuristic(), prompt)
    assert found == text and rounds == expected
    assert len({drafted for drafted, _, _ in rounds}) > 2


def test_dynamic_decisions_are_theirs(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, prompt = pair
    options = {"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant"}
    text, expected = theirs(target, draft, prompt, monkeypatch, assistant_confidence_threshold=0.4, **options)
    found, rounds = ours(Stack(target), Stack(draft), Dynamic(), prompt)
    assert found == text
    assert [r[:2] for r in rounds] == [r[:2] for r in expected]
    np.testing.assert_allclose([r[2] for r in rounds], [r[2] for r in expected], rtol=1e-4)
    assert len({t for _, _, t in rounds}) > 1, "never refitted"


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=2, max_size=40))
def test_the_refit_is_scikit_learns(tokens: list[tuple[int, bool]]) -> None:
    """With many equal probabilities, and costs that are equal but for rounding."""
    probs, kept = [p / 12 for p, _ in tokens], [k for _, k in tokens]
    if len(set(kept)) == 1:
        return
    fpr, tpr, thresholds = roc_curve([int(k) for k in kept], probs)
    assert refit(probs, kept) == thresholds[np.argmin(fpr + 3 * (1 - tpr))]
