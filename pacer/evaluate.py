"""``python -m pacer.evaluate``: methods side by side on benchmarks."""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from pacer.artifacts import provenance, write_atomic, write_json
from pacer.command.app import run_folder, verb, with_settings
from pacer.errors import ConfigError, UnsupportedError
from pacer.files import is_part, sha256, stable_hash
from pacer.methods.arms import ASSISTED_ARMS, is_reference, method_settings
from pacer.settings import Settings, ShardSettings
from pacer.work.records import REPORTING, hold, is_own, recorded
from pacer.work.shards import Shard, shard_of

if TYPE_CHECKING:
    from pacer.assemble import Models
    from pacer.evaluation.arms import Arm
    from pacer.evaluation.runner import Benchmark

log = logging.getLogger(__name__)


@verb
def main(settings: Settings) -> None:
    """Measures `benchmark.arms` on `benchmark.sets`, interleaved per prompt, and prints a table.

    Builds the draft and the pre-verifier it lacks. A stopped run goes on where it was.
    """
    from pacer.evaluation.arms import make_arm
    from pacer.evaluation.runner import load_benchmarks
    from pacer.stages.build import build

    benchmark = settings.benchmark
    benchmarks = load_benchmarks(benchmark, settings.paths.data_dir)
    _refuse_unscorable(settings)
    methods = [method_settings(arm) for arm in benchmark.arms if not is_reference(arm)]
    models = build(settings, methods, full_head=any(arm.startswith(ASSISTED_ARMS) for arm in benchmark.arms))
    arms = [make_arm(arm, models, settings.sampling, benchmark.batch_size) for arm in benchmark.arms]
    folder = run_folder(settings, "evaluate")
    shard = shard_of(settings.shard)
    with hold(folder, shard.name):
        _same_parts(folder, models)
        write_atomic(folder / "settings.yaml", _settings_text(settings))
        _measured(settings, folder, shard, benchmarks, arms, models)


def measured(settings: Settings) -> tuple[Path, dict[str, Any]]:
    """Measure, or go on where it stopped, by settings that are loaded already; the run's folder and results."""
    with_settings(main)(settings)
    folder = run_folder(settings, "evaluate")
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return folder, results


def _settings_text(settings: Settings) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(replace(settings, shard=ShardSettings())))


def _measured(
    settings: Settings, folder: Path, shard: Shard, benchmarks: list[Benchmark], arms: list[Arm], models: Models
) -> None:
    """Measure this process's part; whoever finds that nothing is missing any more reports on the whole."""
    from pacer.evaluation.merging import measure_part, merge

    def begin() -> None:
        write_json(folder / f"provenance{shard.name}.json", provenance())

    with recorded(folder, shard.name) as record:
        record |= measure_part(folder, shard, benchmarks, arms, models, settings.benchmark, begin)
        with hold(folder, REPORTING):
            lines, missing = merge(folder, benchmarks, [arm.name for arm in arms], settings.benchmark)
            if missing and shard.count > 1:
                done = f"{record['measured']} of its {record['requests']} requests are measured"
                print(f"part {shard.index} of {shard.count}: {done}; of all parts {missing} are missing.")
                print(f"The table comes with the last of them: python -m pacer.status {shlex.quote(str(folder))}")
                return
            report(settings, folder, lines, benchmarks, {arm.name: arm.guarantee for arm in arms})


def _same_parts(folder: Path, models: Models) -> None:
    """A trace goes on only with the parts it was begun with: after a search the arm `pacer` has other values.

    Raises:
        ConfigError: the folder holds measurements of another draft, pre-verifier or tuning.
    """
    from pacer.methods.feature import FEATURE_DRAFTER
    from pacer.models.checkpoint import digest, identity

    trained = models.preverifier_folder
    parts = {
        "draft": identity(models.draft, layers=True) if models.draft else None,
        "preverifier": sha256(trained / "model.safetensors") if trained else None, "tuned": models.tuned,
        "exits": {f"{kind} {layer}": digest(head.parameters()) for (kind, layer), head in models.exits.items()},
        "heads": {name: sha256(head / "model.safetensors") for name, head in models.head_folders.items()},
        "feature": digest(models.feature.draft.parameters()) if models.feature else None,
        **({"prices": models.prices} if models.prices else {}),
        "on_feature": {
            str(key[0]): digest(judge.parameters())
            for key, (judge, _) in models.judges.items()
            if key[1:] == (FEATURE_DRAFTER,)
        },
    }  # fmt: skip
    path = folder / "parts.json"
    if path.is_file() and any(folder.glob("trace*.jsonl")) and json.loads(path.read_text()) != parts:
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
    from pacer.evaluation.tuned import notes_on
    from pacer.reporting.tables import to_csv, to_markdown, to_text
    from pacer.reporting.wandb_runs import log_results
    from pacer.stages.training import command_line

    wrong = check_trace(lines)
    if wrong:
        raise UnsupportedError("the trace contradicts itself", value=wrong[0], remedy=f"delete {folder} and run again")
    scores, notes = score_all(lines, benchmarks, settings.benchmark.sandbox) if settings.benchmark.score else ({}, [])
    if settings.model.dtype != "float32":
        notes.append(
            f"{settings.model.dtype}: a pass over several tokens rounds otherwise than passes over one, so exact "
            "outputs part at near-ties; identity is judged in float32 (scripts/check_exact.sh)."
        )
    notes += notes_on(settings.model.target.id)
    results = evaluate_trace(
        lines, arms=settings.benchmark.arms, guarantees=guarantees, scores=scores,
        samples=[b.name for b in benchmarks if b.sample], greedy=settings.sampling.temperature == 0,
        resamples=settings.benchmark.bootstrap, seed=settings.benchmark.seed,
        settings_hash=stable_hash(asdict(settings)),
    )  # fmt: skip
    write_json(folder / "results.json", results)
    command = command_line()
    machines = {json.dumps(json.loads(p.read_text())["machine"]) for p in folder.glob("provenance*.json")}
    names = {f"{m['processor']}, {m['cores']} cores" for m in map(json.loads, machines)}
    where = f"{' and '.join(sorted(names))}, {settings.model.name} {settings.model.dtype}"
    write_atomic(folder / "table.md", to_markdown(results, command=command, machine=where, notes=notes))
    write_atomic(folder / "table.csv", to_csv(results))
    plot(results, folder / "plots", command)
    log_results(settings.logger, folder, "evaluate", {"results": results["rows"], "overall": results["overall"]})
    print(to_text(results, command=command, machine=where, notes=notes))
    print("\nwritten:")
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not (is_own(p) or is_part(p))):
        print(f"  {path}")
    print(f"\nround by round, in a browser: python -m pacer.report run={shlex.quote(str(folder))}")


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
