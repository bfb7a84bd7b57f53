"""What rounds of a method take on this machine, for rules that weigh tokens against time: measured once."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from pacer.artifacts import write_json
from pacer.assemble import Models, make_decoder, plain_decoder
from pacer.evaluation.profiler import points_of
from pacer.evaluation.replay.costs import Prices, from_points, from_settings
from pacer.evaluation.rounds import measure_rounds, windows
from pacer.methods.arms import method_settings
from pacer.methods.rules import needed_by, price_key
from pacer.models.checkpoint import digest, identity
from pacer.provenance import provenance
from pacer.settings import MethodSettings, Settings
from pacer.stages.texts import stage_of

log = logging.getLogger(__name__)


def attach_prices(settings: Settings, models: Models, methods: Sequence[MethodSettings]) -> None:
    """Times of the rounds of the methods whose rule asks for them, by ``method.controller.prices``.

    Raises:
        ConfigError: a file that is no profile.
    """
    for method in methods:
        alone = not method.stages and len(method.exits or [0]) == 1  # no exit between the drafts and the target
        if alone and "prices" in needed_by(method.controller):
            models.prices[price_key(method)] = _rounds(settings, models, method)


def _rounds(settings: Settings, models: Models, method: MethodSettings) -> list[float]:
    rule = method.controller or {}
    source, gamma = str(rule["prices"]), int(rule["gamma_max"])
    block = int(rule["b"]) if rule["signal"] == "preverifier" else None
    if source == "settings":
        return rounds_of(from_settings(settings.costs), gamma, block)
    if source != "measure":
        points = points_of(Path(source).expanduser(), "prices", "measure", "settings")
        here = [point for point in points if point.batch == settings.benchmark.batch_size]
        return rounds_of(from_points(here or points, _context(settings), settings.costs.rest), gamma, block)
    key = {
        "target": identity(models.target), "dtype": settings.model.dtype, "batch": settings.benchmark.batch_size,
        "block": settings.model.block, "context": _context(settings), "gamma_max": gamma, "calls": block,
        "draft": identity(models.draft, layers=True) if models.draft else None,
        "exits": {f"{kind} {layer}": digest(head.parameters()) for (kind, layer), head in models.exits.items()},
        "feature": digest(models.feature.draft.parameters()) if models.feature else None,
        "method": [method.drafter, method.exits, method.head, method.drafting],
        "machine": provenance()["machine"], "threads": torch.get_num_threads(),
        "sampling": {**asdict(settings.sampling), "seed": None},
    }  # fmt: skip
    stage = stage_of(settings, "rounds", key)
    if not stage.complete:
        with stage.lock():
            if not stage.complete:
                log.info("measuring what rounds of %s take in %s", method.name, stage.folder)
                stage.folder.mkdir(parents=True, exist_ok=True)
                write_json(stage.folder / "rounds.json", {"seconds": _measured(settings, models, method, gamma, block)})
                stage.finish()
    found: list[float] = json.loads((stage.folder / "rounds.json").read_text())["seconds"]
    return found


def _measured(
    settings: Settings, models: Models, method: MethodSettings, gamma: int, block: int | None
) -> list[float]:  # fmt: skip
    """Rounds of this drafter under a rule that asks as the method's does, and never stops."""
    rule = "threshold t=0.0" if block is None else f"pacer b={block} t0=0.0 lo=0.0 hi=1.0"
    decoders = {0: plain_decoder(models, settings.sampling)}
    for window in windows(gamma, block or 1)[1:]:
        asking = method_settings(f"{rule} gamma_max={window}").controller
        decoders[window] = make_decoder(replace(method, controller=asking), models, settings.sampling)
    return measure_rounds(decoders, models.target.vocab_size, settings.benchmark.batch_size, _context(settings))


def _context(settings: Settings) -> int:
    return sorted(settings.profile.contexts)[0]


def rounds_of(prices: Prices, gamma_max: int, block: int | None = None) -> list[float]:
    """Rounds with a draft of 0 … γ tokens from the prices of passes; ``block``: tokens to a pre-verifier's call."""
    times = [float(prices.target[1])]
    for n in range(1, gamma_max + 1):
        calls = 0.0 if block is None else float(prices.preverifier[block]) * -(-n // block)
        each = float(prices.draft[1]) + prices.signals
        times.append(float(prices.target[n + 1]) + n * each + calls + prices.rest)
    return times
