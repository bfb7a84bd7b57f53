"""Acceptance heads learn what is planted in the draft's states, and are saved as what they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pacer.assemble import Models, attach_head
from pacer.data.labels import Rounds
from pacer.data.packing import pack, produced_states
from pacer.data.sampled import sampled_rounds
from pacer.errors import ConfigError, MismatchError
from pacer.models.preverifier import Preverifier, load_preverifier
from pacer.models.stack import Stack
from pacer.settings import LabelSettings, LoggerSettings, PreverifierSettings, Settings, TrainerSettings
from pacer.training.preverifier_run import Pair, train_preverifier
from pacer.training.preverify import acceptance_loss, packed_logits
from tests.texts import draft, target, written
from tests.tiny import near, tiny_model, tiny_stack

GAMMA = 4
LABELS = LabelSettings(gamma=GAMMA, starts_per_text=16, temperature=1.0)
HEADS = {"probe": Settings().probe, "specdecpp": Settings().specdecpp}


def planted(pair: Pair) -> Pair:
    """The same rounds with p = q on one side of a plane through the draft's normed states, p = q/20 on the other."""
    packed = pack([[pair]], "survival")
    states = draft().normed(produced_states(draft(), packed)[0])[packed.index[0] > 0]
    direction = torch.randn(states.shape[1], generator=torch.Generator().manual_seed(5))
    good = torch.zeros(pair[1].tokens.shape)
    real = torch.arange(GAMMA) < pair[1].counts[:, None]
    good[real] = (states @ direction > 0).float()
    logq = pair[1].logq
    assert logq is not None
    accepted = torch.minimum((good.cumprod(1).sum(1)).long(), pair[1].counts)
    return pair[0], replace(pair[1], logp=logq - 3.0 * (1 - good), accepted=accepted)


@pytest.fixture(scope="module")
def rounds() -> list[Pair]:
    found: list[tuple[object, Rounds | None]] = [
        (text, sampled_rounds(draft(), target(), text, LABELS, [])) for text in written(24)
    ]
    return [planted((text, of)) for text, of in found if of is not None]  # type: ignore[arg-type]  # texts


def train(folder: Path, found: list[Pair], part: str, head: PreverifierSettings, **trainer: object) -> Path:
    values = {"precision": "fp32", "epochs": 14, "lr": 0.04, "tokens_per_batch": 1024, "val_every": 14, **trainer}
    settings = Settings(
        preverifier=head, labels=LABELS, logger=LoggerSettings(csv=False),
        trainer=TrainerSettings(part=part, patience=0, **values),  # type: ignore[arg-type]  # of many types
    )  # fmt: skip
    models = Models(target(), None, (), folder, draft())  # type: ignore[arg-type]  # no tokenizer is used
    return train_preverifier(models, found[:16], found[16:], settings, folder, command="make it")


def judged(module: Preverifier, found: list[Pair]) -> tuple[Tensor, Tensor]:
    """Logits and labels of all that counts."""
    with torch.no_grad():
        packed = [pack([[pair]], module.settings.label) for pair in found]
        return (
            torch.cat([packed_logits(module, batch)[batch.used] for batch in packed]),
            torch.cat([batch.labels[batch.used] for batch in packed]),
        )


