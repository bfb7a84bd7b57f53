"""Parts of a method by their names: a length rule or a drafter is one module, found by its name.

The class says what its values may be, in plain data, so that a verb can check words before anything heavy is imported:
this file and the bases of the parts import no torch, and a part that needs none itself is checked without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any, ClassVar, NamedTuple, TypeVar

from pacer.errors import ConfigError


class Range(NamedTuple):
    """An interval; ``open_low`` leaves its lower end out, ``open_high`` its upper end; ``whole``: of whole numbers."""

    low: float = 0
    high: float = inf
    open_low: bool = False
    open_high: bool = False
    whole: bool = False

    def holds(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high or self.high == inf else value <= self.high)

    def __str__(self) -> str:
        kind = "whole numbers " if self.whole else ""
        if self.high == inf:
            return f"{kind}{'>' if self.open_low else '≥'} {self.low}"
        ends = f"{'(' if self.open_low else '['}{self.low}, {self.high}{')' if self.open_high else ']'}"
        return f"{kind}in {ends}" if kind else ends


SIZE = Range(1, whole=True)  # a count of at least one
SHARE = Range(0, 1)
SWITCH = (False, True)

Allowed = Range | tuple[Any, ...]  # an interval, or the choices


class Part:
    """What has values that a user sets: those of its yaml, which are its constructor's arguments.

    Attributes:
        values: what each of them may be (:func:`allows`). The file's own values are tested to be allowed.
        section: what they are called in errors.
    """

    values: ClassVar[Mapping[str, Allowed]] = {}
    section: ClassVar[str] = "controller"

    @classmethod
    def allowed(cls, given: Mapping[str, Any]) -> Mapping[str, Allowed]:
        """What each value may be beside the others; by default :attr:`values`."""
        return cls.values

    @classmethod
    def needs(cls, given: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of what it is given beside its values, trained or measured (`pacer.methods.rules.PARTS`)."""
        return ()

    @classmethod
    def check(cls, given: Mapping[str, Any], where: str = "") -> None:
        """Check values by name; those that are missing are not looked at.

        Args:
            where: whose they are, for errors.

        Raises:
            ConfigError: names the value and what is allowed.
        """
        for key, allowed in cls.allowed(given).items():
            if key in given and not _holds(allowed, given[key]):
                what = f"{key} in {where}" if where else f"{cls.section}.{key} out of range"
                raise ConfigError(what, value=given[key], allowed=_said(allowed))


def _said(allowed: Allowed) -> str | tuple[Any, ...]:
    return str(allowed) if isinstance(allowed, Range) else allowed


def _holds(allowed: Allowed, value: Any) -> bool:
    return allowed.holds(value) if isinstance(allowed, Range) else value in allowed


P = TypeVar("P", bound=Part)


def allows(**values: Allowed) -> Callable[[type[P]], type[P]]:
    """Say of a part what its values may be, by name."""

    def note(part: type[P]) -> type[P]:
        part.values = values
        return part

    return note


def find(name: str, room: str, base: type[P]) -> type[P]:
    """The part of this name: the one subclass of ``base`` that the module ``room.name`` defines.

    Args:
        name: with a dot in it, it is the module itself: a part that lives outside this package.

    Raises:
        ConfigError: no such module, or not one such class in it.
    """
    path = name if "." in name else f"{room}.{name}"
    if not exists(name, room):
        raise ConfigError(f"no module {path}", value=name, remedy="a part's name is that of its module")
    module = importlib.import_module(path)
    found = [item for item in vars(module).values() if inspect.isclass(item) and item.__module__ == module.__name__]
    parts = [item for item in found if issubclass(item, base)]
    if len(parts) != 1:
        raise ConfigError(f"module {path} defines {len(parts)} kinds of {base.__name__}", allowed="one")
    return parts[0]


def exists(name: str, room: str) -> bool:
    """Whether :func:`find` would find a module."""
    try:
        return importlib.util.find_spec(name if "." in name else f"{room}.{name}") is not None
    except (ImportError, ValueError):
        return False


def names(room: str, without: Iterable[str] = ()) -> list[str]:
    """Names of the modules of a room."""
    spec = importlib.util.find_spec(room)
    places = (spec.submodule_search_locations or []) if spec else []
    return sorted(module.name for module in pkgutil.iter_modules(places) if module.name not in without)


def resolved(
    given: Mapping[str, Any], tuned: Mapping[str, Any] | None, without: Iterable[str] = ("kind",)
) -> dict[str, Any]:
    """Values by name: null ones are those tuned for a checkpoint, or the part's own defaults.

    Returns:
        The part's arguments; what is left to the part is left out.
    """
    values = {key: (tuned or {}).get(key) if value is None else value for key, value in given.items()}
    return {key: value for key, value in values.items() if key not in without and value is not None}
