"""Drafts that learn from the target's stored predictions: labels and loss of a batch, and what comes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pacer.data import teacher as data
from pacer.data.batching import token_batches
from pacer.data.corpus import Text
from pacer.data.teacher import Predictions
from pacer.models.copying import copied_all
from pacer.models.draft import TrainableDraft
from pacer.stages.teacher import teacher_labels
from pacer.training.distill import COPIED, TEACHER, DistillModule, collate_texts
from pacer.training.draft_run import train_draft
from pacer.training.losses import IGNORE, chunked, token_losses
from tests.scripted import QUIET
from tests.teachers import LAYERS, K, agreement, make_stage, remembered, trainer
from tests.texts import path, target, written
from tests.tiny import VOCAB


def test_labels_and_predictions_of_a_batch() -> None:
    head_of = torch.full((10,), IGNORE)
    head_of[[2, 5, 7]] = torch.arange(3)
    text = Text("a", "x", [1, 2, 5], [7, 3], True)
    ids = torch.tensor([[5, 9], [3, 2], [7, 5], [2, 1], [0, 7]])
    stored = Predictions(ids, torch.randn(5, 2), torch.randn(5))
    for kind, prompt in (("text", [0, 1]), ("teacher", [1, IGNORE])):
        batch = collate_texts([text], head_of, 0.15, teacher={"a": stored}.__getitem__, prompt_labels=kind)
        assert batch["labels"].tolist() == [[*prompt, 2, IGNORE, IGNORE]]  # outputs: always the text
        rows, logprobs, rest = (batch[name][0] for name in TEACHER)
        assert rows.tolist() == [[1, IGNORE], [IGNORE, 0], [2, 1], [0, IGNORE], [IGNORE, 2]]
        assert torch.equal(logprobs, stored.logprobs) and torch.equal(rest, stored.rest)
    other = Text("b", "x", [1], [2], True)
    pad = {"a": stored, "b": Predictions(*(part[:2] for part in stored))}
    batch = collate_texts([text, other], head_of, 0.15, teacher=pad.__getitem__)
    assert batch["weights"][1].tolist() == [1, 0, 0, 0, 0] and (batch[TEACHER[0]][1, 2:] == IGNORE).all()


def test_candidates_for_copying_are_rows_of_their_own() -> None:
    head_of = torch.full((10,), IGNORE)
    head_of[[2, 5, 7]] = torch.arange(3)
    text = Text("a", "x", [4, 9, 5, 4], [9, 4, 9], True)
    stored = Predictions(torch.tensor([[9, 2]] * 7), torch.zeros(7, 2), torch.zeros(7))
    batch = collate_texts([text], head_of, 0.15, True, teacher={"a": stored}.__getitem__)
    candidates, match = copied_all(torch.tensor(path(text)))
    assert torch.equal(batch[COPIED[0]][0], candidates) and torch.equal(batch[COPIED[1]][0], match)
    # after the second 4 the candidate is 9, which the head lacks: row 3; the first 4 has no earlier one
    assert batch["labels"].tolist() == [[IGNORE, 1, IGNORE, 3, IGNORE, 3, IGNORE]]
    assert batch[TEACHER[0]][0, :, 0].tolist() == [IGNORE, IGNORE, IGNORE, 3, IGNORE, 3, IGNORE]


@pytest.mark.parametrize("copying", [False, True])
@pytest.mark.parametrize("kl_weight", [0.0, 0.4])
def test_a_training_step_is_the_weighted_mean_of_its_tokens(
    copying: bool, kl_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same in chunks of any size (T93)."""
    texts = written(4)
    head_ids = torch.arange(0, VOCAB, 2)
    head_of = torch.full((VOCAB,), IGNORE)
    head_of[head_ids] = torch.arange(len(head_ids))
    batch = collate_texts(texts, head_of, 0.15, copying, teacher=remembered(texts).__getitem__)
    found = []
    for size in (2**25, 7 * len(head_ids)):
        monkeypatch.setattr(data, "LOGITS", size)
        draft = TrainableDraft(target(), [0, 1], head_ids, copying)
        step = DistillModule(draft, trainer(kl_weight=kl_weight), 1)
        step.log = lambda *_, **__: None  # type: ignore[method-assign]  # no Trainer is attached
        loss = step.training_step(batch, 1)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in draft.parameters())])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    sums = [0.0, 0.0]
    states = step.states(batch["ids"])
    for row, text in enumerate(texts):
        for place in range(len(path(text)) - 1):
            weight = 0.15 if place < len(text.prompt_ids) - 1 else 1.0
            if kl_weight == 0 and batch["labels"][row, place] == IGNORE:
                continue
            at = (torch.tensor([row]), torch.tensor([place]))
            stored = [batch[name][at] for name in TEACHER]
            logits = step.logits(states[at], batch, at)
            sums[0] += weight * float(token_losses(logits, batch["labels"][at], stored, kl_weight).detach())
            sums[1] += weight
    assert float(found[0][0]) == pytest.approx(sums[0] / sums[1], rel=1e-4)


