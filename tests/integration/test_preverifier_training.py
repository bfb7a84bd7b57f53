"""Training the pre-verifier: where it starts, what is chosen, states on disk, texts and batches that are too long."""

from __future__ import annotations

import errno
import json
import logging
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from pacer.assemble import Models
from pacer.choices import FEATURES
from pacer.data.batching import Loader
from pacer.data.packing import Packed, pack, packed_length
from pacer.errors import PacerError
from pacer.files import ArtifactError
from pacer.models.preverifier import Preverifier
from pacer.models.stack import Stack
from pacer.settings import (
    CostSettings,
    LabelSettings,
    LoggerSettings,
    PathSettings,
    PreverifierSettings,
    Settings,
    TrainerSettings,
)
from pacer.training import preverify, states
from pacer.training.fit import fit, memory_errors
from pacer.training.preverifier_run import Pair, in_pieces, packed_batches, train_preverifier
from pacer.training.preverify import PreverifierModule, calibrate, packed_logits
from pacer.training.states import bytes_needed, read_states, store_states
from pacer.work.records import is_own
from tests.texts import draft, rounds_at, target, written
from tests.tiny import make_preverifier, near, tiny_model

GAMMA = 4
QUIET = LoggerSettings(csv=False)


def pairs(count: int = 5) -> list[Pair]:
    return [(text, rounds_at(text, [1, 4, 9, 15, 22], GAMMA)) for text in written(count)]


def batch_of(found: list[Pair], label: str = "survival", produced: list[list[Tensor]] | None = None) -> Packed:
    return pack([[pair] for pair in found], label, produced)


@pytest.mark.parametrize("features", [[], ["logprob", "cumulative"], list(FEATURES)])
@pytest.mark.parametrize("label", ["survival", "conditional"])
def test_training_starts_from_what_the_signals_say(features: list[str], label: str) -> None:
    """The first estimates are the logistic regression on the draft's signals; without any, the base rate."""
    module = Preverifier(draft(), PreverifierSettings(gamma_max=GAMMA, width=16, features=features, label=label))
    found = pairs()
    calibrate(module, [rounds for _, rounds in found])
    packed = batch_of(found, label)
    with torch.no_grad():
        logits = packed_logits(module, packed)
    estimates, labels = logits.sigmoid()[packed.used], packed.labels[packed.used]
    assert 0.1 < labels.mean() < 0.9
    assert estimates.mean() == pytest.approx(float(labels.mean()), abs=0.01)
    chosen = module.select(lambda name: getattr(packed, name), packed.index)[packed.used]
    slope = ((estimates - labels)[:, None] * chosen).mean(0)  # the gradient of the loss at its minimum
    assert slope.abs().sum() < 0.01
    if not features:
        torch.testing.assert_close(estimates, labels.mean().expand_as(estimates), atol=1e-3, rtol=0)
    else:
        assert F.binary_cross_entropy(estimates, labels) < F.binary_cross_entropy(
            labels.mean().expand_as(labels), labels
        )


