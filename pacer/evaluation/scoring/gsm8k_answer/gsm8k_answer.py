"""GSM8K exact answer as an `evaluate` module; `evaluate.load` takes the path of this file."""

from __future__ import annotations

import datasets
import evaluate

from pacer.evaluation.scoring.answers import exact_answers

DESCRIPTION = """Share of answers whose final number equals the reference's, compared as decimals. Strict reads the
number right after the last "####"; flexible also reads boxed and stated answers, else the last number of the text."""

INPUTS = """
Args:
    predictions: list of texts written by the model.
    references: list of GSM8K answers, each ending in "#### <number>".
Returns:
    exact_strict, exact_flexible: shares in [0, 1].
"""

CITATION = """@article{cobbe2021gsm8k,
  title={Training Verifiers to Solve Math Word Problems},
  author={Cobbe, Karl and Kosaraju, Vineet and Bavarian, Mohammad and Chen, Mark and Jun, Heewoo and others},
  journal={arXiv preprint arXiv:2110.14168},
  year={2021}
}"""


class Gsm8kAnswer(evaluate.Metric):
    """Exact answers of GSM8K, strict and flexible."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": text, "references": text}),
            reference_urls=["https://github.com/openai/grade-school-math"],
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float | None]:
        return exact_answers(predictions, references)
