"""Exit heads learn from the frozen model: one pass for all exits, a weighted loss, a run that survives a kill."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pacer.data import teacher as data
from pacer.data.batching import token_batches
from pacer.data.corpus import Text
from pacer.decoding.lane import Lane
from pacer.errors import ConfigError, PacerError
from pacer.models.exits import ExitHead, load_exits, shared_exits
from pacer.models.stack import Stack
from pacer.settings import ExitSettings
from pacer.training.exits import ExitModule, collate_ids, leading_runs, rung_states
from pacer.training.exits_run import loaders, train_exits
from pacer.training.losses import IGNORE, token_losses
from tests.exit_trainings import IDS, K, killed_at, make_module, silent, texts, trainer
from tests.scripted import QUIET, Killed
from tests.texts import path, target, written
from tests.tiny import VOCAB, tiny_model


def test_batches_weigh_what_is_predicted() -> None:
    batch = collate_ids([Text("a", "x", [1, 2, 5], [7, 3], True), Text("b", "y", [5], [2], True)], 0.15)
    assert batch["ids"].tolist() == [[1, 2, 5, 7, 3], [5, 2, 0, 0, 0]] and batch["names"] == ["a", "b"]
    torch.testing.assert_close(batch["weights"], torch.tensor([[0.15, 0.15, 1, 1, 0], [1, 0, 0, 0, 0]]))
    with pytest.raises(PacerError, match="a text without supervised tokens: 'empty'"):
        collate_ids([Text("empty", "t", [1, 2], [], True)], 0.15)


@pytest.mark.parametrize("kl_weight", [0.0, 0.5])
def test_one_pass_of_the_model_serves_all_exits(kl_weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer runs once per batch, whatever the number of exits, those above the last exit only for predictions;
    and nothing of the model is trained."""
    module, calls, real = make_module(kind="adapter", kl_weight=kl_weight), list[tuple[int, int]](), Stack.run
    learn, check = collate_ids(texts()[0][:3], 0.15), collate_ids(texts()[1][:3], 0.0)

    def run(self: Stack, x: Tensor, a: int, b: int, *rest: Any) -> Tensor:
        calls.append((a, b))
        return real(self, x, a, b, *rest)

    monkeypatch.setattr(Stack, "run", run)
    module.training_step(learn, 1).backward()
    assert calls == [(0, 1), (1, 2), (2, 3)][: 3 if kl_weight else 2]
    calls.clear()
    module.validation_step(check, 0)
    assert calls == [(0, 1), (1, 2), (2, 3)]
    assert all(p.grad is not None for p in module.parameters())
    assert all(p.grad is None for p in target().model.parameters())
    assert not {p.data_ptr() for p in module.parameters()} & {p.data_ptr() for p in target().model.parameters()}


@pytest.mark.parametrize("ids", [IDS, None])
@pytest.mark.parametrize("kl_weight", [0.0, 0.4, 1.0])
def test_a_step_is_the_weighted_mean_of_places_and_exits(
    kl_weight: float, ids: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Place by place from the whole model's own logits, or from the text alone; and in chunks of any size (T93)."""
    batch, found = collate_ids(texts()[0][:4], 0.15), list[list[Any]]()
    for size in (2**25, 7 * VOCAB):
        monkeypatch.setattr(data, "LOGITS", size)
        module = make_module(ids, weights=(1.0, 3.0), kl_weight=kl_weight)
        loss = module.training_step(batch, 1)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in module.parameters())])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    head_of = torch.full((VOCAB,), IGNORE)
    kept = torch.arange(VOCAB) if ids is None else ids
    head_of[kept] = torch.arange(len(kept))
    total = 0.0
    for share, (layer, head) in zip((0.25, 0.75), make_module(ids).exits.items(), strict=True):
        sums = [0.0, 0.0]
        for row, text in enumerate(texts()[0][:4]):
            with torch.no_grad():
                out = tiny_model()(input_ids=torch.tensor([path(text)]), output_hidden_states=True, use_cache=False)
                logits = head.readout(out.hidden_states[layer][0])
            said = out.logits[0].log_softmax(-1)
            for place in range(len(path(text)) - 1):
                weight = 0.15 if place < len(text.prompt_ids) - 1 else 1.0
                assert batch["weights"][row, place] == pytest.approx(weight)
                top = said[place].topk(K)
                left = said[place].scatter(0, top.indices, -torch.inf).logsumexp(0)
                rows = head_of[top.indices][None]
                if kl_weight == 0:
                    rows = head_of[path(text)[place + 1]][None, None]
                if kl_weight == 0 and rows[0, 0] == IGNORE:
                    continue
                teacher = (rows, top.values[None], left[None]) if kl_weight else None
                sums[0] += weight * token_losses(logits[place][None], rows[:, 0], teacher, kl_weight).item()
                sums[1] += weight
        total += share * sums[0] / sums[1]
    assert float(found[0][0]) == pytest.approx(total, rel=1e-4)


