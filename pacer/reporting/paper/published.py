"""Published figures, from ``published.yaml`` beside this file: nothing of them is typed elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

STATUS = {"paper": "read in the paper", "summary": "in a summary of the paper"}


@dataclass(frozen=True)
class Published:
    """A published figure: how it is written, its number where it is one, what it is of, how it was read (STATUS)."""

    text: str
    value: float | None
    of: str
    status: str
    source: str

    def __str__(self) -> str:
        return f"{self.text} ({self.of}) [{self.status}]" if self.of else f"{self.text} [{self.status}]"


@cache
def _file() -> Mapping[str, Any]:
    found: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("published.yaml")))
    return dict(found)


def published(paper: str, name: str) -> Published:
    """A figure by its paper (``pacer``, ``hispec``) and name."""
    group = _file()[paper]
    given = group["figures"][name]
    words = [given.get("bound", ""), *([f"{given['value']:,g}"] if "value" in given else [given["word"]])]
    text = " ".join(word for word in words if word) + (f"–{given['to']:g}" if "to" in given else "")
    return Published(text, given.get("value"), given["of"], given.get("status", group["status"]), group["source"])


def speedups() -> tuple[list[str], dict[str, dict[tuple[str, str], Published]]]:
    """HiSpec's table 1: its models, and per model the speed over AR by (system, set)."""
    group = _file()["speedups"]
    found = {
        model: {
            (system, name): _number(group, value, f"{value:.2f}")
            for system, values in systems.items()
            for name, value in zip(group["sets"], values, strict=True)
        }
        for model, systems in group["models"].items()
    }
    return list(found), found


def sets() -> list[str]:
    """The data sets of HiSpec's table 1."""
    return list(_file()["speedups"]["sets"])


def over_layerskip() -> Published:
    """HiSpec over LayerSkip: mean and range over the models and sets of table 1."""
    ratios = [
        ours.value / theirs.value
        for cells in speedups()[1].values()
        for (system, name), ours in cells.items()
        if system == "hispec" and (theirs := cells["layerskip", name]).value and ours.value
    ]
    mean = sum(ratios) / len(ratios)
    return _number(_file()["speedups"], mean, f"mean {mean:.2f}, {min(ratios):.2f}–{max(ratios):.2f}")


def sweep(which: str) -> dict[int, Published]:
    """Published curve over L_i (``verifier``: speed over AR) or over N_i (``buffer``: tokens/s)."""
    group = _file()["sweep"]
    return {int(at): _number(group, value, f"{value:.2f}" if which == "verifier" else f"{value:g}")
            for at, value in group[which].items()}  # fmt: skip


def swept_depths() -> tuple[int, int]:
    """(L_d, layers of the model) of the published sweep."""
    return int(_file()["sweep"]["draft"]), int(_file()["sweep"]["layers"])


def buffers() -> dict[int, float]:
    """N_i → tokens/s, for plots."""
    return {at: figure.value for at, figure in sweep("buffer").items() if figure.value is not None}


def sources(figures: Sequence[Published]) -> list[str]:
    """A line per source: what it is, and how its figures were read."""
    pairs = dict.fromkeys((figure.source, figure.status) for figure in figures)
    return [f"Published, [{status}]: {source}, {STATUS[status]}." for source, status in pairs]


def _number(group: Mapping[str, Any], value: float, text: str) -> Published:
    return Published(text, float(value), "", group["status"], group["source"])
