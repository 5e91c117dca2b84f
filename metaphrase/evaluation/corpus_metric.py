"""Scores as metrics of the package `evaluate`, for loops that add batches and for `evaluate.combine`."""

from collections.abc import Sequence
from typing import Any

import evaluate
from datasets import Features, List, Value

from metaphrase.evaluation.metrics import METRICS, References, compute_metrics


class CorpusMetric(evaluate.Metric):
    """A score of `METRICS` with `add`, `add_batch` and `compute` of `evaluate`: `CorpusMetric("bleu")`.

    Each reference is a text, or a list of texts. Options of the score, such as `tokenize` of BLEU, go to `compute`. Texts stay
    in memory, except with `num_process` above 1.

    Raises:
        MetaphraseError: From `compute`, if the name is unknown.
    """

    def __init__(self, config_name: str = "bleu", **kwargs):
        kwargs.setdefault("keep_in_memory", kwargs.get("num_process", 1) == 1)
        super().__init__(config_name, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        forms = (Value("string"), List(Value("string")))
        return evaluate.MetricInfo(
            description=f"Corpus scores: {', '.join(METRICS)}.",
            citation="",
            features=[Features({"predictions": Value("string"), "references": form}) for form in forms],
        )

    def _compute(self, predictions: Sequence[str], references: References, **options) -> dict[str, Any]:
        results = compute_metrics(predictions, references, [self.config_name], {self.config_name: options})
        return results[self.config_name]
