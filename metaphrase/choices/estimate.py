"""Estimate of a run before it starts: parameters, memory per device, tokens, steps and hours."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, TrainingArguments, set_seed

from metaphrase.choices import memory
from metaphrase.data.collators import PackedCollator, PairCollator, with_decoder_inputs
from metaphrase.data.pairs import LENGTH_COLUMNS, WEIGHT_COLUMN, data_seed
from metaphrase.data.token_budget import LengthGroupedSampler, TokenBudgetSampler
from metaphrase.evaluation.evaluate import spread
from metaphrase.modeling import MetaphraseConfig
from metaphrase.training.distributed import from_first_process, is_adapted
from metaphrase.training.experiment import Experiment, make_arguments, make_reward, pad_to_multiple_of
from metaphrase.training.model_setup import Data, make_model
from metaphrase.training.recipe.recipe import CHECKPOINTING, Recipe
from metaphrase.training.training_loss import TrainingLoss, smooths_labels, weights_of_labels

_ENCODED_PAIRS = 20_000  # pairs of a stream that are encoded to count their tokens
# Steps to time, fewer if they take longer than two seconds, and pairs from which their batches are formed.
TIMED_STEPS, _PLANNED_PAIRS = 12, 20_000
# A CPU computes 16 times as many tokens as fast: within 10 %, networks of width 128 and 512, one core.
_TIMED_TOKENS = 1024
_NOTE_ON_PROCESS = (
    "A process on a CPU takes half a GiB before its first tensor, and its heap up to 1.8 times as much as its tensors."
)
_NOTE_ON_FSDP = "accelerate shares weights by FSDP on accelerators alone: on a CPU each process holds all of them."


@dataclass(frozen=True)
class RunEstimate:
    """Needs of a run. Bytes are those of one device, batches those of all devices. Tokens do not count padding.
    Those of an objective that draws how long its pairs are, such as `ul2`, are the most that may come.

    Attributes:
        largest_batch: The batch that needs most memory. `activations` are its bytes.
        other_peak: `peak`, the maximum bytes of a step, with checkpoints for a run without them, and the other way round.
        padding_share: Share of computed cells that hold no token, from 0 to 1.
        hours: Duration of the run; None without a rate.
    """

    parameters: int
    trained_parameters: int
    precision: memory.Precision
    sharding: memory.Sharding
    state: memory.StateMemory
    largest_batch: memory.BatchShape
    activations: memory.ActivationEstimate
    peak: int
    other_peak: int
    pairs: int
    source_tokens: int
    target_tokens: int
    padding_share: float
    batches_per_epoch: int
    steps_per_epoch: int
    steps: int
    hours: float | None
    notes: list[str]

    def __str__(self) -> str:
        """Return a table with one line per quantity."""
        time = "unknown"
        if self.hours is not None:
            time = f"{self.hours:,.1f} hours" if self.hours >= 1 else f"{60 * self.hours:.1f} minutes"
        state, batch = self.state, self.largest_batch
        kind, other = ("with", "without") if self.activations.is_checkpointed else ("without", "with")
        sizes = {
            "weights": state.weights,
            "weights cast by autocast": state.cast_weights,
            "gathered weights": state.gathered_weights,
            "gradients": state.gradients,
            "gradients on their way": state.buffers,
            "optimizer": state.optimizer,
            f"activations, {kind} checkpoints": self.activations.kept_bytes,
            "workspace of the loss": self.activations.loss_workspace,
            "workspace of a layer": self.activations.backward_workspace,
        }
        tokens = f"{batch.source_tokens:,} source and {batch.target_tokens:,} target tokens"
        rows = [
            ("parameters", f"{self.parameters:,}"),
            ("  trained", f"{self.trained_parameters:,}"),
            ("", ""),
            ("pairs", f"{self.pairs:,}"),
            ("tokens for each epoch", f"{self.source_tokens:,} source, {self.target_tokens:,} target"),
            ("padding", f"{100 * self.padding_share:.1f} %"),
            ("batches for each epoch", f"{self.batches_per_epoch:,}"),
            ("steps", f"{self.steps:,}, {self.steps_per_epoch:,} for each epoch"),
            ("", ""),
            ("memory of each device", str(self.sharding)),
            *((f"  {name}", _format_bytes(size)) for name, size in sizes.items() if size),
            ("  most at a time", _format_bytes(self.peak)),
            (f"  most {other} checkpoints", _format_bytes(self.other_peak)),
            ("  largest batch", f"{batch.pairs:,} pairs, {tokens}"),
            ("", ""),
            ("time", time),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}".rstrip() for name, value in rows]
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])


def _format_bytes(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def plan_batches(
    lengths: np.ndarray,
    arguments: TrainingArguments,
    max_tokens_per_batch: int | None,
    devices: int,
    length_multiple: int = 1,
) -> list[list[int]]:
    """Return the batches that the trainer forms of the first epoch, of all devices. `length_multiple` rounds widths up."""
    seed = data_seed(arguments)
    if max_tokens_per_batch is not None:
        sampler = TokenBudgetSampler(lengths, max_tokens_per_batch, seed, devices, length_multiple=length_multiple)
        # Indices beyond the end repeat a pair to fill up a batch.
        return [[index % len(lengths) for index in batch] for batch in sampler.epoch_batches(0)]
    rows = arguments.per_device_train_batch_size
    if arguments.train_sampling_strategy == "group_by_length":
        order = list(LengthGroupedSampler(lengths.sum(axis=1).tolist(), rows, seed))
    else:
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    batches = [order[start : start + rows] for start in range(0, len(order), rows)]
    # Dropping the last leaves full batches alone, equally many on each device.
    return batches[: len(order) // rows // devices * devices] if arguments.dataloader_drop_last else batches


def estimate_run(
    model: PreTrainedModel,
    arguments: TrainingArguments,
    lengths: np.ndarray | Sequence[Sequence[int]],
    *,
    max_tokens_per_batch: int | None = None,
    pad_to_multiple_of: int = 1,
    r_drop_start_step: int | None = None,
    devices: int | None = None,
    on_accelerator: bool | None = None,
    tokens_per_second: float | None = None,
    scale: float = 1.0,
) -> RunEstimate:
    """Estimate a run from its model, which may be on the meta device, its arguments and the lengths of its pairs.

    Args:
        lengths: Tokens of source and target of each training pair, shape (pairs, 2).
        max_tokens_per_batch: Token budget per device; None for `per_device_train_batch_size` pairs.
        pad_to_multiple_of: Multiple that the collator rounds widths up to, if batches are not packed.
        r_drop_start_step: Steps before R-Drop begins; None without R-Drop.
        devices: Number of devices to plan for; those of this run by default.
        on_accelerator: True to plan for an accelerator; by default, the device of the run decides.
        tokens_per_second: Rate of one device, padding counted, stated or measured.
        scale: Number of training pairs for each pair of `lengths`, which are those of a sample.

    Raises:
        MetaphraseError: If the budget cannot hold the longest pair.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    sharding = memory.Sharding.of(arguments, devices)
    is_packed = max_tokens_per_batch is not None and getattr(model, "supports_packing", False)
    multiple = 1 if is_packed else pad_to_multiple_of
    batches = plan_batches(lengths, arguments, max_tokens_per_batch, sharding.devices, multiple)
    padded = -(-lengths // multiple) * multiple
    times = 1 if r_drop_start_step is None else 2  # R-Drop passes each batch twice
    shapes = [memory.BatchShape.of(*padded[times * batch].T, is_packed) for batch in batches]
    source_tokens, target_tokens = (round(scale * count) for count in lengths.sum(axis=0).tolist())
    computed = scale / times * sum(shape.source_tokens + shape.target_tokens for shape in shapes)
    batches_per_epoch = round(scale * len(batches))
    steps_per_epoch = math.ceil(math.ceil(batches_per_epoch / sharding.devices) / arguments.gradient_accumulation_steps)
    steps = arguments.max_steps if arguments.max_steps > 0 else math.ceil(arguments.num_train_epochs * steps_per_epoch)
    passes = steps if r_drop_start_step is None else steps + max(0, steps - r_drop_start_step)
    on_accelerator = arguments.device.type != "cpu" if on_accelerator is None else on_accelerator
    stored = next(iter(model.parameters())).element_size()
    # `accelerate launch` sets `mixed_precision`.
    is_half = arguments.bf16 or arguments.fp16 or getattr(arguments, "mixed_precision", "no") in ("bf16", "fp16")
    compute = 2 if is_half else stored
    # FSDP and DeepSpeed convert weights and states to half precision; autocast keeps states in float32.
    precision = memory.Precision(compute, stored if sharding.engine == "ddp" else compute, on_accelerator)
    # transformers has two names for it, and FSDP has a switch of its own.
    fsdp_switch = (arguments.fsdp_plugin_args or {}).get("activation_checkpointing")
    is_checkpointed = any((getattr(arguments, CHECKPOINTING), arguments.gradient_checkpointing, fsdp_switch))
    optimizer, remark = memory.optimizer_bytes(model, arguments)
    state = memory.estimate_states(model, optimizer, precision, sharding, arguments.gradient_accumulation_steps > 1)
    # The batch that needs most memory is among the largest by one of these sizes.
    sizes = (
        lambda shape: shape.source_tokens + shape.target_tokens,
        lambda shape: shape.target_tokens,
        lambda shape: shape.pairs * (shape.longest_source + shape.longest_target) ** 2,
    )
    estimates = {
        shape: memory.estimate_activations(model.config, shape, precision, is_checkpointed)
        for size in sizes
        for shape in nlargest(16, shapes, key=size)
    }
    largest = max(estimates, key=lambda shape: (state.peak(estimates[shape]), sizes[0](shape)))
    tokens = passes * computed / steps_per_epoch
    hours = None if tokens_per_second is None else tokens / (tokens_per_second * sharding.devices) / 3600
    parameters, trained_parameters = (model.num_parameters(only_trainable=only) for only in (False, True))
    family = model.config.model_type
    notes = (
        (r_drop_start_step is not None, "R-Drop passes each batch twice: the largest one is counted with both."),
        (remark, remark),
        (not on_accelerator, _NOTE_ON_PROCESS),
        (not on_accelerator and sharding.engine == "fsdp", _NOTE_ON_FSDP),
        (family != MetaphraseConfig.model_type, f"The activations of {family} follow a formula for Transformers."),
        (trained_parameters < parameters, "Some weights are frozen: activations are counted as if all were trained."),
        (hours is None, "No time is given, because no rate of the device was measured or stated."),
    )
    return RunEstimate(
        parameters=parameters,
        trained_parameters=trained_parameters,
        precision=precision,
        sharding=sharding,
        state=state,
        largest_batch=largest,
        activations=estimates[largest],
        peak=state.peak(estimates[largest]),
        other_peak=state.peak(memory.estimate_activations(model.config, largest, precision, not is_checkpointed)),
        pairs=round(scale * len(lengths)),
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        padding_share=max(0.0, 1 - (source_tokens + target_tokens) / computed),
        batches_per_epoch=batches_per_epoch,
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        hours=hours,
        notes=[note for applies, note in notes if applies],
    )


def dry_run(experiment: Experiment, devices: int | None = None) -> RunEstimate:
    """Estimate the needs of `experiment.train()` from its corpus, tokenizer and batches. Nothing is written."""
    data = sampled_data(experiment.prepare())
    return from_first_process(lambda: estimate_recipe(experiment.recipe, data, devices))


def sampled_data(data: Data) -> Data:
    """Return the data with encoded pairs of a sample in place of a stream."""
    if data.corpus.stream is None:
        return data._replace(encoded=data.encoded or data.corpus.encode(data.tokenizers))
    corpus = data.corpus.with_recipe(data.corpus.recipe.replace(streaming=False))
    corpus.reports.pop("train", None)
    # The blocks of the sample have random places.
    corpus.splits["train"] = corpus.splits["train"].select(range(min(len(corpus.splits["train"]), _ENCODED_PAIRS)))
    return data._replace(corpus=corpus, encoded=corpus.encode(data.tokenizers))


def estimate_recipe(recipe: Recipe, data: Data, devices: int | None = None) -> RunEstimate:
    """Estimate the needs of a run by a recipe on data that are prepared.

    Memory is counted on a model without weights. The hours follow from a few steps of a real model, unless it is too large;
    evaluations are not counted. By default, the devices are those of this run.
    """
    arguments, train = make_arguments(recipe), data.encoded["train"]
    set_seed(arguments.seed)
    lengths = np.stack([np.asarray(train[side][:]) for side in LENGTH_COLUMNS], axis=1)
    with torch.device("meta"):
        model = make_model(recipe, data, with_weights=False)
    # Adapters replace the layers that they wrap.
    model = model.get_base_model() if is_adapted(model) else model
    rate = None
    # Larger models are not made for a timing.
    if model.num_parameters() <= 300_000_000 and devices is None:
        rate = _measured_rate(recipe, arguments, make_model(recipe, data), data, lengths)
    multiple, start = pad_to_multiple_of(arguments), recipe.r_drop_start_step if recipe.r_drop_alpha > 0 else None
    options: dict[str, Any] = {"devices": devices, "tokens_per_second": rate, "scale": data.corpus.scale}
    options |= {"pad_to_multiple_of": multiple, "r_drop_start_step": start}
    return estimate_run(model, arguments, lengths, max_tokens_per_batch=recipe.max_tokens_per_batch, **options)


def _measured_rate(
    recipe: Recipe, arguments: TrainingArguments, model: PreTrainedModel, data: Data, lengths: np.ndarray
) -> float:
    """Return the median tokens per second of real training steps by AdamW with a learning rate of 0.

    The batches are formed of some pairs as the trainer does. On a CPU, a step has a part of a batch, and the time of the
    optimizer counts as that part of its time in a whole one. The first step warms up.
    """
    budget, kind = recipe.max_tokens_per_batch, arguments.device.type
    is_packed = budget is not None and getattr(model, "supports_packing", False)
    multiple = 1 if is_packed else pad_to_multiple_of(arguments)
    collate = PackedCollator() if is_packed else PairCollator(model.config.pad_token_id or 0, multiple)
    sample = spread(len(lengths), _PLANNED_PAIRS)
    planned = plan_batches(lengths[sample], arguments, budget, 1, multiple)
    if arguments.gradient_checkpointing:
        getattr(model, f"{CHECKPOINTING}_enable")()
    model.to(arguments.device).train()
    # The optimizer of a Trainer by default.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    # The trainer refuses other models beside a reward or preferences.
    replace_batch = (smooths_labels(model) and make_reward(recipe, data)) or (lambda model, batch: batch)
    rates, begin = [], time.perf_counter()
    for number in range(TIMED_STEPS + 1):
        # A corpus with too few batches repeats them.
        rows = [sample[index] for index in planned[number % len(planned)]]
        most = _TIMED_TOKENS if kind == "cpu" else lengths.sum()
        part = rows[: 1 + int(np.searchsorted(lengths[rows].sum(axis=1).cumsum(), most))]
        pairs = (
            {name: pair[name] for name in ("input_ids", "labels")}
            for pair in map(data.encoded["train"].__getitem__, part)
        )
        batch = with_decoder_inputs(model, collate([*pairs]))
        batch = {name: value.to(kind) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        start, num_tokens = time.perf_counter(), batch["input_ids"].numel() + batch["labels"].numel()
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=arguments.bf16):
            batch = replace_batch(model, batch)
            weights = {"label_weights": weights_of_labels(batch)}
            loss_options = {"loss_of_states": partial(TrainingLoss(), **weights)} if smooths_labels(model) else {}
            batch.pop(WEIGHT_COLUMN, None)
            loss = model(**batch, **loss_options).loss
        loss.backward()
        computed = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        if kind != "cpu":
            torch.accelerator.synchronize()
        end = time.perf_counter()
        seconds = computed - start + (end - computed) * len(part) / len(rows)
        rates.append(num_tokens / seconds)
        if len(rates) > 2 and end - begin > 2:
            break
    return statistics.median(rates[1:])
