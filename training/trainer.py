"""`MetaphraseTrainer`: transformers' `Seq2SeqTrainer` for encoder-decoders, with all that this package adds to training."""

import contextlib
import inspect
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    PreTrainedModel,
    Seq2SeqTrainer,
    default_data_collator,
)
from transformers.trainer_utils import seed_worker

from metaphrase.data.collators import PackedCollator, PairCollator, source_of, with_decoder_inputs
from metaphrase.data.pairs import LENGTH_COLUMNS, data_seed
from metaphrase.data.stages import StagedPairs
from metaphrase.data.token_budget import (
    LengthGroupedSampler,
    TokenBudgetSampler,
    TokenBudgetStream,
    WithFillers,
    check_beside_budget,
)
from metaphrase.inference import decode
from metaphrase.modeling import IGNORED_LABEL, sequence_loss
from metaphrase.storage.folders import set_modes_of_weights
from metaphrase.storage.weight_files import is_finite
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.adapters import is_adapted
from metaphrase.training.checkpointing.averaging import DEFAULT_METRIC, is_better_lower, scores_in
from metaphrase.training.checkpointing.folders import ARGUMENTS_NAME, checkpoints_in, step_of
from metaphrase.training.checkpointing.sharding import (
    as_plain_class,
    gather_model,
    gather_partitions,
    is_sharded,
    keep_embeddings_together,
)
from metaphrase.training.checkpointing.trainer_mixin import BATCHES_BY_NUMBER, WholeCheckpoints
from metaphrase.training.distributed import ProcessSeeds, ignore_repeated_pairs, is_data_parallel, sum_over_processes
from metaphrase.training.optimizer import optimizer_class_and_options

logger = logging.getLogger(__name__)

# Updates in a row. With float16, an update that overflows is skipped and halves the scale of the loss, which may be 2 ** 24.
_MOST_UPDATES, _MOST_UPDATES_IN_FLOAT16 = 2, 30
# Packed rows in half precision have a multiple of this many tokens, so that kernels meet few lengths.
TOKENS_MULTIPLE = 32
# Collators that only pad, which a packed row does not need. A subclass may do more.
_PLAIN_COLLATORS = (PairCollator, PackedCollator, DataCollatorForSeq2Seq, DataCollatorWithPadding)
_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


