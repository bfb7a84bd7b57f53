"""HumanEval pass@1 as an `evaluate` module; `evaluate.load` takes the path of this file."""

from __future__ import annotations

import datasets
import evaluate

from pacer.evaluation.scoring.code import pass_at_1

DESCRIPTION = """Share of items whose generated program passes its unit tests, one program per item (pass@1). The code
is taken from the last fenced Python block of the answer, or continues the prompt. Programs run one process each in a
sandbox that the kernel enforces; where there is none, nothing runs."""

INPUTS = """
Args:
    predictions: list of texts written by the model: chat with fenced code, or the bare continuation of the prompt.
    references: list of items with the strings prompt, entry_point and test.
    sandbox: auto (in the sandbox or not at all), unsafe (a plain process where no sandbox works), off (no score).
    seconds: wall-clock limit of a program.
Returns:
    pass@1: share in [0, 1]; None where sandbox is off.
"""

CITATION = """@article{chen2021codex,
  title={Evaluating Large Language Models Trained on Code},
  author={Chen, Mark and Tworek, Jerry and Jun, Heewoo and Yuan, Qiming and others},
  journal={arXiv preprint arXiv:2107.03374},
  year={2021}
}"""


class HumanevalPass(evaluate.Metric):
    """pass@1 of HumanEval with one program per item."""

    def _info(self) -> evaluate.MetricInfo:
        item = {name: datasets.Value("string") for name in ("prompt", "entry_point", "test")}
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": datasets.Value("string"), "references": item}),
            reference_urls=["https://github.com/openai/human-eval"],
        )

    def _compute(
        self, predictions: list[str], references: list[dict[str, str]], sandbox: str = "auto", seconds: float = 5.0
    ) -> dict[str, float | None]:
        return {"pass@1": pass_at_1(predictions, references, seconds=seconds, sandbox=sandbox)}
