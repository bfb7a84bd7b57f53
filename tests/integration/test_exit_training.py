"""Exits that learn from the whole model, from the settings to heads that decode; and a model tuned to exit early."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pacer import stages, train
from pacer.app import load_settings
from pacer.assemble import Models, load_target
from pacer.data import teacher as data
from pacer.data.batching import token_batches
from pacer.data.corpus import Text
from pacer.decoding.lane import Lane
from pacer.errors import ConfigError, MismatchError, PacerError
from pacer.exit_stage import exit_heads, exits_checkpoint, layerskip_checkpoint
from pacer.models.exits import RECORD, ExitHead, load_exits, make_exits, shared_exits
from pacer.models.sources import check_folder, load_model, load_tokenizer
from pacer.models.stack import Stack
from pacer.settings import (
    CorpusSettings,
    ExitSettings,
    LayerSkipSettings,
    LoggerSettings,
    ModelSettings,
    PathSettings,
    Settings,
    SourceSettings,
    TrainerSettings,
)
from pacer.training.exits import ExitModule, collate_ids, leading_runs, rung_states
from pacer.training.exits_run import loaders, train_exits
from pacer.training.layerskip import LayerSkipModule, dropout_rates, thinned_states, train_layerskip
from pacer.training.losses import IGNORE, token_losses
from tests.folders import tiny_folder, tiny_tokenizer
from tests.texts import path, target, written
from tests.tiny import VOCAB, tiny_model, tiny_stack

QUIET = LoggerSettings(csv=False)
IDS = torch.arange(0, VOCAB, 2)
K = 5


class Killed(Exception):
    """What ends a process at any moment."""


def texts(count: int = 24) -> tuple[tuple[Text, ...], tuple[Text, ...]]:
    """To learn from, and held out."""
    return written(count, new=20), written(8, new=20, seed=9)


def trainer(**changes: Any) -> TrainerSettings:
    values = {"precision": "fp32", "tokens_per_batch": 200, "epochs": 1, "patience": 0, "monitor": "val/agree"}
    return TrainerSettings(
        **{"part": "exits", "teacher_top_k": K, "kl_weight": 0.5, "val_every": 5, **values, **changes}
    )


def silent(module: Any) -> Any:
    module.log = lambda *_, **__: None  # no Trainer is attached
    return module


def make_module(
    ids: Tensor | None = IDS, kind: str = "norm", weights: tuple[float, ...] = (), **changes: Any
) -> ExitModule:
    heads = make_exits(target(), kind, [1, 2], ids, dtype=torch.float32)
    return silent(ExitModule(target(), heads, trainer(**changes), 1, weights))


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


def killed_at(step: int, module: type, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.training_step  # type: ignore[attr-defined]  # of a Lightning module

    def training_step(self: Any, batch: Any, index: int) -> Tensor:
        if index == step:
            raise Killed
        return real(self, batch, index)

    monkeypatch.setattr(module, "training_step", training_step)


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


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target and prompts."""
    home = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target")
    rows = "".join(f'{{"prompt": "12 + {i} = the fox {i * 7}"}}\n' for i in range(14))
    (home / "mine.jsonl").write_text(rows)
    return home


def settings(home: Path, runs: Path, exits: dict[str, Any], **changes: Any) -> Settings:
    """Settings for one training step."""
    chosen = ExitSettings(**{"kind": "norm", "layers": [1, 2], "head_size": 150, **exits})
    return Settings(
        model=ModelSettings("tiny", SourceSettings(str(home / "target")), exits=chosen, dtype="float32", device="cpu"),
        corpus=CorpusSettings([str(home / "mine.jsonl")], max_new_tokens=9, parts={"draft": 0.6, "tuning": 0.4}),
        trainer=trainer(max_steps=1, **changes), logger=QUIET, paths=PathSettings(str(runs), str(home / "cache")),
    )  # fmt: skip


