"""Fitting: steps, schedule, modes, the best parameters, and a run that was killed ends like one that was not."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pacer.data.batching import Loader
from pacer.errors import PacerError
from pacer.settings import TrainerSettings
from pacer.training.fit import fit, optimiser_steps
from pacer.work.progress import progress
from pacer.work.stopping import Stopped, stop_signals
from tests.scripted import QUIET, SCORES, Killed, Script, kill, scripted, terminate


@pytest.mark.parametrize(("batches", "accumulate"), [(1, 1), (5, 1), (5, 2), (6, 4), (3, 8)])
def test_optimiser_steps(tmp_path: Path, batches: int, accumulate: int) -> None:
    """T87: ceil(batches / accumulate), the last step over what is left, and a validation at the end."""
    module, figures = scripted(
        tmp_path, list(range(20)), batches=batches, accumulate=accumulate, val_every=100, checkpoint_every=100
    )
    steps = math.ceil(batches / accumulate)
    assert module.steps == steps == optimiser_steps(batches, accumulate)
    assert [batch for batch, _ in module.seen] == list(range(batches))
    assert module.validated == [steps, steps]  # in the fit, and at the end with the best parameters
    assert figures == {"val/score": steps, "steps": steps}


def test_fewer_steps_than_batches(tmp_path: Path) -> None:
    module, figures = scripted(tmp_path, list(range(20)), accumulate=2, max_steps=3, val_every=2)
    assert (module.steps, len(module.seen), figures["steps"]) == (3, 6, 3)
    assert optimiser_steps(9, 2, 3) == 3 and optimiser_steps(9, 2, 30) == 5 and optimiser_steps(9, 2) == 5


@pytest.mark.parametrize("val_every", [1, 2, 3])
def test_the_best_parameters_are_kept(tmp_path: Path, val_every: int) -> None:
    """T83: the module ends with the parameters of the highest metric, not of the last step."""
    scores = [0, 1, 5, 9, 8, 2, 7, 3, 3, 4]
    module, figures = scripted(tmp_path, scores, val_every=val_every)
    seen = module.validated[:-1]
    assert seen == list(range(val_every, 10, val_every))[: len(seen)] and len(seen) >= 9 // val_every
    best = max(seen, key=lambda step: scores[step])
    assert figures == {"val/score": scores[best], "steps": best}
    assert module.weight.item() == best
    kept = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert kept["state_dict"]["weight"].item() == best and "optimizer_states" not in kept


def test_the_lowest_may_be_the_best(tmp_path: Path) -> None:
    module = Script([9, 9, 9, 2, 9, 9, 5, 9, 9, 9])
    settings = TrainerSettings(monitor="val/score", precision="fp32", val_every=3, patience=0, clip=0.0)
    train, check = Loader(list(range(9)), int), Loader([0], int)
    assert fit(module, train, check, settings, QUIET, tmp_path, maximise=False)["steps"] == 3


def test_patience(tmp_path: Path) -> None:
    module, figures = scripted(tmp_path, [0, 1, 5, 4, 3, 9, 9, 9, 9, 9], val_every=1, patience=2)
    assert module.steps == 4 and figures["steps"] == 2


def test_modes_come_back_after_validation(tmp_path: Path) -> None:
    """T88: each module's own mode, eval inside training included."""
    module, _ = scripted(tmp_path, list(range(20)), val_every=2)
    assert len(module.validated) == 5
    assert all(modes == module.modes[0] for modes in module.modes)
    assert module.modes[0] == [True, False, True]


def test_a_deadline_ends_with_a_validation(tmp_path: Path) -> None:
    module, figures = scripted(tmp_path, list(range(20)), max_minutes=1e-9, val_every=3)
    assert module.steps == 1 and figures == {"val/score": 1, "steps": 1}
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 1