@pytest.mark.parametrize(("prompt_labels", "kl_weight"), [("text", 1.0), ("teacher", 0.5), ("teacher", 0.0)])
def test_a_draft_learns_from_predictions(tmp_path: Path, prompt_labels: str, kl_weight: float) -> None:
    """A disturbed copy of the target comes back, on unseen text; with a weight of 1 it sees no hard label."""
    learn, check, head_ids = written(48), written(12, seed=9), torch.arange(80)
    stored = teacher_labels(make_stage(tmp_path), target(), learn)
    draft = TrainableDraft(target(), [0, 1, 2], head_ids)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    before = agreement(draft, check, head_ids)
    head_of = torch.full((VOCAB,), IGNORE)
    head_of[head_ids] = head_ids
    step = DistillModule(draft, trainer(kl_weight=kl_weight, prompt_weight=1.0), 1)
    step.log = lambda *_, **__: None  # type: ignore[method-assign]  # no Trainer is attached
    optimizer = torch.optim.AdamW(draft.parameters(), lr=2e-3)
    for rows in token_batches([len(path(t)) for t in learn], 400, seed=0, epochs=6):
        batch = collate_texts([learn[i] for i in rows], head_of, 1.0, teacher=stored, prompt_labels=prompt_labels)
        optimizer.zero_grad()
        step.training_step(batch, 1).backward()
        optimizer.step()
    gain = agreement(draft, check, head_ids) - before
    assert gain > (0.1 if kl_weight else 0.03)  # one id a token says less than a distribution


def test_training_reads_what_the_settings_ask_for(tmp_path: Path) -> None:
    """From the settings to the batches and the card."""
    learn, check = written(8), written(4, seed=9)
    cards = {}
    for name, asked in (("none", {}), ("kl", {"kl_weight": 0.3}), ("prompts", {"prompt_labels": "teacher"})):
        read: list[str] = []
        stored = remembered(learn)

        def teacher(text: str, read: list[str] = read, stored: dict[str, Predictions] = stored) -> Predictions:
            read.append(text)
            return stored[text]

        given = None if name == "none" else teacher
        chosen = trainer(teacher_top_k=K, **asked)
        folder = train_draft(
            target(), learn, check, LAYERS, chosen, QUIET, tmp_path / name, always=[], command="make", teacher=given
        )
        assert sorted(read) == ([] if name == "none" else sorted(t.id for t in learn))  # held-out text has no teacher
        cards[name] = (folder / "README.md").read_text()
    assert "0.3 of the loss is the divergence from the target's predictions (its top 5 ids)" in cards["kl"]
    assert "Labels inside the prompts are the target's choices" in cards["prompts"]
    assert all("Started from" not in card for card in cards.values()) and "loss" not in cards["none"]


def test_memory_of_the_loss_is_that_of_a_chunk() -> None:
    """T93: what is kept for the backward pass does not hold the logits of all tokens."""
    head, states = torch.randn(400, 8), torch.randn(300, 8, requires_grad=True)
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    def losses(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return token_losses(states @ head.T, labels, None, 0.0)

    labels = torch.arange(300)
    for rows, holds in ((300, True), (16, False)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            chunked(losses, rows, states, labels)
        assert (max(kept, default=0) >= 300 * 400) == holds
