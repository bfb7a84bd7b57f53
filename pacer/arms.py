"""Arms by name: ``"sd gamma=4"`` is conf/method/sd.yaml with its controller's gamma set to 4."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pacer.choices import BUFFERS, CHOICES, CONTROLLER_CHOICES
from pacer.errors import ConfigError
from pacer.resources import resource
from pacer.settings import MethodSettings

ASSISTED_ARMS = ("hf_assisted", "hf_dynamic", "hf_heuristic")  # need the draft with the whole vocabulary's head
REFERENCE_ARMS = ("hf_generate", *ASSISTED_ARMS)  # measured beside ours, decoded by transformers itself
METHOD_KEYS = ("exits", "head", "bonus", "share")  # what an arm may set of the method itself
ALIASES = {"n": "buffer.n"}
_CONTROLLER = "/controller@controller"  # how a method file names its controller


def unknown(what: str, value: str, choices: Iterable[str], name: str | None = None) -> ConfigError:
    """The error for a name that does not exist, with the choices and the closest one.

    Args:
        what: what kind of name it is, such as ``unknown key of trainer``.
        value: the name as given.
        choices: the names there are.
        name: the part of `value` that is to be one of them; by default the whole.
    """
    choices = list(choices)
    close = difflib.get_close_matches(value if name is None else name, choices, n=1, cutoff=0.5)
    return ConfigError(
        what, value=value, allowed=choices or "none", remedy=f"did you mean {close[0]}?" if close else None
    )


def methods() -> list[str]:
    """Names of the methods: the files of conf/method."""
    return sorted(path.stem for path in (resource("conf") / "method").glob("*.yaml"))


def controllers() -> dict[str, list[str]]:
    """Keys of each controller kind, read from the files of conf/controller; ``kind`` itself is left out."""
    keys: dict[str, list[str]] = {}
    for path in sorted((resource("conf") / "controller").glob("*.yaml")):
        node = _read(path)
        keys[str(node["kind"])] = [str(key) for key in node if key != "kind"]
    return keys


def is_reference(arm: str) -> bool:
    """Whether the arm is a reference implementation rather than a method of this project."""
    return (arm.split() or [""])[0] in REFERENCE_ARMS


def method_settings(arm: str) -> MethodSettings:
    """Settings of an arm.

    Args:
        arm: a method name, then overrides ``key=value``: of the method (METHOD_KEYS), of its buffers (``n``), else of
            its controller.

    Returns:
        The method's settings; their name is the whole string.

    Raises:
        ConfigError: the method or a key does not exist, or a value does not fit; with the choices.
    """
    words = arm.split()
    if not words or words[0] not in methods():
        raise unknown(f"unknown method in arm {arm!r}", words[0] if words else "", [*methods(), *REFERENCE_ARMS])
    method = _compose(words[0])
    for word in words[1:]:
        key, equals, _ = word.partition("=")
        if not equals:
            raise ConfigError(f"cannot read {word!r} in arm {arm!r}", allowed="key=value, such as gamma=4")
        path = _path(key)
        part, _, name = path.partition(".")
        if name:
            if part not in ("controller", "buffer"):
                raise unknown(f"arm {arm!r} sets what is no part of a controller", key, [])
            choices = [str(name) for name in method[part] or {}]
            if name not in choices:
                raise unknown(f"unknown key in arm {arm!r}", key, choices)
        method.merge_with_dotlist([path + word[len(key) :]])
    settings = OmegaConf.to_object(method)
    assert isinstance(settings, MethodSettings)
    settings.name = arm
    settings.controller = normal_controller(settings.controller)
    check_controller(settings.controller, f"arm {arm!r}")
    check_exits(settings, f"arm {arm!r}")
    return settings


def _path(key: str) -> str:
    """Where a method keeps what an arm sets by this key."""
    return ALIASES.get(key, key if "." in key or key in METHOD_KEYS else f"controller.{key}")


def overrides(arm: str) -> list[str]:
    """The words of a verb's command line that choose an arm's method: ``method=sd``, ``method.controller.gamma=4``."""
    name, *words = arm.split()
    pairs = [word.partition("=") for word in words]
    return [f"method={name}", *(f"method.{_path(key)}={value}" for key, _, value in pairs)]


def check_exits(method: MethodSettings, where: str) -> None:
    """Check what a method says of exits.

    Raises:
        ConfigError: names the value and what is allowed.
    """
    exits, head = method.exits, method.head
    sized = not isinstance(exits, list) or (exits == sorted(set(exits)) and bool(exits) and min(exits) > 0)
    buffer = method.buffer or {"kind": "enough", "n": 1}
    sizes = buffer.get("n", 1) if isinstance(buffer.get("n", 1), list) else [buffer.get("n", 1)]
    for what, value, ok, allowed in (
        ("exits", exits, sized, "numbers of layers in rising order, from 1"),
        ("exits", exits, exits is None or method.drafter in ("exit", "exits"), "methods that draft with exits"),
        ("head", head, head is None or head in CHOICES["method.head"], ", ".join(CHOICES["method.head"])),
        ("buffer.kind", buffer.get("kind"), buffer.get("kind") in BUFFERS, ", ".join(BUFFERS)),
        ("n", buffer.get("n"), all(type(n) is int and n >= 1 for n in sizes), "whole numbers ≥ 1"),
        ("share", method.share, 0 < method.share <= 1, "in (0, 1]"),
    ):
        if not ok:
            raise ConfigError(f"{what} in {where}", value=value, allowed=allowed)


def normal_controller(controller: dict[str, Any] | None) -> dict[str, Any] | None:
    """The controller with ``kind: none``, the way to say "off" on a command line, as None."""
    return None if controller is None or controller.get("kind") == "none" else controller


def check_controller(controller: dict[str, Any] | None, where: str) -> None:
    """Check a controller's kind, keys and common values.

    Raises:
        ConfigError: an unknown kind or key, or a value outside its range.
    """
    if controller is None:
        return
    kinds = controllers()
    kind = controller.get("kind")
    if kind not in kinds:
        raise unknown(f"unknown controller kind in {where}", str(kind), kinds)
    for key, value in controller.items():
        if key != "kind" and key not in kinds[kind]:
            raise unknown(f"unknown key of controller {kind} in {where}", key, kinds[kind])
        if value is None and kind == "preverifier":  # what was tuned for the checkpoint
            continue
        if allowed := _allowed(kind, key, value, controller):
            raise ConfigError(f"{key} in {where}", value=value, allowed=allowed)


def resolved(controller: Mapping[str, Any], tuned: Mapping[str, Any] | None) -> dict[str, Any]:
    """A controller's values without its kind: null ones are those tuned for a checkpoint, or the rule's own defaults.

    Returns:
        Its arguments by name; what is left to the rule is left out.
    """
    values = {key: (tuned or {}).get(key) if value is None else value for key, value in controller.items()}
    return {key: value for key, value in values.items() if key != "kind" and value is not None}


def _allowed(kind: str, key: str, value: object, controller: dict[str, Any]) -> str | tuple[str, ...] | None:
    """What a controller's key may be, if ``value`` is not that."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if key in ("gamma", "gamma_max", "b"):
        least = 0 if key == "gamma" else 1  # γ = 0 is a window: it never drafts
        return None if type(value) is int and value >= least else f"whole numbers ≥ {least}"
    if key in ("t0", "lo", "hi") or (key == "t" and controller.get("signal", "probability") == "probability"):
        low = controller.get("lo") or 0 if key == "hi" else 0
        return None if number is not None and low <= number <= 1 else f"[{low}, 1]"
    if key == "t":
        return None if number is not None and number >= 0 else "≥ 0"
    if key == "rho":
        return None if number is not None and number > 0 else "> 0"
    choices = CONTROLLER_CHOICES.get((kind, key))
    if key == "rule" and controller.get("signal", "probability") != "probability":
        choices = ("last",)  # only probabilities have a product
    return None if choices is None or value in choices else choices


@lru_cache
def _read_text(path: Path, modified: float) -> DictConfig:
    try:
        node = OmegaConf.load(path)
    except (OSError, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    assert isinstance(node, DictConfig)
    return node


def _read(path: Path) -> DictConfig:
    return _read_text(path, path.stat().st_mtime).copy()


def _compose(name: str) -> DictConfig:
    """A method file with the controller that its defaults list names, as a typed node."""
    file = _read(resource("conf") / "method" / f"{name}.yaml")
    chosen = [str(item[_CONTROLLER]) for item in file.pop("defaults", []) if item != "_self_" and _CONTROLLER in item]
    node = OmegaConf.structured(MethodSettings)
    for controller in chosen:
        node.controller = _read(resource("conf") / "controller" / f"{controller}.yaml")
    node.merge_with(file)
    return node
