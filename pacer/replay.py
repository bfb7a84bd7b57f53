"""``python -m pacer.replay``: what any length rule would gain on the target's own texts, without decoding again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from pacer.artifacts import provenance, stable_hash, write_atomic, write_json
from pacer.command.app import run_folder, verb
from pacer.errors import ConfigError
from pacer.settings import Settings

if TYPE_CHECKING:
    from pacer.assemble import Models
    from pacer.evaluation.replay.costs import Prices


@verb
def main(settings: Settings) -> None:
    """Builds the dense table of the tuning texts, searches every rule's best values and predicts their speed.

    With replay.profile=FILE or replay.profile=measure prices come from a latency profile, else from the costs block;
    replay.write=true puts the best values beside the pre-verifier's weights. method=threshold needs no pre-verifier.
    """
    from pacer.evaluation.metrics import jsonable
    from pacer.evaluation.replay.choice import halved
    from pacer.evaluation.replay.results import results, to_text
    from pacer.evaluation.replay.search import families
    from pacer.evaluation.replay.stage import dense_table, texts_of
    from pacer.reporting.wandb_runs import log_results
    from pacer.stages.build import build
    from pacer.stages.training import command_line

    if settings.replay.write and settings.replay.texts == "benchmark" and settings.replay.split != "tune":
        raise ConfigError("values are tuned on tuning texts alone", value=f"replay.split={settings.replay.split}",
                          allowed="replay.split=tune, or replay.texts=corpus")  # fmt: skip
    models = build(settings, [settings.method])
    texts, budget, key = texts_of(settings, models)
    table, table_key = dense_table(settings, models, texts, budget, key)
    folder = run_folder(settings, "replay")
    folder.mkdir(parents=True, exist_ok=True)
    prices = _prices(settings, models, float(table.start.mean()), folder)
    found = families(table, prices, halved(table))
    result = results(table, found, prices, settings.replay.draft_costs, settings.replay.token_costs)
    result |= {"table": table_key, "command": command_line()}
    write_atomic(folder / "settings.yaml", OmegaConf.to_yaml(OmegaConf.structured(settings)))
    write_json(folder / "provenance.json", provenance())
    write_json(folder / "results.json", jsonable(result))
    arms = {row["family"]: row["arm"] for row in result["rows"] if row["benchmark"] == "all"}
    write_atomic(folder / "table.txt", to_text(result) + "\n")
    print(to_text(result))
    files = [folder / "table.txt", folder / "results.json", *_plots(result, folder / "plots")]
    if settings.replay.write:
        files.append(_write(models, result, found, prices, stable_hash([text.id for text in texts])))
    tuned = {family: arm for family, arm in arms.items() if family not in ("oracle", "fixed_here")}
    files.append(write_json(folder / "tuned.json", tuned))  # the last: with it the search is finished
    log_results(settings.logger, folder, "replay", {"results": result["rows"]})
    print("\nwritten:")
    for path in files:
        print(f"  {path}")


def _prices(settings: Settings, models: Models, context: float, folder: Path) -> Prices:
    """Prices by the settings: a profile file, a profile made here, or the costs block."""
    from pacer.evaluation.profiler import as_json, points_of, profile
    from pacer.evaluation.replay.costs import from_points, from_settings

    if settings.replay.profile is None:
        return from_settings(settings.costs)
    if settings.replay.profile == "measure":
        points = profile(models, replace(settings.profile, batches=[1], contexts=[max(1, round(context))]))
        write_json(folder / "profile.json", {**as_json(points), "provenance": provenance()})
        return from_points(points, context, settings.costs.rest)
    points = points_of(Path(settings.replay.profile).expanduser(), "replay.profile", "measure", "null")
    return from_points(points, context, settings.costs.rest)


def _write(models: Models, result: dict[str, Any], found: Any, prices: Prices, texts: str) -> Path:
    """The best values of the pre-verifier's rule, lazy or not, into its checkpoint."""
    from pacer.evaluation.replay.search import write_tuned

    if models.preverifier_folder is None:
        raise ConfigError("replay.write needs a pre-verifier", value="none", remedy="use method=pacer")
    family = max(("pacer", "pacer_lazy"), key=lambda name: prices.ratio(found[name].usage).max())
    values = {"lo": 0.0, "hi": 1.0, **found[family].settings[found[family].best(prices)].values}
    speeds = {row["family"]: row["ratio_to_ar"] for row in result["rows"] if row["benchmark"] == "all"}
    made_of = {"texts": result["texts"], "texts_hash": texts, "prices": result["prices"], "speeds": speeds,
               "table": result["table"], "command": result["command"]}  # fmt: skip
    return write_tuned(models.preverifier_folder, values, made_of)


def _plots(result: dict[str, Any], folder: Path) -> list[Path]:
    from pacer.reporting import evidence_plots as plots

    command = result["command"]
    found = [
        *plots.accepted_lengths(result["runs"], folder / "lengths", command=command),
        *plots.calibration(result["signals"], folder / "calibration", command=command),
        *plots.gain(result["over_c"], folder / "gain_over_c", command=command, axis="c"),
        *plots.gain(result["over_v"], folder / "gain_over_v", command=command, axis="v"),
    ]
    if any(row["gap_share"] is not None for row in result["rows"]):  # else the oracle gains nothing over the window
        found += plots.gap_recovered(result["rows"], folder / "gap", command=command)
    return found


if __name__ == "__main__":
    main()
