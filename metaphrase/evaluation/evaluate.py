"""Scores of a model: of a test set, and of the validation sample and the tasks of a run."""

import collections
import logging
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import torch
from transformers import PreTrainedModel

from metaphrase.data.collators import PairCollator, with_decoder_inputs
from metaphrase.data.pairs import TASK_COLUMN
from metaphrase.errors import MetaphraseError
from metaphrase.evaluation.metrics import NUM_BOOTSTRAP_SAMPLES, compute_metrics, metric_options
from metaphrase.inference import Generator
from metaphrase.inference.batches import longest_target
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.tokenization import TextFrame, TokenizerPair, check_target_language, shorten
from metaphrase.tokenization.texts import batches_by_length

logger = logging.getLogger(__name__)


def corpus_loss(
    model: PreTrainedModel,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    batch_size: int = 64,
    max_tokens_per_batch: int = 8192,
) -> dict[str, float | None]:
    """Return `loss`, its exponential `perplexity`, and `num_target_tokens`.

    The loss is the mean negative log-likelihood per target token, end-of-sequence tokens included, in nats, without label
    smoothing. A value that is not finite, which JSON lacks, is None, with a warning.
    """
    collate = PairCollator(model.config.pad_token_id or 0)
    lengths = [len(source) + len(target) for source, target in zip(sources, targets, strict=True)]
    total, count = 0.0, 0
    with torch.inference_mode():
        for batch in batches_by_length(lengths, batch_size, max_tokens_per_batch):
            inputs = collate([{"input_ids": sources[index], "labels": targets[index]} for index in batch])
            inputs = with_decoder_inputs(model, inputs)
            loss = model(**{name: tensor.to(model.device) for name, tensor in inputs.items()}).loss
            num_labels = int((inputs["labels"] != IGNORED_LABEL).sum())
            total, count = total + loss.item() * num_labels, count + num_labels
    loss = total / count
    # `math.exp` raises an error where the result is infinite.
    perplexity = torch.tensor(loss, dtype=torch.float64).exp().item()
    values: dict[str, float | None] = {"loss": loss, "perplexity": perplexity}
    for name, value in values.items():
        if not math.isfinite(value):
            logger.warning("The %s must be a finite number, got %s. It is written as null.", name, value)
            values[name] = None
    return values | {"num_target_tokens": count}


def evaluate_generator(
    generator: Generator,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    references: Sequence[str] | None = None,
    metrics: Sequence[str],
    metric_options: dict[str, dict] | None = None,
    generation_options: dict | None = None,
    num_bootstrap_samples: int = NUM_BOOTSTRAP_SAMPLES,
    show_progress: bool | None = None,
    on_decoded: Callable[[list[str]], object] | None = None,
    judges: Sequence[Any] = (),
) -> tuple[dict, list[str]]:
    """Generate targets for a test set and score them.

    Args:
        targets: One target for each source, as in training, for the loss.
        references: Texts for the scores; by default the targets as decoding writes them, with `pretokenized` pieces joined.
        generation_options: Arguments of `generate()`, over the generation config of the model. With `num_return_sequences` K
            above 1, the first candidate has the scores, and `exact_match@K` is the share of references among the candidates.
        num_bootstrap_samples: Resamples for the 95 % interval of each score; 0 for no interval.
        show_progress: True for a bar, or lines without a terminal; None for a bar on a terminal only.
        on_decoded: Called with the targets of the model before scoring, so that an error in scoring loses no text.
        judges: More scores, each a `metaphrase.analysis.judges.Judge`.

    Returns:
        The content of `metrics.json`, and the targets of the model. Only a single torch model has a loss, not an ensemble or
        another engine. `num_truncated` counts truncated sources, and `num_truncated_references` targets whose loss stops at the
        length limit of the model. Scores are of the whole texts.

    Raises:
        MetaphraseError: If the texts differ in number or are none, a score is unknown, or the references cannot be encoded
            without their language.
    """
    references = generator.tokenizers.as_decoded(targets) if references is None else references
    if not len(sources) == len(targets) == len(references) > 0:
        counts = f"{len(sources)}, {len(targets)} and {len(references)}"
        raise MetaphraseError(f"Sources, targets and references must be equally many and not empty, got {counts}.")
    # Generation takes long: check first.
    TaskScores(metrics)
    if generator.is_single:
        check_target_language(generator.tokenizers.target)
    generation_options = dict(generation_options or {})
    before, truncated_before = generator.num_unfinished, generator.num_truncated
    options = {"num_return_sequences": 1, "return_scores": False} | generation_options
    rows = generator.generate_n_best(sources, show_progress=show_progress, **options)
    candidates = [[scored.text for scored in row] for row in rows]
    predictions = [row[0] for row in candidates]
    if on_decoded is not None:
        on_decoded(predictions)
    scores = compute_metrics(predictions, references, metrics, metric_options, num_bootstrap_samples)
    for judge in judges:
        scores[judge.name] = judge.segments(sources, predictions, references).summary(num_bootstrap_samples)
    if (count := len(candidates[0])) > 1:
        # A reference matches one of its candidates, as a prediction matches one of its references.
        names = ["exact_match"]
        [match] = compute_metrics(references, candidates, names, metric_options, num_bootstrap_samples).values()
        signature = match["signature"].replace(f"nrefs:{count}", f"nrefs:1|candidates:{count}")
        scores[f"exact_match@{count}"] = match | {"signature": signature}
    result = {
        "scores": scores,
        "num_examples": len(sources),
        "num_unfinished": generator.num_unfinished - before,
        "generation": generation_settings(generator, generation_options),
    }
    if count := generator.num_truncated - truncated_before:
        result["num_truncated"] = count
    if generator.is_single:
        encode = generator.tokenizers.encode_targets
        end, limit, whole = TextFrame.of(encode).end, longest_target(generator.model), encode(list(targets))
        labels = [shorten(ids, limit, end) for ids in whole]
        if count := sum(map(operator.ne, whole, labels)):
            result["num_truncated_references"] = count
        limits = {"batch_size": generator.batch_size, "max_tokens_per_batch": generator.max_tokens_per_batch}
        result.update(corpus_loss(generator.model, generator.encode(list(sources)), labels, **limits))
    return result, predictions