def test_what_a_training_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole lines off a terminal: steps, time left, the last validation; a run that goes on counts what was done."""
    began: list[int] = []

    def noting(*given: Any, initial: int) -> Any:
        began.append(initial)
        return progress(*given, initial=initial)

    monkeypatch.setattr("pacer.work.progress.LINE_SECONDS", 0.0)
    monkeypatch.setattr("pacer.training.shown.progress", noting)
    with pytest.raises(Killed):
        scripted(tmp_path, SCORES, {"step 7": kill})
    capsys.readouterr()
    scripted(tmp_path, SCORES, max_minutes=5)
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("training, at most 5 min: ")]
    assert "\r" not in said and began == [0, 6]  # the rate is of the steps made since
    assert " 9/9 step [" in lines[-1] and lines[-1].endswith(", val/score 4]")


def test_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(PacerError, match="nothing to train or validate on"):
        scripted(tmp_path, [0], batches=0)


MOMENTS = [f"step {i}" for i in range(9)] + ["validation 3", "validation 6", "validation 9"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Script, dict[str, float]]:
    return scripted(tmp_path_factory.mktemp("undisturbed"), SCORES)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_and_started_again(
    tmp_path: Path, undisturbed: tuple[Script, dict[str, float]], moment: str
) -> None:
    """The same batches under the same random numbers, no validation lost or made up, the same best."""
    with pytest.raises(Killed):
        scripted(tmp_path, SCORES, {moment: kill})
    last = tmp_path / "last.ckpt"
    reached = torch.load(last, weights_only=True)["global_step"] if last.exists() else 0
    again, figures = scripted(tmp_path, SCORES)
    whole, wanted = undisturbed
    assert figures == wanted and torch.equal(again.weight, whole.weight)
    assert again.seen == whole.seen[reached:]
    assert again.validated == [step for step in whole.validated[:-1] if step > reached] + [6]
    assert len({number for _, number in whole.seen}) == 9


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("moment", ["step 4", "step 5", "step 8", "validation 3"])
def test_sigterm_saves_the_current_step(tmp_path: Path, moment: str, accumulate: int) -> None:
    """K101: the step is finished (in an accumulation or a validation: that first), saved, and nothing more is done."""
    options = {"batches": 9 * accumulate, "accumulate": accumulate, "checkpoint_every": 100}
    whole, wanted = scripted(tmp_path / "whole", SCORES, **options)
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals(), pytest.raises(Stopped, match=r"state saved in .*last\.ckpt"):
        scripted(tmp_path / "stopped", SCORES, {moment: terminate}, **options)
    assert signal.getsignal(signal.SIGTERM) is before
    kind, number = moment.split()
    step = int(number) if kind == "validation" else int(number) // accumulate + 1
    state = torch.load(tmp_path / "stopped" / "last.ckpt", weights_only=True)
    assert state["global_step"] == step
    assert not list((tmp_path / "stopped").glob("*.part"))
    again, figures = scripted(tmp_path / "stopped", SCORES, **options)
    assert figures == wanted and torch.equal(again.weight, whole.weight)
    assert again.seen == whole.seen[step * accumulate :]
    assert again.validated == [s for s in whole.validated[:-1] if s > step] + [6]


def test_patience_survives_a_kill(tmp_path: Path) -> None:
    """A run that was killed after its patience had ended ends there again."""
    scores = [0, 1, 5, 4, 3, 2, 9, 9, 9, 9]
    options: dict[str, Any] = {"val_every": 1, "patience": 3, "checkpoint_every": 1}
    whole, wanted = scripted(tmp_path / "whole", scores, **options)
    assert (whole.steps, wanted["steps"]) == (5, 2)
    for moment in ("validation 4", "step 4"):
        with pytest.raises(Killed):
            scripted(tmp_path / moment, scores, {moment: kill}, **options)
    # after the fit, in the validation of the best parameters
    module = Script(scores)
    module.on_fit_end = lambda: module.events.update({"validation 2": kill})  # type: ignore[method-assign]  # a hook
    settings = TrainerSettings(monitor="val/score", precision="fp32", clip=0.0, **options)
    loaders = [Loader(list(range(n)), int) for n in (9, 2)]
    with pytest.raises(Killed):
        fit(module, *loaders, settings, QUIET, tmp_path / "end")
    for moment in ("validation 4", "step 4", "end"):
        assert scripted(tmp_path / moment, scores, **options)[1] == wanted, moment


def test_a_second_interrupt_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    """The verb's exit code is its own, not Lightning's."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scripted(tmp_path, SCORES, {"step 3": interrupt})
    assert scripted(tmp_path, SCORES)[1]["steps"] == 6


VERB = """
import sys, time
from pathlib import Path
sys.path[:0] = {paths!r}
from tests.scripted import Script, QUIET, SCORES
from pacer.command.app import verb
from pacer.data.batching import Loader
from pacer.settings import TrainerSettings
from pacer.training.fit import fit

DELAY = float(sys.argv[1])

class Slow(Script):
    def training_step(self, batch, index):
        print("batch", index, flush=True)
        time.sleep(DELAY)
        return super().training_step(batch, index)

@verb
def main(settings):
    "Trains slowly."
    trainer = TrainerSettings(
        monitor="val/score", precision="fp32", val_every=3, checkpoint_every=100, patience=0, clip=0.0
    )
    module = Slow(SCORES)
    print(fit(module, Loader(list(range(9)), int), Loader([0, 1], int), trainer, QUIET, Path({folder!r})), module.seen)

main([])
"""


def test_sigterm_ends_a_process_with_a_requeue_code(tmp_path: Path) -> None:
    """K101: exit code 75, the state of the current step on disk, and the same command goes on from it."""
    program = tmp_path / "slowly.py"
    folder = tmp_path / "out"
    program.write_text(VERB.format(paths=[str(Path(__file__).parents[2])], folder=str(folder)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    first = subprocess.Popen([sys.executable, str(program), "0.2"], **pipes)
    assert first.stdout is not None
    for line in first.stdout:
        if line.strip() == "batch 4":
            first.send_signal(signal.SIGTERM)
            break
    rest, errors = first.communicate(timeout=120)
    assert first.returncode == 75, errors
    assert "the same command resumes" in errors and "batch 5" not in rest
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 5
    second = subprocess.run([sys.executable, str(program), "0"], timeout=120, **pipes)
    assert second.returncode == 0, second.stderr
    _, figures = scripted(tmp_path / "whole", SCORES, checkpoint_every=100)
    assert "batch 5" in second.stdout and "batch 4" not in second.stdout and str(figures) in second.stdout
