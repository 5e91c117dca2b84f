"""Dry run: estimate the needs of a recipe without training."""

import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel, set_seed

from metaphrase.data.collators import PackedCollator, PairCollator, with_decoder_inputs
from metaphrase.data.pairs import LENGTH_COLUMNS
from metaphrase.data.stages import StagedPairs
from metaphrase.modeling.compat import CHECKPOINTING
from metaphrase.training.adapters import is_adapted
from metaphrase.training.experiment import Experiment
from metaphrase.training.planning.batches import BatchShape, plan_batches, training_flops
from metaphrase.training.planning.estimate import RunEstimate, estimate_run

# Steps to time, fewer if they take longer than this.
TIMED_STEPS, TIMED_SECONDS = 12, 4.0
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
    tokenizers, encoded = experiment.prepare()
    train = encoded["train"]
    lengths = np.stack([np.asarray(train[side][:]) for side in LENGTH_COLUMNS], axis=1)
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
        devices=devices,
        flops_per_second=rate,
        staged=train if isinstance(train, StagedPairs) else None,
    )
    objective = getattr(train, "objective", None)
    if objective is not None and not objective.lengths_are_exact:
        note = "Tokens, and what follows from them, are the most that may come: the objective draws how long its pairs are."
        estimate.notes.append(note)
    return estimate


def _measured_rate(experiment: Experiment, model: PreTrainedModel, train, lengths: np.ndarray) -> float:
    """Return the FLOP per second of the first batches of an epoch, formed as the trainer does."""
    budget, arguments = experiment.recipe.max_tokens_per_batch, experiment.arguments
    is_packed = budget is not None and getattr(model, "supports_packing", False)
    multiple = experiment.pad_to_multiple_of
    collate = PackedCollator() if is_packed else PairCollator(model.config.pad_token_id or 0, multiple)
    planned = plan_batches(lengths, arguments, budget, 1, 1 if is_packed else multiple)
    batches = []
    for number in range(TIMED_STEPS + 1):
        # A corpus with too few batches repeats them.
        pairs = [train[index] for index in planned[number % len(planned)]]
        batch = collate([{name: pair[name] for name in ("input_ids", "labels")} for pair in pairs])
        batches.append(
            {
                name: value.to(arguments.device) if isinstance(value, torch.Tensor) else value
                for name, value in with_decoder_inputs(model, batch).items()
            }
        )
    if arguments.gradient_checkpointing:
        getattr(model, f"{CHECKPOINTING}_enable")()
    model.to(arguments.device)
    return measure_flops_per_second(model, batches, arguments.gradient_checkpointing, arguments.bf16)


def measure_flops_per_second(
    model: PreTrainedModel,
    batches: Sequence[Mapping[str, torch.Tensor]],
    is_checkpointed: bool = False,
    bf16: bool = False,
) -> float:
    """Return the median rate of real training steps by AdamW with a learning rate of 0, for `estimate_run`.

    Args:
        model: Model on its training device.
        batches: At least two batches on that device, with labels, as the trainer will form them. The first one warms up,
            and after `TIMED_SECONDS` the rest is left out.
        is_checkpointed: True if the model computes layers again in the backward pass.
        bf16: True to compute under autocast to bfloat16.
    """
    model.train()
    kind, rates = model.device.type, []
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The optimizer of a Trainer by default.
    optimizer = torch.optim.AdamW(weights, lr=0.0, weight_decay=0.0, fused=True)
    total = 0.0
    for batch in batches:
        if len(rates) > 3 and total > TIMED_SECONDS:
            break
        start = _now(kind)
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=bf16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = _now(kind) - start
        total += seconds
        rates.append(training_flops(model, [BatchShape.of_tensors(batch)], is_checkpointed) / seconds)
    return statistics.median(rates[1:])


def _now(kind: str) -> float:
    if kind != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