def test_checkpoints_are_chosen_by_simulated_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T83: a perfect order with badly placed estimates decodes fast and has the higher loss; it wins."""
    module = Preverifier(draft(), PreverifierSettings(gamma_max=GAMMA, width=16))
    found = pairs()
    trained = PreverifierModule(module, TrainerSettings(), 3, CostSettings())
    seen: dict[int, dict[str, float]] = {}

    def planted(own: Preverifier, batch: Packed, dropout: float = 0.0) -> Tensor:
        if own.training:
            return own.out.bias.expand(batch.ids.shape)
        # the last validation, after step 3, is the one of the parameters that were chosen
        return torch.where(batch.labels > 0, 4.0, 1.5) if trained.global_step == 2 else torch.zeros(batch.ids.shape)

    log = trained.log

    def spy(name: str, value: Any, **options: Any) -> None:
        seen.setdefault(trained.global_step, {}).setdefault(name, float(torch.as_tensor(value).detach()))
        log(name, value, **options)

    monkeypatch.setattr(preverify, "packed_logits", planted)
    monkeypatch.setattr(trained, "log", spy)
    settings = TrainerSettings(precision="fp32", val_every=1, patience=0, monitor="val/sim_speedup")
    train, check = (Loader(batches, lambda _: batch_of(found)) for batches in ([0, 1, 2], [0]))
    figures = fit(trained, train, check, settings, QUIET, tmp_path)
    assert seen[2]["val/loss"] > seen[1]["val/loss"] + 0.1
    assert seen[2]["val/sim_speedup"] > seen[1]["val/sim_speedup"] + 0.1
    assert figures["steps"] == 2 and seen[3]["val/loss"] < seen[2]["val/loss"]


def keep(root: Path, found: list[Pair]) -> list[Tensor]:
    stored = store_states(root, draft(), found)
    return [read_states(stored, i) for i in range(len(found))]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SHARD", 2)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("settings", [{}, {"state": "before_norm", "attention": "block", "depth": 2}])
def test_stored_states_give_the_same_logits(tmp_path: Path, settings: dict[str, Any]) -> None:
    """T92: shards and a manifest that says what they are; the size is estimated to the byte."""
    found = pairs()
    stored = keep(tmp_path, found)
    module = make_preverifier(draft(), gamma_max=GAMMA, **settings)
    plain = pack([found[:3], found[3:]], "survival")
    kept = pack([found[:3], found[3:]], "survival", [stored[:3], stored[3:]])
    real = plain.document >= 0
    torch.testing.assert_close(packed_logits(module, kept)[real], packed_logits(module, plain)[real])
    (manifest,) = tmp_path.glob("states/*/manifest.json")
    record = json.loads(manifest.read_text())
    assert (record["key"]["layer"], record["key"]["dtype"]) == (draft().n_layers, "float32")
    assert record["key"]["draft"]["fingerprint"] and len(record["files"]) == 3
    assert all(len(entry["sha256"]) == 64 for entry in record["files"].values())
    tensors = [tensor for file in manifest.parent.glob("*.safetensors") for tensor in load_file(file).values()]
    assert sum(tensor.nbytes for tensor in tensors) == bytes_needed(draft(), found) == record["extra"]["bytes"]


def test_states_of_another_draft_or_other_texts_are_others(tmp_path: Path) -> None:
    """T92: the folder's name is a hash of all that the states depend on."""
    found = pairs()
    first = store_states(tmp_path, draft(), found)
    assert store_states(tmp_path, draft(), found) == first
    other = Stack(near(tiny_model(), scale=0.012, seed=8))
    elsewhere = [store_states(tmp_path, other, found), store_states(tmp_path, draft(), found[:4])]
    assert len({of[0][0].parent for of in (first, *elsewhere)}) == 3
    assert not torch.equal(read_states(first, 0), read_states(elsewhere[0], 0))


class Killed(Exception):
    """What ends a process at any moment."""


