"""ROUGE-1, -2, -L and -Lsum as an `evaluate` module; `evaluate.load` takes the path of this file."""

from __future__ import annotations

import datasets
import evaluate

from pacer.evaluation.scoring.summaries import rouge

DESCRIPTION = """Mean F1 of ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum from the package rouge_score, words stemmed.
ROUGE-Lsum takes each line as a sentence: a text on a single line gets newlines between its sentences first, set by a
rule on punctuation (abbreviations and initials excepted); a text of several lines is taken as it is. The other three do
not depend on newlines."""

INPUTS = """
Args:
    predictions: list of summaries written by the model.
    references: list of reference summaries, one for each.
Returns:
    rouge1, rouge2, rougeL, rougeLsum: mean F1 in [0, 1].
"""

CITATION = """@inproceedings{lin2004rouge,
  title={{ROUGE}: A Package for Automatic Evaluation of Summaries},
  author={Lin, Chin-Yew},
  booktitle={Text Summarization Branches Out},
  pages={74--81},
  year={2004}
}"""


class RougeLsum(evaluate.Metric):
    """ROUGE of summaries, with sentences for Lsum."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": text, "references": text}),
            reference_urls=["https://pypi.org/project/rouge-score/"],
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float | None]:
        return rouge(predictions, references)
