"""The plan of a verb as text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pacer.models.sizes import TOKENS
from pacer.planning.parts import Part, learning_bytes, parts
from pacer.planning.steps import LATER, Step, measured, steps
from pacer.planning.wanted import wanted
from pacer.settings import Settings

UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def show(settings: Settings, verb: str) -> None:
    """Print the plan of a verb.

    Raises:
        PacerError: what the verb itself would refuse, as far as settings, configs and folders tell.
    """
    found = wanted(settings, verb)
    sizes = parts(settings, found)
    print(f"plan of {verb} ({settings.name}): no weights are read, nothing is written\n")
    print(f"{'part':14}{'parameters':>16}{'weights':>12}{'keys, values':>14}")
    for part in sizes:
        print(_row(part.name, part.parameters, part.bytes, part.kv, part.what))
    known = [part for part in sizes if part.bytes is not None]
    if len(sizes) > 1 and len(known) == len(sizes):
        print(_row("together", _sum(known, "parameters"), _sum(known, "bytes"), _sum(known, "kv"), ""))
    if (learning := learning_bytes(sizes, settings, found.part)) is not None:
        print(_row("training adds", None, learning, None, "parameters, gradients and moments in float32"))
    print(f"keys and values: of {TOKENS} tokens of a row; activations and logits come on top of all")
    print(devices(settings))
    if verb == "fetch" or (verb == "profile" and settings.profile.weights == "random"):
        return
    print("\nstages")
    stages = list(steps(settings, found))
    if verb == "evaluate":
        stages.append(measured(settings))
    if verb in ("advise", "replay"):
        stages.append(Step("dense table", LATER, "with the weights"))
    for step in stages:
        print(f"  {step.state:9}{step.what:50} {step.where}".rstrip())
    if not stages:
        print("  none")


def devices(settings: Settings) -> str:
    """Where the models would lie on this machine."""
    model, count = settings.model, torch.cuda.device_count()
    asked = f"model.device={model.device}" + (f" model.device_map={model.device_map}" if model.device_map else "")
    if not count:
        return f"here: {asked}; no GPU"
    names = [torch.cuda.get_device_properties(i) for i in range(count)]
    return f"here: {asked}; " + ", ".join(f"{one.name} {size(one.total_memory)}" for one in names)


def size(number: int | None) -> str:
    """Bytes for people; – where they are not known."""
    if number is None:
        return "–"
    unit, name = next(((unit, name) for unit, name in UNITS if number >= unit), (1, "B"))
    return f"{number / unit:.{2 if unit > 1 else 0}f} {name}"


def _sum(known: Sequence[Part], name: str) -> int:
    return sum(getattr(part, name) or 0 for part in known)


def _row(name: str, parameters: int | None, weights: int | None, kv: int | None, what: str) -> str:
    count = "–" if parameters is None else f"{parameters:,}"
    return f"{name:14}{count:>16}{size(weights):>12}{size(kv):>14}  {what}".rstrip()
