"""``python -m pacer.advise``: the best method for this model, machine, batch size and kind of text."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, replace

from pacer.artifacts import write_json
from pacer.command.app import run_folder, verb
from pacer.evaluate import measured
from pacer.methods.arms import overrides
from pacer.settings import Settings


@verb
def main(settings: Settings) -> None:
    """Predicts the speed of every method from a short profile and short tables, measures the best, and says which.

    The kind of text is benchmark.sets, the batch benchmark.batch_size. Exits take part where model.exits names them;
    method=threshold does without a pre-verifier. What it prints last is the command to use the method.
    """
    from pacer.evaluation.advice import best, candidates, confirmed, report

    found = candidates(settings)
    arms = confirmed(found, settings.advise.measured)
    wanted = replace(settings.benchmark, arms=arms, split="report", limit=settings.advise.prompts, score=False)
    measuring = replace(settings, benchmark=wanted)
    overall = measured(measuring)[1]["overall"]
    arm, sure = best(overall)
    print("\n" + report(found, overall))
    folder = run_folder(settings, "advise")
    folder.mkdir(parents=True, exist_ok=True)
    advice = {"arm": arm, "sure": sure, "predicted": [asdict(c) for c in found], "measured": overall}
    print(f"\nwritten: {write_json(folder / 'advice.json', advice)}")
    doubt = "" if sure else "; its interval includes 1: measure longer with advise.prompts"
    print(f"\nbest measured here: {arm}{doubt}\n    {command(arm, sys.argv[1:])}")


def command(arm: str, words: list[str]) -> str:
    """The command that decodes with an arm, by the same settings.

    Args:
        words: of the command line that asked for advice.
    """
    aside = ("advise.", "benchmark.", "replay.", "method=", "method.", "-")
    kept = [word for word in words if not word.lstrip("+~").startswith(aside)]
    return shlex.join(["python", "-m", "pacer.generate", "your prompt", *kept, *overrides(arm)])


if __name__ == "__main__":
    main()
