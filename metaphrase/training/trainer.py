"""`MetaphraseTrainer`: transformers' `Seq2SeqTrainer` for encoder-decoders, with all that this package adds to training."""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    PreTrainedModel,
    Seq2SeqTrainer,
    Trainer,
    TrainingArguments,
    default_data_collator,
    get_scheduler,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, seed_worker
from transformers.training_args import OptimizerNames

from metaphrase.data.collators import PackedCollator, PairCollator, source_of, with_decoder_inputs
from metaphrase.data.encoding import data_fingerprint
from metaphrase.data.pairs import LENGTH_COLUMNS, WEIGHT_COLUMN, data_seed
from metaphrase.data.token_budget import (
    LengthGroupedSampler,
    TokenBudgetSampler,
    TokenBudgetStream,
    WithFillers,
    announce_epoch,
    check_beside_budget,
)
from metaphrase.errors import MetaphraseError
from metaphrase.inference import decode
from metaphrase.modeling import IGNORED_LABEL, sequence_loss
from metaphrase.storage.folders import set_modes_of_weights
from metaphrase.storage.weight_files import is_finite
from metaphrase.tokenization import TokenizerPair
from metaphrase.training import checkpoints, distributed
from metaphrase.training.callbacks import restore_callbacks
from metaphrase.training.training_loss import TrainingLoss, repeat_batch, smooths_labels, weights_of_labels

logger = logging.getLogger(__name__)

_READ_THE_MODEL = ("lomo", "galore", "apollo")
# Updates in a row. With float16, an update that overflows is skipped and halves the scale of the loss, which may be 2 ** 24.
_MOST_UPDATES, _MOST_UPDATES_IN_FLOAT16 = 2, 30
# Packed rows in half precision have a multiple of this many tokens, so that kernels meet few lengths.
TOKENS_MULTIPLE = 32
# Collators that only pad, which a packed row does not need. A subclass may do more, and gets padded batches.
_PLAIN_COLLATORS = (PairCollator, PackedCollator, DataCollatorForSeq2Seq, DataCollatorWithPadding)


def optimizer_class_and_options(arguments: TrainingArguments, model: PreTrainedModel | None = None) -> tuple:
    """Return what `Trainer.get_optimizer_cls_and_kwargs` returns, with Adafactor's options, which it ignores.

    `scale_parameter=true` makes an update proportional to the root mean square of the weights, as in T5's training (Shazeer and
    Stern 2018, section 8, arXiv 1804.04235).
    """
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    if arguments.optim == OptimizerNames.ADAFACTOR:
        parts = [part.partition("=") for part in (arguments.optim_args or "").split(",") if part.strip()]
        options |= {name.strip(): json.loads(value.lower()) for name, _, value in parts}
    return optimizer_class, options


def check_optimizer(arguments: TrainingArguments) -> None:
    """Refuse options of optimizer and schedule before any data is read, by making both for a single weight."""
    if arguments.optim_target_modules or any(name in arguments.optim for name in _READ_THE_MODEL):
        return
    owner, field = "optim", "optim_args"
    try:
        optimizer_class, options = optimizer_class_and_options(arguments)
        optimizer = optimizer_class([nn.Parameter(torch.zeros(1))], **options)
        owner, field = "lr_scheduler_type", "lr_scheduler_kwargs"
        kwargs = arguments.lr_scheduler_kwargs
        get_scheduler(arguments.lr_scheduler_type, optimizer, 0, 10, scheduler_specific_kwargs=kwargs)
    except (ValueError, TypeError) as error:
        name, value = getattr(arguments, owner).value, getattr(arguments, field)
        raise MetaphraseError(f"`{field}` must be options of `{owner}` {name}, got {value!r}: {error}") from error


