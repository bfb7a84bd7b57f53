"""What is measured, what is advised, and the command that follows: from hand-made predictions and results."""

from __future__ import annotations

import pytest

from pacer.advise import command
from pacer.evaluation.advice import Candidate, best, confirmed, report
from pacer.methods.arms import method_settings, overrides

FOUND = [
    Candidate("pacer", "pacer b=2 t0=0.5", 1.4), Candidate("product", "threshold rule=product t=0.6", 1.39),
    Candidate("fixed", "sd gamma=2", 1.3), Candidate("plain", "ar", 1.0),
    Candidate("layerskip", "layerskip gamma=1", 0.9),
]  # fmt: skip


def measured(arm: str, ratio: float | None, low: float | None = None, high: float | None = None) -> dict[str, object]:
    return {"arm": arm, "ratio_to_ar": ratio, "ratio_low": low, "ratio_high": high}


def test_the_best_predicted_are_measured_and_plain_decoding_with_them() -> None:
    assert confirmed(FOUND, 2) == ["ar", "pacer b=2 t0=0.5", "threshold rule=product t=0.6"]
    assert confirmed([Candidate("fixed", "sd gamma=0", 1.0), *FOUND], 1) == ["ar", "pacer b=2 t0=0.5"]


@pytest.mark.parametrize(
    ("overall", "advice"),
    [
        ([measured("ar", 1.0), measured("a", 1.2, 1.1, 1.3), measured("b", 1.3, 1.2, 1.4)], ("b", True)),
        ([measured("ar", 1.0), measured("a", 1.2, 0.9, 1.5)], ("a", False)),
        ([measured("ar", 1.0), measured("a", 1.2)], ("a", False)),  # one prompt has no interval
        ([measured("ar", 1.0), measured("a", 0.8, 0.7, 0.9)], ("ar", True)),
        ([measured("ar", 1.0), measured("a", None)], ("ar", True)),
        ([], ("ar", True)),
    ],
)
def test_advice_follows_what_was_measured(overall: list[dict[str, object]], advice: tuple[str, bool]) -> None:
    assert best(overall) == advice


def test_the_table_shows_predicted_beside_measured() -> None:
    lines = report(FOUND, [measured("ar", 1.0, 1.0, 1.0), measured("sd gamma=2", 1.25, 1.2, 1.3)]).splitlines()
    assert lines[3].split() == ["sd", "gamma=2", "1.30", "1.25", "[1.20,", "1.30]"]
    assert lines[1].split() == ["pacer", "b=2", "t0=0.5", "1.40"]


@pytest.mark.parametrize("arm", ["ar", "sd gamma=3", "hispec exits=[4,10] gamma=2 n=4 bonus=false share=0.5"])
def test_the_command_decodes_with_the_arm(arm: str) -> None:
    from pacer.command.app import load_settings

    words = overrides(arm)
    chosen, wanted = load_settings(["+experiment=pacer/demo", *words]).method, method_settings(arm)
    wanted.name = chosen.name
    assert chosen == wanted
    given = ["+experiment=pacer/demo", "advise.texts=2", "benchmark.sets=[gsm8k]", "threads=2", "method=sd"]
    said = command(arm, given)
    assert "advise." not in said and "benchmark." not in said and "method=sd " not in said.replace(words[0], "")
    assert "threads=2" in said and "+experiment=pacer/demo" in said
