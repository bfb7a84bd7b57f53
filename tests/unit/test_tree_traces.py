"""What rounds with branching drafts become: counts that stay right, curves that are left out, a trace that is sound."""

from __future__ import annotations

import io
from typing import Any

import pytest

from pacer.evaluation.metrics import check_trace, evaluate_trace
from pacer.evaluation.tally import measures, tally
from pacer.evaluation.traces import group_requests
from pacer.reporting.streaming import GREEN, LEGEND, RESET, YELLOW, Painter
from tests.unit.test_metrics import request_line, round_line

TREE = round_line(1, [2, 5, 3, 3], 2, [2, 3, 4]) | {"parents": [-1, -1, 0, 1]}  # 2 and then 3 accepted, 4 the target's
CHAIN = round_line(2, [6, 7], 1, [6, 8])
END = request_line([1, 2, 3, 4, 6, 8], 2.0)
START = round_line(0, [], 0, [1], "prefill")


def test_counts_are_of_all_nodes_and_there_are_no_curves() -> None:
    """The chain alone has curves; beside a tree it is no sample of all rounds."""
    row = evaluate_trace([START, TREE, CHAIN, END])["rows"][0]
    assert row["tokens_per_verify"] == pytest.approx(5 / 2)
    assert row["mean_drafted"] == pytest.approx(6 / 2)
    assert row["accepted_per_verify"] == pytest.approx(3 / 2)
    assert row["acceptance_rate"] == pytest.approx(3 / 6)
    for name in ("conditional_acceptance", "conditional_counts", "survival", "survival_counts"):
        assert row[name] == []
    alone = evaluate_trace([START, CHAIN, END | {"ids": [1, 6, 8], "new_tokens": 3}])["rows"][0]
    assert alone["survival"] == [1.0, 0.0] and alone["conditional_counts"] == [1, 1]


def test_an_exit_that_verifies_trees_has_no_curve_either() -> None:
    inner = {"drafted": [2, 5, 3], "accepted": 1, "emitted": [5, 3], "stop": "x", "parents": [-1, -1, 0]}
    line = round_line(1, [5, 3], 2, [5, 3, 4]) | {"inner": [inner, {**inner, "accepted": 2}]}
    requests = group_requests([START, line, request_line([1, 5, 3, 4], 1.0)])
    found = measures(tally(r for group in requests.values() for r in group.values()))
    assert found["exits"] == [{"drafts_per_verify": 2.0, "acceptance_rate": 0.5, "conditional_acceptance": []}]
    assert found["survival"] == [1.0, 1.0], "what the exit sent is a chain"


@pytest.mark.parametrize(
    "wrong",
    [
        {"emitted": [2, 4, 4]},  # 4 follows 2 nowhere
        {"emitted": [5, 2, 4]},
        {"accepted": [3], "emitted": [2, 3, 3, 4]},  # no branch is as long
        {"parents": [-1, -1, 0]},
        {"parents": [-1, -1, 0, 3]},  # its own parent
        {"parents": [-1, -2, 0, 1]},
    ],
)
def test_what_contradicts_a_tree_is_found(wrong: dict[str, Any]) -> None:
    assert check_trace([START, TREE, CHAIN, END]) == []
    assert "what was accepted is no branch of the tree" in check_trace([START, TREE | wrong, CHAIN])[0]


def test_accepted_tokens_past_the_end_need_no_branch() -> None:
    """The budget cut what was emitted."""
    assert check_trace([START, TREE | {"emitted": [2]}, request_line([1, 2], 1.0)]) == []


def test_the_branch_that_is_text_is_painted() -> None:
    class Words:
        def decode(self, ids: list[int], **_: object) -> str:
            return "".join(f"<{i}>" for i in ids)

    out = io.StringIO()
    Painter(Words(), out).write(TREE)  # type: ignore[arg-type]  # a stand-in
    kept = "".join(f"{GREEN}<{token}>{RESET}" for token in (2, 3))
    assert out.getvalue() == f"{LEGEND}\n{kept}{YELLOW}<4>{RESET}"
