"""``python -m pacer.profile``: what draft, pre-verifier, head and target cost on this machine."""

from __future__ import annotations

from pacer.artifacts import provenance, write_json
from pacer.command.app import run_folder, verb
from pacer.methods.arms import method_settings
from pacer.settings import Settings


@verb
def main(settings: Settings) -> None:
    """Times each part at n = 1 … profile.gamma_max + 1 tokens, for the batches and contexts given; JSON and a plot.

    The costs it prints can be given to training and simulation: costs.draft=… costs.preverify=… costs.token=…
    profile.weights=random takes models of these shapes with random weights: nothing is fetched or trained.
    """
    from pacer.evaluation.profiler import as_json, profile
    from pacer.random_models import random_models
    from pacer.reporting.plots import profile_curves
    from pacer.reporting.wandb_runs import log_results
    from pacer.stages.build import build
    from pacer.stages.training import command_line

    random = settings.profile.weights == "random"
    models = random_models(settings) if random else build(settings, [method_settings("pacer")])
    points = profile(models, settings.profile)
    folder = run_folder(settings, "profile")
    folder.mkdir(parents=True, exist_ok=True)
    shape = {"weights": settings.profile.weights, "scale": settings.profile.scale}
    result = {**as_json(points), **shape, "provenance": provenance()}
    write_json(folder / "profile.json", result)
    files = [folder / "profile.json", *profile_curves(result, folder / "profile", command=command_line())]
    for point in points:
        if point.n in (1, 2, 4, 8, 16):
            print(
                f"{point.part:12} n={point.n:<3} batch={point.batch:<3} context={point.context:<5} "
                f"{point.median_ms:8.2f} ms  (quartiles {point.low_ms:.2f} – {point.high_ms:.2f})"
            )
    print("costs in one-token target passes:", " ".join(f"costs.{k}={v:.4f}" for k, v in result["costs"].items()))
    log_results(settings.logger, folder, "profile", {"points": result["points"], "costs": [result["costs"]]})
    print("\nwritten:")
    for path in files:
        print(f"  {path}")


if __name__ == "__main__":
    main()
