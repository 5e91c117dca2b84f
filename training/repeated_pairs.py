"""Pairs that come twice, so that all processes have equal batches: they count once, in training and evaluation."""

from collections.abc import Iterable, Iterator, Mapping

import torch

from metaphrase.modeling import IGNORED_LABEL
from metaphrase.training.processes import share_out_pairs


class RepeatedPairsMixin:
    """For a trainer, before its parents: a pair that fills a batch up has its labels ignored, and counts nowhere.

    accelerate takes the first pairs for that. The last step of an epoch is the one that a single process would make. Batches by
    a budget of tokens have fillers of their own.
    """

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self._repeats_pairs:
            epoch_iterator = self._each_pair_once(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    @property
    def _repeats_pairs(self) -> bool:
        """Whether the last batches of an epoch of training may hold pairs again."""
        accelerator = self.accelerator
        return (
            share_out_pairs(self.args, accelerator)
            and self.max_tokens_per_batch is None
            and hasattr(self.train_dataset, "__len__")
            and not self.args.dataloader_drop_last
            and accelerator.even_batches
            and not accelerator.dispatch_batches
            # A loss of one's own need not be a number where there is no label at all.
            and not self._has_own_loss
        )

    def _each_pair_once(self, batches: Iterable[Mapping]) -> Iterator[Mapping]:
        for batch in batches:
            labels = batch.get("labels")
            # Packed pairs have no rows.
            if (
                self.accelerator.gradient_state.end_of_dataloader
                and labels is not None
                and "target_lengths" not in batch
            ):
                # A loader that skips batches does not know it.
                remainder = len(self.train_dataset) % (len(labels) * self.args.world_size)
                batch = {**batch, "labels": self._own_labels(labels, remainder)}
            yield batch

    def _own_labels(self, labels: torch.Tensor, remainder: int) -> torch.Tensor:
        """Labels `(batch, target)` of a last batch, those of repeated pairs ignored.

        Args:
            labels: Of this process.
            remainder: So many pairs of the last batches, of all processes in order, are no repeats; 0 or less means all.
        """
        if remainder <= 0:
            return labels
        own = max(0, remainder - self.args.process_index * len(labels))
        return torch.cat([labels[:own], torch.full_like(labels[own:], IGNORED_LABEL)])
