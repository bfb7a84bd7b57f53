"""Methods that draft with exits of the target: which exits they need, and a decoder over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pacer.choices import HEADS
from pacer.decoding.build import Stage, speculative
from pacer.decoding.controllers.buffer import BufferRule, Enough
from pacer.decoding.controllers.preverified import Preverified
from pacer.decoding.drafters.exits import ConfidentExits
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.ladder import Ladder, Rung
from pacer.decoding.loop import Decoder
from pacer.errors import ConfigError
from pacer.methods.rules import Judge, draft_rule, needed_by, preverifier_rule, price_key
from pacer.models.exit_stack import ExitStack
from pacer.settings import ExitSettings, MethodSettings, SamplingSettings

if TYPE_CHECKING:
    from pacer.assemble import Models

EXIT_DRAFTERS = ("exit", "exits")


def exits_of(method: MethodSettings, layers: Sequence[int]) -> list[int]:
    """Layers below each exit of a method, what drafts first.

    Args:
        layers: model.exits.layers, for a method that names none.

    Raises:
        ConfigError: neither names enough.
    """
    if method.exits is not None:
        return list(method.exits)
    wanted = method.stages + 1
    if len(layers) < wanted:
        remedy = f'name them: model.exits.layers=[4,8], or in the arm: "{method.name} exits=[4,8]"'
        raise ConfigError(f"method {method.name} needs {wanted} exits", value=list(layers), remedy=remedy)
    return list(layers[:wanted])


def wanted_exits(methods: Iterable[MethodSettings], exits: ExitSettings) -> dict[str, list[int]]:
    """Layers below the exits that these methods need, by kind of head."""
    found: dict[str, set[int]] = {}
    for method in methods:
        if method.drafter in EXIT_DRAFTERS:
            found.setdefault(method.head or exits.kind, set()).update(exits_of(method, exits.layers))
    return {kind: sorted(layers) for kind, layers in found.items()}


def exit_decoder(method: MethodSettings, models: Models, sampling: SamplingSettings) -> Decoder:
    """A decoder for a method whose drafter is an exit (or several), over shared models; its caches are its own."""
    target, depths, kind = models.target, exits_of(method, models.exit_layers), method.head or models.exit_kind
    heads = [models.exits[kind, depth] for depth in depths]
    adapters = {head.layer: head.adapter for head in heads if head.adapter is not None}
    ladder = Ladder(target, (*depths, target.n_layers), adapters, models.block)
    exits = [ExitStack(target, head) for head in heads]
    accepts = [*depths[1:], None]  # who accepts what each exit writes
    judges = [models.judges.get(("preverifier", kind, *pair)) for pair in zip(depths, accepts, strict=True)]
    own = {name: models.judges.get((name, kind, depths[0], accepts[0])) for name in HEADS}
    prices = models.prices.get(price_key(method))
    controller = draft_rule(method.name, method.controller, {"preverifier": judges[0], "prices": prices, **own})
    if controller is None:
        return Decoder(target, None, sampling, models.text, ladder.rungs[-1], shares_prefixes=models.block is not None)
    if method.drafter == "exits":
        t = float((method.controller or {}).get("t", 0.0))
        confident = ConfidentExits(exits, ladder, target.vocab_size, sampling, t)
        return speculative(target, confident, controller, sampling, models.text, ladder)
    record = controller.reads_record
    drafter = ModelDrafter(exits[0], target.vocab_size, sampling, record=record, reader=ladder.rungs[0])
    stages = []
    for k in range(1, len(exits)):
        rule = _buffer_rule(method, k - 1, len(exits) - 1, exits[k], ladder.rungs[k], judges[k])
        stages.append(Stage(exits[k], rule, method.bonus))
    return speculative(target, drafter, controller, sampling, models.text, ladder, stages, method.share)


def _buffer_rule(
    method: MethodSettings, number: int, stages: int, own: ExitStack, rung: Rung, judge: Judge | None
) -> BufferRule:
    """When the buffer of exit ``number`` of those that verify is full."""
    values = dict(method.buffer or {"kind": "enough", "n": 4})
    kind = values.pop("kind")
    if kind == "preverifier":
        return Preverified(own, rung, preverifier_rule(method.name, values, judge))
    sizes = list(values["n"]) if isinstance(values["n"], list) else [values["n"]] * stages
    if len(sizes) != stages:
        allowed = f"one for each of {stages} exits that verify"
        raise ConfigError(f"n of method {method.name}", value=sizes, allowed=allowed)
    return Enough(sizes[number])


def wanted_judges(
    methods: Iterable[MethodSettings], exits: ExitSettings, part: str = "preverifier"
) -> set[tuple[str, int, int | None]]:
    """The pre-verifiers on exits that these methods need: kind, layers below, and below the exit that accepts.

    Args:
        part: or acceptance heads of this name.
    """
    found: set[tuple[str, int, int | None]] = set()
    for method in methods:
        if method.drafter not in EXIT_DRAFTERS:
            continue
        depths, kind = exits_of(method, exits.layers), method.head or exits.kind
        accepts = [*depths[1:], None]
        rules = [method.controller, *[method.buffer] * (len(depths) - 1)]
        for rule, depth, by in zip(rules, depths, accepts, strict=True):
            if part in needed_by(rule):
                found.add((kind, depth, by))
    return found
