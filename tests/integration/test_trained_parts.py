"""What a training leaves: checkpoints of trained tensors alone, that refuse other models and score as they scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pacer.assemble import Models
from pacer.data.corpus import Text
from pacer.data.labels import simulate
from pacer.data.packing import pack
from pacer.decoding.controllers.fixed import Fixed
from pacer.errors import ConfigError, MismatchError, PacerError
from pacer.evaluation.simulate import best_fixed, blockwise, oracle, outcome
from pacer.models.checkpoint import save_checkpoint
from pacer.models.draft import load_draft
from pacer.models.preverifier import Preverifier, load_preverifier
from pacer.models.stack import Stack
from pacer.settings import CostSettings, DraftSettings, LabelSettings, PreverifierSettings, Settings, TrainerSettings
from pacer.training.distill import IGNORE, collate_texts
from pacer.training.draft_run import train_draft
from pacer.training.preverifier_run import packed_batches, train_preverifier
from pacer.training.preverify import RoundScores, packed_logits
from tests.learners import GAMMA, pairs, part, texts
from tests.scripted import QUIET
from tests.texts import draft, requests, rounds_at, target, written
from tests.tiny import generate, make_decoder, make_preverifier, near, strangers, tiny_model


def run_preverifier(folder: Path, **settings: Any) -> tuple[Path, Models]:
    learn, check = (pairs(of) for of in texts())
    models = Models(target(), None, (), folder, draft())  # type: ignore[arg-type]  # no tokenizer is used
    chosen = Settings(
        preverifier=PreverifierSettings(gamma_max=GAMMA, width=16), labels=LabelSettings(gamma=GAMMA),
        trainer=TrainerSettings(precision="fp32", tokens_per_batch=256, epochs=1, patience=0, **settings), logger=QUIET,
    )  # fmt: skip
    return train_preverifier(models, learn, check, chosen, folder, command="train it"), models


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Models]:
    return run_preverifier(tmp_path_factory.mktemp("preverifier"))


def test_a_loaded_preverifier_scores_what_it_scored(saved: tuple[Path, Models]) -> None:
    """T90: the very validation that the checkpoint reports, from the loaded tensors alone."""
    folder, models = saved
    module, config = load_preverifier(folder, models.target, draft())
    assert not module.training and not any(p.requires_grad for p in module.parameters())
    held_out = pairs(texts()[1])
    scores = RoundScores(GAMMA)
    for rows in packed_batches(held_out, 256, seed=0):
        batch = pack([[held_out[i] for i in row] for row in rows], "survival")
        scores.add(batch, packed_logits(module, batch).sigmoid())
    rule, paced, gamma, window, best = scores.rounds(CostSettings())
    assert rule == config["tuned"]
    figures = config["validation"]
    found = (paced.speedup, paced.accepted, gamma, window.speedup, best.speedup)
    names = ("sim_speedup", "sim_accepted_length", "sim_fixed_gamma", "sim_fixed_speedup", "sim_oracle_speedup")
    assert found == pytest.approx([figures[f"val/{name}"] for name in names])
    assert {"val/loss", "val/auc", "val/ece", "val/accuracy_01", f"val/accuracy_{GAMMA:02}"} <= figures.keys()
    kept = torch.load(folder.parent / "best.ckpt", weights_only=True)["state_dict"]
    assert kept.keys() == {f"module.{name}" for name, _ in module.named_parameters()}  # K99
    for name, value in module.named_parameters():
        assert torch.equal(kept[f"module.{name}"], value)


def test_checkpoints_hold_trained_tensors_alone(saved: tuple[Path, Models], tmp_path: Path) -> None:
    """K99: nothing of the frozen models, but what identifies them."""
    folder, _ = saved
    tensors = load_file(folder / "model.safetensors")
    module = Preverifier(draft(), PreverifierSettings(gamma_max=GAMMA, width=16))
    assert tensors.keys() == dict(module.named_parameters()).keys()
    one_layer = sum(value.numel() for value in draft().decoder.layers[0].parameters())
    assert sum(value.numel() for value in tensors.values()) < one_layer  # nothing of the draft is in it
    config = json.loads((folder / "config.json").read_text())
    assert config["target"]["num_hidden_layers"] == 3
    assert config["draft"]["fingerprint"] != config["target"]["fingerprint"]
    learn, check = texts()
    trainer = TrainerSettings(precision="fp32", tokens_per_batch=200, epochs=1, patience=0, monitor="val/agreement")
    layers = DraftSettings(layers=[0, 2], head_size=50)
    made = train_draft(target(), learn, check, layers, trainer, QUIET, tmp_path, always=[96], command="")
    tensors = load_file(made / "model.safetensors")
    assert all(
        name.startswith(("layers.", "norm.", "projection.", "copying.")) or name == "head_ids" for name in tensors
    )
    assert len(tensors["head_ids"]) == 50 and 96 in tensors["head_ids"]
    frozen = torch.load(tmp_path / "best.ckpt", weights_only=True)["state_dict"]
    assert {f"draft.{name}" for name in tensors if name != "head_ids"} == frozen.keys()
    loaded = load_draft(made, target())
    for name, value in loaded.named_parameters():
        assert torch.equal(value, frozen[f"draft.{name}"].bfloat16().float())
    states = torch.randn(3, 32)
    merged = load_draft(made, target()).merged()
    torch.testing.assert_close(merged.readout(states), loaded.logits(states), atol=1e-4, rtol=1e-4)
    whole = load_draft(made, target()).merged(full=True, target=target())
    ids = tensors["head_ids"].long()
    torch.testing.assert_close(whole.readout(states)[:, ids], merged.readout(states), atol=1e-4, rtol=1e-4)


def test_tensors_that_do_not_fit_are_named(saved: tuple[Path, Models], tmp_path: Path) -> None:
    """T90: a missing, an unexpected, a misshapen tensor."""
    folder, models = saved
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    less = {name: value for name, value in tensors.items() if name != "out.weight"}
    for changed, what in (
        (less, r"'missing': \['out.weight'\]"),
        ({**tensors, "more": torch.zeros(1)}, r"'unexpected': \['more'\]"),
        ({**tensors, "out.weight": torch.zeros(1, 3)}, r"'wrong shape': \['out.weight'\]"),
    ):
        save_checkpoint(tmp_path / "changed", changed, config, "")
        with pytest.raises(MismatchError, match=what):
            load_preverifier(tmp_path / "changed", models.target, draft())
    save_file(less, tmp_path / "changed" / "model.safetensors")
    with pytest.raises(MismatchError, match="of another kind"):
        load_draft(tmp_path / "changed", target())


def test_a_part_refuses_models_it_was_not_trained_for(saved: tuple[Path, Models]) -> None:
    """V60: layers, width, vocabulary, and weights of the same shape."""
    folder, models = saved
    for other, what in strangers():
        with pytest.raises(MismatchError, match=rf"\(target\) belongs to another model: {what}"):
            load_preverifier(folder, other, draft())
    with pytest.raises(MismatchError, match=r"\(draft\) belongs to another model: fingerprint"):
        load_preverifier(folder, models.target, Stack(near(tiny_model(), seed=8)))


def test_lengths_of_labels_and_judgement_must_agree(tmp_path: Path) -> None:
    learn, check = (pairs(of) for of in texts())
    models = Models(target(), None, (), tmp_path, draft())  # type: ignore[arg-type]  # no tokenizer is used
    settings = Settings(preverifier=PreverifierSettings(gamma_max=3), labels=LabelSettings(gamma=GAMMA))
    with pytest.raises(ConfigError, match=r"labels\.gamma and preverifier\.gamma_max differ: 4; allowed: 3"):
        train_preverifier(models, learn, check, settings, tmp_path, command="")


def test_a_batch_without_supervised_tokens_is_named() -> None:
    """T84 for drafts: none of the text's ids is in the head."""
    module, _, _ = part("draft", TrainerSettings())
    nothing = torch.full((97,), IGNORE)
    batch = collate_texts([Text("odd", "t", [1, 2], [3], True)], nothing, 0.15)
    with pytest.raises(PacerError, match="a batch without supervised tokens: 'odd'"):
        module.training_step(batch, 0)
    with pytest.raises(PacerError, match="a text without supervised tokens: 'empty'"):
        collate_texts([Text("empty", "t", [1, 2], [], True)], nothing, 0.15)


