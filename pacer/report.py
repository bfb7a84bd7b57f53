"""``python -m pacer.report``: the papers' tables beside our numbers, and finished runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pacer.artifacts import write_atomic
from pacer.choices import TABLES
from pacer.command.app import verb
from pacer.errors import ConfigError
from pacer.settings import Settings


@verb
def main(settings: Settings) -> None:
    """Shows finished runs: +experiment=table/NAME, one of the papers' tables, or run=FOLDER ('run=[A,B]'), a report.

    A table gathers what is under paths.runs and report.kept and says what was not run. A report is one HTML file that
    needs no network: tables, plots, and each decoded text round by round. Nothing is measured.
    """
    if settings.run is None and settings.report.table is None:
        raise ConfigError("nothing to report", allowed=[f"+experiment=table/{name}" for name in TABLES],
                          remedy="name a table, or a finished run: run=FOLDER")  # fmt: skip
    if settings.run is not None and not _listed(settings.run):
        raise ConfigError("run names nothing", value=settings.run, allowed="a folder, or a list of folders")
    folder = Path(settings.paths.runs) / "report"
    written = []
    if settings.report.table is not None:
        written += _table(settings, settings.report.table, folder / settings.report.table)
    if settings.run is not None:
        written += _page(settings, [Path(str(name)).expanduser() for name in _listed(settings.run)], folder)
    print("written:")
    for path in written:
        print(f"  {path}")


def _table(settings: Settings, name: str, folder: Path) -> list[Path]:
    from pacer.reporting.gather import finished
    from pacer.reporting.paper.render import to_csv, to_latex, to_markdown, to_text
    from pacer.reporting.paper.tables import TABLES
    from pacer.stages.training import command_line

    kept = [Path(place).expanduser() for place in settings.report.kept]
    table, command = TABLES[name](finished(Path(settings.paths.runs), kept)), command_line()
    print(to_text(table, command))
    texts = {"md": to_markdown(table, command), "csv": to_csv(table), "tex": to_latex(table, command)}
    return [write_atomic(folder / f"table.{kind}", text) for kind, text in texts.items()]


def _page(settings: Settings, folders: list[Path], root: Path) -> list[Path]:
    from pacer.evaluate import plot
    from pacer.reporting.gather import read_run
    from pacer.reporting.page import make_page
    from pacer.stages.training import command_line

    runs = [read_run(folder) for folder in folders]
    name = "-".join(folders[0].resolve().parts[-2:]) + (f"-and-{len(runs) - 1}" if len(runs) > 1 else "")
    cache = settings.paths.cache_folder
    return [write_atomic(root / name / "report.html", make_page(runs, root / name, cache, command_line(), plot))]


def _listed(run: Any) -> list[Any]:
    return list(run) if isinstance(run, list | tuple) else [run]


if __name__ == "__main__":
    main()