class MetaphraseTrainer(WholeCheckpoints, Seq2SeqTrainer):
    """Trainer of an encoder-decoder.

    - Batches: with `max_tokens_per_batch` they are formed by tokens, and packed where the model reads packed rows. With
      `group_by_length` and a length column, batches of like length come in random order. Several processes share one order of the
      pairs. Pairs that accelerate repeats at the end of an epoch have their labels ignored, so the last step is that of a single
      process. Batches by tokens have fillers instead. Evaluation never drops the last batch.
    - Loss: a mean over the tokens of a whole step, for models of other families too. So gradient accumulation and several
      processes give the gradient of one large batch, unless a `compute_loss_func` computes it. The model smooths labels, and in
      training alone. R-Drop runs each batch twice in one call, which needs the memory of two batches, and adds the divergence of
      the two predictions (Liang et al. 2021, section 2, arXiv 2106.14448).
    - Evaluation: the loss is a mean over tokens that counts each pair once. `score` gets decoded texts.
    - Checkpoints: whole, or absent. A resumed run ends as one that never stopped. See `WholeCheckpoints`.
    - Divergence: training ends at the third update in a row whose loss or gradients are not finite, and no weights that are not
      finite are saved. Updates are counted on their device. A CPU reads the count after each update; other devices, which it
      would make wait, and several processes only before they log, evaluate or save.
    """

    get_optimizer_cls_and_kwargs = staticmethod(optimizer_class_and_options)
    # The parent's constructor and subclasses may read these early.
    score = decoded_rows = max_tokens_per_batch = None
    has_custom_loss = False
    # Sum of the losses of all labels, and number of labels, in this process and evaluation.
    evaluation_loss = torch.zeros(2, dtype=torch.float64)
    _needs_loss_alone = False
    _is_own_dataset = True
    # Pairs and optimizer steps of this process in this call of `train`.
    _num_pairs: torch.Tensor | int = 0
    _num_steps = 0
    _counted_step = -1
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
        """
        super().__init__(*args, **kwargs)
        self.tokenizers = tokenizers
        self.score = score
        self.generation_options = dict(generation_options or {})
        self.max_tokens_per_batch = max_tokens_per_batch
        self.decoded_rows = decoded_rows
        self.r_drop_alpha = r_drop_alpha
        self.r_drop_start_step = r_drop_start_step
        self.num_best_kept, self.num_last_kept = num_best_kept, num_last_kept
        self.best_kept_metric = best_kept_metric or self.args.metric_for_best_model or DEFAULT_METRIC
        self.label_smoothing = self.args.label_smoothing_factor
        # The parent's smoother would hide the labels from the model.
        self.label_smoother = None
        self.has_custom_loss = self.compute_loss_func is not None
        self._check_arguments()
        if not self.has_custom_loss and not _smooths_labels(self.model):
            # Models of other families neither smooth labels nor divide by the labels of the whole step.
            self.compute_loss_func = self._loss_of_logits
        self.add_callback(ProcessSeeds(self.accelerator))

    def _check_arguments(self) -> None:
        if self.decodes and self.compute_metrics is not None:
            raise ValueError("`score` and `compute_metrics` must not both be given with `predict_with_generate`.")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"`label_smoothing_factor` must be at least 0 and below 1, got {self.label_smoothing}.")
        if not 0 <= self.r_drop_alpha < math.inf:
            raise ValueError(f"`r_drop_alpha` must be at least 0 and finite, got {self.r_drop_alpha}.")
        if self.r_drop_alpha and self.has_custom_loss:
            raise ValueError("`r_drop_alpha` must be left out with `compute_loss_func`, which knows of no second pass.")
        if self.r_drop_alpha:
            # The passes may differ by other noise than the model's dropout.
            check_r_drop(self.model, other_dropout=1.0)
        metric = self.args.metric_for_best_model
        if metric is not None and self.args.greater_is_better is is_better_lower(metric):
            logger.warning(
                "`greater_is_better` is %s, while %s is better when it is %s.",
                *(self.args.greater_is_better, metric, "lower" if is_better_lower(metric) else "higher"),
            )

    # Training

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled:
            self.accelerator.prepare = keep_embeddings_together(self.accelerator.prepare)

    # Loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not model.training:
            return self._compute_evaluation_loss(model, inputs, return_outputs)
        if self._uses_r_drop():
            inputs = {**repeat_batch(inputs), "r_drop_alpha": self.r_drop_alpha}
            num_items_in_batch = None if num_items_in_batch is None else 2 * num_items_in_batch
        if self.compute_loss_func is None:
            inputs = {**inputs, "smoothing": self.label_smoothing}
        model, inputs = self._with_decoder_inputs(model, inputs)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _compute_evaluation_loss(self, model, inputs, return_outputs):
        state, labels = self.accelerator.gradient_state, inputs["labels"]
        if state.end_of_dataloader:
            labels = ignore_repeated_pairs(labels, state.remainder, self.args.process_index)
        num_labels = (labels != IGNORED_LABEL).sum().item()
        # All processes must compute, where weights are sharded: a batch of repeated pairs alone runs with its labels, uncounted.
        inputs = {**inputs, "labels": labels} if num_labels else inputs
        model, inputs = self._with_decoder_inputs(model, inputs)
        if self.evaluates_without_logits and self.packs_pairs and not self.has_custom_loss:
            inputs = {**inputs, "return_logits": False}
        # A custom loss divides by the number it gets.
        count = torch.tensor(max(num_labels, 1), device=labels.device) if self.has_custom_loss else None
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=count)
        if num_labels:
            # Without labels the loss is undefined.
            counted = torch.tensor([loss.item() * num_labels, num_labels], dtype=torch.float64)
            self.evaluation_loss = self.evaluation_loss + counted
        return (loss, outputs) if return_outputs else loss

    def _uses_r_drop(self) -> bool:
        if self.r_drop_alpha and 0 < self.state.max_steps <= self.r_drop_start_step:
            # The number of steps of an epoch is not known earlier.
            raise ValueError(
                f"`r_drop_start_step` must be below the {self.state.max_steps} steps of the run, got {self.r_drop_start_step}."
            )
        return bool(self.r_drop_alpha) and self.state.global_step >= self.r_drop_start_step

    def _with_decoder_inputs(self, model, inputs: Mapping) -> tuple[Callable, Mapping]:
        """Return model and inputs so that the decoder gets its inputs, although the parent hides labels from the model."""
        if self.compute_loss_func is None:
            return model, inputs
        if not self.has_custom_loss:
            inputs = with_decoder_inputs(self.model, inputs)
            return partial(model, labels=inputs["labels"]), inputs
        network = self.accelerator.unwrap_model(self.model)
        if "decoder_input_ids" in inputs or not hasattr(network, "prepare_decoder_input_ids_from_labels"):
            return model, dict(inputs)
        packed = {name: inputs[name] for name in ("target_lengths",) if name in inputs}
        shifted = network.prepare_decoder_input_ids_from_labels(inputs["labels"], **packed)
        return model, {**inputs, "decoder_input_ids": shifted}

    def _loss_of_logits(self, outputs, labels: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
        smoothing = self.label_smoothing if self.model.training else 0.0
        return sequence_loss(outputs["logits"], labels, num_items_in_batch, smoothing)

    # Batches

    def data_layout(self) -> dict[str, int | str | None]:
        has_budget = self.max_tokens_per_batch is not None
        # The budget decides in place of these.
        replaced = dict.fromkeys(BATCHES_BY_NUMBER if has_budget else ())
        return (
            super().data_layout()
            | replaced
            | {
                "max_tokens_per_batch": self.max_tokens_per_batch,
                "pairs_in_buffer": getattr(self.train_dataset, "pairs_in_buffer", None),
                "length_multiple": self._length_multiple if has_budget else 1,
            }
        )

    def get_train_dataloader(self):
        self._num_pairs = self._num_steps = 0
        if self._trains_by_budget:
            self._check_budget()
        if isinstance(self.train_dataset, TokenBudgetStream):
            self.train_dataset.length_multiple = self._length_multiple
            return self._prepare_loader(self.train_dataset, is_training=True, batch_size=None)
        if self.max_tokens_per_batch is None:
            return self._loader_by_number()
        loader = self._loader_by_budget(self.train_dataset, is_training=True)
        sampler = loader.batch_sampler
        if isinstance(self.train_dataset, StagedPairs):
            return loader
        logger.info(
            "An epoch has %d batches of at most %d tokens. %s %.1f %% of them.",
            len(sampler) * sampler.num_processes,
            self.max_tokens_per_batch,
            "Packed rows need no padding, which would take" if self.packs_pairs else "Padding takes",
            100 * sampler.padding_share(),
        )
        return loader

    def get_eval_dataloader(self, eval_dataset=None):
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        needs_loss_alone = self.args.prediction_loss_only or self.decodes or self.compute_metrics is None
        # With fewer pairs than processes, the parent's loader repeats pairs that are not counted.
        if (
            self.max_tokens_per_batch is not None
            and needs_loss_alone
            and _has_lengths(dataset)
            and len(dataset) >= self.args.world_size
        ):
            return self._loader_by_budget(dataset, is_training=False)
        with self._keeping_last_batch():
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset):
        with self._keeping_last_batch():
            return super().get_test_dataloader(test_dataset)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self._repeats_pairs:
            epoch_iterator = self._each_pair_once(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    @property
    def packs_pairs(self) -> bool:
        """True if the model reads packed rows."""
        return getattr(self.accelerator.unwrap_model(self.model), "supports_packing", False)

    # Batches by a number of pairs

    def _loader_by_number(self) -> DataLoader:
        dataset, column = self.train_dataset, self.args.length_column_name
        is_grouped = self.args.train_sampling_strategy == "group_by_length" and hasattr(dataset, "__len__")
        # accelerate takes the seed of torch's generator for the order of the pairs, which must be one for all processes.
        is_shared = is_data_parallel(self.args, self.accelerator)
        with torch.random.fork_rng(devices=(), enabled=is_shared):
            if is_shared:
                torch.default_generator.manual_seed(self.args.seed)
            if not is_grouped or column not in (getattr(dataset, "column_names", None) or ()):
                return super().get_train_dataloader()
            # transformers' own sampler goes from the longest batch to the shortest, again and again.
            sampler = LengthGroupedSampler(dataset[column][:], self.args.train_batch_size, data_seed(self.args))
            options = {"sampler_fn": lambda _: sampler, "is_training": True}
            return self._get_dataloader(dataset, "Training", self._train_batch_size, **options)

    @contextlib.contextmanager
    def _keeping_last_batch(self) -> Iterator[None]:
        drops_last = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = False
        try:
            yield
        finally:
            self.args.dataloader_drop_last = drops_last

    @property
    def _repeats_pairs(self) -> bool:
        """True if the last batches of an epoch may hold repeated pairs."""
        return (
            is_data_parallel(self.args, self.accelerator)
            and self.max_tokens_per_batch is None
            and hasattr(self.train_dataset, "__len__")
            and not self.args.dataloader_drop_last
            and self.accelerator.even_batches
            and not self.accelerator.dispatch_batches
            and not self.has_custom_loss
        )

    def _each_pair_once(self, batches: Iterable[Mapping]) -> Iterator[Mapping]:
        for batch in batches:
            labels = batch.get("labels")
            # Packed pairs have no rows.
            is_last = self.accelerator.gradient_state.end_of_dataloader
            if is_last and labels is not None and "target_lengths" not in batch:
                # accelerate's own `remainder` is unknown to a loader that skips batches.
                num_pairs = len(self.train_dataset) % (len(labels) * self.args.world_size)
                batch = {**batch, "labels": ignore_repeated_pairs(labels, num_pairs, self.args.process_index)}
            yield batch

    # Batches by a token budget

    @property
    def _trains_by_budget(self) -> bool:
        return self.max_tokens_per_batch is not None or isinstance(self.train_dataset, TokenBudgetStream)

    def _check_budget(self) -> None:
        """Refuse a data set, a collator or arguments that a token budget would ignore."""
        check_beside_budget(self.args, self.max_tokens_per_batch)
        if not isinstance(self.train_dataset, TokenBudgetStream) and not _has_lengths(self.train_dataset):
            columns = getattr(self.train_dataset, "column_names", None)
            raise ValueError(
                f"`train_dataset` must have the columns {' and '.join(LENGTH_COLUMNS)}, in tokens, and an end with "
                f"`max_tokens_per_batch`, got a {type(self.train_dataset).__name__} with {columns}. Wrap a stream without end in "
                "a `TokenBudgetStream`."
            )
        if hasattr(self.train_dataset, "__len__") and len(self.train_dataset) < self.args.world_size:
            raise ValueError(
                f"`train_dataset` must have a pair for each process with `max_tokens_per_batch`, got {len(self.train_dataset)} "
                f"and {self.args.world_size} processes."
            )
        if not self.packs_pairs:
            return
        if type(self.data_collator) not in _PLAIN_COLLATORS and self.data_collator is not default_data_collator:
            raise ValueError(
                "`data_collator` must be one that only pads with `max_tokens_per_batch` and a model that reads packed rows, "
                f"got a {type(self.data_collator).__name__}, which packing does not call. Set the model's `supports_packing` to "
                "false."
            )
        if self.args.torch_compile and self.args.device.type == "cpu":
            logger.warning(
                "Compiled for a CPU, packed rows take minutes for each new shape: leave `torch_compile` out."
            )

    @property
    def _length_multiple(self) -> int:
        """The multiple that the collator rounds widths up to. Packed rows have no width."""
        # Collators of transformers have None by default.
        return 1 if self.packs_pairs else getattr(self.data_collator, "pad_to_multiple_of", None) or 1

    def _loader_by_budget(self, dataset, is_training: bool) -> DataLoader:
        lengths = np.stack([np.asarray(dataset[name][:]) for name in LENGTH_COLUMNS], axis=1)
        budget = self.max_tokens_per_batch
        if not is_training:
            # Evaluation leaves no pair out: the budget grows to the longest.
            budget = max(budget, lengths.sum(axis=1).max().item())
        processes = (self.args.world_size, self.args.process_index)
        is_staged = is_training and isinstance(dataset, StagedPairs)
        make_sampler = dataset.sampler if is_staged else TokenBudgetSampler
        sampler = make_sampler(lengths, budget, data_seed(self.args), *processes, length_multiple=self._length_multiple)
        if is_staged:
            return self._prepare_loader(dataset, is_training, batch_sampler=sampler)
        if sampler.num_fillers:
            logger.info(
                "So that all processes have equally many batches, %d of %d hold a repeated pair alone, which does not count.",
                *(sampler.num_fillers, len(sampler) * sampler.num_processes),
            )
            dataset = WithFillers(dataset)
        return self._prepare_loader(dataset, is_training, batch_sampler=sampler)

    def _prepare_loader(self, dataset, is_training: bool, **batching) -> DataLoader:
        arguments = self.args
        workers = arguments.dataloader_num_workers
        seed = partial(seed_worker, num_workers=workers, rank=arguments.process_index) if is_training else None
        loader = DataLoader(
            dataset,
            collate_fn=self._packed_collator() if self.packs_pairs else self.data_collator,
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

    def _packed_collator(self) -> PackedCollator:
        pad_token_id = self.accelerator.unwrap_model(self.model).config.pad_token_id or 0
        return PackedCollator(pad_token_id, TOKENS_MULTIPLE if self.args.bf16 or self.args.fp16 else 1)

    # Training steps

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self._trains_by_budget and "labels" in inputs:
            self._num_pairs = self._num_pairs + count_pairs(inputs)
            self._num_steps += self.accelerator.sync_gradients
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._has_finite_losses = loss.isfinite() & self._has_finite_losses
        return loss

    # transformers 5.24.0: passes the gradient norm here alone.
    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, *args, **kwargs):
        # There is one more report at the end of an epoch.
        if self.state.global_step != self._counted_step:
            self._counted_step = self.state.global_step
            self._count(grad_norm)
        control, is_alone = self.control, self.args.world_size == 1
        is_waiting = control.should_log or control.should_evaluate or control.should_save
        if is_waiting or (is_alone and self.args.device.type == "cpu"):
            self._check_updates()
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _count(self, grad_norm: torch.Tensor | float | None) -> None:
        # With sharded weights, the norm has a part on each device.
        norm = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm
        norm = torch.as_tensor(0.0 if norm is None else norm)
        is_finite_update = norm.isfinite().to(self.args.device) & self._has_finite_losses
        self._num_not_finite = (self._num_not_finite + 1) * ~is_finite_update
        self._has_finite_losses = True

    def _check_updates(self) -> None:
        number = torch.as_tensor(self._num_not_finite, device=self.args.device).reshape(1)
        number = int(self.accelerator.gather(number).max())
        if number > (_MOST_UPDATES_IN_FLOAT16 if self.args.fp16 else _MOST_UPDATES):
            first = self.state.global_step - number + 1
            self._refuse(f"The loss and the gradients must be finite, got NaN or infinity since update {first}")

    def _check_weights(self) -> None:
        trained = (weight for weight in self.model.parameters() if weight.requires_grad)
        num_not_finite = torch.tensor([sum(not is_finite(weight) for weight in trained)], device=self.args.device)
        if self.accelerator.gather(num_not_finite).any():
            self._refuse(f"The weights must be finite, got NaN or infinity after update {self.state.global_step}")

    def _refuse(self, problem: str) -> NoReturn:
        arguments, rate, saved = self.args, self.args.learning_rate, checkpoints_in(self._get_output_dir(None))
        other = ", or `bf16` in place of `fp16`" if arguments.fp16 else ""
        checkpoint = f" {saved[-1]} holds the last weights that were saved, which are finite." if saved else ""
        raise ValueError(
            f"{problem} of {self.state.max_steps}. Start a new run with a lower `learning_rate`, got {rate:g}, "
            f"more `warmup_steps`, got {arguments.warmup_steps:g}, or a `max_grad_norm` of 1{other}.{checkpoint}"
        )

    def _save_checkpoint(self, model, trial):
        self._check_weights()
        super()._save_checkpoint(model, trial)

    # transformers 5.23.0: the only way to say how many pairs were trained on. Batches by tokens have no fixed number of pairs.
    def _finalize_training(self, trial, num_train_samples, start_time):
        self._check_weights()
        if self._trains_by_budget:
            [num_pairs] = sum_over_processes(self.accelerator, self.args, torch.as_tensor([self._num_pairs]))
            # The parent multiplies by the share of `max_steps` that is done.
            num_train_samples = num_pairs * self.state.max_steps / max(self._num_steps, 1)
        return super()._finalize_training(trial, num_train_samples, start_time)

    # Evaluation

    @property
    def decodes(self) -> bool:
        """True if the evaluation decodes texts for `score`."""
        return self.args.predict_with_generate and self.score is not None and not self.args.prediction_loss_only

    @property
    def evaluates_without_logits(self) -> bool:
        """True if nothing of the evaluation reads logits."""
        return self.decodes or self._needs_loss_alone

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval", **gen_kwargs):
        self._is_own_dataset = eval_dataset is None or eval_dataset is self.eval_dataset
        options = self._decoding_options(gen_kwargs)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **options)

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test", **gen_kwargs):
        """Predict as the parent does. With `score`, predictions are token ids (rows, longest), padded with -100.

        The rows are all rows, but for `eval_dataset` only `decoded_rows`.
        """
        self._is_own_dataset = test_dataset is self.eval_dataset
        options = self._decoding_options(gen_kwargs)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix, **options)

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        self.evaluation_loss = torch.zeros(2, dtype=torch.float64)
        # Loaders with persistent workers count epochs: another epoch would have other noise.
        dataloader.iteration = 0
        decodes = self.decodes
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        self._needs_loss_alone = prediction_loss_only or decodes
        try:
            output = super().evaluation_loop(
                dataloader, description, self._needs_loss_alone, ignore_keys, metric_key_prefix
            )
        finally:
            self._needs_loss_alone = False
        total, count = sum_over_processes(self.accelerator, self.args, self.evaluation_loss)
        if count:
            output.metrics[f"{metric_key_prefix}_loss"] = total / count
            output.metrics[f"{metric_key_prefix}_perplexity"] = float(torch.tensor(total / count).exp())
        if decodes:
            decoded, labels = self._decode(dataloader.dataset)
            scores = self.score(decoded, labels)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in scores.items()})
            output = output._replace(predictions=_as_array(decoded), label_ids=_as_array(labels))
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
        loss, generated, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs
        )
        if loss is not None and self.args.predict_with_generate and not prediction_loss_only:
            # The parent does not compute this loss by `compute_loss`.
            with torch.no_grad(), self.compute_loss_context_manager():
                loss = self.compute_loss(model, self._prepare_inputs(inputs)).detach()
        return loss, generated, labels

    def _decoding_options(self, call: Mapping) -> dict:
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
        return gather_model(model) if self.is_fsdp_enabled or is_sharded(model) else model

    # Saving

    @property
    def has_whole_checkpoints(self) -> bool:
        """True if a checkpoint holds weights for `from_pretrained`, not only the share of each process."""
        if self.is_fsdp_enabled:
            return "FULL" in str(self.accelerator.state.fsdp_plugin.state_dict_type)
        if not self.is_deepspeed_enabled:
            return True
        zero = self.accelerator.state.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        # accelerate does not gather with "auto".
        return zero.get("stage") != 3 or zero.get("stage3_gather_16bit_weights_on_model_save") is True

    def protected_checkpoints(self, run: Path) -> list[str | Path | None]:
        checkpoints = checkpoints_in(run)
        scores = scores_in(self.state.log_history, self.best_kept_metric)
        scored = [path for path in checkpoints if step_of(path) in scores]
        scored.sort(key=lambda path: (scores[step_of(path)], step_of(path)), reverse=True)
        last = checkpoints[-self.num_last_kept :] if self.num_last_kept else []
        return [*super().protected_checkpoints(run), *scored[: self.num_best_kept], *last]

    def save_model(self, output_dir=None, _internal_call=False):
        """Save the model as the parent does, and whole even if checkpoints are not."""
        if not (_internal_call and output_dir is not None):
            self._save_whole(output_dir, _internal_call)
            return
        if self.has_whole_checkpoints or not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            # accelerate saves the shares of the weights later.
            with as_plain_class(self.model):
                self.model.config.save_pretrained(output_dir)
            self._save_beside_weights(output_dir, has_generation_config=False)

    def _save_whole(self, output_dir: str | None, _internal_call: bool) -> None:
        if self.has_whole_checkpoints:
            super().save_model(output_dir, _internal_call)
            return
        state = self.accelerator.get_state_dict(self.model) if self.is_fsdp_enabled else gather_partitions(self.model)
        self._save(output_dir or self.args.output_dir, state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    # transformers 5.24.0: writes the arguments as a pickle, and saves tied weights of a gathered state twice.
    def _save(self, output_dir=None, state_dict=None):
        folder = output_dir or self.args.output_dir
        if state_dict is not None:
            tied = self.model.all_tied_weights_keys
            state_dict = {name: weight for name, weight in state_dict.items() if name not in tied}
        # If the model was sharded when it was loaded, all processes gather its weights.
        if self.args.should_save or getattr(self, "is_distributed_loading_by_transformers", False):
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            with as_plain_class(model):
                model.save_pretrained(folder, state_dict=state_dict, is_main_process=self.args.should_save)
        if self.args.should_save:
            processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processor is not None:
                processor.save_pretrained(folder)
            set_modes_of_weights(Path(folder))
            self._save_beside_weights(folder, not is_adapted(self.model))

    def _save_beside_weights(self, folder: str, has_generation_config: bool) -> None:
        arguments = json.dumps(self.args.to_dict(), indent=2, default=str)
        (Path(folder) / ARGUMENTS_NAME).write_text(arguments + "\n", encoding="utf-8")
        # peft saves the adapter alone.
        if not has_generation_config:
            self.model.generation_config.save_pretrained(folder)
        if self.tokenizers is not None:
            self.tokenizers.save_pretrained(folder)


def _smooths_labels(model: PreTrainedModel) -> bool:
    """True if the model's own loss smooths labels, as the loss of Metaphrase models does."""
    base = model.get_base_model() if is_adapted(model) else model
    return "smoothing" in inspect.signature(base.forward).parameters