@pytest.fixture(scope="module")
def saved(rounds: list[Pair], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {part: train(tmp_path_factory.mktemp(part), rounds, part, head) for part, head in HEADS.items()}


@pytest.mark.parametrize("part", HEADS)
def test_a_head_learns_what_the_states_say(part: str, saved: dict[str, Path], rounds: list[Pair]) -> None:
    """A plane is what a probe can learn; residual blocks find it too. Nothing but the head is saved (K99)."""
    config = json.loads((saved[part] / "config.json").read_text())
    assert config["validation"]["val/auc"] > 0.9 and config["tuned"] == {} and config["part"] == part
    assert config["temperature"] == 1.0 and 0 <= config["validation"]["val/sim_t"] <= 1
    assert f"head {part}" in (saved[part] / "README.md").read_text()
    module, _ = load_preverifier(saved[part], target(), draft())
    width, depth = draft().width, HEADS[part].depth
    assert sum(p.numel() for p in module.parameters()) == depth * width * (width + 1) + width + 1
    logits, labels = judged(module, rounds[16:])
    assert logits[labels > 0.5].mean() - logits[labels < 0.5].mean() > 1


def test_soft_labels_are_learnt_as_they_are(rounds: list[Pair]) -> None:
    """The minimum of the loss on equal entries is their mean label; with a weight on rejection it lies lower."""
    labels = torch.tensor([1.0, 0.25, 1.0, 0.4])
    for weight, wanted in ((1.0, 2.65 / 4), (6.0, 2.65 / (2.65 + 6 * 1.35))):
        logit = torch.zeros(1, requires_grad=True)
        for _ in range(300):
            (slope,) = torch.autograd.grad(acceptance_loss(logit.expand(4), labels, weight), logit)
            logit = (logit - 5 * slope).detach().requires_grad_()
        assert logit.sigmoid().item() == pytest.approx(wanted, abs=1e-3)
    logits = torch.tensor([0.3, -1.2, 2.0, 0.0])
    by_hand = -(labels * F.logsigmoid(logits) + 6 * (1 - labels) * F.logsigmoid(-logits)).sum()
    assert acceptance_loss(logits, labels, 6.0) == pytest.approx(float(by_hand / (labels + 6 * (1 - labels)).sum()))
    assert acceptance_loss(logits, labels) == pytest.approx(float(F.binary_cross_entropy_with_logits(logits, labels)))


@pytest.mark.parametrize("part", HEADS)
def test_a_loaded_head_scores_what_it_scored(part: str, saved: dict[str, Path], rounds: list[Pair]) -> None:
    """T90: the validation loss of the loaded tensors is the one that the checkpoint reports."""
    module, config = load_preverifier(saved[part], target(), draft())
    assert module.settings == HEADS[part]
    loss = acceptance_loss(*judged(module, rounds[16:]), module.settings.reject_weight)
    assert float(loss) == pytest.approx(config["validation"]["val/loss"], rel=5e-3)


def test_training_starts_from_the_base_rate(rounds: list[Pair], tmp_path: Path) -> None:
    """T90 at step 0: without a step, all estimates are the weighted share of what was accepted."""
    folder = train(tmp_path, rounds, "specdecpp", HEADS["specdecpp"], max_steps=1, lr=1e-12)
    module, _ = load_preverifier(folder, target(), draft())
    logits, _ = judged(module, rounds[16:])
    labels = torch.cat([of.labels("conditional")[0][of.labels("conditional")[1]] for _, of in rounds[:16]])
    share = labels.sum() / (labels + 6 * (1 - labels)).sum()
    torch.testing.assert_close(logits.sigmoid(), share.expand_as(logits), atol=2e-3, rtol=0)


def test_a_head_of_other_models_is_refused(saved: dict[str, Path]) -> None:
    """V60."""
    for other in (Stack(near(tiny_model(), 0.012, seed=9)), tiny_stack(hidden_size=16)):
        models = Models(target(), None, (), saved["probe"], other)  # type: ignore[arg-type]  # no tokenizer is used
        with pytest.raises(MismatchError, match="belongs to another model"):
            attach_head(models, "probe", saved["probe"])
        assert not models.judges


def test_labels_may_be_shorter_than_a_head_s_drafts_but_not_longer(rounds: list[Pair], tmp_path: Path) -> None:
    """What a head says does not depend on the place; one that is told the place is like a pre-verifier."""
    for changes, allowed in (({"gamma_max": 3}, "up to 3"), ({"index_embedding": True}, "allowed: 20")):
        with pytest.raises(ConfigError, match=rf"labels\.gamma and probe\.gamma_max differ.*{allowed}"):
            train(tmp_path, rounds, "probe", replace(HEADS["probe"], **changes))
