"""Evaluation: loss and scores of a model on a test set."""

import logging
import math
import operator
import sys
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from metaphrase.data.collators import PairCollator, with_decoder_inputs
from metaphrase.evaluation.metrics import check_references, compute_metrics
from metaphrase.evaluation.significance import NUM_BOOTSTRAP_SAMPLES
from metaphrase.inference import Generator
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.modeling.pipeline_support import batches_by_length, longest_target
from metaphrase.tokenization import TextFrame, check_target_language, shorten

logger = logging.getLogger(__name__)


def corpus_loss(
    model: PreTrainedModel,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    batch_size: int = 64,
    max_tokens_per_batch: int = 8192,
) -> dict[str, float | None]:
    """Return the mean negative log-likelihood per target token (end-of-sequence tokens included), without label smoothing.

    Args:
        model: The model, in evaluation mode.
        sources: Ids of each source.
        targets: Ids of each target.
        batch_size: Most pairs in a batch.
        max_tokens_per_batch: Most tokens of both sides in a batch, with padding.

    Returns:
        `loss` in nats, its exponential `perplexity`, and `num_target_tokens`. A value that is not finite is None, with a
        warning.

    Raises:
        ValueError: If there are no pairs.
    """
    if not sources:
        raise ValueError("`sources` must not be empty, got no pairs.")
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
    # `math.exp` raises an error beyond this bound.
    perplexity = math.inf if loss >= math.log(sys.float_info.max) else math.exp(loss)
    return {"loss": _finite("loss", loss), "perplexity": _finite("perplexity", perplexity), "num_target_tokens": count}


def _finite(name: str, value: float) -> float | None:
    """Return a finite value, or None with a warning: JSON has neither NaN nor infinity."""
    if math.isfinite(value):
        return value
    logger.warning("The %s must be a finite number, got %s. It is written as null.", name, value)
    return None


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
) -> tuple[dict, list[str]]:
    """Decode a test set and score it.

    Args:
        generator: Model and tokenizers.
        sources: Source texts.
        targets: One target for each source, as in training. The loss is that of the targets.
        references: Texts for the scores; by default the targets as decoding writes them, with `pretokenized` pieces joined.
        metrics: Names of scores (see `metaphrase.evaluation.metrics`).
        metric_options: Options of each metric.
        generation_options: Arguments of `generate()`, over the generation config of the model.
        num_bootstrap_samples: Resamples for the 95 % interval of each score; 0 for no interval.
        show_progress: True for a bar, or lines without a terminal; None for a bar on a terminal only.
        on_decoded: Called with the decoded texts before scoring, so that an error in scoring loses no text.

    Returns:
        The content of `metrics.json`, and the decoded texts. Only a single torch model has a loss, not an ensemble or another
        engine. `num_truncated` counts truncated sources, and `num_truncated_references` targets whose loss stops at the length
        limit of the model. Scores are of the whole texts.

    Raises:
        ValueError: If the sides differ in length or are empty, or the references cannot be encoded without their language.
    """
    if len(sources) != len(targets) or not sources:
        raise ValueError(
            f"`sources` and `targets` must be equally many and not empty, got {len(sources)} and {len(targets)}."
        )
    references = generator.tokenizers.as_decoded(targets) if references is None else references
    if len(references) != len(targets):
        raise ValueError(f"`references` must be as many as `targets`, got {len(references)} and {len(targets)}.")
    # Decoding takes long: check first.
    check_references(references, metrics, "references")
    if generator.is_single:
        check_target_language(generator.tokenizers.target)
    generation_options = dict(generation_options or {})
    before, truncated_before = generator.num_unfinished, generator.num_truncated
    predictions = generator.generate(sources, show_progress=show_progress, **generation_options)
    if on_decoded is not None:
        on_decoded(predictions)
    result = {
        "scores": compute_metrics(predictions, references, metrics, metric_options, num_bootstrap_samples),
        "num_examples": len(sources),
        "num_unfinished": generator.num_unfinished - before,
        "generation": generation_settings(generator, generation_options),
    }
    if generator.num_truncated > truncated_before:
        result["num_truncated"] = generator.num_truncated - truncated_before
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
    """Return the settings that decoding used: the generation config of the model, the options over it, and `use_vmap` if true."""
    hidden = ("transformers_version", "use_cache", "return_dict_in_generate")
    config = {
        name: value
        for name, value in generator.model.generation_config.to_diff_dict().items()
        if name not in hidden and not name.startswith(("_", "output_")) and not name.endswith("token_id")
    }
    has_map = {"use_vmap": True} if generator.vocabulary_map is not None else {}
    return {"num_beams": 1, **config, **generation_options, **has_map}
