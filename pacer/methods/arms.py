"""Arms by name: ``"sd gamma=4"`` is conf/method/sd.yaml with its controller's gamma set to 4."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pacer.choices import BUFFERS, CHOICES, DRAFTERS
from pacer.decoding.controllers.base import controller_class
from pacer.decoding.drafters.base import ROOM, drafter_class
from pacer.decoding.parts import Part, exists, names
from pacer.errors import ConfigError
from pacer.resources import configs
from pacer.settings import MethodSettings

ASSISTED_ARMS = ("hf_assisted", "hf_dynamic", "hf_heuristic")  # need the draft with the whole vocabulary's head
REFERENCE_ARMS = ("hf_generate", *ASSISTED_ARMS)  # measured beside ours, decoded by transformers itself
METHOD_KEYS = ("drafter", "exits", "head", "bonus", "share")  # what an arm may set of the method itself
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
    return sorted(_files("method"))


def controllers() -> dict[str, list[str]]:
    """Keys of each controller kind, read from the files of conf/controller; ``kind`` itself is left out."""
    return {kind: list(values) for kind, values in defaults().items()}


def defaults() -> dict[str, dict[str, Any]]:
    """The values in the files of conf/controller by kind; ``kind`` itself is left out."""
    found: dict[str, dict[str, Any]] = {}
    for _, path in sorted(_files("controller").items()):
        node = _read(path)
        values = OmegaConf.to_container(node)
        assert isinstance(values, dict)
        kind = str(values.pop("kind"))
        found[kind] = {str(key): value for key, value in values.items()}
    return found


def is_reference(arm: str) -> bool:
    """Whether the arm is a reference implementation rather than a method of this project."""
    return (arm.split() or [""])[0] in REFERENCE_ARMS


def method_settings(arm: str) -> MethodSettings:
    """Settings of an arm.

    Args:
        arm: a method name, then overrides ``key=value``: of the method (METHOD_KEYS), of its buffers (``n``), of its
            drafter, else of its controller; ``controller=NAME`` takes another one.

    Returns:
        The method's settings; their name is the whole string.

    Raises:
        ConfigError: the method or a key does not exist, or a value does not fit; with the choices.
    """
    words = arm.split()
    if not words or words[0] not in methods():
        raise unknown(f"unknown method in arm {arm!r}", words[0] if words else "", [*methods(), *REFERENCE_ARMS])
    method = _compose(words[0])
    rules = [word for word in words[1:] if word.startswith("controller=")]
    for word in rules:  # first: the other words are about it
        method.controller = _controller_file(word.partition("=")[2], f"arm {arm!r}")
    for word in (word for word in words[1:] if word not in rules):
        key, equals, _ = word.partition("=")
        if not equals:
            raise ConfigError(f"cannot read {word!r} in arm {arm!r}", allowed="key=value, such as gamma=4")
        path = _path(key, method.drafting or {})
        part, _, name = path.partition(".")
        if name:
            if part not in ("controller", "buffer", "drafting"):
                raise unknown(f"arm {arm!r} sets what is no part of a controller", key, [])
            choices = [str(name) for name in method[part] or {}]
            if name not in choices:
                raise unknown(f"unknown key in arm {arm!r}", key, [*choices, *(method.drafting or {})])
        method.merge_with_dotlist([path + word[len(key) :]])
    settings = OmegaConf.to_object(method)
    assert isinstance(settings, MethodSettings)
    settings.name = arm
    settings.controller = normal_controller(settings.controller)
    check_controller(settings.controller, f"arm {arm!r}")
    check_drafter(settings, f"arm {arm!r}")
    check_exits(settings, f"arm {arm!r}")
    check_guarantee(settings, f"arm {arm!r}")
    return settings


def _path(key: str, drafting: Collection[str]) -> str:
    """Where a method keeps what an arm sets by this key; ``drafting``: its drafter's own keys."""
    if key in drafting:
        return f"drafting.{key}"
    return ALIASES.get(key, key if "." in key or key in METHOD_KEYS else f"controller.{key}")


