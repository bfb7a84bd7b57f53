"""Training by two processes (gloo): the same gradients and parameters as one that accumulates twice, and one writer."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file

from pacer.assemble import Models
from pacer.command.app import load_settings
from pacer.data.batching import Loader
from pacer.errors import ConfigError, PacerError, UnsupportedError
from pacer.models.stack import Stack
from pacer.settings import LayerSkipSettings, TrainerSettings
from pacer.training.fit import fit
from pacer.training.layerskip import LayerSkipModule, train_layerskip
from pacer.training.ranks import AnotherWrites, _free_port, _place, launched, rank, together
from pacer.work.stopping import Stopped, stop_signals
from tests.folders import tiny_tokenizer
from tests.learners import part
from tests.scripted import QUIET
from tests.texts import written
from tests.tiny import tiny_model

WORLD = 2


def settings(processes: int, **values: Any) -> TrainerSettings:
    """Ten or so optimiser steps of two batches each, by one process or by two."""
    return TrainerSettings(**{
        "precision": "fp32", "lr": 3e-3, "warmup": 0.3, "val_every": 2, "checkpoint_every": 3, "patience": 0,
        "accumulate": WORLD // processes, "devices": processes, **values,
    })  # fmt: skip


def run(name: str, trainer: TrainerSettings, folder: Path, stop_at: int | None = None) -> dict[str, Any]:
    """A training: batches in their order, the gradients of every step, the final parameters, the figures."""
    module, train, check = part(name, trainer)
    train = Loader(train.batches[: 11 if name == "draft" else 9], train.collate)  # the last step has one batch alone
    seen: list[tuple[int, list[str]]] = []
    gradients: list[list[torch.Tensor]] = []
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == stop_at and rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # one process alone is asked to stop
        seen.append((batch_idx, batch["names"] if isinstance(batch, dict) else batch.ids.tolist()))
        return step(batch, batch_idx)

    def on_before_optimizer_step(optimizer: torch.optim.Optimizer) -> None:
        gradients.append([p.grad.clone() for p in module.parameters() if p.grad is not None])

    module.training_step = training_step  # type: ignore[method-assign]  # to look in
    module.on_before_optimizer_step = on_before_optimizer_step  # type: ignore[method-assign]
    found: dict[str, Any] = {"seen": seen, "gradients": gradients, "ended": "done"}
    try:
        with stop_signals():
            found["figures"] = fit(module, train, check, trainer, QUIET, folder)
    except AnotherWrites:
        found["ended"] = "another writes"
    except Stopped:
        found["ended"] = "stopped"
    except PacerError as error:
        found["ended"] = str(error)
    return {**found, "parameters": {name: value.detach() for name, value in module.named_parameters()}}


def _process(number: int, port: int, work: bytes, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(_place(number, WORLD, number, "127.0.0.1", port))
    with together(TrainerSettings(devices=WORLD), []):
        torch.save(cloudpickle.loads(work)(number), folder / f"{number}.pt")


def apart(work: Callable[[int], Any], folder: Path) -> list[Any]:
    """What two processes return, which train together."""
    context = multiprocessing.get_context("forkserver")  # a fork of this process would inherit locks of its threads
    context.set_forkserver_preload([__name__])
    port, sent = _free_port(), cloudpickle.dumps(work)  # most of it is closures
    workers = [context.Process(target=_process, args=(number, port, sent, folder)) for number in range(WORLD)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join(120)
        assert [worker.exitcode for worker in workers] == [0] * WORLD
    finally:
        for worker in workers:
            worker.kill()
    return [torch.load(folder / f"{number}.pt", weights_only=False) for number in range(WORLD)]


@pytest.mark.parametrize(("name", "dropout"), [("draft", 0.0), ("preverifier", 0.2)])
def test_two_processes_train_as_one_does(tmp_path: Path, name: str, dropout: float) -> None:
    """Data order, gradients of every step, parameters and figures; stopped and resumed in between, the same again."""
    monitor = {"draft": "val/agreement", "preverifier": "val/sim_speedup"}[name]
    values: dict[str, Any] = {"monitor": monitor, "dropout": dropout}
    whole = run(name, settings(1, **values), tmp_path / "one")
    batches = len(whole["seen"])
    assert batches in (9, 11)

    def work(number: int) -> list[dict[str, Any]]:
        chosen = settings(WORLD, **values)
        through = run(name, chosen, tmp_path / "two")
        stopped = run(name, chosen, tmp_path / "again", stop_at=2)
        return [through, stopped, run(name, chosen, tmp_path / "again")]

    for number, (through, stopped, resumed) in enumerate(apart(work, tmp_path)):
        mine = [batch for _, batch in whole["seen"][number::WORLD]]
        filled = mine if number == 0 else [*mine, whole["seen"][-1][1]]
        assert [batch for _, batch in through["seen"]] == filled
        assert len(through["gradients"]) == len(whole["gradients"]) == (batches + 1) // 2
        for one, other in zip(whole["gradients"], through["gradients"], strict=True):
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
        assert stopped["ended"] == "stopped" and [index for index, _ in stopped["seen"]] == [0, 1, 2]
        assert [index for index, _ in resumed["seen"]] == list(range(3, (batches + 1) // 2))
        for found in (through, resumed):
            assert found["ended"] == ("another writes" if number else "done")
            for key, value in whole["parameters"].items():
                torch.testing.assert_close(found["parameters"][key], value, rtol=1e-6, atol=1e-7)
        for key, value in through["parameters"].items():
            assert torch.equal(resumed["parameters"][key], value), key  # to the bit
        if number == 0:
            assert through["figures"] == pytest.approx(whole["figures"], rel=1e-5)
            assert resumed["figures"] == through["figures"]
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["best.ckpt", "last.ckpt"]  # one writer


@pytest.mark.parametrize("tied", [False, True], ids=["two ends", "tied ends"])
def test_a_model_split_over_processes_is_tuned_as_in_one(tmp_path: Path, tied: bool) -> None:
    """LayerSkip by one process, by two with a copy each, and by two with a share each (where verbs refuse it: on CPUs);
    the same weights on disk, a resumed run included, though rows of the processes leave out different layers."""
    recipe = LayerSkipSettings(p_max=0.5, rotation=2)

    def tune(processes: int, name: str, **values: Any) -> None:
        chosen = settings(
            processes,
            part="layerskip",
            monitor="val/agree",
            tokens_per_batch=80,
            checkpoint_every=2,
            epochs=2,
            **values,
        )
        models = Models(Stack(tiny_model(tie_word_embeddings=tied)), tiny_tokenizer(), (), tmp_path)
        learn, check = written(14, new=20), written(4, new=20, seed=9)
        train_layerskip(models, learn, check, [1, 2], recipe, chosen, QUIET, tmp_path / name, command="")

    def work(number: int) -> None:
        real = LayerSkipModule._loss

        def stopping(module: LayerSkipModule, batch: Any) -> torch.Tensor:
            if module.global_step == 2 and number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(module, batch)

        runs: list[tuple[str, dict[str, Any]]] = [("copies", {})] + 3 * [("shares", {"strategy": "fsdp"})]
        for index, (name, values) in enumerate(runs):
            LayerSkipModule._loss = stopping if index == 2 else real  # type: ignore[method-assign]  # to stop it
            with stop_signals(), contextlib.suppress(AnotherWrites, Stopped):
                tune(WORLD, name + ("" if index < 2 else " again"), **values)

    tune(1, "one")
    apart(work, tmp_path)
    names = ("one", "copies", "shares", "shares again")
    weights = {name: load_file(tmp_path / name / "model" / "model.safetensors") for name in names}
    start = dict(tiny_model(tie_word_embeddings=tied).named_parameters())
    for name, value in weights["one"].items():
        assert torch.equal(weights["copies"][name], value), name  # bfloat16, from equal float32
        torch.testing.assert_close(weights["shares"][name], value, rtol=1e-2, atol=1e-6)
        assert torch.equal(weights["shares again"][name], weights["shares"][name]), name
        assert not torch.equal(value, start[name].bfloat16())
    states = [torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("copies", "shares")]
    for name, value in states[0]["state_dict"].items():
        torch.testing.assert_close(states[1]["state_dict"][name], value, rtol=1e-5, atol=1e-6)


def test_splitting_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"fsdp without a GPU: .*share one; use trainer\.strategy=ddp"):
        together(TrainerSettings(part="layerskip", devices=2, strategy="fsdp"), []).__enter__()
    with pytest.raises(ConfigError, match=r"trainer\.strategy: 'fsdp'; allowed: auto, ddp for trainer\.part=draft"):
        load_settings(["trainer=draft", "trainer.strategy=fsdp"])


def test_a_state_is_that_of_its_number_of_processes(tmp_path: Path) -> None:
    values: dict[str, Any] = {"monitor": "val/agreement"}
    run("draft", settings(1, max_steps=3, **values), tmp_path / "state")
    found = apart(lambda _: run("draft", settings(WORLD, **values), tmp_path / "state"), tmp_path)
    for result in found:
        assert "begun by another number of processes: 2; allowed: 1" in result["ended"] and not result["seen"]
    with pytest.raises(PacerError, match=r"trained by several processes.*: 2; allowed: 1; train it by"):
        fit(*part("draft", settings(WORLD)), settings(WORLD), QUIET, tmp_path / "alone")


@pytest.mark.parametrize("count", range(1, 8))
def test_shares_of_batches(count: int) -> None:
    whole = Loader(list(range(count)), lambda batch: batch)
    shares = [list(whole.share(number, 3)) for number in range(3)]
    assert {len(share) for share in shares} == {-(-count // 3)}
    dealt = [batch for step in zip(*shares, strict=True) for batch in step]
    assert dealt[:count] == list(range(count)) and set(dealt[count:]) <= {count - 1}


SRUN = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[3-4]",
}  # fmt: skip
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "GROUP_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip


def test_who_started_the_processes() -> None:
    two, four = TrainerSettings(devices=2), TrainerSettings(devices=2, nodes=2)
    assert launched(two, {}) is None and launched(two, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}) is None
    assert launched(two, TORCHRUN) == TORCHRUN
    place = launched(four, SRUN)
    assert place is not None and (place["RANK"], place["LOCAL_RANK"], place["MASTER_ADDR"]) == ("3", "1", "gpu3")
    assert place == {**place, "WORLD_SIZE": "4", "GROUP_RANK": "1"}
    with pytest.raises(ConfigError, match=r"srun started 4 processes.*: 2; allowed: 4"):
        launched(two, SRUN)
    with pytest.raises(ConfigError, match="torchrun started 2 processes"):
        launched(four, TORCHRUN)
    with pytest.raises(ConfigError, match=r"other nodes.*srun --nodes=2 --ntasks-per-node=2"):
        launched(four, {})