def test_labels_and_weights_of_a_draft_batch() -> None:
    head_of = torch.full((10,), IGNORE)
    head_of[[2, 5, 7]] = torch.arange(3)
    batch = collate_texts([Text("a", "x", [1, 2, 5], [7, 3], True), Text("b", "y", [5], [2], True)], head_of, 0.15)
    assert batch["ids"].tolist() == [[1, 2, 5, 7, 3], [5, 2, 0, 0, 0]]
    ignored = IGNORE
    assert batch["labels"].tolist() == [[0, 1, 2, ignored, ignored], [0, *[ignored] * 4]]
    wanted = torch.tensor([[0.15, 0.15, 1, 1, 0], [1, 0, 0, 0, 0]])
    torch.testing.assert_close(batch["weights"], wanted)
    assert (batch["tasks"], batch["names"]) == (["x", "y"], ["a", "b"])


def test_round_scores_are_the_rounds(saved: tuple[Path, Models]) -> None:
    """Tables gathered from packed batches, place by place; and T82: their acceptance is the decoder's."""
    stops = (35, 51, 75)
    settings = LabelSettings(starts="rounds", gamma=GAMMA)
    everyone = written(10, new=90, stop_ids=stops)
    found = [(t, r) for t in everyone if (r := simulate(draft(), t, settings, stops)) is not None]
    cut = written(10)[1]
    unsettled = [(cut, rounds_at(cut, [1, len(cut.output_ids) - 2], GAMMA, by=target()))]  # one of the two
    module = make_preverifier(draft(), gamma_max=GAMMA)
    for label in ("survival", "conditional"):
        gathered = RoundScores(GAMMA)
        order = []
        everything = [*found, *unsettled]
        for rows in packed_batches(everything, 200, seed=3):
            batch = pack([[everything[i] for i in row] for row in rows], label)
            gathered.add(batch, packed_logits(module, batch).sigmoid())
            order += [i for row in rows for i in row]
        scores, labels, used = gathered.tables()
        rounds = [everything[i][1] for i in order]
        place = np.arange(GAMMA)
        counts, accepted, known, starts = (
            torch.cat([getattr(r, name) for r in rounds]).numpy() for name in ("counts", "accepted", "known", "starts")
        )
        assert scores.shape == (len(starts), GAMMA)
        assert ((scores > 0) == (place < counts[:, None])).all()
        assert (labels == (place < accepted[:, None])).all()
        assert (used == torch.cat([r.labels(label)[1] for r in rounds]).numpy()).all()
        costs = CostSettings()
        settled = (accepted < known) | (counts <= known)
        assert 1 <= (~settled).sum() < 4
        rule, paced, gamma, window, best = gathered.rounds(costs)
        kept = [x[settled] for x in (scores, counts, accepted)]
        lengths, calls = blockwise(kept[0], kept[1], int(rule["b"]), rule["t0"], rule["rho"], GAMMA)
        assert paced == outcome(lengths, calls, kept[2], costs)
        assert (gamma, window) == best_fixed(kept[2], kept[1], costs, GAMMA)
        assert best == oracle(kept[2], costs)
    results = generate(make_decoder(target(), draft(), Fixed(GAMMA)), requests(10, 90, stops), 4)
    simulated = sum(int(r.accepted.sum()) for _, r in found) / sum(int(r.counts.sum()) for _, r in found)
    lines = [line for result in results for line in result.rounds]
    real = sum(line["accepted"][0] for line in lines) / sum(len(line["drafted"]) for line in lines)
    assert simulated == pytest.approx(real, abs=0.01)
