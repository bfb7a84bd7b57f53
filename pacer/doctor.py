"""``python -m pacer.doctor``: why is acceptance low?"""

from __future__ import annotations

from pacer.artifacts import provenance, write_json
from pacer.command.app import run_folder, verb
from pacer.settings import Settings


@verb
def main(settings: Settings) -> None:
    """Measures what may keep acceptance low, on a few prompts of benchmark.sets, and prints findings by likely effect.

    Looks at tokenizer, head, layers, readout, dtype, template, training data, context, pre-verifier, window, costs and
    sampling. Builds nothing: parts that earlier runs left are examined. Findings are no error: the exit code is 0.
    """
    from pacer.evaluation.doctor.findings import as_text
    from pacer.evaluation.doctor.run import examine

    report = examine(settings)
    print(as_text(report))
    path = write_json(run_folder(settings, "doctor") / "doctor.json", {**report, "provenance": provenance()})
    print(f"\nwritten:\n  {path}")


if __name__ == "__main__":
    main()
