"""Arms of transformers: each with its own windows and states, at their best, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers.generation.stopping_criteria import ConfidenceCriteria

from pacer.assemble import Models
from pacer.errors import ConfigError, UnsupportedError
from pacer.evaluation import arms as arms_module
from pacer.evaluation.arms import make_arm
from pacer.settings import SamplingSettings
from tests.arms import arms, make_models, run
from tests.folders import tiny_folder

Windows = list[tuple[int, float, str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tiny_folder(tmp_path_factory.mktemp("arms") / "target"))


@pytest.fixture
def windows(models: Models, monkeypatch: pytest.MonkeyPatch) -> Windows:
    """The assistant's settings at each request."""
    seen: Windows = []
    real = type(models.target.model).generate

    def generate(model: Any, *arguments: Any, **options: Any) -> Any:
        if "assistant_model" in options:  # else it is the assistant's own call
            config = options["assistant_model"].generation_config
            schedule = config.num_assistant_tokens_schedule
            seen.append((config.num_assistant_tokens, config.assistant_confidence_threshold, schedule))
        return real(model, *arguments, **options)

    monkeypatch.setattr(type(models.target.model), "generate", generate)
    return seen


def test_assisted_arms_have_their_own_windows(models: Models, windows: Windows) -> None:
    """Arms share the assistant; each has its settings for itself, and the assistant's own are never touched."""
    assert models.draft_full is not None
    own = models.draft_full.model.generation_config
    before = own.to_dict()
    plain, fixed, heuristic = arms(models, ["hf_assisted", "hf_assisted gamma=2", "hf_heuristic"])
    for arm in (plain, heuristic, fixed, plain):
        run(arm, models)
    constant = [(20, 0.4, "constant")] * 3
    assert windows[:3] == windows[9:] == constant and windows[6:9] == [(2, 0.0, "constant")] * 3
    assert [w[1:] for w in windows[3:6]] == [(0.0, "heuristic")] * 3
    assert models.draft_full.model.generation_config is own and own.to_dict() == before


@pytest.mark.parametrize("name", ["hf_assisted gamma=3", "hf_heuristic"])
def test_the_assistant_reads_every_token_once(name: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its prompt one token at a time, two after full acceptance: transformers at its best, without its fault."""
    assert models.draft_full is not None
    read: list[int] = []
    model = models.draft_full.model
    forward = model.forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        read.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", noting)
    lines = run(arms(models, [name])[0], models)
    prompts = [count for count in read if count > 2]
    assert prompts == [line["prompt_tokens"] + 1 for line in lines] and len(read) > 3 * len(prompts)


def test_the_heuristic_goes_on_from_request_to_request(models: Models, windows: Windows) -> None:
    """Its state is the arm's: other arms of the same assistant neither see nor change it; a new arm begins at 5."""
    first, other, plain = arms(models, ["hf_heuristic", "hf_heuristic", "hf_assisted"])
    for arm in (first, plain, first, other):
        run(arm, models)
    lengths = [w[0] for w in windows]
    assert lengths[0] == 5 and len(set(lengths[:3])) > 1, "the number of tokens followed the acceptance"
    assert lengths[3:6] == [20] * 3
    assert lengths[6] != 5 and lengths[9:] == lengths[:3], "the second run went on; another arm began anew"


@pytest.mark.parametrize("installed", [False, True])
def test_the_dynamic_arm_insists_on_what_its_refit_needs(
    models: Models, windows: Windows, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(arms_module, "is_sklearn_available", lambda: installed)
    if not installed:
        with pytest.raises(UnsupportedError, match=r"hf_dynamic needs scikit-learn.*pip install scikit-learn"):
            make_arm("hf_dynamic", models, SamplingSettings())
        return
    wanted = [line["ids"] for line in run(arms(models, ["hf_generate"])[0], models)]
    arm = arms(models, ["hf_dynamic"])[0]
    for _ in range(2):
        assert [line["ids"] for line in run(arm, models)] == wanted
    assert windows == [(20, 0.4, "constant")] * 6, "each request begins at 0.4"


def test_the_dynamic_arm_refits_its_threshold(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason="transformers refits the threshold with scikit-learn")
    used: list[float] = []
    real = ConfidenceCriteria.__init__

    def init(self: Any, assistant_confidence_threshold: float) -> None:
        used.append(float(assistant_confidence_threshold))
        real(self, assistant_confidence_threshold)

    monkeypatch.setattr(ConfidenceCriteria, "__init__", init)
    run(arms(models, ["hf_dynamic"])[0], models)
    assert used.count(0.4) >= 3 and len(set(used)) > 1


def test_arms_that_cannot_be(models: Models) -> None:
    for name in (
        "hf_assisted gamma", "hf_assisted gamma=x", "hf_assisted b=2", "hf_assisted gamma=2 gamma=3",
        "hf_heuristic gamma=2", "hf_dynamic gamma=2",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"cannot read arm .*allowed: hf_assisted, or hf_assisted gamma=N"):
            make_arm(name, models, SamplingSettings())
    for name in ("hf_assisted", "hf_heuristic"):
        with pytest.raises(ConfigError, match=rf"{name} needs a draft model; set model\.draft"):
            make_arm(name, replace(models, draft_full=None), SamplingSettings())


def test_a_failing_reference_arm_leaves_the_models_as_they_were(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(arms(models, ["ar"])[0], models)[-1]["ids"]
    arm = arms(models, ["hf_assisted"])[0]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(type(models.target.model), "generate", fail)
        run(arm, models)
    assert models.draft_full is not None
    for stack in (models.target, models.draft_full):
        assert stack.model.config._attn_implementation == "pacer_sdpa"
    assert run(arms(models, ["ar"])[0], models)[-1]["ids"] == before