@pytest.mark.usefixtures("small_shards")
def test_storing_states_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T92: whole shards stay, half a one never shows."""
    found, compute, left = pairs(), states.produced_states, [3]
    made: list[int] = []

    def killed(drafter: Stack, batch: Packed) -> Tensor:
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        made.append(batch.ids.shape[1])
        return compute(drafter, batch)

    monkeypatch.setattr(states, "produced_states", killed)
    with pytest.raises(Killed):
        store_states(tmp_path, draft(), found)
    assert [path.name for path in tmp_path.glob("states/*/*.safetensors")] == ["shard-00000.safetensors"]
    assert not list(tmp_path.rglob("manifest.json"))
    left[0] = 99
    stored = keep(tmp_path, found)
    assert made == [packed_length(*found[i]) for i in (0, 1, 2, 2, 3, 4)]
    assert all(len(stored[i]) == packed_length(*pair) for i, pair in enumerate(found))
    keep(tmp_path, found)
    assert len(made) == 6, "complete: nothing is computed again"


def test_a_full_disk_is_said_before_and_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """T92."""
    usage = namedtuple("usage", "total used free")
    needed = bytes_needed(draft(), pairs())
    with monkeypatch.context() as little:
        little.setattr(states.shutil, "disk_usage", lambda _: usage(0, 0, needed))
        with caplog.at_level(logging.INFO), pytest.raises(PacerError, match=r"no room .*MB free.*cache_states=false"):
            store_states(tmp_path, draft(), pairs())
    assert f"{needed / 1e6:.0f} MB" in caplog.text and not list(tmp_path.rglob("*.safetensors"))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(states, "save_file", full)
    with pytest.raises(ArtifactError, match="the disk is full"):
        store_states(tmp_path, draft(), pairs())
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and not is_own(path)]


def run(folder: Path, found: list[Pair] | None = None, **trainer: Any) -> Path:
    found = found or pairs()
    settings = Settings(
        preverifier=PreverifierSettings(gamma_max=GAMMA, width=16), labels=LabelSettings(gamma=GAMMA),
        trainer=TrainerSettings(**{"precision": "fp32", "epochs": 2, "patience": 0, **trainer}), logger=QUIET,
        paths=PathSettings(runs=str(folder)),
    )  # fmt: skip
    models = Models(target(), None, (), folder, draft())  # type: ignore[arg-type]  # no tokenizer is used
    return train_preverifier(models, found[:4], found[4:], settings, folder, command="")


def test_training_with_stored_states_never_runs_the_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = pairs()
    plain = load_file(run(tmp_path / "plain", found) / "model.safetensors")
    first = load_file(run(tmp_path / "stored", found, cache_states=True) / "model.safetensors")
    monkeypatch.setattr(draft(), "run", None)
    (tmp_path / "stored" / "last.ckpt").unlink(missing_ok=True)
    stored = load_file(run(tmp_path / "stored", found, cache_states=True) / "model.safetensors")
    assert all(torch.equal(value, first[name]) for name, value in stored.items())
    assert stored.keys() == plain.keys()
    for name, value in stored.items():
        torch.testing.assert_close(value, plain[name], atol=1e-3, rtol=1e-3)


def test_a_long_text_is_read_in_pieces() -> None:
    """T93: each piece holds the path that its rounds see; every round is in one of them and means the same."""
    found = pairs(2)
    module = make_preverifier(draft(), gamma_max=GAMMA)
    pieces = in_pieces(found, 40)
    assert len(pieces) > 3 and all(packed_length(*piece) <= 40 for piece in pieces)
    for text, rounds in found:
        own = [piece for piece in pieces if piece[0].id == text.id]
        assert torch.cat([part.starts for _, part in own]).tolist() == rounds.starts.tolist()

        def drafted(of: list[Pair]) -> Tensor:
            packed = batch_of(of)
            return packed_logits(module, packed)[packed.index > 0]

        torch.testing.assert_close(drafted(own), drafted([(text, rounds)]), atol=5e-5, rtol=0)
    alone = in_pieces(found, 1)
    assert all(len(rounds.starts) == 1 for _, rounds in alone) and len(alone) == 10
    assert in_pieces(found, 10_000) == found
    assert max(len(row) for batch in packed_batches(alone, 1, seed=0) for row in batch) == 1


def test_training_on_texts_longer_than_a_batch(tmp_path: Path) -> None:
    assert json.loads((run(tmp_path, tokens_per_batch=40) / "config.json").read_text())["rounds"] == 20


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: not enough memory: you tried"),
    ],
)  # fmt: skip
def test_out_of_memory_names_the_knob(tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """T93."""

    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(preverify, "packed_logits", full)
    with pytest.raises(PacerError, match=r"out of memory .*trainer\.tokens_per_batch: 777; set it lower"):
        run(tmp_path, tokens_per_batch=777)


def test_other_errors_of_a_step_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), memory_errors(TrainerSettings()):
        raise RuntimeError("shapes do not match")
