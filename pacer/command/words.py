"""Words of a command line: the prompt before the overrides, keys that do not exist, and Hydra's errors in one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from pacer.checks import check_key
from pacer.errors import ConfigError
from pacer.methods.arms import controllers, unknown
from pacer.resources import configs
from pacer.settings import Settings

_OVERRIDE = re.compile(r"(?P<prefix>\+\+?|~)?(?P<key>[A-Za-z_][\w./@:-]*)(?P<equals>=)?")
_DICTS = ("method.controller", "corpus.parts")


def split_prompt(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Separate the prompt from the overrides.

    Args:
        argv: words before the first that looks like an override (``key=value``, ``+…``, ``~…``, ``-flag``) are the
            prompt, and so are all words after ``--``; ``-`` alone stands for standard input.

    Returns:
        The prompt exactly as given, or None without one; and the other words.
    """
    words: list[str] = []
    rest = list(argv)
    while rest and not _is_override(rest[0]):
        words.append(rest.pop(0))
    if "--" in rest:
        at = rest.index("--")
        words, rest = words + rest[at + 1 :], rest[:at]
    if words == ["-"]:
        return sys.stdin.buffer.read().decode("utf-8"), rest  # not as text: newlines stay as they are
    return (" ".join(words) if words else None), rest


def flags_first(words: Sequence[str]) -> list[str]:
    """The words with overrides last: argparse, which Hydra uses, refuses overrides on both sides of a flag."""
    return [word for word in words if not is_assignment(word)] + [word for word in words if is_assignment(word)]


def check_overrides(overrides: Sequence[str]) -> None:
    """Check the keys that overrides name; groups are left to Hydra, which knows all search paths.

    Raises:
        ConfigError: names the key, the keys there are at that place, and the closest one.
    """
    groups = _groups(overrides)
    for word in overrides:
        match = _OVERRIDE.match(word)
        if not match or not is_assignment(word):
            continue
        key = match["key"]
        if key.startswith(("hydra.", "hydra/")) or "@" in key or "/" in key or key in groups:
            continue
        if match["prefix"] and key in ("experiment", "debug"):
            continue
        check_key(key)


def as_config_error(error: Exception) -> ConfigError:
    """One line for an error of Hydra or OmegaConf."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_config(error)
    if isinstance(error, OverrideParseException):
        return ConfigError(
            "cannot read an override",
            value=error.override,
            allowed="key=value",
            remedy="quote a value with a space or = in it, as in key='\"a b\"' or key='[ar,\"sd gamma=4\"]'",
        )
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    if isinstance(cause, MissingMandatoryValue):
        return ConfigError(f"no value for {cause.full_key}", remedy=f"add {cause.full_key}=VALUE to the command line")
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        key = str(cause.full_key)
        line = str(cause).splitlines()[0].strip()
        return (None if key.startswith("hydra") else _key_error(key)) or ConfigError(f"{key}: {line}")
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("See https://")]
    return ConfigError("; ".join(lines) or type(error).__name__)


def _key_error(key: str) -> ConfigError | None:
    try:
        check_key(key)
    except ConfigError as error:
        return error
    parent, _, name = key.rpartition(".")
    if parent == "method.controller":
        kinds = {kind: keys for kind, keys in controllers().items() if keys}
        allowed = "; ".join(f"{kind}: {', '.join(keys)}" for kind, keys in kinds.items())
        return ConfigError(
            "the chosen controller has no such key",
            value=key,
            allowed=f"({allowed})",
            remedy="choose it with controller@method.controller=NAME or a method",
        )
    return ConfigError("unknown key", value=name, allowed=f"the keys of {parent}") if parent in _DICTS else None


def _missing_config(error: MissingConfigException) -> ConfigError:
    group, _, name = str(error.missing_cfg_file).partition("/")
    folders = [folder / group for folder in configs()]
    if folders[0].is_dir() and group != "hydra":
        found = {str(path.relative_to(folder).with_suffix("")) for folder in folders for path in folder.rglob("*.yaml")}
        choices = sorted(found)
    else:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        choices = list(error.options or [])
    if group == "hydra/launcher" and name in ("joblib", "submitit_slurm"):
        return ConfigError("this launcher is not installed", value=name, remedy="pip install 'pacer[cluster]'")
    return unknown(f"no such {group}", name, choices)


def _is_override(word: str) -> bool:
    if word == "-" or not word:
        return False
    spaced = any(character.isspace() for character in word)
    if word.startswith("-"):
        return not spaced
    match = _OVERRIDE.match(word)
    if not match or not is_assignment(word):
        return False
    # "E=mc^2 is what?" is a prompt, trainer.lrr=1 a mistyped key: an unknown first name and a space make a prompt.
    known = {field.name for field in fields(Settings)} | _groups([]) | {"hydra"}
    return not spaced or re.split(r"[./@]", match["key"])[0] in known


def is_assignment(word: str) -> bool:
    """Whether a word is an override, not a flag."""
    match = _OVERRIDE.match(word)
    return bool(match and (match["equals"] or match["prefix"] == "~"))


def _groups(overrides: Sequence[str]) -> set[str]:
    """Config groups of this project and of the folders given with --config-dir."""
    folders = configs()
    for index, word in enumerate(overrides):
        if word in ("--config-dir", "-cd") and index + 1 < len(overrides):
            folders.append(Path(overrides[index + 1]))
        elif word.startswith("--config-dir="):
            folders.append(Path(word.partition("=")[2]))
    return {path.name for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_dir()}
