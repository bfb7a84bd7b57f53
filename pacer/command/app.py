"""From a command line to typed settings: what every verb (``python -m pacer.<verb>``) shares.

Hydra composes conf/; keys and values are checked against `pacer.settings.Settings`; a problem that the user can solve
is one line on stderr and exit code 2 (``PACER_DEBUG=1`` shows the traceback); a signal stops the verb at its next safe
point (exit code 75).
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import overload

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pacer.checks import check, get
from pacer.command.hydra_words import FULL_ERROR, full_error, hydra_line, search_path
from pacer.command.quiet import quiet_libraries
from pacer.command.sweeps import in_sweep, job_record, job_words, name_group, own_process, stopped_launcher
from pacer.command.words import as_config_error, check_overrides, split_prompt
from pacer.errors import EXIT_ERROR, EXIT_REQUEUE, ConfigError, PacerError
from pacer.files import file_errors, stable_hash, write_atomic, write_json
from pacer.methods.arms import normal_controller
from pacer.provenance import provenance
from pacer.resources import resource
from pacer.settings import Settings
from pacer.work.shards import from_environment
from pacer.work.stopping import Stopped, check_stop, stop_requested, stop_signals

__all__ = [
    "Stopped", "check_stop", "describe_run", "load_settings", "program", "run_folder", "stop_requested", "verb",
    "with_settings",
]  # fmt: skip

EXIT_INTERRUPTED = 130
# Settings that change no result.
FREE = ("paths", "shard", "logger", "threads", "color", "sandbox", "report", "export", "run", "dry_run")

_Verb = Callable[[Settings], None]
_Entry = Callable[..., None]


@overload
def verb(function: _Verb) -> _Entry: ...
@overload
def verb(*, positional: str) -> Callable[[_Verb], _Entry]: ...
def verb(function: _Verb | None = None, *, positional: str | None = None) -> _Entry | Callable[[_Verb], _Entry]:
    """Make a function of the settings a command-line entry; its docstring is the command's help.

    Args:
        function: what the verb does.
        positional: key of the setting that takes the words before the first override (``-``: standard input).

    Returns:
        ``main(argv=None)``: composes the settings from ``argv`` (default: the process's), runs the function, and raises
        ``SystemExit`` with a non-zero code when it fails. The bare function is ``main.__wrapped__``.
    """
    if function is None:
        return lambda function: _entry(function, positional)
    return _entry(function, positional)


def load_settings(overrides: Sequence[str] = ()) -> Settings:
    """Settings as a verb would get them, for scripts, notebooks and tests; `threads` takes effect, as in a verb.

    Args:
        overrides: words of a command line, such as ``+experiment=pacer/demo``.

    Raises:
        ConfigError: a key or value that does not exist or does not fit.
    """
    _register("")
    check_overrides(overrides)
    try:
        with hydra.initialize_config_dir(str(resource("conf")), version_base="1.3"):
            return _use_threads(_typed(hydra.compose("config", [*overrides, *search_path()])))
    except (HydraException, OmegaConfBaseException) as error:
        raise as_config_error(error) from error


def run_folder(settings: Settings, verb: str) -> Path:
    """The folder of a verb's outputs, ``paths.runs/<verb>/<name>/<hash8>``; the hash is over what changes results.

    Where things are written, what is logged, a time box and the name are left out, so a bench goes on where it stopped.
    """
    key = {name: value for name, value in asdict(settings).items() if name not in (*FREE, "name")}
    key["data_dir"] = settings.paths.data_dir
    aside = (("benchmark", "minutes"), ("benchmark", "sandbox"), ("generate", "color"), ("replay", "write"))
    for section, name in aside:
        del key[section][name]
    return Path(settings.paths.runs) / verb / settings.name / stable_hash(key)[:8]


def describe_run(settings: Settings, folder: Path) -> None:
    """Writes what made a run into its folder: ``settings.yaml``, ``provenance.json``."""
    write_atomic(folder / "settings.yaml", OmegaConf.to_yaml(OmegaConf.structured(settings)))
    write_json(folder / "provenance.json", provenance())


def _entry(function: _Verb, positional: str | None) -> _Entry:
    @functools.wraps(function)
    def main(argv: Sequence[str] | None = None) -> None:
        words = list(sys.argv[1:] if argv is None else argv)
        code = _guarded(lambda: _run(function, words, positional, last=argv is None))
        if code:
            raise SystemExit(code)

    return main


def with_settings(main: Callable[..., None]) -> Callable[[Settings], None]:
    """A verb without its command line, for a program that has its settings already."""
    verb_itself: Callable[[Settings], None] = inspect.unwrap(main)
    return verb_itself


def program(function: Callable[[list[str]], int]) -> Callable[[Sequence[str] | None], int]:
    """Make a script's function of its words an entry that runs as verbs do: libraries quiet, stopped at a safe point,
    a problem that the user can solve one line. The entry, ``main(argv)`` (None: the process's), returns the exit code.
    """

    @functools.wraps(function)
    def main(argv: Sequence[str] | None = None) -> int:
        def run() -> int:
            with quiet_libraries(loud=_debug()), stop_signals(last=argv is None), file_errors():
                return function(list(sys.argv[1:] if argv is None else argv))

        return _guarded(run)

    return main


def _guarded(run: Callable[[], int]) -> int:
    """The exit code; what the user can solve becomes a line."""
    try:
        return run()
    except PacerError as error:
        if _debug():
            raise
        return _say(f"error: {error}", EXIT_ERROR)
    except Stopped as stop:
        return _say(f"stopped ({stop}): the same command resumes", EXIT_REQUEUE)
    except KeyboardInterrupt:
        return _say("interrupted", EXIT_INTERRUPTED)


def _run(function: _Verb, argv: list[str], positional: str | None, *, last: bool) -> int:
    prompt, overrides = split_prompt(argv) if positional else (None, argv)
    check_overrides(overrides)
    help_text = inspect.cleandoc(function.__doc__ or "")
    _register(help_text)
    errors: list[Exception] = []
    user_full_error, program, launcher, loud = os.environ.get(FULL_ERROR), sys.argv[0], os.getpid(), _debug()

    def job(cfg: DictConfig) -> None:
        _register(help_text)  # it may run in another process
        sweep = in_sweep()
        # what provenance records; hydra_line puts the process's own words back
        sys.argv = [program, *(job_words(argv) if sweep else argv)]
        with full_error(user_full_error), own_process(launcher, loud):
            try:
                with job_record() if sweep else nullcontext():
                    _job(function, cfg, positional, prompt)
            except PacerError as error:
                if sweep:  # the launcher must see it
                    raise
                errors.append(error)  # raised through Hydra, it would print lines of its own

    job.__module__ = function.__module__
    name = Path(inspect.getfile(function)).stem
    try:
        with (
            stop_signals(last), quiet_libraries(loud), hydra_line(name, overrides), full_error("1"),
            stopped_launcher(),
        ):  # fmt: skip
            hydra.main(version_base="1.3", config_path=str(resource("conf")), config_name="config")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise as_config_error(error) from error
    if errors:
        raise errors[0]
    return 0


def _job(function: _Verb, cfg: DictConfig, positional: str | None, prompt: str | None) -> None:
    try:
        settings = _use_threads(_typed(cfg))
        if in_sweep():
            name_group(settings)
        else:  # the numbers of a sweep's array are those of its jobs
            settings.shard = from_environment(settings.shard, os.environ)
        if positional and prompt is not None:  # set here, since the override grammar would rewrite quotes and braces
            section, _, name = positional.rpartition(".")
            setattr(get(settings, section) if section else settings, name, prompt)
        with file_errors():
            if settings.dry_run:
                _plan(function, settings)
            else:
                function(settings)
    except (HydraException, OmegaConfBaseException) as error:
        raise as_config_error(error) from error


def _plan(function: _Verb, settings: Settings) -> None:
    from pacer.planning.show import show  # slow to import, and most calls do what they are for

    show(settings, Path(inspect.getfile(function)).stem)


def _use_threads(settings: Settings) -> Settings:
    if settings.threads:
        import torch  # slow to import, and most calls leave the thread count alone

        torch.set_num_threads(settings.threads)
    return settings


def _typed(cfg: DictConfig) -> Settings:
    """The composed configuration as plain dataclasses, shorthands resolved and values checked."""
    try:
        settings = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise as_config_error(error) from error
    if not isinstance(settings, Settings):
        raise ConfigError("config.yaml does not begin with the schema", remedy="put `schema` first in its defaults")
    settings.paths.data_dir = settings.paths.data_dir or None
    settings.method.controller = normal_controller(settings.method.controller)
    settings.generate.color = settings.generate.color or settings.color
    settings.benchmark.sandbox = settings.sandbox or settings.benchmark.sandbox
    check(settings)
    return settings


def _register(help_text: str) -> None:
    ConfigStore.instance().store(name="schema", node=Settings)
    # Hydra fills the help text in with string.Template, so a dollar sign must be doubled.
    OmegaConf.register_new_resolver("verb_help", lambda: help_text.replace("$", "$$"), replace=True)
    OmegaConf.register_new_resolver("data_file", _data_file, replace=True)


def _data_file(name: str, *, _root_: DictConfig) -> str | None:
    """``${data_file:NAME}``: the file in paths.data_dir, null where there is no such folder set."""
    folder = _root_.paths.data_dir
    return str(Path(folder) / name) if folder else None


def _debug() -> bool:
    return "1" in (os.environ.get("PACER_DEBUG"), os.environ.get(FULL_ERROR))


def _say(line: str, code: int) -> int:
    print(line, file=sys.stderr, flush=True)
    return code
