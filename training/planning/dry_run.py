"""Dry run: what a recipe would need, found without training."""

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
# A model of more is not made only to be timed.
MAX_TIMED_PARAMETERS = 300_000_000


def dry_run(experiment: Experiment, devices: int | None = None) -> RunEstimate:
    """What `experiment.train()` would need. Corpus, tokenizer and batches are made, and nothing is written.

    The memory is counted for a model that is not made. For the time, a model that is not too large makes a few steps, whose speed
    is taken for that of the whole run, evaluations aside.

    Args:
        experiment: Not trained yet.
        devices: Plans for so many; by default those of this run.

    Raises:
        ValueError: If the training pairs are streamed, so that their lengths are not known.
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
        # Adapters stand in the place of the layers that they wrap.
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
    """FLOP per second of a few batches such as the trainer forms, taken from the beginning of an epoch."""
    recipe, arguments = experiment.recipe, experiment.arguments
    is_packed = recipe.max_tokens_per_batch is not None and getattr(model, "supports_packing", False)
    if recipe.max_tokens_per_batch is None:
        size = arguments.train_batch_size
        rows = [range(start, min(start + size, len(train))) for start in range(0, len(train), size)]
    else:
        multiple = 1 if is_packed else experiment.pad_to_multiple_of
        rows = list(TokenBudgetSampler(lengths, recipe.max_tokens_per_batch, arguments.seed, length_multiple=multiple))
    # A corpus of one batch makes it again and again.
    rows = [rows[number % len(rows)] for number in range(TIMED_STEPS + 1)]
    collate = (
        PackedCollator() if is_packed else PairCollator(model.config.pad_token_id or 0, experiment.pad_to_multiple_of)
    )
    names = ("input_ids", "labels")
    batches = [collate([{name: train[row][name] for name in names} for row in batch]) for batch in rows]
    batches = [with_decoder_inputs(model, batch) for batch in batches]
    device = arguments.device
    batches = [
        {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for batch in batches
    ]
    if arguments.gradient_checkpointing:
        # Later versions of transformers warn of the first name.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return measure_flops_per_second(
        model.to(device), batches, arguments.gradient_checkpointing, bf16=bool(arguments.bf16)
    )
