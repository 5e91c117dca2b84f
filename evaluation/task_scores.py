"""Scores of a corpus whose lines may belong to tasks, and of a sample of the validation pairs while a model is trained."""

from collections.abc import Sequence

import datasets

from metaphrase.data.pairs import TASK_COLUMN
from metaphrase.evaluation.metrics import check_references, compute_metrics
from metaphrase.tokenization import TokenizerPair


class TaskScores:
    """The scores that a recipe asks for, of whole corpora and of each task in them."""

    def __init__(self, metrics: Sequence[str], bleu_tokenize: str | None = None):
        """Args:
        metrics: Keys of `METRICS`.
        bleu_tokenize: sacreBLEU's tokenizer; by default its own choice.
        """
        self.metrics = list(metrics)
        self.options = {} if bleu_tokenize is None else {"bleu": {"tokenize": bleu_tokenize}}

    def check(self, references: list[str], tasks: list[str], what: str) -> None:
        """Refuses before any work references that a score cannot be computed for.

        Args:
            references: One text for each line.
            tasks: The task of each line; empty where there are none.
            what: What the references are.

        Raises:
            ValueError: As `check_references` does.
        """
        check_references(references, self.metrics, what)
        for task, rows in _rows_by_task(tasks).items():
            check_references([references[row] for row in rows], self.metrics, f"{what} of task {task!r}")

    def compute(self, texts: Sequence[str], references: Sequence[str]) -> dict[str, dict]:
        """What `compute_metrics` returns."""
        return compute_metrics(texts, references, self.metrics, self.options)

    def compute_by_task(self, texts: list[str], references: list[str], tasks: list[str]) -> dict[str, dict]:
        """For each task, in the order in which they occur, what its lines score alone and how many there are."""
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
    """Validation pairs that are decoded and scored at each evaluation.

    Attributes:
        rows: Their rows in the validation pairs, ascending.
    """

    def __init__(
        self, pairs: datasets.Dataset, most: int | None, has_tasks: bool, tokenizers: TokenizerPair, scores: TaskScores
    ):
        """Chooses them, evenly spread.

        Args:
            pairs: All validation pairs.
            most: How many are chosen at most; by default all are.
            has_tasks: Whether pairs belong to tasks. Each has a pair then, however small its share, beyond `most` if need be.
            tokenizers: Of the model.
            scores: What is computed.
        """
        self.tokenizers, self.scores = tokenizers, scores
        self.rows = spread(len(pairs), most)
        of_rows = pairs[TASK_COLUMN][:] if has_tasks else []
        if has_tasks:
            first = {task: row for row, task in reversed(list(enumerate(of_rows)))}
            chosen = {of_rows[row] for row in self.rows}
            self.rows = sorted([*self.rows, *(row for task, row in first.items() if task not in chosen)])
        self.tasks = [of_rows[row] for row in self.rows] if has_tasks else []
        chosen = pairs.select(self.rows)
        self.sources = chosen["source"][:]
        self.references = tokenizers.as_decoded(chosen["target"][:])

    def check(self, what: str) -> None:
        """Refuses a sample that a score cannot be computed for, as `TaskScores.check` does."""
        self.scores.check(self.references, self.tasks, what)

    def __call__(self, decoded: list[list[int]], labels: list[list[int]]) -> dict[str, float]:
        """The scores by name, and those of a task under `<task>_<name>`.

        Args:
            decoded: What the model wrote for each pair, as token ids.
            labels: Not read: the references are texts that no tokenizer has touched.
        """
        texts = self.tokenizers.decode_targets(decoded)
        # As the finished model's texts are: the decoder is not asked about a source without a word.
        texts = [text if source.strip() else "" for text, source in zip(texts, self.sources, strict=True)]
        values = {name: result["score"] for name, result in self.scores.compute(texts, self.references).items()}
        for task, part in self.scores.compute_by_task(texts, self.references, self.tasks).items():
            values |= {f"{task}_{name}": result["score"] for name, result in part["scores"].items()}
        return values


def spread(rows: int, most: int | None) -> list[int]:
    """At most so many of the numbers below `rows`, evenly spread; `None` means all."""
    if most is None or most >= rows:
        return list(range(rows))
    return [place * rows // most for place in range(most)]