def test_no_more_rows_of_logits_are_held_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """T93: of the model's whole vocabulary and of the heads', in training and in validation."""
    batch, module = collate_ids(texts()[0][:3], 1.0), make_module(None)
    sizes: list[int] = []
    for kind in (Stack, ExitHead):
        real = kind.readout

        def readout(self: Any, states: Tensor, *rest: Any, real: Callable[..., Tensor] = real) -> Tensor:
            sizes.append(len(states))
            return real(self, states, *rest)

        monkeypatch.setattr(kind, "readout", readout)
    monkeypatch.setattr(data, "LOGITS", 7 * VOCAB)
    module.training_step(batch, 1)
    trained, places = len(sizes), int((batch["weights"] > 0).sum())
    module.validation_step(batch, 0)
    assert max(sizes) == 7 and sum(sizes[:trained]) == sum(sizes[trained:]) == 3 * places


def test_a_batch_without_supervised_tokens_is_named() -> None:
    """T84: the text's tokens are none of the heads' ids; that the model's predictions are not, is learnt from."""
    batch = collate_ids([Text("odd", "t", [1, 2], [3], True)], 0.0)
    said = int(target().readout(rung_states(target(), batch["ids"], [3])[3])[0, 1].argmax())
    others = torch.tensor([i for i in range(VOCAB) if i not in (3, said)])
    with pytest.raises(PacerError, match=r"a batch without supervised tokens: 'odd'; raise model\.exits\.head_size"):
        make_module(others, kl_weight=0.0).training_step(batch, 1)
    assert make_module(others, kl_weight=0.5).training_step(batch, 1) > 0


def test_the_share_of_supervised_tokens_is_said(caplog: pytest.LogCaptureFixture) -> None:
    batch = collate_ids([Text("a", "t", [1, 2, 3], [4, 5], True)], 0.0)
    with caplog.at_level(logging.INFO, "pacer"):
        make_module(None).training_step(batch, 0)
    assert "supervised share of the first batch: 0.400" in caplog.text


@pytest.mark.parametrize("kl_weight", [0.0, 1.0])
@pytest.mark.parametrize(
    ("kind", "gain", "left"), [("norm", -0.01, 0.99), ("linear", 0.03, 0.93), ("adapter", 0.03, 0.93)]
)
def test_exits_learn(kind: str, gain: float, left: float, kl_weight: float) -> None:
    """On unseen text, from where the shared exit is; a norm alone says the same, surer."""
    learn, check = written(64, new=20), written(16, new=20, seed=9)
    judged = [collate_ids(check, 0.0)]
    torch.manual_seed(0)
    module = make_module(None, kind, kl_weight=kl_weight)

    def figures() -> dict[str, float]:
        return {**module.measure(judged), "loss": float(module.training_step(judged[0], 1).detach())}

    before = figures()
    same = silent(ExitModule(target(), shared_exits(target(), [1, 2]), trainer(), 1)).measure(judged)
    assert {**same, "loss": before["loss"]} == pytest.approx(before)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for rows in token_batches([len(path(t)) for t in learn], 400, seed=0, epochs=8):
        optimizer.zero_grad()
        module.training_step(collate_ids([learn[i] for i in rows], 0.15), 1).backward()
        optimizer.step()
    after = figures()
    assert after["loss"] < left * before["loss"]
    assert after["val/agree"] > before["val/agree"] + gain and after["val/length_2"] > before["val/length_2"]
    assert after["val/agree_text"] == before["val/agree_text"] == 1


def run(folder: Path, kind: str = "adapter", of: Stack | None = None, **changes: Any) -> Path:
    learn, check = texts()
    exits = ExitSettings(kind=kind, layers=[1, 2], head_size=60, attention_only=changes.pop("attention_only", False))
    return train_exits(
        of or target(), learn, check, exits, trainer(lr=3e-3, **changes), QUIET, folder, always=[96], command="make it"
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("exits"), epochs=2)


