"""Dry run: estimate the needs of a recipe without training."""

import dataclasses
import logging

import numpy as np
import torch
from transformers import set_seed

from metaphrase.data.collators import PackedCollator, PairCollator, with_decoder_inputs
from metaphrase.data.token_budget import TokenBudgetSampler
from metaphrase.training.adapters import is_adapted
from metaphrase.training.experiment import Experiment
from metaphrase.training.planning.compute import measure_flops_per_second
from metaphrase.training.planning.estimate import RunEstimate, estimate_run

logger = logging.getLogger(__name__)

TIMED_STEPS = 3
# Larger models are not made for a timing.
MAX_TIMED_PARAMETERS = 300_000_000


def dry_run(experiment: Experiment, devices: int | None = None) -> RunEstimate:
    """Estimate the needs of `experiment.train()` from its corpus, tokenizer and batches. Nothing is written.

    Memory is counted on a model without weights. The hours follow from a few steps of a real model, unless it is too large;
    evaluations are not counted.

    Args:
        experiment: An experiment before training.
        devices: Number of devices to plan for; those of this run by default.

    Raises:
        ValueError: If the training pairs are streamed, so that their lengths are unknown.
    """
    recipe, arguments = experiment.recipe, experiment.arguments
    if recipe.streaming:
        raise ValueError("`streaming` must be false for a dry run: the lengths of a stream are not known.")
    set_seed(arguments.seed)
    experiment.corpus.load()
    tokenizers = experiment.make_tokenizers()
    train = experiment.corpus.encode(tokenizers)["train"]
    lengths = np.stack([np.asarray(train[side][:]) for side in ("source_length", "target_length")], axis=1)
    with torch.device("meta"):
        model = experiment.make_model(tokenizers, with_weights=False)
    if is_adapted(model):
        # Adapters replace the layers that they wrap.
        model = model.get_base_model()
    rate = None
    if model.num_parameters() <= MAX_TIMED_PARAMETERS and devices is None and arguments.world_size == 1:
        rate = _measured_rate(experiment, experiment.make_model(tokenizers), train, lengths)
    estimate = estimate_run(
        model,
        arguments,
        lengths,
        max_tokens_per_batch=recipe.max_tokens_per_batch,
        pad_to_multiple_of=experiment.pad_to_multiple_of,
        r_drop_start_step=recipe.r_drop_start_step if recipe.r_drop_alpha > 0 else None,
        is_averaged=recipe.exponential_average_decay is not None,
        devices=devices,
        flops_per_second=rate,
    )
    objective = getattr(train, "objective", None)
    if objective is not None and not objective.lengths_are_exact:
        note = "Tokens, and what follows from them, are the most that may come: the objective draws how long its pairs are."
        estimate = dataclasses.replace(estimate, notes=[*estimate.notes, note])
    return estimate


def _measured_rate(experiment: Experiment, model, train, lengths: np.ndarray) -> float:
    """Return the FLOP per second of the first batches of an epoch, formed as the trainer does."""
    recipe, arguments = experiment.recipe, experiment.arguments
    is_packed = recipe.max_tokens_per_batch is not None and getattr(model, "supports_packing", False)
    if recipe.max_tokens_per_batch is None:
        size = arguments.train_batch_size
        rows = [range(start, min(start + size, len(train))) for start in range(0, len(train), size)]
    else:
        multiple = 1 if is_packed else experiment.pad_to_multiple_of
        rows = list(TokenBudgetSampler(lengths, recipe.max_tokens_per_batch, arguments.seed, length_multiple=multiple))
    # A corpus with too few batches repeats them.
    rows = [rows[number % len(rows)] for number in range(TIMED_STEPS + 1)]
    collate = (
        PackedCollator() if is_packed else PairCollator(model.config.pad_token_id or 0, experiment.pad_to_multiple_of)
    )
    names = ("input_ids", "labels")
    batches = []
    for indices in rows:
        batch = collate([{name: train[index][name] for name in names} for index in indices])
        batch = with_decoder_inputs(model, batch)
        batches.append(
            {
                name: value.to(arguments.device) if isinstance(value, torch.Tensor) else value
                for name, value in batch.items()
            }
        )
    if arguments.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return measure_flops_per_second(
        model.to(arguments.device), batches, arguments.gradient_checkpointing, bf16=bool(arguments.bf16)
    )