def check_r_drop(model: PreTrainedModel, other_dropout: float) -> None:
    """Check that R-Drop can train a model.

    Args:
        model: The model to train.
        other_dropout: Dropout of an adapter beside the model.

    Raises:
        ValueError: If it is no Metaphrase model, or all dropout is 0, so that both passes agree.
    """
    if not _smooths_labels(model):
        raise ValueError(f"`r_drop_alpha` must come with a Metaphrase model, got a {type(model).__name__}.")
    if not other_dropout and not any(getattr(model.config, name) for name in _DROPOUTS):
        raise ValueError(f"`r_drop_alpha` must come with a model whose {', '.join(_DROPOUTS)} are not all 0.")


def repeat_batch(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with all its rows twice.

    Args:
        inputs: Tensors (B, ...), with `labels` among them. Plain values, and tensors without a row for each pair such as
            positions (1, T), are not repeated. A packed batch, which has `source_lengths`, is a row (1, tokens) and gets longer.
    """
    num_rows, is_packed = len(inputs["labels"]), inputs.get("source_lengths") is not None
    repeated = {}
    for name, value in inputs.items():
        is_batch = isinstance(value, torch.Tensor) and value.ndim > 0
        if is_batch and (is_packed or len(value) == num_rows):
            value = torch.cat([value, value], dim=min(value.ndim - 1, 1) if is_packed else 0)
        repeated[name] = value
    return repeated


def _has_lengths(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and set(LENGTH_COLUMNS) <= set(getattr(dataset, "column_names", None) or ())


def count_pairs(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the number of pairs with labels in a padded or packed batch, as a scalar on its device. Fillers have no labels."""
    is_label = inputs["labels"] != IGNORED_LABEL
    if (lengths := inputs.get("target_lengths")) is None:
        return is_label.any(dim=1).sum()
    pair_of_token = torch.arange(len(lengths), device=is_label.device).repeat_interleave(
        lengths, output_size=is_label.numel()
    )
    return torch.zeros_like(lengths).index_add_(0, pair_of_token, is_label.flatten().to(lengths.dtype)).count_nonzero()


def _as_array(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return ids (rows, longest), padded as transformers pads predictions."""
    array = np.full((len(rows), max(map(len, rows), default=0)), IGNORED_LABEL)
    for row, ids in enumerate(rows):
        array[row, : len(ids)] = ids
    return array
