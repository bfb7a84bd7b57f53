"""Several processes that train one part together, a device each: who they are, how they start, what they agree on.

A launcher starts them (srun with a task per device, torchrun), or on one machine the verb itself. All run the verb from
its beginning: they share the pieces of corpus and labels, each trains on its share of the batches, and the first, rank
0, writes.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from pacer.errors import EXIT_REQUEUE, ConfigError, UnsupportedError
from pacer.settings import TrainerSettings

PATIENCE = datetime.timedelta(days=7)  # for a word of rank 0, which may wait for a job that trains the same part
GRACE = 60.0  # seconds for the others to end by themselves
_slow: list[dist.ProcessGroup] = []  # the same processes, for what may take long; a step's exchange may not


class AnotherWrites(BaseException):
    """This rank has done its part of a training; what was trained is written by rank 0."""


def wanted(trainer: TrainerSettings) -> int:
    """Processes of a training by these settings."""
    return trainer.devices * trainer.nodes


def world() -> int:
    """Processes that train together; 1: this one alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This one's number among them."""
    return dist.get_rank() if world() > 1 else 0


def agreed(word: bool = True) -> bool:
    """The word of rank 0; everyone waits for it, however long."""
    if world() == 1:
        return word
    said = [word]
    dist.broadcast_object_list(said, group=_slow[0])
    return said[0]


@contextmanager
def together(trainer: TrainerSettings, command: Sequence[str]) -> Iterator[None]:
    """Inside, all processes that the settings ask for train together.

    Args:
        command: words that start this verb anew, for those that are started here.

    Raises:
        ConfigError: a launcher started another number of them, nobody started those of other nodes, or this is a job of
            a sweep. UnsupportedError: a model is to be split without GPUs.
    """
    _refuse_splitting(trainer)
    if wanted(trainer) == 1:
        yield
        return
    _refuse_sweeps(trainer)
    place = launched(trainer, os.environ)
    others: list[subprocess.Popen[bytes]] = []
    if place is None:
        place = _place(0, trainer.devices, 0, "127.0.0.1", _free_port())
        others = [_start(command, {**place, "RANK": str(i), "LOCAL_RANK": str(i)}) for i in range(1, trainer.devices)]
    before = {name: os.environ.get(name) for name in place}
    os.environ.update(place)
    _watch(others)
    try:
        _meet(int(place["LOCAL_RANK"]))
        yield
        dist.barrier(_slow[0])
    except BaseException as error:
        _end(others, 0.0 if isinstance(error, Exception) else GRACE)  # stopped: they are saving, too
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    _end(others, GRACE)


def launched(trainer: TrainerSettings, environment: Mapping[str, str]) -> dict[str, str] | None:
    """This process's place among those that torchrun or srun started, as torchrun's variables; None without either.

    Raises:
        ConfigError: they are not as many as the settings ask for.
    """
    count = wanted(trainer)
    if "RANK" in environment and "WORLD_SIZE" in environment:
        _check_number(int(environment["WORLD_SIZE"]), count, "torchrun")
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
        return {name: environment[name] for name in names if name in environment}
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1:
        from lightning.pytorch.plugins.environments import SLURMEnvironment  # Lightning takes seconds to import

        _check_number(tasks, count, "srun")
        first = SLURMEnvironment.resolve_root_node_address(environment["SLURM_STEP_NODELIST"])
        port = 20000 + (int(environment["SLURM_JOB_ID"]) * 7 + int(environment.get("SLURM_STEP_ID", 0))) % 10000
        local, node = (int(environment[name]) for name in ("SLURM_LOCALID", "SLURM_NODEID"))
        return {**_place(int(environment["SLURM_PROCID"]), count, local, first, port), "GROUP_RANK": str(node)}
    if trainer.nodes > 1:
        raise ConfigError(
            "nobody started the processes of the other nodes: trainer.nodes", value=trainer.nodes,
            remedy=f"srun --nodes={trainer.nodes} --ntasks-per-node={trainer.devices} python -m pacer.train …",
        )  # fmt: skip
    return None


def _check_number(there: int, count: int, launcher: str) -> None:
    if there != count:
        raise ConfigError(
            f"{launcher} started {there} processes; trainer.devices × trainer.nodes", value=count, allowed=str(there)
        )


def _refuse_splitting(trainer: TrainerSettings) -> None:
    if trainer.strategy != "fsdp":
        return
    if not torch.cuda.is_available():
        reason = "a model is split to fit the memory of several GPUs, and processes on CPUs share one"
        raise UnsupportedError(f"trainer.strategy=fsdp without a GPU: {reason}", remedy="use trainer.strategy=ddp")
    if wanted(trainer) == 1:
        raise ConfigError("trainer.strategy=fsdp with one process", remedy="set trainer.devices, or drop it")


def _refuse_sweeps(trainer: TrainerSettings) -> None:
    """A sweep starts one process per job; its own processes could not tell whose rank they are."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError(
            "several processes per training in a sweep: trainer.devices × trainer.nodes", value=wanted(trainer),
            allowed="1", remedy="start each training by a command of its own (README, Clusters)",
        )  # fmt: skip


def _place(rank: int, count: int, local: int, address: str, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(local), "GROUP_RANK": "0",
        "MASTER_ADDR": address, "MASTER_PORT": str(port),
    }  # fmt: skip


def _meet(local: int) -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    _slow[:] = [dist.new_group(backend="gloo", timeout=PATIENCE)]
    if rank():
        logging.getLogger("pacer").setLevel(logging.WARNING)  # rank 0 has said it


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(command: Sequence[str], place: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(list(command), env={**os.environ, **place}, stdout=subprocess.DEVNULL)


def _watch(others: Sequence[subprocess.Popen[bytes]]) -> None:
    """End this process when one of the others has failed: what they do together would wait for it for ever."""

    def watch() -> None:
        while any(other.poll() is None for other in others):
            codes = {other.returncode for other in others} - {None, 0, EXIT_REQUEUE}
            if codes:
                time.sleep(5)  # an error that all have is said by this one
                print(f"error: another process of this training ended with code {codes}", file=sys.stderr, flush=True)
                _end(others, 0.0)
                os._exit(1)
            time.sleep(0.5)

    if others:
        threading.Thread(target=watch, daemon=True).start()


def _end(others: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    """Wait for them, but no longer than that."""
    deadline = time.monotonic() + grace
    for other in others:
        try:
            other.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            other.kill()
            other.wait()