def overrides(arm: str) -> list[str]:
    """The words of a verb's command line that choose an arm's method: ``method=sd``, ``method.controller.gamma=4``."""
    name, *words = arm.split()
    pairs = [word.partition("=") for word in words]
    own = method_settings(name).drafting or {}
    rules = [f"controller@method.controller={value}" for key, _, value in pairs if key == "controller"]
    values = [f"method.{_path(key, own)}={value}" for key, _, value in pairs if key != "controller"]
    return [f"method={name}", *rules, *values]


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


def check_guarantee(method: MethodSettings, where: str) -> None:
    """A method that leaves drafts unchecked is lossy, and says so.

    Raises:
        ConfigError: it does not, or its drafter is none that this works with.
    """
    if method.checks != "last":
        return
    for what, value, allowed in (
        ("guarantee", method.guarantee, ("lossy",)),
        ("drafter", method.drafter, ("model", "model_full")),
    ):
        if value not in allowed:
            raise ConfigError(f"{what} in {where}, which checks the last token alone", value=value, allowed=allowed)


def normal_controller(controller: dict[str, Any] | None) -> dict[str, Any] | None:
    """The controller with ``kind: none``, the way to say "off" on a command line, as None."""
    return None if controller is None or controller.get("kind") == "none" else controller


def check_controller(controller: dict[str, Any] | None, where: str) -> None:
    """Check a controller's kind and keys by its file, its values by its class.

    Raises:
        ConfigError: an unknown kind or key, or a value outside its range.
    """
    if controller is None:
        return
    kinds = defaults()
    kind = controller.get("kind")
    if kind not in kinds:
        raise unknown(f"unknown controller kind in {where}", str(kind), kinds)
    given = {key: value for key, value in controller.items() if key != "kind"}
    for key in given:
        if key not in kinds[kind]:
            raise unknown(f"unknown key of controller {kind} in {where}", key, kinds[kind])
    _check_values(lambda: controller_class(str(kind)), given, kinds[kind], where)


def check_drafter(method: MethodSettings, where: str) -> None:
    """Check a method's drafter, and its values by its class.

    Raises:
        ConfigError: an unknown drafter, or a value outside its range.
    """
    name, given = method.drafter, method.drafting or {}
    if name is None or name in DRAFTERS:
        return
    if not exists(name, ROOM):
        others = names(ROOM, without=("base", "branching", *DRAFTERS))
        raise unknown(f"unknown drafter in {where}", name, ["null", *DRAFTERS, *others])
    chosen = method.name.split()[0]
    file = OmegaConf.to_container(_read(_files("method")[chosen])) if chosen in methods() else {}
    assert isinstance(file, dict)
    _check_values(lambda: drafter_class(name), given, file.get("drafting") or {}, where)


def _check_values(
    part: Callable[[], type[Part]], given: Mapping[str, Any], file: Mapping[str, Any], where: str
) -> None:  # fmt: skip
    """Check what differs from the part's file, which needs none; null where the file has null is left to the part.

    The part's class comes last: most of them need torch, which takes seconds to import.
    """
    own = {key: value for key, value in given.items() if value is not None or file.get(key, 0) is not None}
    if any(type(value) is not type(file.get(key)) or value != file.get(key) for key, value in own.items()):
        part().check(own, where)


def _files(group: str) -> dict[str, Path]:
    """The files of a group by name; of two of a name the one shipped with pacer counts, as in Hydra."""
    return {path.stem: path for folder in reversed(configs()) for path in (folder / group).glob("*.yaml")}


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
    file = _read(_files("method")[name])
    chosen = [str(item[_CONTROLLER]) for item in file.pop("defaults", []) if item != "_self_" and _CONTROLLER in item]
    node = OmegaConf.structured(MethodSettings)
    for controller in chosen:
        node.controller = _controller_file(controller, f"method {name}")
    node.merge_with(file)
    return node


def _controller_file(name: str, where: str) -> DictConfig:
    files = _files("controller")
    if name not in files:
        raise unknown(f"unknown controller of {where}", name, files)
    return _read(files[name])
