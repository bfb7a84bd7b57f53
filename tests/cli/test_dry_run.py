"""``dry_run=true``: the plan of a verb is what the verb then does; making it reads no weights and writes nothing."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pacer import evaluate, report, train
from pacer.command.app import load_settings
from pacer.models.sources import load_model
from pacer.models.stack import Stack
from pacer.planning import show
from pacer.planning.parts import learning_bytes, parts
from pacer.planning.wanted import VERBS, wanted
from tests.cli.test_verbs import words
from tests.folders import tiny_folder

LINE = re.compile(r"  (there|begun|to make|later) +(\S.*?)  +(\S.*)?$")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target")
    return home


def plan(verb: str, command: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    """The stages of a plan: what → state and where."""
    capsys.readouterr()
    importlib.import_module(f"pacer.{verb}").main([*command, "dry_run=true"])
    out = capsys.readouterr().out
    assert out.startswith(f"plan of {verb} ")
    return {m[2]: (m[1], m[3] or "") for m in map(LINE.match, out.splitlines()) if m}


def files(home: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in home.rglob("*")}


CASES = {
    "train draft": ("train", "draft/smollm2", []),
    "train preverifier": ("train", "pacer/demo", []),
    "train exits": ("train", "exits/demo", ["model.exits.kind=adapter"]),
    "train layerskip": ("train", "exits/layerskip", []),
    "label": ("label", "pacer/demo", []),
    "evaluate": ("evaluate", "pacer/demo", ["benchmark.sets=[gsm8k]", "benchmark.score=false"]),
    "evaluate exits": (
        "evaluate", "hispec/demo",
        ["benchmark.sets=[gsm8k]", "benchmark.score=false", "benchmark.arms=[ar,hispec,kangaroo,hispec_pacer]"],
    ),
}  # fmt: skip


FAST = ("train draft", "train exits")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CASES])
def test_the_plan_is_what_is_done(name: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before: nothing is there. After: every stage that was made is there, under the name that the plan gave it."""
    verb, experiment, more = CASES[name]
    given = [word for word in words(home, experiment, *more) if not word.startswith("paths.runs")]
    command = [*given, f"paths.runs={tmp_path / 'runs'}"]
    before = plan(verb, command, capsys)
    assert before and {state for state, _ in before.values()} <= {"to make", "later"}
    assert not (tmp_path / "runs").exists()
    importlib.import_module(f"pacer.{verb}").main(command)
    made = {str(record.parent) for record in (tmp_path / "runs" / "stages").glob("*/*/manifest.json")}
    after = plan(verb, command, capsys)
    there = {where for what, (state, where) in after.items() if state == "there" and not what.startswith("run:")}
    made = {folder for folder in made if "/stages/states/" not in folder}  # kept to train faster, by what was labelled
    judges = {folder for folder in made if "exits" in name and re.search("/(labels|preverifier)/", folder)}
    assert there == made - judges, "pre-verifiers on exits are named by the exits' weights"
    assert {state for state, _ in after.values()} == ({"there", "later"} if judges else {"there"})
    named = {where for state, where in before.values() if state == "to make"}
    assert named <= there | {where for where in named if "/evaluate/" in where}
    if verb == "evaluate":
        done = re.search(r"run: (\d+) of (\d+) requests measured", " ".join(after))
        assert done and int(done[1]) == int(done[2]) > 0


