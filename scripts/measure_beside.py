"""What drafting beside the target costs each side on this machine: a pass alone, and while both run.

Parallel drafting (PEARL) counts on the draft's time being free; where both want the same cores or the same memory bus,
it is not. In turn: nothing could run beside the target here, so there is nothing to measure.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from pacer.assemble import make_decoder
from pacer.command.app import load_settings, program
from pacer.decoding.drafters.pearl import Pearl
from pacer.decoding.request import Request
from pacer.evaluation.beside import sentence
from pacer.methods.arms import method_settings
from pacer.provenance import provenance
from pacer.stages.build import build
from pacer.work.stopping import check_stop


@program
def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="rows decoded at once")
    arguments, words = parser.parse_known_args(argv)
    settings = load_settings(words)
    method = method_settings("pearl")
    models = build(settings, [method])
    decoder = make_decoder(method, models, settings.sampling)
    assert isinstance(decoder.proposer, Pearl)
    found: list[dict[str, Any]] = []
    for rows in arguments.rows:
        decoder.generate([Request(str(i), [i + 1], 2) for i in range(rows)])
        found.append(decoder.proposer.report())
        print(sentence(f"pearl, {rows} rows", {key: _listed(value) for key, value in found[-1].items()}), flush=True)
        check_stop()
    beside = all(costs["worker"] != "in turn" for costs in found)
    print(json.dumps({"costs": found, "machine": provenance()["machine"], "threads": settings.threads, "ok": beside}))
    return 0 if beside else 1


def _listed(value: Any) -> Any:
    """As :func:`pacer.evaluation.beside.beside` has it over many requests."""
    return value if isinstance(value, float) else [value]


if __name__ == "__main__":
    raise SystemExit(main(None))
