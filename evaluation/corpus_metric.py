"""Base class of corpus scores, and the checks of their texts and options."""

import inspect
import os
from collections.abc import Collection, Sequence
from typing import Any

import evaluate
from datasets import Features, List, Value

from metaphrase.evaluation.significance import SegmentStatistics
from metaphrase.storage.hints import did_you_mean

References = Sequence[str] | Sequence[Sequence[str]]
_COLUMNS = ("predictions", "references")


def check_choice(field: str, value: Any, choices: Collection[str]) -> None:
    """Raise a `ValueError`, with the nearest choice as a hint, if a value is not one of the choices."""
    if value not in choices:
        hint = did_you_mean(value, choices, cutoff=0.4)
        raise ValueError(f"{field} must be one of {', '.join(choices)}, got {value!r}.{hint}")


def _as_reference_lists(predictions: Sequence[str], references: References) -> list[list[str]]:
    """Check both columns and return one list of references for each prediction.

    Raises:
        ValueError: If a column is missing or empty, the lengths differ, or an entry is not text.
    """
    for name, column in zip(_COLUMNS, (predictions, references), strict=True):
        if column is None or isinstance(column, str):
            raise ValueError(f"`{name}` must be a sequence of texts, got {type(column).__name__}.")
    if not len(predictions) == len(references) > 0:
        raise ValueError(
            "`predictions` and `references` must hold the same number of entries, at least one, "
            f"got {len(predictions)} and {len(references)}."
        )
    is_single = isinstance(references[0], str)
    for index, (prediction, entry) in enumerate(zip(predictions, references, strict=True)):
        if not isinstance(prediction, str):
            raise ValueError(f"`predictions` must hold texts, got {prediction!r} at index {index}.")
        is_list = isinstance(entry, list | tuple) and len(entry) > 0 and all(isinstance(text, str) for text in entry)
        if not (isinstance(entry, str) if is_single else is_list):
            kind = "texts" if is_single else "non-empty lists of texts"
            raise ValueError(f"`references` must hold {kind} only, like its first entry, got {entry!r} at {index}.")
    return [[entry] if is_single else list(entry) for entry in references]


def number_of_references(references: list[list[str]]) -> str:
    """Return the number of references for a signature."""
    counts = {len(texts) for texts in references}
    return str(counts.pop()) if len(counts) == 1 else "var"


class CorpusMetric(evaluate.Metric):
    """A corpus score.

    `references` holds one text, or a list of texts, for each prediction. An empty prediction is valid. Everything stays in
    memory, except with `num_process` above 1.
    """

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("keep_in_memory", kwargs.get("num_process", 1) == 1)
        super().__init__(*args, **kwargs)

    @classmethod
    def option_names(cls) -> list[str]:
        """Return the options of `compute`."""
        return [name for name in inspect.signature(cls._compute).parameters if name not in ("self", *_COLUMNS)]

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=inspect.getdoc(type(self)),
            citation="",
            inputs_description=inspect.getdoc(CorpusMetric),
            features=Features({"predictions": Value("string"), "references": List(Value("string"))}),
        )

    def _build_data_dir(self) -> str:
        # The base class makes a folder in the home folder even if it keeps everything in memory.
        if self.keep_in_memory:
            return os.path.join(self._data_dir_root, self.name, self.config_name)
        return super()._build_data_dir()

    def compute(self, *, predictions=None, references=None, **kwargs) -> dict[str, Any] | None:
        """Return the score of all added texts and of these."""
        for name in kwargs:
            check_choice(f"An option of `{type(self).__name__}`", name, self.option_names())
        if predictions is None and references is None and self.writer is None:
            raise ValueError("`predictions` and `references` must hold at least one entry each, got 0 and 0.")
        return super().compute(predictions=predictions, references=references, **kwargs)

    def segments(self, predictions: Sequence[str], references: References, **options) -> SegmentStatistics:
        """Return the statistics of each line, for intervals and tests. The options are those of `compute`."""
        return self._segments(predictions, _as_reference_lists(predictions, references), **options)

    def add_batch(self, *, predictions=None, references=None, **kwargs) -> None:
        """Add predictions and their references."""
        references = _as_reference_lists(predictions, references)
        super().add_batch(predictions=list(predictions), references=references, **kwargs)

    def add(self, *, prediction=None, reference=None, **kwargs) -> None:
        """Add one prediction and its reference or references."""
        self.add_batch(predictions=[prediction], references=[reference], **kwargs)
