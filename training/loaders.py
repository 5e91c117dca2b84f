"""Loaders of batches by a budget of tokens, packed where the model can read that, for a trainer."""

import logging
from collections.abc import Mapping
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
from metaphrase.data.token_budget import TokenBudgetSampler, WithFillers, check_beside_budget
from metaphrase.data.token_stream import TokenBudgetStream
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.training.checkpointing.resuming import BATCHES_BY_NUMBER

logger = logging.getLogger(__name__)

# Of the tokens in a packed row where kernels of half precision compute it.
TOKENS_MULTIPLE = 32
# They do nothing that a packed row does not.
_PLAIN_COLLATORS = (PairCollator, PackedCollator, DataCollatorForSeq2Seq, DataCollatorWithPadding)


def _has_lengths(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and set(LENGTH_COLUMNS) <= set(getattr(dataset, "column_names", None) or ())


def count_pairs(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """How many pairs of a batch, padded or packed, have labels: fillers have none. A scalar, where the batch is."""
    is_label = inputs["labels"] != IGNORED_LABEL
    if (lengths := inputs.get("target_lengths")) is None:
        return is_label.any(dim=1).sum()
    of_pairs = torch.arange(len(lengths), device=is_label.device).repeat_interleave(
        lengths, output_size=is_label.numel()
    )
    return torch.zeros_like(lengths).index_add_(0, of_pairs, is_label.flatten().to(lengths.dtype)).count_nonzero()


class TokenBudgetMixin:
    """For a trainer, before its parents: what `max_tokens_per_batch` changes of its loaders. With `None` that is nothing."""

    max_tokens_per_batch: int | None = None
    # Pairs of this process in this call of `train`.
    _num_trained: torch.Tensor | int = 0

    def _layout_of_epochs(self) -> dict[str, int | str | None]:
        layout = super()._layout_of_epochs()
        has_budget = self.max_tokens_per_batch is not None
        if has_budget:
            # It decides what these do otherwise.
            layout |= dict.fromkeys(BATCHES_BY_NUMBER)
        return layout | {
            "max_tokens_per_batch": self.max_tokens_per_batch,
            "pairs_in_buffer": getattr(self.train_dataset, "pairs_in_buffer", None),
            "length_multiple": self._length_multiple if has_budget else 1,
        }

    def get_train_dataloader(self):
        self._num_trained = 0
        if self._trains_by_budget:
            self._check_budget()
        if isinstance(self.train_dataset, TokenBudgetStream):
            self.train_dataset.length_multiple = self._length_multiple
            return self._prepare_loader(self.train_dataset, is_training=True, batch_size=None)
        if self.max_tokens_per_batch is None:
            return super().get_train_dataloader()
        loader = self._budget_loader(self.train_dataset, is_training=True)
        sampler = loader.batch_sampler
        logger.info(
            "An epoch has %d batches of at most %d tokens; padded, %.1f %% of them would be padding.",
            len(sampler) * sampler.num_processes,
            self.max_tokens_per_batch,
            100 * sampler.padding_share(),
        )
        return loader

    def _check_budget(self) -> None:
        """Refuses what a budget would leave unasked.

        Raises:
            ValueError: Naming the argument.
        """
        check_beside_budget(self.args, self.max_tokens_per_batch)
        if not isinstance(self.train_dataset, TokenBudgetStream) and not _has_lengths(self.train_dataset):
            columns = getattr(self.train_dataset, "column_names", None)
            raise ValueError(
                f"`train_dataset` must have the columns {' and '.join(LENGTH_COLUMNS)}, in tokens, and an end with "
                f"`max_tokens_per_batch`, got a {type(self.train_dataset).__name__} with {columns}. What has no end is read by a "
                "`TokenBudgetStream`."
            )
        if hasattr(self.train_dataset, "__len__") and len(self.train_dataset) < self.args.world_size:
            raise ValueError(
                f"`train_dataset` must have a pair for each process with `max_tokens_per_batch`, got {len(self.train_dataset)} "
                f"and {self.args.world_size} processes."
            )
        # One that is derived from these may do more.
        is_plain = type(self.data_collator) in _PLAIN_COLLATORS or self.data_collator is default_data_collator
        if self._is_packing_model and not is_plain:
            raise ValueError(
                "`data_collator` must be one that only pads with `max_tokens_per_batch` and a model that reads packed rows, "
                f"since pairs are put into rows in its place, got a {type(self.data_collator).__name__}. Pairs are padded by it "
                "where the model's `supports_packing` is false."
            )
        if self._is_packing_model and self.args.torch_compile and self.args.device.type == "cpu":
            logger.warning(
                "Compiled for a CPU, packed rows take minutes for each new shape: leave `torch_compile` out."
            )

    def get_eval_dataloader(self, eval_dataset=None):
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        # As `evaluate` sees it.
        is_loss_alone = self.args.prediction_loss_only or self._decodes or self.compute_metrics is None
        if self.max_tokens_per_batch is None or not is_loss_alone or not _has_lengths(dataset):
            return super().get_eval_dataloader(eval_dataset)
        if len(dataset) < self.args.world_size:
            # Some processes have no pair of their own: the parent's loader gives them one that is not counted.
            return super().get_eval_dataloader(eval_dataset)
        return self._budget_loader(dataset, is_training=False)

    @property
    def _trains_by_budget(self) -> bool:
        return self.max_tokens_per_batch is not None or isinstance(self.train_dataset, TokenBudgetStream)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self._trains_by_budget and "labels" in inputs:
            self._num_trained = self._num_trained + count_pairs(inputs)
        return super().training_step(model, inputs, num_items_in_batch)

    def _finalize_training(self, trial, num_train_samples, start_time):
        if self._trains_by_budget:
            # The parent multiplies steps by a number of pairs, which a budget does not go by, and takes the share of those steps
            # that were made in this call.
            num_steps = self.state.global_step - self._first_step
            [num_trained] = self._sum_over_processes(torch.as_tensor([self._num_trained]))
            num_train_samples = num_trained * self.state.max_steps / max(num_steps, 1)
        return super()._finalize_training(trial, num_train_samples, start_time)

    @property
    def _is_packing_model(self) -> bool:
        return getattr(self.accelerator.unwrap_model(self.model), "supports_packing", False)

    @property
    def _length_multiple(self) -> int:
        """What widths are rounded up to a multiple of after a budget was filled. Packed pairs have no width."""
        # Collators of transformers have none where none is asked for.
        return 1 if self._is_packing_model else getattr(self.data_collator, "pad_to_multiple_of", None) or 1

    def _budget_loader(self, dataset, is_training: bool) -> DataLoader:
        lengths = np.stack([np.asarray(dataset[name][:]) for name in LENGTH_COLUMNS], axis=1)
        arguments = self.args
        seed = data_seed(arguments)
        # A pair to be evaluated is never left out: if it is longer than the budget, that grows to hold it.
        budget = (
            self.max_tokens_per_batch
            if is_training
            else max(self.max_tokens_per_batch, lengths.sum(axis=1).max().item())
        )
        shares = (arguments.world_size, arguments.process_index)
        sampler = TokenBudgetSampler(lengths, budget, seed, *shares, length_multiple=self._length_multiple)
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
            collate_fn=self._packed_collator() if self._is_packing_model else self.data_collator,
            num_workers=workers,
            pin_memory=arguments.dataloader_pin_memory,
            persistent_workers=arguments.dataloader_persistent_workers,
            prefetch_factor=arguments.dataloader_prefetch_factor,
            # Earlier versions of transformers have none of these two.
            multiprocessing_context=getattr(arguments, "dataloader_multiprocessing_context", None),
            in_order=getattr(arguments, "dataloader_in_order", True),
            worker_init_fn=seed,
            **batching,
        )
        # The batches are this process's own already: accelerate must not share them out again.
        return prepare_data_loader(
            loader,
            device=arguments.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            dispatch_batches=False,
        )

    def _packed_collator(self) -> PackedCollator:
        pad_token_id = self.accelerator.unwrap_model(self.model).config.pad_token_id or 0
        return PackedCollator(pad_token_id, TOKENS_MULTIPLE if self.args.bf16 or self.args.fp16 else 1)
