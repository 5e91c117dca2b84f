"""Word and character error rate, by the Levenshtein distance."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from metaphrase.evaluation.metric_base import CorpusMetric, number_of_references


def count_edits(prediction: Sequence, reference: Sequence) -> tuple[int, int, int]:
    """Return the substitutions, insertions and deletions that turn a reference into a prediction.

    Their sum is the Levenshtein distance, with as few substitutions as possible. A row of the table is computed at once:
    insertions are a running minimum, substitutions a small surcharge on the cost. The difference of the lengths separates
    insertions from deletions.
    """
    numbers: dict[Any, int] = {}
    row_tokens, column_tokens = (
        np.fromiter((numbers.setdefault(token, len(numbers)) for token in tokens), dtype=np.int64)
        for tokens in (reference, prediction)
    )
    edit_cost = len(reference) + len(prediction) + 1  # more than the surcharge of all substitutions
    insertions = edit_cost * np.arange(len(prediction) + 1)
    costs = insertions
    for row_token in row_tokens:
        candidates = costs + edit_cost
        replaced = costs[:-1] + (column_tokens != row_token) * (edit_cost + 1)
        np.minimum(candidates[1:], replaced, out=candidates[1:])
        costs = np.minimum.accumulate(candidates - insertions) + insertions
    edits, substitutions = divmod(int(costs[-1]), edit_cost)
    surplus = len(prediction) - len(reference)
    return substitutions, (edits - substitutions + surplus) // 2, (edits - substitutions - surplus) // 2


class WordErrorRate(CorpusMetric):
    """Word edits over all lines, in percent of the words of the references. Words are split at spaces.

    Lower is better, and more than 100 is possible. The reference with the fewest edits counts, of equals the longest. An empty
    reference adds the words of the prediction as insertions; `empty_references` counts empty references. References without
    any word are refused.
    """

    unit = "word"

    @staticmethod
    def units(text: str) -> Sequence[str]:
        """Return the units of a text."""
        return text.split()

    def _compute(self, predictions, references, lowercase: bool = False) -> dict[str, Any]:
        totals, length, empty = np.zeros(3, dtype=np.int64), 0, 0
        for prediction, texts in zip(predictions, references, strict=True):
            units, *candidates = (self.units(text.lower() if lowercase else text) for text in (prediction, *texts))
            counted = [(count_edits(units, candidate), len(candidate)) for candidate in candidates]
            edits, chosen_length = min(counted, key=lambda pair: (sum(pair[0]), -pair[1]))
            totals, length, empty = totals + edits, length + chosen_length, empty + (chosen_length == 0)
        if length == 0:
            raise ValueError(
                f"`references` must hold at least one {self.unit}, got {len(references)} empty references."
            )
        substitutions, insertions, deletions = totals.tolist()
        case = "lc" if lowercase else "mixed"
        return {
            "score": 100 * int(totals.sum()) / length,
            "substitutions": substitutions,
            "insertions": insertions,
            "deletions": deletions,
            "ref_length": length,
            "empty_references": empty,
            "signature": f"nrefs:{number_of_references(references)}|case:{case}|unit:{self.unit}",
        }


class CharacterErrorRate(WordErrorRate):
    """Character edits (Unicode code points, spaces included), otherwise as `WordErrorRate`."""

    unit = "character"

    @staticmethod
    def units(text: str) -> Sequence[str]:
        return text