def generation_settings(generator: Generator, generation_options: dict) -> dict:
    """Return the settings of the search: the generation config of the model, the options over it, and `use_vmap` if true."""
    hidden = re.compile("transformers_version|use_cache|return_dict_in_generate|_.*|output_.*|.*token_id")
    settings = generator.model.generation_config.to_diff_dict()
    config = {name: value for name, value in settings.items() if not hidden.fullmatch(name)}
    has_map = {"use_vmap": True} if generator.vocabulary_map is not None else {}
    return {"num_beams": 1, **config, **generation_options, **has_map}


class TaskScores:
    """The scores of a recipe, for whole corpora and for each task."""

    def __init__(self, metrics: Sequence[str], bleu_tokenize: str | None = None):
        """Check names and tokenizer, as `metric_options`."""
        self.metrics = list(metrics)
        self.options = metric_options(metrics, bleu_tokenize)

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
    rows = collections.defaultdict(list)
    for row, task in enumerate(tasks):
        rows[task].append(row)
    return rows


class ValidationSample:
    """Validation pairs for which each evaluation generates and scores targets.

    Attributes:
        rows: Ascending rows of the validation pairs.
    """

    def __init__(
        self, pairs: datasets.Dataset, most: int | None, has_tasks: bool, tokenizers: TokenizerPair, scores: TaskScores
    ):
        """Choose at most `most` evenly spread pairs; None means all. Each task has a pair, beyond `most` if need be."""
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

    def __call__(self, decoded: list[list[int]], labels: list[list[int]]) -> dict[str, float]:
        """Return the scores of generated ids by name, and scores of a task under `<task>_<name>`.

        The labels are not read, because the references are the original texts.
        """
        texts = self.tokenizers.decode_targets(decoded)
        # Leave empty sources empty: a generator skips them.
        texts = [text if source.strip() else "" for text, source in zip(texts, self.sources, strict=True)]
        values = {name: result["score"] for name, result in self.scores.compute(texts, self.references).items()}
        for task, part in self.scores.compute_by_task(texts, self.references, self.tasks).items():
            values |= {f"{task}_{name}": result["score"] for name, result in part["scores"].items()}
        return values


def spread(rows: int, most: int | None) -> list[int]:
    """Return at most `most` evenly spread numbers below `rows`; None means all."""
    most = rows if most is None else min(most, rows)
    return [number * rows // most for number in range(most)]