def test_from_settings_to_heads(home: Path, tmp_path: Path) -> None:
    """Trained once, found again, kept apart from what other settings make."""

    def files() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}

    chosen = settings(home, tmp_path, {})
    models = load_target(chosen.model, home / "cache")
    heads = exit_heads(chosen, models, [2])
    assert list(heads) == [2] and heads[2].kind == "norm" and len(heads[2].head.weight) == 150
    assert heads[2].head_ids is not None and set(models.stop_ids) <= set(heads[2].head_ids.tolist())
    (folder,) = (file.parent for file in tmp_path.glob("stages/exits/*/manifest.json"))
    assert not (folder / "last.ckpt").exists() and exits_checkpoint(chosen) == folder / "exits"
    before = files()
    assert list(exit_heads(chosen, models, [1, 2])) == [1, 2] and files() == before
    named = exit_heads(settings(home, tmp_path, {"source": str(folder / "exits"), "kind": "adapter"}), models, [1])
    assert list(named) == [1] and named[1].kind == "norm" and files() == before
    for exits, changes in (
        ({"kind": "adapter"}, {}), ({"kind": "adapter", "attention_only": True}, {}), ({"layers": [1]}, {}),
        ({"head_size": 0}, {}), ({"weights": [1.0, 2.0]}, {}), ({}, {"lr": 1e-4}),
    ):  # fmt: skip
        exits_checkpoint(settings(home, tmp_path, exits, **changes), models)
    assert len(list(tmp_path.glob("stages/exits/*/manifest.json"))) == 7
    assert exits_checkpoint(settings(home, tmp_path, {"attention_only": True}), models) == folder / "exits"
    needed = exit_heads(settings(home, tmp_path, {"layers": []}), models, [2, 1])  # what the method asks for
    assert list(needed) == [1, 2] and len(list(tmp_path.glob("stages/exits/*/manifest.json"))) == 7


def test_shared_exits_need_no_stage(home: Path, tmp_path: Path) -> None:
    chosen = settings(home, tmp_path, {"kind": "shared", "head_size": 0})
    models = load_target(chosen.model, home / "cache")
    heads = exit_heads(chosen, models, [2])
    assert heads[2].kind == "shared" and heads[2].head_ids is None and not (tmp_path / "stages").exists()
    reduced = exit_heads(settings(home, tmp_path, {"kind": "shared"}), models, [1])
    trained = exit_heads(settings(home, tmp_path, {}), models, [1])
    assert reduced[1].head_ids is not None and trained[1].head_ids is not None
    assert torch.equal(reduced[1].head_ids, trained[1].head_ids)  # both of the draft's part of the corpus
    with pytest.raises(ConfigError, match=r"exits after so many layers: \[3\]; allowed: different numbers from 1 to 2"):
        exit_heads(chosen, models, [3])