def test_other_settings_are_other_stages(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = words(home, "pacer/demo")
    train.main(command)
    assert {state for state, _ in plan("train", command, capsys).values()} == {"there"}
    other = plan("train", [*command, "trainer.lr=0.5"], capsys)
    assert other["preverifier"][0] == "to make" and other["labels: part tuning"][0] == "there"
    other = plan("train", [*command, "corpus.max_new_tokens=9"], capsys)
    assert other["draft of layers [0, 1]"][0] == "to make" and other["preverifier"] == ("later", "after the draft")
    shard = next((home / "runs" / "stages" / "corpus").glob("*/shard-*"))
    shard.with_name("manifest.json").unlink()
    assert any(
        state == "begun" and "1 of 1 pieces" in where for state, where in plan("train", command, capsys).values()
    )


@pytest.mark.parametrize("verb", VERBS)
def test_no_weights_are_read_and_nothing_is_written(
    verb: str, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaders = ("pacer.assemble.load_model", "pacer.models.checkpoint.load_file", "pacer.stages.build.load_target")
    for name in (*loaders, "pacer.stages.draft.load_target"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("loaded"))
    before = files(home)
    command = words(home, "pacer/demo", "benchmark.sets=[gsm8k]")
    importlib.import_module(f"pacer.{verb}").main([*command, "dry_run=true"])
    assert files(home) == before and "target" in capsys.readouterr().out


def test_sizes_are_those_of_what_is_loaded(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = words(home, "pacer/demo", "model.draft.copying=true")
    settings = load_settings(command)
    found = {part.name: part for part in parts(settings, wanted(settings, "evaluate"))}
    target = Stack(load_model(home / "target", "float32"))
    own = sum(p.numel() for p in target.model.parameters())
    assert (found["target"].parameters, found["target"].bytes) == (own, 4 * own)
    assert found["target"].kv == target.new_cache(1, 1000).nbytes() - target.new_cache(1, 0).nbytes()
    train.main(command)
    folder = Path(capsys.readouterr().out.strip().splitlines()[-1].removeprefix("saved in "))
    trained = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert found["preverifier"].parameters == trained
    (draft,) = (home / "runs" / "stages" / "draft").glob("*/draft")
    tensors = load_file(draft / "model.safetensors")
    rows = len(tensors.pop("head_ids")) * target.width  # the target's, copied
    # a projection is multiplied into the head's rows once the draft decodes
    assert found["draft"].parameters == sum(t.numel() for t in tensors.values()) + rows
    named = load_settings(
        [*command, f"model.draft.source={draft}", "model.draft.layers=[2]", "model.draft.head_size=9"]
    )
    again = {part.name: part for part in parts(named, wanted(named, "evaluate"))}
    assert again["draft"].parameters == found["draft"].parameters, "a named draft is as it was saved"


def test_what_training_adds(home: Path) -> None:
    """What learns is held in float32 with its gradient and two moments; a draft is cut from a target in float32."""
    adds = {}
    experiments = {
        "draft": "draft/smollm2", "preverifier": "pacer/demo", "layerskip": "exits/layerskip", "exits": "exits/demo",
    }  # fmt: skip
    for part, experiment in experiments.items():
        settings = load_settings(words(home, experiment))
        found = parts(settings, wanted(settings, "train"))
        adds[part] = learning_bytes(found, settings, part), {one.name: one.parameters for one in found}
    target = adds["draft"][1]["target"]
    assert target is not None and adds["layerskip"][0] == 16 * target
    assert adds["draft"][0] == 16 * (adds["draft"][1]["draft"] or 0) + 4 * target
    assert adds["preverifier"][0] == 16 * (adds["preverifier"][1]["preverifier"] or 0) > 0
    assert adds["exits"][0] == 16 * (adds["exits"][1]["exits"] or 0) > 0
    settings = load_settings(words(home, "pacer/demo"))
    assert learning_bytes(parts(settings, wanted(settings, "evaluate")), settings, None) is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["model.draft.source=/no/such/folder"], "no draft checkpoint"),
        (["preverifier.source=/no/such/folder"], "no preverifier checkpoint"),
        (["model.target.id=/no/such/folder"], "no model folder here"),
        (["model.draft.layers=[0,9]"], "no such target layers"),
        (["corpus.prompts=[gsm9k/train]"], "gsm9k"),
    ],
)
def test_what_the_verb_would_refuse_is_said(
    more: list[str], said: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for word in words(home, "pacer/demo") if word.split("=")[0] != more[0].split("=")[0]]
    with pytest.raises(SystemExit) as stop:
        evaluate.main([*given, *more, "dry_run=true"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert stop.value.code == 2 and said in line


def test_a_family_that_cannot_be_cut_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = home / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2}))
    with pytest.raises(SystemExit):
        evaluate.main([*words(home, "pacer/demo"), f"model.target.id={folder}", "dry_run=true"])
    assert "unsupported architecture: 'gpt2'; allowed: gpt_neox, llama" in capsys.readouterr().err


def test_hub_models_offline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("pacer.models.sizes.try_to_load_from_cache", lambda *_, **__: None)
    rest = ["data=samples", "paths.data_dir=null", f"paths.runs={tmp_path}", "dry_run=true"]
    evaluate.main(["+experiment=pacer/hub", "model=llama31_1b_70b", *rest])
    out = capsys.readouterr().out
    assert re.search(r"target +70,\d{3},\d{3},\d{3} +141\.\d\d GB .*the config itself is unknown offline", out)
    evaluate.main(["+experiment=pacer/hub", "model=llama31_1b_70b", "model.target.id=some/model", *rest])
    out = capsys.readouterr().out
    assert "some/model: unknown offline" in out and "together" not in out
    assert "later" not in out and "preverifier" in out, "a draft model of its own has no weights to wait for"


def test_another_verb_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main(["dry_run=true"])
    assert (
        "this verb has no plan: 'report dry_run=true'; allowed: advise, evaluate, export, fetch"
        in capsys.readouterr().err
    )


def test_sizes_for_people() -> None:
    assert [show.size(n) for n in (None, 0, 999, 1000, 2_500_000, 141_000_000_000)] == [
        "–", "0 B", "999 B", "1.00 kB", "2.50 MB", "141.00 GB",
    ]  # fmt: skip
    assert show.devices(load_settings([])) == "here: model.device=auto; no GPU" or torch.cuda.is_available()
