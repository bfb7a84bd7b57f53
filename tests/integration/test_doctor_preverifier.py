"""A pre-verifier of another draft, of another kind of state, or one that no longer sees what it was trained on."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pacer.data.corpus import Text
from pacer.data.labels import Rounds
from pacer.data.packing import pack
from pacer.errors import MismatchError
from pacer.evaluation.doctor.preverifier import auc, judgement
from pacer.models.checkpoint import identity
from pacer.models.draft import TrainableDraft
from pacer.models.preverifier import Preverifier, load_preverifier, save_preverifier
from pacer.models.stack import Stack
from pacer.settings import PreverifierSettings
from pacer.training.preverify import packed_logits
from tests.texts import rounds_at, target, written
from tests.tiny import VOCAB, near, tiny_model

GAMMA = 4


@functools.cache
def draft() -> Stack:
    """A draft whose norm's weights are far from 1, taken out again in its head."""
    model = near(tiny_model(), scale=0.012)
    weight = (2 * torch.randn(32, generator=torch.Generator().manual_seed(0))).exp()
    with torch.no_grad():
        model.lm_head.weight.mul_(model.model.norm.weight / weight)
        model.model.norm.weight.copy_(weight)
    return Stack(model)


@functools.cache
def pairs() -> list[tuple[Text, Rounds]]:
    return [(text, rounds_at(text, range(1, 33, 3), GAMMA, by=draft())) for text in written(10)]


def config(recorded: float | None) -> dict[str, object]:
    return {"draft": {"layers": "known"}, "validation": {"val/auc": recorded}}


@pytest.fixture(scope="module")
def trained() -> Preverifier:
    """Trained on the very rounds it is judged on: it tells them apart well."""
    torch.manual_seed(0)
    module = Preverifier(draft(), PreverifierSettings(gamma_max=GAMMA, width=16, features=[], state="after_norm"))
    batch = pack([[pair] for pair in pairs()], "survival")
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(80):
        loss = F.binary_cross_entropy_with_logits(packed_logits(module, batch)[batch.used], batch.labels[batch.used])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return module.eval().requires_grad_(False)


def test_auc_as_recorded_or_not(trained: Preverifier) -> None:
    area, error = auc(trained, pairs())
    assert area > 0.85 and 0 < error < 0.1
    assert judgement(trained, config(area), pairs()) == (area, [])
    assert judgement(trained, config(area - 0.2), pairs()) == (area, []), "better than recorded is no fault"
    assert judgement(trained, config(None), pairs()) == (area, [])
    with torch.no_grad():
        trained.out.weight.neg_()
    _, (found,) = judgement(trained, config(area), pairs())
    assert found.check == "pre-verifier" and found.effect == pytest.approx(2 * area - 1, abs=0.02)
    with torch.no_grad():
        trained.out.weight.neg_()


def test_the_other_kind_of_state(trained: Preverifier) -> None:
    trained.settings.state = "before_norm"
    _, (found,) = judgement(trained, config(None), pairs())
    assert "on states before_norm" in found.what and found.effect > 0.1
    assert trained.settings.state == "before_norm", "left as it was"
    trained.settings.state = "after_norm"


def test_nothing_to_tell_apart(trained: Preverifier) -> None:
    whole = [(t, r) for t, r in [(written(1)[0], rounds_at(written(1)[0], [1, 5], GAMMA, by=target()))]]
    area, found = judgement(trained, config(0.99), whole)
    assert area != area and found == []


def layers_draft(layers: list[int]) -> Stack:
    return TrainableDraft(target(), layers, torch.arange(VOCAB)).merged()


def test_a_preverifier_of_another_draft_is_refused(tmp_path: Path) -> None:
    """Embedding, norm and shapes are the same; only the layers differ."""
    own, other = layers_draft([0, 1]), layers_draft([0, 2])
    assert identity(own) == identity(other)
    assert identity(own, layers=True) != identity(other, layers=True)
    module = Preverifier(own, PreverifierSettings(gamma_max=GAMMA))
    folder = save_preverifier(tmp_path / "preverifier", module, target(), {}, "card")
    load_preverifier(folder, target(), own)
    rounded = Stack(copy.deepcopy(own.model).bfloat16())
    assert identity(rounded, layers=True)["layers"] == identity(own, layers=True)["layers"]
    with pytest.raises(MismatchError, match=r"\(draft\) belongs to another model: layers"):
        load_preverifier(folder, target(), other)


def test_a_checkpoint_from_before_layers_were_recorded(trained: Preverifier, tmp_path: Path) -> None:
    """It loads; the doctor says that another draft's would go unseen."""
    folder = save_preverifier(tmp_path / "preverifier", trained, target(), {}, "card")
    saved = json.loads((folder / "config.json").read_text())
    del saved["draft"]["layers"]
    (folder / "config.json").write_text(json.dumps(saved))
    module, read = load_preverifier(folder, target(), draft())
    area, (found,) = judgement(module, read, pairs())
    assert "does not record" in found.what and found.effect > 0
    _, (found,) = judgement(module, {**read, "validation": {"val/auc": area}}, pairs())
    assert found.effect == 0
