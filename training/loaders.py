"""Data loaders of a trainer: batches by a token budget or by length, and batches of several processes."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, default_data_collator
from transformers.trainer_utils import seed_worker

from metaphrase.data.collators import PackedCollator, PairCollator
from metaphrase.data.pairs import LENGTH_COLUMNS, data_seed
from metaphrase.data.stages import StagedPairs
from metaphrase.data.streams import TokenBudgetStream
from metaphrase.data.token_budget import LengthGroupedSampler, TokenBudgetSampler, WithFillers, check_beside_budget
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.training.checkpointing.resuming import BATCHES_BY_NUMBER
from metaphrase.training.distributed import ignore_repeated_pairs, is_data_parallel, sum_over_processes

logger = logging.getLogger(__name__)

# Packed rows in half precision have a multiple of this many tokens, so that kernels meet few lengths.
TOKENS_MULTIPLE = 32
# Collators that only pad, which a packed row does not need. A subclass may do more.
_PLAIN_COLLATORS = (PairCollator, PackedCollator, DataCollatorForSeq2Seq, DataCollatorWithPadding)


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


class DataLoadersMixin:
    """Data loaders, placed before `WholeCheckpoints` and transformers' Trainer.

    - With `max_tokens_per_batch`, batches are formed by tokens, and packed where the model reads packed rows.
    - With `group_by_length` and a length column, batches of like length come in random order.
    - Several processes share one order of the pairs. Pairs that accelerate repeats at the end of an epoch have their labels
      ignored, so the last step is that of a single process. Batches by tokens have fillers instead.
    - Evaluation never drops the last batch.
    """

    max_tokens_per_batch: int | None = None
    # True if the user's own function computes the loss, which need not be a number without any label.
    has_custom_loss = False
    # True if the evaluation decodes texts and needs no logits.
    decodes = False
    # Pairs and optimizer steps of this process in this call of `train`.
    _num_pairs: torch.Tensor | int = 0
    _num_steps = 0

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

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self._trains_by_budget and "labels" in inputs:
            self._num_pairs = self._num_pairs + count_pairs(inputs)
            self._num_steps += self.accelerator.sync_gradients
        return super().training_step(model, inputs, num_items_in_batch)

    # transformers 5.23.0: the only way to say how many pairs were trained on. Batches by tokens have no fixed number of pairs.
    def _finalize_training(self, trial, num_train_samples, start_time):
        if self._trains_by_budget:
            [num_pairs] = sum_over_processes(self.accelerator, self.args, torch.as_tensor([self._num_pairs]))
            # The parent multiplies by the share of `max_steps` that is done.
            num_train_samples = num_pairs * self.state.max_steps / max(self._num_steps, 1)
        return super()._finalize_training(trial, num_train_samples, start_time)

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
