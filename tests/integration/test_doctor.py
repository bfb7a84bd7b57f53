"""The verb on model folders: each planted fault comes first, a healthy pair has none; what it wrote is what it said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from pacer import doctor
from pacer.data.prompts import encode
from pacer.models.draft import TrainableDraft, save_draft
from pacer.models.stack import Stack
from tests.folders import tiny_folder, tiny_tokenizer
from tests.tiny import loud, near, plain_greedy

SETS = "benchmark.sets=[gsm8k]"
VOCAB = len(tiny_tokenizer())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("doctor")
    tiny_folder(home / "target")
    save(near(model(home), scale=0.004), home / "draft")
    return home


def model(home: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(home / "target", dtype=torch.float32).eval()


def save(draft: PreTrainedModel, folder: Path) -> Path:
    draft.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def words(home: Path, runs: Path, *more: str) -> list[str]:
    given = {word.split("=")[0] for word in more}
    common = [
        "+experiment=pacer/demo", "model=local", f"model.target.id={home / 'target'}",
        f"model.draft.source={home / 'draft'}", "model.dtype=float32", f"paths.runs={runs}",
        f"paths.cache={home / 'cache'}", SETS, "benchmark.max_new_tokens=24", "benchmark.limit=4",
        "method=sd", "costs.draft=0.05", "costs.token=0.0", "labels.gamma=4", "method.controller.gamma=2",
    ]  # fmt: skip
    return [*(word for word in common if word.split("=")[0] not in given), *more]


def examine(home: Path, runs: Path, *more: str) -> dict[str, Any]:
    doctor.main(words(home, runs, *more))
    (path,) = (runs / "doctor").glob("*/*/doctor.json")
    return dict(json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name)))


def first(report: dict[str, Any]) -> dict[str, Any]:
    assert report["findings"]
    assert report["findings"][0]["effect"] == max(finding["effect"] for finding in report["findings"])
    return dict(report["findings"][0])


def test_a_healthy_pair(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = examine(home, tmp_path)
    assert report["findings"] == [] and 0.5 < report["acceptance"] <= 1
    assert {"tokenizer", "readout", "template", "context", "costs and window"} <= set(report["checked"])
    assert {"head", "dtype", "data", "pre-verifier", "sampling"} <= set(report["not_checked"])
    out = capsys.readouterr().out
    assert "nothing found" in out and f"{report['acceptance']:.3f}" in out and "not checked: data (no corpus" in out
    assert report["prompts"] == 4 and report["acceptance_by_task"] == {"gsm8k": report["acceptance"]}


def test_another_tokenizer(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(near(model(home), scale=0.004), tmp_path / "draft")
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    report = examine(home, tmp_path, f"model.draft.source={folder}")
    assert first(report)["check"] == "tokenizer" and first(report)["effect"] == 1 and report["acceptance"] is None
    assert "eos token" in capsys.readouterr().out


def test_norm_and_dtype(home: Path, tmp_path: Path) -> None:
    draft = near(model(home), scale=0.004)
    save(loud(draft, 4e4), tmp_path / "loud")
    with torch.no_grad():
        draft.model.norm.weight.copy_(torch.randn(32, generator=torch.Generator().manual_seed(0)).exp())
    save(draft, tmp_path / "norm")
    found = first(examine(home, tmp_path / "a", f"model.draft.source={tmp_path / 'norm'}"))
    assert found["check"] == "readout" and found["effect"] > 0.4
    found = first(examine(home, tmp_path / "b", f"model.draft.source={tmp_path / 'loud'}", "model.dtype=float16"))
    assert found["check"] == "dtype" and found["evidence"]["not_finite"] > 0.5
    report = examine(home, tmp_path / "c", "model.dtype=float16")
    assert "dtype" in report["checked"] and report["findings"] == []


def test_a_target_that_overflows(home: Path, tmp_path: Path) -> None:
    save(loud(model(home), 4e4), tmp_path / "target")
    found = first(examine(home, tmp_path, f"model.target.id={tmp_path / 'target'}", "model.dtype=float16"))
    assert found["check"] == "dtype" and "not finite" in found["what"]


def corpus_file(home: Path, path: Path, foreign: bool = False, templated: bool = True) -> Path:
    tokenizer, target = tiny_tokenizer(), model(home)
    rows = []
    for number, text in enumerate(("How many?", "the fox", "12 + 7", "def add", "What is it?", "the dog")):
        ids = encode(text, tokenizer) if templated else tokenizer(text)["input_ids"]
        output = plain_greedy(target, [*ids, 9] if foreign else ids, 16)
        rows.append({"id": f"t-{number}", "task": "t", "prompt_ids": ids, "output_ids": output})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_corpus_of_another_hand_or_template(home: Path, tmp_path: Path) -> None:
    good = corpus_file(home, tmp_path / "good.jsonl")
    report = examine(home, tmp_path / "a", f"corpus.file={good}")
    assert "data" in report["checked"] and report["findings"] == []
    found = first(examine(home, tmp_path / "b", f"corpus.file={corpus_file(home, tmp_path / 'x.jsonl', foreign=True)}"))
    assert found["check"] == "data" and found["effect"] > 0.2
    path = corpus_file(home, tmp_path / "plain.jsonl", templated=False)
    found = first(examine(home, tmp_path / "c", f"corpus.file={path}"))
    assert found["check"] == "template" and found["evidence"]["share"] == 1


def of_layers(home: Path, folder: Path, layers: list[int], head: torch.Tensor, **extra: Any) -> Path:
    target = Stack(model(home))
    draft = TrainableDraft(target, layers, head)
    return save_draft(folder, draft, target, {"layers": layers, **extra}, "card")


def layer_words(folder: Path | str, layers: str, head: int) -> list[str]:
    return ["model.draft.kind=layers", f"model.draft.source={folder}", f"model.draft.layers={layers}",
            f"model.draft.head_size={head}", "model.draft.copying=false"]  # fmt: skip


def test_layers_head_and_a_stale_checkpoint(home: Path, tmp_path: Path) -> None:
    every = torch.arange(VOCAB)
    good = of_layers(
        home, tmp_path / "good", [0, 1, 2], every, validation={"val/agreement_gsm8k": 0.97, "val/agreement": 1.0}
    )
    report = examine(home, tmp_path / "a", *layer_words(good, "[0,1,2]", 0))
    assert report["findings"] == [] and {"layers", "settings", "stale"} <= set(report["checked"])

    swapped = of_layers(home, tmp_path / "swapped", [0, 1, 2], every)
    tensors = load_file(swapped / "model.safetensors")
    places = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    moved = {places.get(name[:9], name[:9]) + name[9:]: value for name, value in tensors.items()}
    save_file(moved, swapped / "model.safetensors")
    found = first(examine(home, tmp_path / "b", *layer_words(swapped, "[0,1,2]", 0)))
    assert found["check"] == "layers" and found["evidence"]["order"] == "[1, 0, 2]" and found["effect"] > 0.2

    few = of_layers(home, tmp_path / "few", [0, 1, 2], torch.arange(0, VOCAB, 3))
    found = first(examine(home, tmp_path / "c", *layer_words(few, "[0,1,2]", len(range(0, VOCAB, 3)))))
    assert (
        found["check"] == "head" and found["effect"] > 0.2 and found["evidence"]["head_ids"] == len(range(0, VOCAB, 3))
    )

    once = of_layers(
        home, tmp_path / "once", [0], every, validation={"val/agreement_gsm8k": 0.99, "val/agreement": 0.99}
    )
    found = first(examine(home, tmp_path / "d", *layer_words(once, "[0]", 0)))
    assert found["check"] == "stale" and found["evidence"]["recorded"] == 0.99

    other = examine(home, tmp_path / "e", *layer_words(good, "[0,1]", 10))
    assert [finding["check"] for finding in other["findings"]] == ["settings", "settings"]

    config = json.loads((good / "config.json").read_text())
    config["target"]["fingerprint"] = "another"
    (good / "config.json").write_text(json.dumps(config))
    found = first(examine(home, tmp_path / "f", *layer_words(good, "[0,1,2]", 0)))
    assert found["check"] == "stale" and "another model" in found["what"]


def with_an_idle_layer(home: Path, folder: Path) -> None:
    """A target whose last layer changes nothing."""
    target = model(home)
    with torch.no_grad():
        target.model.layers[2].self_attn.o_proj.weight.zero_()
        target.model.layers[2].mlp.down_proj.weight.zero_()
    save(target, folder)


def test_untrained_layers(home: Path, tmp_path: Path) -> None:
    with_an_idle_layer(home, tmp_path / "target")
    common = [f"model.target.id={tmp_path / 'target'}", *layer_words("null", "[1,2]", 0)]
    found = first(examine(home, tmp_path / "a", *common))
    assert found["check"] == "layers" and found["evidence"]["layers"] == "[0, 1]"
    report = examine(home, tmp_path / "b", *common, "model.draft.layers=[0,1]")
    assert [finding["what"] for finding in report["findings"]] == [
        "the draft is untrained: layers of the target as they are"
    ]


def skipping(layers: str, *more: str) -> list[str]:
    return ["model.draft.kind=skip", "model.draft.source=null", f"model.draft.layers={layers}", *more]


def test_a_skipping_draft_in_weights_of_its_own(home: Path, tmp_path: Path) -> None:
    """All layers, so in float32 it is the target: what is lost, rounding loses."""
    four_bits = skipping("[0,1,2]", "model.draft.dtype=bfloat16", "model.draft.quantise=int4")
    report = examine(home, tmp_path / "a", *four_bits)
    found = first(report)
    assert found["check"] == "dtype" and found["remedy"] == "set model.draft.quantise=null"
    assert found["what"].startswith("int4 in bfloat16") and found["evidence"]["agreement_float32"] == 1
    assert found["evidence"]["agreement"] == report["acceptance"] < 0.9
    assert "layers" in report["checked"] and report["draft"] == "the target with its layers [0, 1, 2] alone"
    # a target in bfloat16 makes no draft in float32
    report = examine(home, tmp_path / "b", *four_bits, "model.dtype=bfloat16")
    assert next(f for f in report["findings"] if f["check"] == "dtype")["evidence"]["agreement_float32"] > 0.9
    report = examine(home, tmp_path / "c", *skipping("[0,1,2]", "model.draft.dtype=bfloat16"))
    assert "dtype" in report["checked"] and report["acceptance"] > 0.9
    report = examine(home, tmp_path / "d", *skipping("[0,1,2]", "model.draft.dtype=float32"), "model.dtype=bfloat16")
    assert report["not_checked"]["dtype"] == "the draft is in float32"


def test_a_skipping_draft_with_the_wrong_layers(home: Path, tmp_path: Path) -> None:
    with_an_idle_layer(home, tmp_path / "target")
    found = first(examine(home, tmp_path / "a", f"model.target.id={tmp_path / 'target'}", *skipping("[1,2]")))
    assert found["check"] == "layers" and found["evidence"]["layers"] == "[0, 1]"


def test_context_window_costs_and_sampling(home: Path, tmp_path: Path) -> None:
    short = near(model(home), scale=0.004)
    short.config.max_position_embeddings = 130
    save(short, tmp_path / "short")
    found = first(examine(home, tmp_path / "a", f"model.draft.source={tmp_path / 'short'}"))
    assert found["check"] == "context" and "130 tokens" in found["what"] and found["effect"] > 0.1
    save(near(model(home), scale=0.05), tmp_path / "poor")
    poor = f"model.draft.source={tmp_path / 'poor'}"
    found = first(examine(home, tmp_path / "b", poor, "method.controller.gamma=12"))
    assert found["check"] == "window" and found["evidence"]["best_gamma"] < 12
    found = first(examine(home, tmp_path / "c", poor, "costs.draft=1.5"))
    assert found["check"] == "costs" and found["effect"] > 0.5
    sure = near(model(home), scale=0.004)
    with torch.no_grad():
        sure.lm_head.weight.mul_(10)  # the same choices, all but certain: nothing like the target's distribution
    save(sure, tmp_path / "sure")
    sure_words = [f"model.draft.source={tmp_path / 'sure'}"]
    assert examine(home, tmp_path / "d", *sure_words)["findings"] == []
    found = first(examine(home, tmp_path / "e", *sure_words, "sampling.temperature=1.0"))
    assert found["check"] == "sampling" and found["evidence"]["temperature"] == 1.0 and found["effect"] > 0.3


def test_a_prompt_no_target_can_read_is_one_line(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        doctor.main(words(home, tmp_path, "model.draft.source=no/such-model", "model.target.id=/no/such"))
    assert stop.value.code == 2 and len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "doctor").exists()
