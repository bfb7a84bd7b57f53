"""``python -m pacer.evaluate``: methods side by side on benchmarks."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from pacer.app import run_folder, verb
from pacer.arms import ASSISTED_ARMS, is_reference, method_settings
from pacer.artifacts import provenance, write_atomic, write_json
from pacer.errors import ConfigError, UnsupportedError
from pacer.files import sha256, stable_hash
from pacer.settings import Settings

if TYPE_CHECKING:
    from pacer.assemble import Models

log = logging.getLogger(__name__)


@verb
def main(settings: Settings) -> None:
    """Measures `benchmark.arms` on `benchmark.sets`, interleaved per prompt, and prints a table.

    Builds the draft and the pre-verifier it lacks. A stopped run goes on where it was.
    """
    from pacer.evaluation.arms import make_arm
    from pacer.evaluation.runner import load_benchmarks, measure
    from pacer.stages import build

    benchmark = settings.benchmark
    benchmarks = load_benchmarks(benchmark, settings.paths.data_dir)
    _refuse_unscorable(settings)
    methods = [method_settings(arm) for arm in benchmark.arms if not is_reference(arm)]
    models = build(settings, methods, full_head=any(arm.startswith(ASSISTED_ARMS) for arm in benchmark.arms))
    arms = [make_arm(arm, models, settings.sampling, benchmark.batch_size) for arm in benchmark.arms]
    folder = run_folder(settings, "evaluate")
    folder.mkdir(parents=True, exist_ok=True)
    _same_parts(folder, models)
    write_atomic(folder / "settings.yaml", OmegaConf.to_yaml(OmegaConf.structured(settings)))
    write_json(folder / "provenance.json", provenance())
    lines = measure(benchmarks, arms, models, benchmark, folder / "trace.jsonl")
    guarantees = {arm.name: arm.guarantee for arm in arms}
    report(settings, folder, lines, benchmarks, guarantees)


def _same_parts(folder: Path, models: Models) -> None:
    """A trace goes on only with the parts it was begun with: after a search the arm `pacer` has other values.

    Raises:
        ConfigError: the folder holds measurements of another draft, pre-verifier or tuning.
    """
    from pacer.models.checkpoint import digest, identity

    trained = models.preverifier_folder
    parts = {
        "draft": identity(models.draft, layers=True) if models.draft else None,
        "preverifier": sha256(trained / "model.safetensors") if trained else None, "tuned": models.tuned,
        "exits": {f"{kind} {layer}": digest(head.parameters()) for (kind, layer), head in models.exits.items()},
    }  # fmt: skip
    path = folder / "parts.json"
    if path.is_file() and (folder / "trace.jsonl").is_file() and json.loads(path.read_text()) != parts:
        raise ConfigError(
            "this run was begun with another draft, pre-verifier or tuning", value=str(folder),
            remedy="give the new one a name of its own (name=…), or delete the folder",
        )  # fmt: skip
    write_json(path, parts)


def _refuse_unscorable(settings: Settings) -> None:
    """Generated code is scored in a sandbox or not at all: say so before hours of decoding."""
    from pacer.evaluation.sandbox import require_sandbox

    if settings.benchmark.score and "humaneval" in settings.benchmark.sets:
        require_sandbox(settings.benchmark.sandbox)


def report(settings: Settings, folder: Path, lines: list[Any], benchmarks: Any, guarantees: dict[str, str]) -> None:
    """Results, tables and plots from the trace lines, results first; prints the table and what was written."""
    from pacer.evaluation.metrics import check_trace, evaluate_trace
    from pacer.evaluation.runner import score_all
    from pacer.reporting.tables import to_csv, to_markdown, to_text
    from pacer.stages import command_line

    wrong = check_trace(lines)
    if wrong:
        raise UnsupportedError("the trace contradicts itself", value=wrong[0], remedy=f"delete {folder} and run again")
    scores, notes = score_all(lines, benchmarks, settings.benchmark.sandbox) if settings.benchmark.score else ({}, [])
    if settings.model.dtype != "float32":
        notes.append(
            f"{settings.model.dtype}: a pass over several tokens rounds otherwise than passes over one, so exact "
            "outputs part at near-ties; identity is judged in float32 (scripts/check_exact.sh)."
        )
    results = evaluate_trace(
        lines, arms=settings.benchmark.arms, guarantees=guarantees, scores=scores,
        samples=[b.name for b in benchmarks if b.sample], greedy=settings.sampling.temperature == 0,
        resamples=settings.benchmark.bootstrap, seed=settings.benchmark.seed,
        settings_hash=stable_hash(asdict(settings)),
    )  # fmt: skip
    write_json(folder / "results.json", results)
    command = command_line()
    machine = json.loads((folder / "provenance.json").read_text())["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores, {settings.model.name} {settings.model.dtype}"
    write_atomic(folder / "table.md", to_markdown(results, command=command, machine=where, notes=notes))
    write_atomic(folder / "table.csv", to_csv(results))
    plot(results, folder / "plots", command)
    print(to_text(results, command=command, machine=where, notes=notes))
    print("\nwritten:")
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        print(f"  {path}")


def plot(results: dict[str, Any], folder: Path, command: str) -> None:
    """The plots of a run; one that has nothing to show is left out."""
    from pacer.reporting import plots

    folder.mkdir(exist_ok=True)
    rows = results["rows"]
    if any(row["ratio_to_ar"] is not None for row in rows):
        plots.speed_bars(rows, folder / "speed", command=command, overall=results["overall"])
    if any(row["tokens_per_verify"] is not None for row in rows):
        plots.time_breakdown(rows, folder / "time", command=command)
    if any(row["survival"] for row in rows):
        plots.acceptance_by_index(rows, folder / "acceptance", command=command)


if __name__ == "__main__":
    main()
