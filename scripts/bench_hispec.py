"""HiSpec against LayerSkip with the same heads, and the other methods of one model: what is wanted, measured.

Both are tuned by the cost model on the same number of settings, on texts that no head learnt from; then all arms are
interleaved per prompt on the benchmarks' other prompts, with the map of where HiSpec pays and our place on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pacer.artifacts import write_json
from pacer.assemble import make_decoder
from pacer.command.app import load_settings, program
from pacer.decoding.ladder import Rung
from pacer.evaluate import measured
from pacer.evaluation.cascade.costs import from_points
from pacer.evaluation.cascade.search import OVERALL, chosen
from pacer.evaluation.cascade.walk import Cascade
from pacer.evaluation.metrics import group_requests, load_trace
from pacer.evaluation.replay.stage import texts_of
from pacer.evaluation.runner import load_benchmarks, make_requests
from pacer.methods.arms import method_settings
from pacer.reporting.cascade_plots import pays_map
from pacer.settings import SamplingSettings, Settings
from pacer.stages.build import build
from pacer.stages.exits import exit_heads
from pacer.stages.training import command_line
from scripts.bench_main import ratio
from scripts.sweep_layers import maps, profiled, table_of

LEAST = 1.05  # HiSpec over LayerSkip


def tuned(settings: Settings) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Each family's best setting that drafts at all, and the maps of where HiSpec pays."""
    models = build(settings, [])
    heads = exit_heads(settings, models, settings.model.exits.layers)
    table = table_of(models, heads, texts_of(settings, models)[0])
    prices = from_points(profiled(models, heads, 256), settings.costs.rest)
    rows = chosen(table, prices)
    best = {row["family"]: row for row in rows if row["benchmark"] == OVERALL}
    exits = tuple(best["hispec"]["exits"])
    return best, maps(table, prices, (exits[0], exits[1]), settings.model.name)


def drafting(row: Mapping[str, Any]) -> Cascade:
    """The setting chosen; a window of 0, which is plain decoding, becomes 1, so that there is something to measure."""
    first, *rest = row["buffers"]
    return Cascade(tuple(row["exits"]), (max(1, first), *rest), row["bonus"])


def arms_of(best: Mapping[str, Any]) -> dict[str, str]:
    """What is measured, by family."""
    skip, spec = drafting(best["layerskip"]), drafting(best["hispec"])
    pair = f"exits=[{spec.exits[0]},{spec.exits[1]}]"
    return {
        "ar": "ar", "layerskip": skip.arm, "hispec": spec.arm, "hispec_pacer": f"hispec_pacer {pair}",
        "kangaroo": f"kangaroo exits=[{skip.exits[0]}]", "adadecode": f"adadecode {pair}", "pacer": "pacer",
    }  # fmt: skip


def extra_memory(settings: Settings, arm: str) -> dict[str, Any]:
    """What the intermediate verification of a request takes beside the model, in bytes, and as a share of model and
    keys and values: states that wait between layers, the exit's distributions when sampling, heads of their own."""
    models = build(settings, [method_settings(arm)])
    decoder = make_decoder(method_settings(arm), models, SamplingSettings())
    benchmark = load_benchmarks(settings.benchmark, settings.paths.data_dir)[0]
    (result,) = decoder.generate(make_requests(benchmark.prompts[:1], models, 64))
    assert isinstance(decoder.reader, Rung)
    ladder = decoder.reader.ladder
    longest = max(len(line["drafted"]) for line in result.rounds)
    parts = {
        "states": ladder.state_bytes(),
        "distributions_when_sampling": longest * models.target.vocab_size * 4,
        "heads": sum(w.nbytes for head in models.exits.values() for w in head.parameters()),
    }
    weights = sum(w.nbytes for w in models.target.model.parameters())
    held = weights + sum(lane.cache.nbytes() for lane in ladder.lanes)
    return {"bytes": parts, "share": {name: size / held for name, size in parts.items()}, "model_and_cache": held}


def figures_of(arms: Mapping[str, str], results: Mapping[str, Any], groups: Any) -> dict[str, Any]:
    """All that is asked of the bench, as plain data."""
    benchmarks = list(dict.fromkeys(row["benchmark"] for row in results["rows"]))
    over = {row["arm"]: [row["ratio_to_ar"], row["ratio_low"], row["ratio_high"]] for row in results["overall"]}
    keys = ("prompts", "tokens_per_second", "tokens_per_verify", "mean_drafted", "acceptance_rate", "exits",
            "conditional_acceptance", "layer_tokens_per_token", "share", "exact")  # fmt: skip
    rows = [{"arm": r["arm"], "benchmark": r["benchmark"], **{key: r[key] for key in keys}} for r in results["rows"]]
    one, other = arms["hispec"], arms["layerskip"]
    return {
        "arms": dict(arms), "over_ar": over, "rows": rows,
        "over_layerskip": ratio(groups, one, other, benchmarks),
        "over_layerskip_by_benchmark": {b: ratio(groups, one, other, [b]) for b in benchmarks},
        "pacer_rule_over_hispec": ratio(groups, arms["hispec_pacer"], one, benchmarks),
        "slower_than_ar": [arm for arm, (value, *_) in over.items() if value is not None and value < 1],
    }  # fmt: skip


@program
def main(words: list[str]) -> int:
    settings = load_settings(words)
    best, pays = tuned(settings)
    arms = arms_of(best)
    listed = ",".join(f'"{arm}"' for arm in dict.fromkeys(arms.values()))
    wanted = load_settings([*words, f"benchmark.arms=[{listed}]"])
    folder, results = measured(wanted)
    found = figures_of(arms, results, group_requests(load_trace(folder / "trace.jsonl")))
    found |= {"extra_memory": extra_memory(wanted, arms["hispec"])}
    found |= {"tuned": best, "where_it_pays": [{key: p[key] for key in ("name", "exits", "points")} for p in pays]}
    pays_map(pays, folder / "plots" / "where_it_pays", command=command_line())
    path = write_json(folder / "bench_hispec.json", {**found, "maps": pays})
    return report(found, str(path))


def report(found: Mapping[str, Any], path: str) -> int:
    """Print; the exit code."""
    print()
    for arm, (value, low, high) in found["over_ar"].items():
        said = "–" if value is None else f"{value:.3f} × AR"
        said += "" if low is None else f" [{low:.3f}, {high:.3f}]"
        print(f"{arm:48} {said}{'   slower than AR' if arm in found['slower_than_ar'] else ''}")
    value = found["over_layerskip"]["value"]
    ok = value is not None and value >= LEAST
    said = "–" if value is None else f"{value:.3f}"
    print(f"{'reached' if ok else 'NOT reached':12} HiSpec over LayerSkip, both tuned: {said}, wanted ≥ {LEAST}")
    memory = found["extra_memory"]
    for name, share in memory["share"].items():
        print(f"extra memory, {name}: {memory['bytes'][name]} bytes, {100 * share:.4f} % of model and cache")
    short: Sequence[str] = ("arms", "over_ar", "over_layerskip", "pacer_rule_over_hispec", "slower_than_ar")
    print(json.dumps({**{key: found[key] for key in short}, "written": path, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main(None))