class MetaphraseTrainer(Seq2SeqTrainer):
    """Trainer of an encoder-decoder.

    - Batches: with `max_tokens_per_batch` they are formed by tokens, and packed where the model reads packed rows and the
      collator only pads. With `group_by_length` and a length column, a batch has pairs of like length. Several processes share
      one order of the pairs. Pairs that accelerate repeats at the end of an epoch have their labels ignored, so the last step is
      that of a single process. Batches by tokens have fillers instead. Evaluation never drops the last batch.
    - Loss: a mean over the tokens of a whole step, for models of other families too. So gradient accumulation and several
      processes give the gradient of one large batch. The model smooths labels, and in training alone. R-Drop runs each batch
      twice in one call, and adds the divergence of the two predictions (Liang et al. 2021, section 2, arXiv 2106.14448).
      With a column `weight`, the loss of a step is sum(weight of the pair * loss of the label) / number of labels.
    - Evaluation: the loss is a mean over tokens that counts each pair once. `score` gets decoded texts.
    - Checkpoints: whole, or absent, so that a run may be killed at any moment. A checkpoint is written below `_unfinished` and
      renamed last, when all of it is on the disk. Machines without a shared folder need `save_on_each_node`.
    - Resuming: a resumed run ends with the same weights, optimizer, schedule, random states, log and best checkpoint, bit for bit
      on a CPU. Random choices of a data set or a collator must follow from seed, epoch and index, as in `DenoisingDataset`,
      because no checkpoint stores the states of workers. With three or more processes, a resumed run may differ in the last
      digits: if DDP does not look for unused parameters, its first step determines the order in which it adds gradients.
    - Divergence: training ends at the third update in a row whose loss or gradients are not finite, and no weights that are not
      finite are saved. Updates are counted on their device. A CPU reads the count after each update; other devices, which it
      would make wait, and several processes only before they log, evaluate or save.
    """

    get_optimizer_cls_and_kwargs = staticmethod(optimizer_class_and_options)
    # The parent's constructor and subclasses may read these early.
    score: Any = None
    decoded_rows = max_tokens_per_batch = None
    compute_loss_func: Any
    # Sum of the losses of all labels, and number of labels, in this process and evaluation.
    evaluation_loss = torch.zeros(2, dtype=torch.float64)
    _needs_loss_alone = False
    _is_own_dataset = True
    # `progress.json` of the checkpoint to resume from, until its epoch begins
    _resumed: dict[str, Any] | None = None
    _checkpoint: str | None = None
    # Place where each worker goes on to read a stream.
    _places: dict[str, list[int]]
    _is_epoch_end_due = False
    _steps_per_epoch, _length_multiple = 0, 1
    _is_saving = False
    # A report follows each step, and the end of an epoch. `progress.json` stores the last one.
    _reported_step = -1
    _report: dict[str, Any] = {"is_epoch_end_reported": False, "grad_norm": None, "learning_rate": None}
    _has_finite_losses: torch.Tensor | bool = True
    # Updates in a row, up to now, whose loss or gradients are not finite.
    _num_not_finite: torch.Tensor | int = 0

    def __init__(
        self,
        *args,
        tokenizers: TokenizerPair | None = None,
        score: Callable[[list[list[int]], list[list[int]]], dict[str, float]] | None = None,
        generation_options: dict | None = None,
        max_tokens_per_batch: int | None = None,
        decoded_rows: Sequence[int] | None = None,
        r_drop_alpha: float = 0.0,
        r_drop_start_step: int = 0,
        num_best_kept: int = 0,
        num_last_kept: int = 0,
        best_kept_metric: str | None = None,
        replace_batch: Callable[..., dict[str, Any]] | None = None,
        **kwargs,
    ):
        """Add to the parent's arguments:

        Args:
            tokenizers: Saved with every checkpoint.
            score: Function of decoded ids and label ids, row by row, that returns named scores.
            generation_options: Arguments of `generate()` for the evaluation.
            max_tokens_per_batch: Most tokens of both sides in a batch of one device, padding included, for training and for the
                evaluation loss. The data sets need the columns `source_length` and `target_length`. With `None`,
                `per_device_train_batch_size` holds.
            decoded_rows: Rows of `eval_dataset` to decode; `None` means all. Of other data sets, all rows are decoded.
            r_drop_alpha: Weight of the divergence of two passes (5 for translation in Liang et al. 2021); 0 is plain training.
            r_drop_start_step: Updates of plain training before R-Drop.
            num_best_kept: Number of checkpoints, the best by `best_kept_metric`, to keep whatever their age.
            num_last_kept: Number of last checkpoints to keep beside the best.
            best_kept_metric: An evaluated metric; by default `metric_for_best_model`, or else BLEU.
            replace_batch: Function of the model and a batch, which returns the batch to learn from. Its `logged` goes to the log.
        """
        super().__init__(*args, **kwargs)
        self.tokenizers = tokenizers
        self.score, self.decoded_rows = score, decoded_rows
        self.generation_options = dict(generation_options or {})
        self.max_tokens_per_batch = max_tokens_per_batch
        self.r_drop_alpha, self.r_drop_start_step = r_drop_alpha, r_drop_start_step
        self.num_best_kept, self.num_last_kept = num_best_kept, num_last_kept
        self.replace_batch = replace_batch
        self.best_kept_metric = best_kept_metric or self.args.metric_for_best_model or checkpoints.DEFAULT_METRIC
        self.label_smoothing = self.args.label_smoothing_factor
        # The parent's smoother would hide the labels from the model.
        self.label_smoother = None
        # The weights of pairs are no argument of the model, but stay in its batches.
        self._set_signature_columns_if_needed()
        self._signature_columns.append(WEIGHT_COLUMN)
        if self.compute_loss_func is not None:
            raise MetaphraseError(f"`compute_loss_func` must be left out, got {self.compute_loss_func}.")
        if not smooths_labels(self.model):
            if self.r_drop_alpha or self.replace_batch is not None:
                name = "`r_drop_alpha`" if self.r_drop_alpha else "`reward` or `rejected_column`"
                kind = f"a {type(self.model).__name__}. `metaphrase convert` makes one of many families"
                raise MetaphraseError(f"{name} must come with a Metaphrase model, got {kind}.")
            # Models of other families neither smooth labels nor divide by the labels of the whole step.
            self.compute_loss_func = self._loss_of_logits
        if not distributed.saves_whole_weights(self.accelerator.state):
            raise MetaphraseError(
                "Checkpoints must hold whole weights, got settings by which each process saves its share. Set "
                "`fsdp_state_dict_type` to FULL_STATE_DICT, or for DeepSpeed `zero3_save_16bit_model` to true."
            )
        if self.is_fsdp_enabled:
            self.accelerator.prepare = distributed.keep_embeddings_together(self.accelerator.prepare)

    def create_optimizer(self, model=None):
        optimizer, config, head = super().create_optimizer(model), self.model.config, self.model.get_output_embeddings()
        starts_with_zeros = not getattr(config, "train_padding_embedding", True)
        row = config.decoder_start_token_id if starts_with_zeros and not distributed.is_sharded(self.model) else None
        if row is not None and row == config.pad_token_id and not head.weight[row].any():
            # A tied output projection would train the zeros, with which Marian's decoder starts.
            optimizer.register_step_post_hook(lambda *_: head.weight.detach()[row].zero_())
        return optimizer

    # Loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        is_training, loss_of_states, weights = model.training, None, None
        if is_training and self.replace_batch is not None:
            inputs = self.replace_batch(self.whole_model(), inputs)
        if is_training:
            alpha = self.r_drop_alpha if self.state.global_step >= self.r_drop_start_step else 0.0
            if alpha:
                inputs = repeat_batch(inputs)
                num_items_in_batch = None if num_items_in_batch is None else 2 * num_items_in_batch
            weights = weights_of_labels(inputs)
            # FSDP would round the fields of a data class.
            loss_of_states = partial(TrainingLoss(self.label_smoothing, alpha), label_weights=weights)
        else:
            state, labels = self.accelerator.gradient_state, inputs["labels"]
            if state.end_of_dataloader:
                labels = distributed.ignore_repeated_pairs(labels, state.remainder, self.args.process_index)
            num_labels = (labels != IGNORED_LABEL).sum().item()
            # All processes must compute, where weights are sharded: a batch of repeated pairs alone runs with its labels,
            # uncounted.
            inputs = {**inputs, "labels": labels} if num_labels else inputs
            if self.decodes or self._needs_loss_alone:
                loss_of_states = TrainingLoss()
        inputs = {name: value for name, value in inputs.items() if name != WEIGHT_COLUMN}
        if self.compute_loss_func is not None:
            self.compute_loss_func = partial(self._loss_of_logits, label_weights=weights)
            # The parent hides the labels from the model, so the decoder gets its inputs here.
            inputs = with_decoder_inputs(self.model, inputs)
            model = partial(model, labels=inputs["labels"])
        elif loss_of_states is not None:
            inputs = {**inputs, "loss_of_states": loss_of_states}
        if is_training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        if num_labels:
            # Without labels the loss is undefined.
            counted = torch.tensor([loss.item() * num_labels, num_labels], dtype=torch.float64)
            self.evaluation_loss = self.evaluation_loss + counted
        return (loss, outputs) if return_outputs else loss

    def _loss_of_logits(self, outputs, labels: torch.Tensor, num_items_in_batch=None, label_weights=None):
        smoothing = self.label_smoothing if self.model.training else 0.0
        return sequence_loss(outputs["logits"], labels, num_items_in_batch, smoothing, label_weights)

    # Batches

    # transformers 5.24.0: makes the loaders of training, evaluation and test here alone.
    def _get_dataloader(
        self, dataset, description, batch_size, sampler_fn=None, is_training=False, dataloader_key=None
    ):
        arguments, columns = self.args, set(getattr(dataset, "column_names", None) or ())
        is_sized, has_budget = hasattr(dataset, "__len__"), self.max_tokens_per_batch is not None
        if is_training and has_budget:
            check_beside_budget(arguments, self.max_tokens_per_batch)
            return self._loader_by_budget(dataset, is_training)
        if description == "Evaluation" and has_budget and is_sized and {*LENGTH_COLUMNS} <= columns:
            needs_loss_alone = arguments.prediction_loss_only or self.decodes or self.compute_metrics is None
            # With fewer pairs than processes, the parent's loader repeats pairs that are not counted.
            if needs_loss_alone and len(dataset) >= arguments.world_size:
                return self._loader_by_budget(dataset, is_training)
        column, is_grouped = arguments.length_column_name, arguments.train_sampling_strategy == "group_by_length"
        if is_training and is_grouped and is_sized and column in columns:
            sampler = LengthGroupedSampler(dataset[column][:], arguments.train_batch_size, data_seed(arguments))
            sampler_fn = lambda _: sampler  # noqa: E731
        # accelerate takes the seed of torch's generator for the order of the pairs, which must be one for all processes.
        is_shared = is_training and distributed.is_data_parallel(arguments, self.accelerator)
        drops_last = arguments.dataloader_drop_last
        arguments.dataloader_drop_last = drops_last and is_training
        try:
            with torch.random.fork_rng(devices=(), enabled=is_shared):
                if is_shared:
                    torch.default_generator.manual_seed(arguments.seed)
                return super()._get_dataloader(
                    dataset, description, batch_size, sampler_fn, is_training, dataloader_key
                )
        finally:
            arguments.dataloader_drop_last = drops_last

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        has_rows = hasattr(self.train_dataset, "__len__") and self.max_tokens_per_batch is None
        fills_up = self.accelerator.even_batches and not self.accelerator.dispatch_batches
        is_parallel = distributed.is_data_parallel(self.args, self.accelerator)
        if is_parallel and has_rows and fills_up and not self.args.dataloader_drop_last:
            # The last batches of an epoch may hold repeated pairs.
            epoch_iterator = self._each_pair_once(epoch_iterator)
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if isinstance(self.train_dataset, TokenBudgetStream):
            # A loader reads ahead, so that the stream itself is further than its batches.
            for worker, *place in (batch.pop("place") for batch in batches):
                self._places[str(worker)] = place
        return batches, num_items

    @property
    def packs_pairs(self) -> bool:
        """True if the model reads packed rows, and the collator may be replaced."""
        is_plain = type(self.data_collator) in _PLAIN_COLLATORS or self.data_collator is default_data_collator
        return is_plain and getattr(self.accelerator.unwrap_model(self.model), "supports_packing", False)

    def _each_pair_once(self, batches: Iterable[Mapping]) -> Iterator[Mapping]:
        for batch in batches:
            labels = batch.get("labels")
            # Packed pairs have no rows.
            is_last = self.accelerator.gradient_state.end_of_dataloader
            if is_last and labels is not None and "target_lengths" not in batch:
                # accelerate's own `remainder` is unknown to a loader that skips batches.
                num_pairs = len(self.train_dataset) % (len(labels) * self.args.world_size)
                labels = distributed.ignore_repeated_pairs(labels, num_pairs, self.args.process_index)
                batch = {**batch, "labels": labels}
            yield batch

    # Batches by a token budget

    def _loader_by_budget(self, dataset, is_training: bool) -> DataLoader:
        arguments, collate = self.args, self.data_collator
        # The collator rounds widths up; those of transformers have None by default. Packed rows have no width.
        multiple = 1 if self.packs_pairs else getattr(collate, "pad_to_multiple_of", None) or 1
        batching: dict[str, Any] = {"batch_size": None}
        if isinstance(dataset, TokenBudgetStream):
            dataset.length_multiple = multiple
        else:
            lengths = np.stack([np.asarray(dataset[name][:]) for name in LENGTH_COLUMNS], axis=1)
            # Evaluation leaves no pair out: the budget grows to the longest.
            budget = max(self.max_tokens_per_batch, 0 if is_training else lengths.sum(axis=1).max().item())
            processes = (arguments.world_size, arguments.process_index)
            sampler = TokenBudgetSampler(lengths, budget, data_seed(arguments), *processes, length_multiple=multiple)
            batching = {"batch_sampler": sampler}
            if sampler.num_fillers:
                total = len(sampler) * sampler.num_processes
                text = "%d of %d batches hold a repeated pair alone, which does not count, as each process has equally many."
                logger.info(text, sampler.num_fillers, total)
                dataset = WithFillers(dataset)
        self._length_multiple, workers = multiple, arguments.dataloader_num_workers
        if self.packs_pairs:
            pad_token_id = self.accelerator.unwrap_model(self.model).config.pad_token_id or 0
            collate = PackedCollator(pad_token_id, TOKENS_MULTIPLE if arguments.bf16 or arguments.fp16 else 1)
        if isinstance(dataset, TokenBudgetStream):
            collate = partial(_collate_with_place, collate)
        seed = partial(seed_worker, num_workers=workers, rank=arguments.process_index) if is_training else None
        loader = DataLoader(
            dataset,
            collate_fn=collate,
            num_workers=workers,
            pin_memory=arguments.dataloader_pin_memory,
            persistent_workers=arguments.dataloader_persistent_workers,
            prefetch_factor=arguments.dataloader_prefetch_factor,
            multiprocessing_context=arguments.dataloader_multiprocessing_context,
            in_order=arguments.dataloader_in_order,
            worker_init_fn=seed,
            **batching,
        )
        # The batches are this process's own already: accelerate must not divide them again.
        alone = {"num_processes": 1, "process_index": 0, "dispatch_batches": False}
        return prepare_data_loader(loader, device=arguments.device, put_on_device=True, **alone)

    # Training steps

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._has_finite_losses = loss.isfinite() & self._has_finite_losses
        return loss

    # transformers 5.24.0: passes the gradient norm here alone.
    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, *args, learning_rate=None, **kwargs):
        # There is a report after each step, and one more at the end of an epoch.
        is_epoch_end = self.state.global_step == self._reported_step
        if not is_epoch_end:
            # With sharded weights, the norm has a part on each device.
            norm = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm
            is_finite_norm = torch.as_tensor(0.0 if norm is None else norm).isfinite().to(self.args.device)
            self._num_not_finite = (self._num_not_finite + 1) * ~(is_finite_norm & self._has_finite_losses)
            self._has_finite_losses = True
        self._reported_step = self.state.global_step
        self._report = {"is_epoch_end_reported": is_epoch_end, "grad_norm": grad_norm, "learning_rate": learning_rate}
        control, is_alone = self.control, self.args.world_size == 1
        is_waiting = control.should_log or control.should_evaluate or control.should_save
        if is_waiting or (is_alone and self.args.device.type == "cpu"):
            number = torch.as_tensor(self._num_not_finite, device=self.args.device).reshape(1)
            number = int(self.accelerator.gather(number).max())
            if number > (_MOST_UPDATES_IN_FLOAT16 if self.args.fp16 else _MOST_UPDATES):
                first = self.state.global_step - number + 1
                self._refuse(f"The loss and the gradients must be finite, got NaN or infinity since update {first}")
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, learning_rate=learning_rate, **kwargs)

    def log(self, logs, *args, **kwargs):
        logs |= self.replace_batch.logged() if self.replace_batch is not None and "loss" in logs else {}
        super().log(logs, *args, **kwargs)  # adds the epoch in place

    def _check_weights(self) -> None:
        trained = (weight for weight in self.model.parameters() if weight.requires_grad)
        num_not_finite = torch.tensor([sum(not is_finite(weight) for weight in trained)], device=self.args.device)
        if self.accelerator.gather(num_not_finite).any():
            self._refuse(f"The weights must be finite, got NaN or infinity after update {self.state.global_step}")

    def _refuse(self, problem: str) -> NoReturn:
        arguments, rate = self.args, self.args.learning_rate
        saved = checkpoints.checkpoints_in(self._get_output_dir(None))
        other = ", or `bf16` in place of `fp16`" if arguments.fp16 else ""
        checkpoint = f" {saved[-1]} holds the last weights that were saved, which are finite." if saved else ""
        raise MetaphraseError(
            f"{problem} of {self.state.max_steps}. Start a new run with a lower `learning_rate`, got {rate:g}, "
            f"more `warmup_steps`, got {arguments.warmup_steps:g}, or a `max_grad_norm` of 1{other}.{checkpoint}"
        )

    # Resuming

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        """Train as the parent does. A checkpoint to resume from must be whole; `True` is the last whole one."""
        run, checkpoint = self._get_output_dir(trial), resume_from_checkpoint or None
        if checkpoint is True:
            checkpoint = checkpoints.last_whole_checkpoint(run)
            if checkpoint is None:
                raise MetaphraseError(f"`output_dir` must hold a whole checkpoint to resume from, got none in {run}.")
        elif checkpoint is not None:
            checkpoints.check_whole(checkpoint, run)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            # A killed run has left it.
            shutil.rmtree(Path(run) / checkpoints.UNFINISHED_NAME, ignore_errors=True)
        hook = self.model.register_load_state_dict_post_hook(_ignore_tied_weights)
        try:
            return super().train(checkpoint, trial, ignore_keys_for_eval)
        finally:
            hook.remove()

    # transformers 5.24.0: fails if a checkpoint of float16 is resumed in another precision.
    def _load_scaler(self, checkpoint):
        if self.accelerator.scaler is not None:
            super()._load_scaler(checkpoint)

    # transformers 5.24.0: takes an epoch that is not yet evaluated for one that is over, and restores no callbacks.
    def _init_training_state(self, max_steps, steps_per_epoch, num_epochs, checkpoint, trial):
        epoch, batches = super()._init_training_state(max_steps, steps_per_epoch, num_epochs, checkpoint, trial)
        distributed.seed_process(self.args, self.accelerator)
        # `auto_find_batch_size` may begin several times.
        self._checkpoint, self._resumed, self._is_epoch_end_due, self._places = checkpoint, None, False, {}
        self._start, self._seconds_before, self._reported_step = time.time(), 0.0, self.state.global_step
        self._steps_per_epoch = steps_per_epoch if hasattr(self.train_dataset, "__len__") else 0
        settings, layout = self._description = self._describe_run()
        if checkpoint is None:
            return epoch, batches
        restore_callbacks(self.state, self.callback_handler.callbacks, self.control)
        # The state of the checkpoint has the intervals of the run before, and the run's folder may have moved.
        self.state.compute_steps(self.args, max_steps)
        self._set_best_folder(Path(checkpoint).parent)
        if self.args.ignore_data_skip:
            settings = {**settings, "data": None}
        self._resumed = progress = checkpoints.read_progress(checkpoint, settings, layout)
        if progress is None:
            return epoch, batches
        places = progress.get("places") or []
        has_same_readers = progress.get("dataloader_num_workers") == layout["dataloader_num_workers"]
        is_stream = isinstance(self.train_dataset, TokenBudgetStream)
        is_same = has_same_readers and len(places) == self.args.world_size and not self.args.ignore_data_skip
        if is_stream and is_same:
            self._places = places[self.args.process_index]
            self.train_dataset.resume(batches, self._places)
        is_epoch_end = epoch > 0 and self.state.global_step % steps_per_epoch == 0
        self._is_epoch_end_due = is_epoch_end and not progress["is_epoch_end_reported"]
        return (epoch - 1, 1) if self._is_epoch_end_due else (epoch, batches)

    # transformers 5.24.0: would begin an epoch without the totals, and make a step in a run that is done.
    def _run_epoch(self, **parts):
        progress = self._resumed
        if self._checkpoint is not None:
            self._restore_totals()
            is_over = self.state.global_step >= self.state.max_steps or any(
                callback.early_stopping_patience_counter >= callback.early_stopping_patience
                for callback in self.callback_handler.callbacks
                if isinstance(callback, EarlyStoppingCallback)
            )
            if is_over or self._is_epoch_end_due:
                # Do what follows the last step of an epoch or run, and was not done before the checkpoint.
                self._is_epoch_end_due = False
                self._load_rng_state(parts["resume_from_checkpoint"])
                self.control.should_training_stop = is_over
                if progress is not None and not progress["is_epoch_end_reported"]:
                    self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
                    report = [parts[name] for name in ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")]
                    norm, rate = progress["grad_norm"], progress["learning_rate"]
                    self._maybe_log_save_evaluate(self._tr_loss, norm, *report, learning_rate=rate)
                return
        # With several processes, a loader that skips batches does not tell the sampler.
        announce_epoch(parts["train_dataloader"], parts["epoch"])
        # Workers draw their seeds apart from training, whose random numbers a resumed run repeats.
        loader = getattr(parts["train_dataloader"], "base_dataloader", parts["train_dataloader"])
        loader.generator = torch.Generator().manual_seed(data_seed(self.args) + parts["epoch"])
        super()._run_epoch(**parts)

    def _restore_totals(self) -> None:
        progress, self._resumed, self._checkpoint = self._resumed, None, None
        if progress is None:
            return
        losses = progress["losses_since_log"]
        has_same_processes = len(losses) == self.args.world_size
        loss = losses[self.args.process_index] if has_same_processes else sum(losses) / len(losses)
        self._tr_loss = torch.tensor(loss, device=self.args.device)
        self._total_loss_scalar = progress["loss_until_log"]
        self._globalstep_last_logged = progress["last_logged_step"]
        self._seconds_before = progress["seconds"]
        # The final mean loss and speed are those of all steps.
        self._initial_global_step = 0

    # transformers 5.24.0: counts neither time nor loss before a checkpoint, knows no batches by tokens, and deletes in place.
    def _finalize_training(self, trial, num_train_samples, start_time):
        if self._checkpoint is not None:
            # No epoch was left to begin.
            self._load_rng_state(self._checkpoint)
            self._restore_totals()
        self._check_weights()
        # A kill just after the last checkpoint was written leaves those that it makes surplus.
        run = Path(self._get_output_dir(trial))
        self._discard_surplus(run, run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.max_tokens_per_batch is not None:
            # The parent multiplies by the share of `max_steps` that is done. A stream has no number of pairs.
            num_epochs = self.state.max_steps / self._steps_per_epoch if self._steps_per_epoch else 0
            num_train_samples = num_epochs * len(self.train_dataset) if num_epochs else 0
        best = self.state.best_model_checkpoint
        if self.args.should_save and self.args.save_total_limit == 1 and best is not None:
            checkpoints.discard_surplus(self._get_output_dir(trial), 1, [best])
        return super()._finalize_training(trial, num_train_samples, start_time - self._seconds_before)

    def _describe_run(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a resumed run must have in common with the run before, and what decides which pairs a batch holds."""
        arguments, has_budget = self.args, self.max_tokens_per_batch is not None
        is_stream = isinstance(self.train_dataset, TokenBudgetStream)
        metric = arguments.metric_for_best_model
        # Values of different metrics do not compare.
        settings = {
            "metric_for_best_model": metric and metric.removeprefix("eval_"),
            "greater_is_better": None if metric is None else bool(arguments.greater_is_better),
            "data": data_fingerprint(self.train_dataset),
        }
        strategy = str(getattr(arguments.train_sampling_strategy, "value", arguments.train_sampling_strategy))
        layout = {
            "num_processes": arguments.world_size,
            "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
            "steps_per_epoch": self._steps_per_epoch or None,
            # The budget decides in place of these.
            "per_device_train_batch_size": None if has_budget else self._train_batch_size,
            "train_sampling_strategy": None if has_budget else strategy,
            "dataloader_drop_last": None if has_budget else arguments.dataloader_drop_last,
            "max_tokens_per_batch": self.max_tokens_per_batch,
            "pairs_in_buffer": getattr(self.train_dataset, "pairs_in_buffer", None),
            "dataloader_num_workers": arguments.dataloader_num_workers if is_stream else None,
            "length_multiple": self._length_multiple,
        }
        return settings, layout

    def _set_best_folder(self, run: Path) -> None:
        best = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if self.state.best_global_step and best.is_dir():
            self.state.best_model_checkpoint = str(best)

    # Evaluation

    @property
    def decodes(self) -> bool:
        """True if the evaluation decodes texts for `score`."""
        return self.args.predict_with_generate and self.score is not None and not self.args.prediction_loss_only

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval", **gen_kwargs):
        if self.is_in_train and self._checkpoint is not None:
            # `eval_on_start`: the run started before the checkpoint.
            return {}
        self._is_own_dataset = eval_dataset is None or eval_dataset is self.eval_dataset
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **self._decoding_options(gen_kwargs))

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test", **gen_kwargs):
        """Predict as the parent does. With `score`, predictions are token ids (rows, longest), padded with -100.

        The rows are all rows, but for `eval_dataset` only `decoded_rows`.
        """
        self._is_own_dataset = test_dataset is self.eval_dataset
        return super().predict(test_dataset, ignore_keys, metric_key_prefix, **self._decoding_options(gen_kwargs))

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        self.evaluation_loss = torch.zeros(2, dtype=torch.float64)
        loader = getattr(dataloader, "base_dataloader", dataloader)
        loader.generator = torch.Generator().manual_seed(data_seed(self.args))
        is_loss_alone = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        is_loss_alone = self._needs_loss_alone = is_loss_alone or self.decodes
        output = super().evaluation_loop(dataloader, description, is_loss_alone, ignore_keys, metric_key_prefix)
        gathered = self.accelerator.gather(self.evaluation_loss.float().to(self.args.device)[None])
        sums = gathered.double().sum(dim=0) if self.args.world_size > 1 else self.evaluation_loss
        total, count = sums.tolist()
        if count:
            output.metrics[f"{metric_key_prefix}_loss"] = total / count
            output.metrics[f"{metric_key_prefix}_perplexity"] = float(torch.tensor(total / count).exp())
        if self.decodes:
            decoded, labels = self._decode(dataloader.dataset)
            scores = self.score(decoded, labels)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in scores.items()})
            # Padded as transformers pads predictions (rows, longest).
            arrays = [
                np.array([*zip_longest(*rows, fillvalue=IGNORED_LABEL)], dtype=np.int64).reshape(-1, len(rows)).T
                for rows in (decoded, labels)
            ]
            output = output._replace(predictions=arrays[0], label_ids=arrays[1])
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
        loss, ids, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        if loss is not None and self.args.predict_with_generate and not prediction_loss_only:
            # The parent does not compute this loss by `compute_loss`.
            with torch.no_grad(), self.compute_loss_context_manager():
                loss = self.compute_loss(model, self._prepare_inputs(inputs)).detach()
        return loss, ids, labels

    def _decoding_options(self, call: dict) -> dict:
        """Return arguments of `generate()`: of this call, over those of the trainer. The parent adds training arguments."""
        limits = {"max_length", "max_new_tokens"}
        # `generate()` obeys `max_new_tokens` where both limits are set.
        overridden = limits if limits & call.keys() else set()
        return {name: value for name, value in self.generation_options.items() if name not in overridden} | call

    def _decode(self, dataset: Sequence[dict]) -> tuple[list[list[int]], list[list[int]]]:
        """Decode this process's share of the chosen rows. Return the decoded ids and the label ids of all processes."""
        is_chosen = self.decoded_rows is not None and self._is_own_dataset
        rows = list(self.decoded_rows if is_chosen else range(len(dataset)))
        share = range(self.args.process_index, len(rows), self.args.world_size)
        hypotheses = decode(
            self.whole_model(),
            [source_of(dataset[rows[index]]) for index in share],
            batch_size=self.args.per_device_eval_batch_size,
            show_progress=None if not self.args.disable_tqdm and self.is_world_process_zero() else False,
            **{name: value for name, value in self._gen_kwargs.items() if value is not None},
        )
        decoded = [(index, candidates[0].ids) for index, candidates in zip(share, hypotheses, strict=True)]
        if self.args.world_size > 1:
            decoded = gather_object(decoded)
        # Labels may have been padded already.
        labels = [[label for label in dataset[row]["labels"] if label != IGNORED_LABEL] for row in rows]
        return [ids for _, ids in sorted(decoded)], labels

    def whole_model(self) -> PreTrainedModel:
        """Return the model to decode with, whole on each process. If weights are sharded, all processes must call this."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        # FSDP 1 marks its wrapper, which is gone here, and not the model.
        return distributed.gather_model(model) if self.is_fsdp_enabled or distributed.is_sharded(model) else model

    # Saving

    def init_hf_repo(self, token=None, private=None):
        raise MetaphraseError("`push_to_hub` must be left out: `metaphrase push` uploads a finished run.")

    # transformers 5.24.0: has no other way to write a checkpoint elsewhere. `args.output_dir` is saved with it, so it must stay.
    def _get_output_dir(self, trial):
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, checkpoints.UNFINISHED_NAME) if self._is_saving else folder

    # transformers 5.24.0: writes a checkpoint file by file under its name.
    def _save_checkpoint(self, model, trial):
        self._check_weights()
        run = Path(self._get_output_dir(trial))
        checkpoint = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._is_saving = False
        norm = self._report.get("grad_norm")
        losses = self.accelerator.gather(self._tr_loss.detach().reshape(1)).tolist()
        settings, layout = self._description
        progress = {
            "places": gather_object([self._places]),
            **layout,
            **settings,
            **self._report,
            "grad_norm": None if norm is None else float(norm),
            "losses_since_log": losses,
            "loss_until_log": self._total_loss_scalar,
            "last_logged_step": self._globalstep_last_logged,
            "seconds": self._seconds_before + time.time() - self._start,
        }
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(checkpoint)
        else:
            self._set_best_folder(run)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            # The parent has stored the folder that it wrote to.
            self.state.save_to_json(str(run / checkpoints.UNFINISHED_NAME / checkpoint.name / TRAINER_STATE_NAME))
            checkpoints.publish_checkpoint(checkpoint, progress)
        self.accelerator.wait_for_everyone()
        self._discard_surplus(run, checkpoint)

    def _discard_surplus(self, run: Path, checkpoint: Path) -> None:
        """Delete surplus checkpoints, but neither the best nor the last, nor those of which the mean is saved in the end."""
        if self.args.should_save:
            saved = {checkpoints.step_of(path): path for path in checkpoints.checkpoints_in(run)}
            scores = checkpoints.scores_in(self.state.log_history, self.best_kept_metric)
            steps = sorted(saved.keys() & scores, key=lambda step: (scores[step], step), reverse=True)
            best = [saved[step] for step in steps[: self.num_best_kept]]
            last = [*saved.values()][-self.num_last_kept :] if self.num_last_kept else []
            protected = [checkpoint, self.state.best_model_checkpoint, *best, *last]
            checkpoints.discard_surplus(run, self.args.save_total_limit, protected)

    # transformers 5.24.0: writes the arguments as a pickle, and saves tied weights of a gathered state twice.
    def _save(self, output_dir=None, state_dict=None):
        folder = output_dir or self.args.output_dir
        if state_dict is not None:
            tied = self.model.all_tied_weights_keys
            state_dict = {name: weight for name, weight in state_dict.items() if name not in tied}
        # If the model was sharded when it was loaded, all processes gather its weights.
        if self.args.should_save or getattr(self, "is_distributed_loading_by_transformers", False):
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            sharded, model.__class__ = type(model), distributed.class_before_sharding(model)
            if self.args.save_on_each_node:
                # transformers 5.24.0: only the first process of all saves the weights.
                model.should_save_on_this_rank = bool
            try:
                model.save_pretrained(folder, state_dict=state_dict, is_main_process=self.args.should_save)
            finally:
                model.__class__ = sharded
        if self.args.should_save:
            processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processor is not None:
                processor.save_pretrained(folder)
            set_modes_of_weights(Path(folder))
            arguments = json.dumps(self.args.to_dict(), indent=2, default=str)
            (Path(folder) / checkpoints.ARGUMENTS_NAME).write_text(arguments + "\n", encoding="utf-8")
            # peft saves the adapter alone.
            if distributed.is_adapted(self.model):
                self.model.generation_config.save_pretrained(folder)
            if self.tokenizers is not None:
                self.tokenizers.save_pretrained(folder)


def _collate_with_place(collate: Callable, item: tuple[list, list[int]]) -> dict[str, Any]:
    """Return a batch of a stream with the place behind it."""
    pairs, place = item
    return {**collate(pairs), "place": place}


def _ignore_tied_weights(model: nn.Module, incompatible_keys: Any) -> None:
    # A checkpoint stores tied weights once. transformers would warn of their other names as missing.
    tied = getattr(model, "all_tied_weights_keys", {})
    incompatible_keys.missing_keys[:] = [name for name in incompatible_keys.missing_keys if name not in tied]
