"""The scripts that run everything behind the papers' tables: what they run, in which order, and what ends them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from pacer.command.app import load_settings
from tests.cli.test_readme import ROOT

NAMES = ("reproduce_pacer.sh", "reproduce_hispec.sh")
PAIRS = {"": [], "smollm2": [], "hub": ["model=layerskip_llama3_8b"]}


def run(script: Path, *settings: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PACER_DATA", "PAIR", "MINUTES")}
    return subprocess.run(
        ["bash", str(script), *settings], env={**kept, **environment}, capture_output=True, text=True, timeout=60
    )


def commands(script: Path, *settings: str, **environment: str) -> list[list[str]]:
    done = run(script, *settings, DRY="1", **environment)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", NAMES)
def test_every_command_is_one(name: str, pair: str) -> None:
    """What is printed composes or exists, and the minutes are those given."""
    environment = {"MINUTES": "200", **({"PAIR": pair} if pair else {})}
    found = commands(ROOT / "scripts" / name, *PAIRS[pair], **environment)
    minutes = 0.0
    for env, *command in found:
        if env == "env":
            boxed, script, *_ = command
            program = ROOT / script
            assert os.access(program, os.X_OK) and "${MINUTES" in program.read_text()
            minutes += float(boxed.removeprefix("MINUTES=")) * (22 if "ablate" in script else 1)  # of each variant
        else:
            settings = load_settings(command[2:])
            assert command[0] == "-m" and (ROOT / f"{command[1].replace('.', '/')}.py").is_file()
            minutes += settings.benchmark.minutes or 0.0
    assert minutes == pytest.approx(200, rel=0.01)
    kinds = ("pacer", "replay") if "pacer" in name else ("pacer", "hispec", "exits")
    assert all(load_settings([f"+experiment={kind}/{pair or 'demo'}", *PAIRS[pair]]).name for kind in kinds)
    assert [command[-1] for command in found[-4:]] == [f"+experiment=table/{table}" for table in tables(name)]


def tables(name: str) -> list[str]:
    return (ROOT / "scripts" / name).read_text().splitlines()[-1].removeprefix("tables ").split()


def test_both_print_all_tables() -> None:
    printed = [table for name in NAMES for table in tables(name)]
    assert sorted(printed) == sorted(path.stem for path in (ROOT / "conf" / "experiment" / "table").glob("*.yaml"))


@pytest.fixture
def pretended(tmp_path: Path) -> Path:
    """The scripts beside programs that note their call and end with the code in a file of their name."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in ("reproduce.sh", "reproduce_pacer.sh"):
        shutil.copy(ROOT / "scripts" / name, folder)
    setup = (
        'set -euo pipefail\ncd "$(dirname "${BASH_SOURCE[0]}")/.."\nPYTHON=./python PAIR=demo EXPERIMENT=pacer/demo\n'
    )
    (folder / "setup.sh").write_text(setup)
    note = [
        "#!/bin/bash",
        'echo "$(basename "$0") ${MINUTES:-} $*" >>calls',
        'exit "$(cat "$(basename "$0").code" 2>/dev/null || echo 0)"',
    ]
    for name in ("scripts/bench_pacer.sh", "scripts/bench_ablation.sh", "scripts/ablate_preverifier.sh", "python"):
        (tmp_path / name).write_text("\n".join(note) + "\n")
        (tmp_path / name).chmod(0o755)
    return folder / "reproduce_pacer.sh"


def test_what_falls_short_is_said_at_the_end_and_a_stop_ends_all(pretended: Path) -> None:
    home = pretended.parents[1]
    (home / "bench_pacer.sh.code").write_text("1")
    assert run(pretended, "a=1", MINUTES="100").returncode == 1
    calls = (home / "calls").read_text().splitlines()
    assert calls[0] == "bench_pacer.sh 40 20 demo a=1" and len(calls) == 8
    assert calls[1].endswith("benchmark.minutes=20 a=1")
    assert calls[-1].endswith("-m pacer.report +experiment=table/draft_lengths")
    (home / "calls").unlink()
    (home / "bench_ablation.sh.code").write_text("75")
    assert run(pretended).returncode == 75
    assert len((home / "calls").read_text().splitlines()) == 3


def test_through_slurm_each_waits_for_the_one_before(pretended: Path) -> None:
    home = pretended.parents[1]
    queue = home / "bin" / "sbatch"
    queue.parent.mkdir()
    queue.write_text('#!/bin/bash\necho "$*" >>calls\nwc -l <calls\n')
    queue.chmod(0o755)
    done = run(pretended, LAUNCHER="slurm", PATH=f"{queue.parent}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    first, *others = (home / "calls").read_text().splitlines()
    assert first == "--parsable scripts/verb.sbatch env MINUTES=48 scripts/bench_pacer.sh 20 demo"
    assert [line.split()[1] for line in others] == [f"--dependency=afterany:{n}" for n in range(1, 8)]


@pytest.mark.parametrize(
    ("name", "value"), [("MINUTES", "0"), ("MINUTES", "-3"), ("MINUTES", "1h"), ("LAUNCHER", "pbs")]
)
def test_what_cannot_be(name: str, value: str) -> None:
    done = run(ROOT / "scripts" / NAMES[0], DRY="1", **{name: value})
    assert done.returncode == 2 and f"error: {name}: {value}; allowed: " in done.stderr