def test_an_exit_that_will_not_be_trained_is_refused_first(home: Path, tmp_path: Path) -> None:
    chosen = settings(home, tmp_path, {"layers": [1]})
    models = load_target(chosen.model, home / "cache")
    with pytest.raises(
        MismatchError, match=r"model\.exits\.layers has no exit after so many layers: \[2\]; allowed: 1"
    ):
        exit_heads(chosen, models, [1, 2])
    assert not (tmp_path / "stages").exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["model.exits.layers=[8,4]"], r"model\.exits\.layers: \[8, 4\]; allowed: numbers of layers in rising order"),
        (["model.exits.layers=[0]"], r"model\.exits\.layers: \[0\]"),
        (["model.exits.layers=[4,8]", "model.exits.weights=[1]"], r"model\.exits\.weights: \[1\.0\]; allowed: one"),
        (["model.exits.kind=mlp"], r"model\.exits\.kind: 'mlp'; allowed: shared, norm, linear, adapter"),
        (["model.exits.head_size=-1"], r"model\.exits\.head_size: -1; allowed: ≥ 0"),
        (["layerskip.p_max=1.5"], r"layerskip\.p_max: 1\.5; allowed: \[0, 1\]"),
        (["layerskip.rotation=0"], r"layerskip\.rotation: 0; allowed: ≥ 1"),
        (["trainer=layerskip", "trainer.kl_weight=0.5"], r"trainer\.kl_weight is for the draft"),
        (["trainer=exits", "trainer.start_from=x"], r"trainer\.start_from is for the draft"),
    ],
)
def test_settings_that_do_not_fit(words: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        load_settings(words)
    assert load_settings(["trainer=exits", "trainer.kl_weight=0.25"]).trainer.kl_weight == 0.25


def test_a_named_checkpoint_is_not_trained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(["+experiment=exits/demo", "model.exits.source=there"])
    assert "model.exits.source names a trained one: 'there'; drop it" in capsys.readouterr().err


def test_rows_leave_out_layers_of_their_own() -> None:
    """Each row is what it would be alone, through the layers it kept."""
    stack = tiny_stack(layers=4)
    ids = torch.randint(0, VOCAB, (5, 7), generator=torch.Generator().manual_seed(1))
    depths = [1, 2, 3, 4]
    plain = rung_states(stack, ids, depths)
    never = thinned_states(stack, ids, [0.0] * 4, depths)
    assert all(torch.equal(never[d], plain[d]) for d in depths)
    always = thinned_states(stack, ids, [1.0] * 4, [4])
    assert torch.equal(always[4], stack.embed(ids)) and list(always) == [4]
    torch.manual_seed(5)
    found = thinned_states(stack, ids, [0.0, 0.3, 0.5, 0.6], depths)
    torch.manual_seed(5)
    kept = torch.stack([torch.rand(5) >= rate for rate in (0.0, 0.3, 0.5, 0.6)])
    assert 4 < int(kept.sum()) < 20
    for row in range(5):
        x, one = stack.embed(ids[row : row + 1]), ids[row : row + 1]
        positions = torch.arange(7)[None]
        mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
        for layer in range(4):
            if kept[layer, row]:
                x = stack.run(x, layer, layer + 1, positions, mask)
            torch.testing.assert_close(found[layer + 1][row], x[0], atol=1e-5, rtol=1e-5)
        assert one.shape == (1, 7)


RECIPE = LayerSkipSettings(p_max=0.2, exit_scale=0.5, rotation=2)


def tune(folder: Path, recipe: LayerSkipSettings = RECIPE, **changes: Any) -> tuple[Path, Models]:
    learn, check = texts()
    models = Models(Stack(tiny_model()), tiny_tokenizer(), (), folder)
    chosen = trainer(**{"part": "layerskip", "kl_weight": 0.0, "lr": 1e-3, **changes})
    made = train_layerskip(models, learn, check, [1, 2], recipe, chosen, QUIET, folder, command="tune it")
    return made, models


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tune(tmp_path_factory.mktemp("tuned"), epochs=3)[0]


def test_a_tuned_model_exits_earlier_and_is_another(tuned: Path) -> None:
    """Its record holds agreement before and after, and how far its output is the original's."""
    record = json.loads((tuned / RECORD).read_text())
    before, after = record["validation_before"], record["validation"]
    assert before["val/agree_text"] == 1 and after["val/agree_text"] < 1
    assert after["val/agree"] > before["val/agree"] + 0.05
    assert record["steps"] > 5 and record["exits"] == [1, 2] and record["recipe"]["p_max"] == 0.2
    original = silent(LayerSkipModule(Stack(tiny_model()), [1, 2], RECIPE, trainer(kl_weight=0.0), 1))
    assert original.measure(loaders(*texts(), trainer())[1]) == pytest.approx(before)


def test_a_tuned_model_is_a_model_folder(tuned: Path) -> None:
    """Loaded as any other, its shared exits score what the record says."""
    check_folder(tuned)
    load_tokenizer(tuned)
    loaded = Stack(load_model(tuned, "float32", "cpu"))
    assert load_file(tuned / "model.safetensors")["model.embed_tokens.weight"].dtype == torch.bfloat16
    record = json.loads((tuned / RECORD).read_text())
    module = silent(LayerSkipModule(loaded, [1, 2], RECIPE, trainer(kl_weight=0.0), 1))
    assert module.measure(loaders(*texts(), trainer())[1]) == pytest.approx(record["validation"])
    card = (tuned / "README.md").read_text()
    assert "This is another model than the original" in card and "tune it" in card and "model.exits.kind=shared" in card
    assert f"at {record['validation']['val/agree_text']:.4f} of all places" in card
    rows = [line for line in card.splitlines() if line.startswith(("| 1 |", "| 2 |"))]
    assert len(rows) == 2 and f"{record['validation_before']['val/agree_1']:.4f}" in rows[0]


def test_the_whole_model_learns_from_the_exits_whose_turn_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = collate_ids(texts()[0][:3], 0.15)
    for step, trained_exits in ((0, [1, 3]), (1, [2, 3])):
        stack = Stack(tiny_model())
        recipe = replace(RECIPE, p_max=0.0)
        module = silent(LayerSkipModule(stack, [1, 2], recipe, trainer(kl_weight=0.0), 1))
        monkeypatch.setattr(LayerSkipModule, "global_step", step)
        loss = module.training_step(batch, 1)
        loss.backward()
        assert all(p.grad is not None for p in stack.model.parameters())
        losses: dict[int, Tensor] = {}
        at = (batch["weights"] > 0).nonzero(as_tuple=True)
        weights = batch["weights"][at]
        with torch.no_grad():
            for depth, states in rung_states(stack, batch["ids"], [1, 2, 3]).items():
                each = torch.nn.functional.cross_entropy(
                    stack.readout(states[at]), batch["ids"].roll(-1, 1)[at], reduction="none"
                )
                losses[depth] = (each * weights).sum() / weights.sum()
        # indices 0, 1, 2 weigh 0.5 · (0, 1) and 2 + 0.5 · 1: the first exit has none
        share = {1: 0.0, 2: 0.5, 3: 2.5}
        wanted = sum(share[e] * losses[e] for e in trained_exits) / sum(share[e] for e in trained_exits)
        torch.testing.assert_close(loss.detach(), wanted)
    assert module.rates == dropout_rates(3, 0.0)


@pytest.mark.parametrize("step", [3])
def test_a_killed_tuning_ends_with_the_same_bytes(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are left out and exits that take turns depend on the step alone."""
    recipe, options = replace(RECIPE, p_max=0.6), {"checkpoint_every": 2, "val_every": 3}
    whole, _ = tune(tmp_path / "whole", recipe, **options)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(step, LayerSkipModule, patch)
        tune(tmp_path / "killed", recipe, **options)
    again, _ = tune(tmp_path / "killed", recipe, **options)
    for name in ("model.safetensors", RECORD):
        assert (again / name).read_bytes() == (whole / name).read_bytes()


def test_from_settings_to_a_tuned_model(home: Path, tmp_path: Path) -> None:
    """Tuned once, found again; then a target like any other, whose exits need no training."""
    chosen = settings(home, tmp_path, {"kind": "shared", "head_size": 0})
    chosen.trainer = trainer(part="layerskip", max_steps=1, kl_weight=0.0)
    folder = layerskip_checkpoint(chosen)
    state = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    assert layerskip_checkpoint(chosen) == folder and not list(tmp_path.rglob("*.ckpt"))
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()} == state
    chosen.model.target = SourceSettings(str(folder))
    models = load_target(chosen.model, home / "cache")
    assert models.stop_ids == load_target(settings(home, tmp_path, {}).model, home / "cache").stop_ids
    heads = exit_heads(chosen, models, [1, 2])
    states = torch.randn(2, 3, 32)
    assert torch.equal(heads[1].readout(states), models.target.readout(states))
    other = replace(chosen, layerskip=replace(RECIPE, p_max=0.9))
    other.model.target = SourceSettings(str(home / "target"))
    assert layerskip_checkpoint(other) != folder
    trained: Callable[..., Any] = stages.trainer_of
    assert trained(chosen, "exits").monitor == "val/agree" and trained(chosen, "exits").part == "exits"