def test_loaded_exits_score_what_was_measured(trained: Path) -> None:
    """T90, T82: from the file alone, all at once and token by token through lanes, the figures of the checkpoint."""
    config = json.loads((trained / "config.json").read_text())
    heads = load_exits(trained, target())
    figures = ExitModule(target(), heads, trainer(), 1).measure(loaders(*texts(), trainer())[1])
    assert figures == pytest.approx(config["validation"])
    agreed: dict[int, list[bool]] = {1: [], 2: []}
    length = 0
    for text in texts()[1]:
        lanes = [Lane(target(), a, a + 1) for a in range(3)]
        adapters = {e: Lane(head.adapter) for e, head in heads.items() if head.adapter is not None}
        for lane in (*lanes, *adapters.values()):
            lane.reset(1, len(path(text)))
        own: dict[int, list[int]] = {1: [], 2: []}
        for token in path(text)[:-1]:
            x = lanes[0].feed_ids(torch.tensor([[token]]), [1])
            for e in (1, 2):
                head = heads[e]
                assert head.head_ids is not None
                logits = head.readout(adapters[e].feed(x, [1]))
                own[e].append(int(head.head_ids[logits[0, 0].argmax()]))
                x = lanes[e].feed(x, [1])
        for e, choices in own.items():
            hits = [a == b for a, b in zip(choices[len(text.prompt_ids) - 1 :], text.output_ids, strict=True)]
            agreed[e] += hits
            length += int(leading_runs(torch.tensor(hits)).sum()) if e == 2 else 0
    for e, hits in agreed.items():
        assert sum(hits) / len(hits) == pytest.approx(figures[f"val/agree_{e}"], abs=1e-6)
    assert length / len(agreed[2]) == pytest.approx(figures["val/length_2"], abs=1e-6)


def test_what_a_run_leaves(trained: Path) -> None:
    """K99, and how it was made."""
    tensors = load_file(trained / "model.safetensors")
    best = torch.load(trained.parent / "best.ckpt", weights_only=True)["state_dict"]
    assert {f"heads.{name}" for name in tensors if name != "head_ids"} == best.keys()
    assert len(tensors["head_ids"]) == 60 and 96 in tensors["head_ids"]
    config = json.loads((trained / "config.json").read_text())
    assert config["command"] == "make it" and config["steps"] > 3 and config["texts"] == 24
    assert config["head_size"] == 60 and config["trainer"]["kl_weight"] == 0.5
    names = {f"val/{what}_{e}" for what in ("agree", "length") for e in ("1", "2", "text")}
    assert config["validation"].keys() == names | {"val/agree"}
    card = (trained / "README.md").read_text()
    assert "# Exits after 1, 2 layers" in card and "a decoder layer and a norm of its own" in card
    assert "make it" in card and f"- val/agree_2: {config['validation']['val/agree_2']:.4f}" in card


def test_exits_that_share_all_are_measured_alone(tmp_path: Path) -> None:
    folder = run(tmp_path, "shared")
    config = json.loads((folder / "config.json").read_text())
    assert config["steps"] == 0 and "nothing was trained" in (folder / "README.md").read_text()
    figures = ExitModule(target(), load_exits(folder, target()), trainer(), 1).measure(loaders(*texts(), trainer())[1])
    assert figures == pytest.approx(config["validation"])
    assert "without MLP" in (run(tmp_path / "a", attention_only=True, max_steps=1) / "README.md").read_text()


def test_too_many_ids_of_a_prediction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.teacher_top_k: 60; allowed: less than the heads' 60 ids"):
        run(tmp_path, teacher_top_k=60)
    with pytest.raises(ConfigError, match=r"trainer\.dropout is for the pre-verifier: 0\.1; allowed: 0"):
        run(tmp_path, dropout=0.1)


@pytest.mark.parametrize("step", [2, 5])
def test_a_killed_run_ends_with_the_same_bytes(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"checkpoint_every": 2, "val_every": 3, "epochs": 2}
    whole = run(tmp_path / "whole", **options)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(step, ExitModule, patch)
        run(tmp_path / "killed", **options)
    again = run(tmp_path / "killed", **options)
    assert (again / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (again / "config.json").read_bytes() == (whole / "config.json").read_bytes()
