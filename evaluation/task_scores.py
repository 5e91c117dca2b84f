"""Scores by task, and scores of a validation sample during training."""

from collections.abc import Sequence

import datasets

from metaphrase.data.pairs import TASK_COLUMN
from metaphrase.evaluation.metrics import check_references, compute_metrics, metric_options
from metaphrase.tokenization import TokenizerPair


class TaskScores:
    """The scores of a recipe, for whole corpora and for each task."""

    def __init__(self, metrics: Sequence[str], bleu_tokenize: str | None = None):
        """Args:
        metrics: Keys of `METRICS`.
        bleu_tokenize: Tokenizer of sacreBLEU; None for its default.
        """
        self.metrics = list(metrics)
        self.options = metric_options(metrics, bleu_tokenize)

    def check(self, references: list[str], tasks: list[str], what: str) -> None:
        """Refuse references that have no score, before any work.

        Args:
            references: One text for each line.
            tasks: The task of each line; empty without tasks.
            what: Description of the references for the message.

        Raises:
            ValueError: As `check_references`.
        """
        check_references(references, self.metrics, what)
        for task, rows in _rows_by_task(tasks).items():
            check_references([references[row] for row in rows], self.metrics, f"{what} of task {task!r}")

    def compute(self, texts: Sequence[str], references: Sequence[str]) -> dict[str, dict]:
        """Return `compute_metrics` of the whole corpus."""
        return compute_metrics(texts, references, self.metrics, self.options)

    def compute_by_task(self, texts: list[str], references: list[str], tasks: list[str]) -> dict[str, dict]:
        """Return scores and number of lines of each task, in the order of the lines."""
        results = {}
        for task, rows in _rows_by_task(tasks).items():
            pair = [[side[row] for row in rows] for side in (texts, references)]
            results[task] = {"scores": self.compute(*pair), "num_examples": len(rows)}
        return results


def _rows_by_task(tasks: list[str]) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for row, task in enumerate(tasks):
        rows.setdefault(task, []).append(row)
    return rows


class ValidationSample:
    """Validation pairs that each evaluation decodes and scores.

    Attributes:
        rows: Ascending rows of the validation pairs.
        exact: Share of the last outputs that equal their reference; None before an evaluation.
        unfinished: Share of the last outputs that are as long as their reference, or longer, and have no end.
    """

    exact: float | None = None
    unfinished = 0.0

    def __init__(
        self, pairs: datasets.Dataset, most: int | None, has_tasks: bool, tokenizers: TokenizerPair, scores: TaskScores
    ):
        """Choose evenly spread pairs.

        Args:
            pairs: All validation pairs.
            most: Most pairs to choose; None for all.
            has_tasks: True if pairs belong to tasks. Each task then has at least one pair, beyond `most` if need be.
            tokenizers: Tokenizers of the model.
            scores: The scores to compute.
        """
        self.tokenizers, self.scores = tokenizers, scores
        self.rows = spread(len(pairs), most)
        if has_tasks:
            rows_by_task = _rows_by_task(pairs[TASK_COLUMN][:])
            self.rows += [rows[0] for rows in rows_by_task.values() if not set(rows) & set(self.rows)]
            self.rows.sort()
        chosen = pairs.select(self.rows)
        self.tasks = chosen[TASK_COLUMN][:] if has_tasks else []
        self.sources = chosen["source"][:]
        self.references = tokenizers.as_decoded(chosen["target"][:])

    def check(self, what: str) -> None:
        """Refuse a sample that has no score, as `TaskScores.check`."""
        self.scores.check(self.references, self.tasks, what)

    def __call__(self, decoded: list[list[int]], labels: list[list[int]]) -> dict[str, float]:
        """Return the scores by name, and scores of a task under `<task>_<name>`.

        Args:
            decoded: Token ids that the model generated for each pair.
            labels: Only their lengths are read, because the references are the original texts.
        """
        texts = self.tokenizers.decode_targets(decoded)
        # As a generator does, which skips empty sources.
        texts = [text if source.strip() else "" for text, source in zip(texts, self.sources, strict=True)]
        self.exact = sum(map(str.__eq__, texts, self.references)) / len(texts)
        eos, rows = self.tokenizers.target.eos_token_id, zip(decoded, labels, strict=True)
        # A limit below the length of the reference would cut a perfect output.
        self.unfinished = sum(ids[-1:] != [eos] and len(ids) >= len(label) for ids, label in rows) / len(decoded)
        values = {name: result["score"] for name, result in self.scores.compute(texts, self.references).items()}
        for task, part in self.scores.compute_by_task(texts, self.references, self.tasks).items():
            values |= {f"{task}_{name}": result["score"] for name, result in part["scores"].items()}
        return values


def spread(rows: int, most: int | None) -> list[int]:
    """Return at most `most` evenly spread numbers below `rows`; None means all."""
    if most is None or most >= rows:
        return list(range(rows))
    return [number * rows // most for number in range(most)]
