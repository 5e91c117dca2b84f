"""Samplers: batches within a token budget, and an order that groups pairs of similar length.

All batches of a token budget cost about the same and hold little padding.
"""

import heapq
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from metaphrase.modeling import IGNORED_LABEL

logger = logging.getLogger(__name__)

# Training arguments that cannot keep their meaning beside a token budget, with the reason.
_NOT_WITH_A_BUDGET = {
    "dataloader_drop_last": "because every pair occurs once in an epoch",
    "auto_find_batch_size": "because the budget decides the batch size",
    # transformers divides the noise by the root of a row's length, and a packed row holds many pairs.
    "neftune_noise_alpha": "because a row holds many pairs, and its length would reduce the noise",
}


def check_beside_budget(arguments: Any, max_tokens_per_batch: int | None) -> None:
    """Refuse training arguments that have no effect, or another one, beside a token budget.

    Args:
        arguments: Training arguments, or a recipe.
        max_tokens_per_batch: The budget; None if one is going to be chosen.

    Raises:
        ValueError: Naming the field.
    """
    budget = max_tokens_per_batch
    if budget is None:
        budget = "no `per_device_train_batch_size`. Give it, or a budget is chosen"
    strategy = getattr(arguments.train_sampling_strategy, "value", arguments.train_sampling_strategy)
    if strategy in ("sequential", "batch_rebalance"):
        raise ValueError(
            f"`train_sampling_strategy` must not be {strategy} with `max_tokens_per_batch`, because the budget groups pairs of "
            f"similar length, got {budget}."
        )
    for name, reason in _NOT_WITH_A_BUDGET.items():
        if value := getattr(arguments, name):
            shown = "true" if value is True else value
            raise ValueError(
                f"`{name}` must be left out with `max_tokens_per_batch`, {reason}, got {shown} and {budget}."
            )


class LengthGroupedSampler(Sampler[int]):
    """Indices in an order whose consecutive batches hold pairs of similar length, with the batches in random order.

    Pairs are shuffled, sorted by length within chunks of many batches, and cut into batches, which are shuffled. The order
    depends on the seed and the epoch alone.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, batches_per_window: int = 50):
        """Args:
        lengths: Tokens of each pair.
        batch_size: Batch size of the loader.
        seed: Seed of the order.
        batches_per_window: Batches of a sorted chunk. More of them means less padding and less mixing.
        """
        self.lengths = lengths
        self.batch_size = batch_size
        self.seed = seed
        self.window = batch_size * batches_per_window
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the order. accelerate's loaders call this method."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        shuffled = torch.randperm(len(self.lengths), generator=generator).tolist()
        batches = []
        for start in range(0, len(shuffled), self.window):
            chunk = sorted(shuffled[start : start + self.window], key=lambda index: -self.lengths[index])
            batches += [chunk[first : first + self.batch_size] for first in range(0, len(chunk), self.batch_size)]
        # The loader cuts the order every `batch_size` indices: only the last batch may be smaller.
        full = [batch for batch in batches if len(batch) == self.batch_size]
        rest = [batch for batch in batches if len(batch) < self.batch_size]
        order = torch.randperm(len(full), generator=generator).tolist()
        for batch in [full[number] for number in order] + rest:
            yield from batch


def padded_cost(source_lengths: np.ndarray | Sequence[int], target_lengths: np.ndarray | Sequence[int]) -> int:
    """Return the tokens of a padded batch, both sides together: the quantity that `max_tokens_per_batch` bounds.

    Args:
        source_lengths: Tokens of each source in the batch.
        target_lengths: Tokens of each target in the batch.
    """
    return len(source_lengths) * (int(max(source_lengths)) + int(max(target_lengths)))


def round_up(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Return lengths rounded up to a multiple, as a collator pads."""
    return -(-lengths // multiple) * multiple


def as_padded(lengths: np.ndarray, max_tokens_per_batch: int, multiple: int, num_before: int = 0) -> np.ndarray:
    """Return lengths rounded up to a multiple. A pair that exceeds the budget only by rounding gets its own batch.

    Args:
        lengths: Tokens of source and target of each pair, `(pairs, 2)`.
        max_tokens_per_batch: The budget.
        multiple: Multiple of the widths.
        num_before: Number of earlier pairs, for the message.

    Raises:
        ValueError: If the longest pair alone exceeds the budget.
    """
    sums = lengths.sum(axis=1)
    longest = int(sums.argmax())
    if sums[longest] > max_tokens_per_batch:
        source, target = lengths[longest].tolist()
        raise ValueError(
            f"`max_tokens_per_batch` must hold the longest pair, number {num_before + longest + 1} of those to train on, with "
            f"{source} source and {target} target tokens, {source + target} in all, got {max_tokens_per_batch}. Raise it, or "
            "lower `max_source_length` and `max_target_length`."
        )
    return round_up(lengths, multiple)


def sort_by_both_lengths(indices: np.ndarray, lengths: np.ndarray, num_batches: int) -> np.ndarray:
    """Return indices in an order whose neighbours are similar in source and in target length.

    Pairs are sorted by source length and cut into about as many strips as a strip has batches. Each strip is sorted by
    target length, up and down in turn.

    Args:
        indices: The pairs to order. Equal pairs keep this order.
        lengths: Lengths of all pairs, `(pairs, 2)`.
        num_batches: Expected number of batches.
    """
    indices = indices[np.argsort(lengths[indices, 0], kind="stable")]
    strips = np.array_split(indices, max(1, round(math.sqrt(num_batches))))
    for number, strip in enumerate(strips):
        targets = lengths[strip, 1]
        strips[number] = strip[np.argsort(targets if number % 2 == 0 else -targets, kind="stable")]
    return np.concatenate(strips)


def cut_into_batches(order: Iterable[int], lengths: np.ndarray, max_tokens_per_batch: int) -> list[list[int]]:
    """Cut an order into consecutive batches, each as large as the budget allows."""
    batches: list[list[int]] = []
    longest_source = longest_target = 0
    for index in order:
        source, target = lengths[index].tolist()
        longest_source, longest_target = max(longest_source, source), max(longest_target, target)
        if batches and (len(batches[-1]) + 1) * (longest_source + longest_target) <= max_tokens_per_batch:
            batches[-1].append(int(index))
        else:
            batches.append([int(index)])
            longest_source, longest_target = source, target
    return batches


def split_to_count(batches: list[list[int]], count: int) -> list[list[int]]:
    """Halve the batches with most pairs until there are `count`.

    Raises:
        ValueError: If there are fewer pairs than `count`.
    """
    if sum(map(len, batches)) < count:
        raise ValueError(f"There must be at least {count} pairs to make {count} batches, got {sum(map(len, batches))}.")
    if len(batches) >= count:
        return list(batches)
    # A half has the key of the whole and one number more, so that the keys keep the order of the batches.
    heap = [(-len(batch), (number,), batch) for number, batch in enumerate(batches)]
    heapq.heapify(heap)
    while len(heap) < count:
        size, key, batch = heap[0]
        half = len(batch) // 2
        heapq.heapreplace(heap, (-half, (*key, 0), batch[:half]))
        heapq.heappush(heap, (size + half, (*key, 1), batch[half:]))
    return [batch for _, _, batch in sorted(heap, key=lambda item: item[1])]


def fill_to_count(batches: list[list[int]], count: int, num_processes: int, filler: int) -> list[list[int]]:
    """Split batches as `split_to_count`, and add batches of the index `filler` alone if there are too few pairs.

    Raises:
        ValueError: If there are fewer pairs than processes.
    """
    missing = max(0, count - max(sum(map(len, batches)), num_processes))
    return split_to_count(batches, count - missing) + [[filler] for _ in range(missing)]


def seeded_generator(seed: int) -> torch.Generator:
    """Return a generator for a seed of any size, also above torch's limit."""
    return torch.Generator().manual_seed(seed if seed < 2**64 else seed % 2**63)


def form_batches(
    lengths: np.ndarray, max_tokens_per_batch: int, generator: torch.Generator, pairs_per_window: int | None = None
) -> list[list[int]]:
    """Shuffle pairs, sort them in chunks by both lengths, and cut each chunk into batches.

    Args:
        lengths: Tokens of source and target of each pair, `(pairs, 2)`.
        max_tokens_per_batch: Bound of `padded_cost`.
        generator: Randomness of the shuffling.
        pairs_per_window: Pairs of a chunk; None sorts all pairs together.
    """
    shuffled = torch.randperm(len(lengths), generator=generator).numpy()
    chunk = pairs_per_window or len(shuffled)
    batches: list[list[int]] = []
    for start in range(0, len(shuffled), chunk):
        indices = shuffled[start : start + chunk]
        expected = math.ceil(lengths[indices].sum() / max_tokens_per_batch)
        batches += cut_into_batches(sort_by_both_lengths(indices, lengths, expected), lengths, max_tokens_per_batch)
    return batches


class TokenBudgetSampler(Sampler[list[int]]):
    """Batches of similar length within a token budget, in random order, for one of several processes.

    Every pair occurs in one batch of one process in each epoch. All processes and all epochs have the same number of batches,
    so that a schedule can be planned. The batches depend on the seed and the epoch alone.

    If each batch holds one pair and the processes cannot share the pairs evenly, the last processes get a filler. This is the
    index of the shortest pair plus the number of all pairs. `WithFillers` turns a filler into a pair that does not count.

    Attributes:
        num_fillers: Fillers of an epoch in all processes together, fewer than processes.
    """

    _PROBED_EPOCHS = 4
    _SPARE = 0.01

    def __init__(
        self,
        lengths: np.ndarray | Sequence[Sequence[int]],
        max_tokens_per_batch: int,
        seed: int,
        num_processes: int = 1,
        process_index: int = 0,
        batches_per_window: int = 200,
        length_multiple: int = 1,
    ):
        """Args:
        lengths: Tokens of source and target of each pair, `(pairs, 2)`.
        max_tokens_per_batch: Bound of the padded tokens of both sides of a batch.
        seed: Seed of the order.
        num_processes: Number of processes that share an epoch.
        process_index: Index of this process.
        batches_per_window: Batches of a sorted chunk. More of them means less padding and less mixing.
        length_multiple: Multiple to which the collator rounds up widths.

        Raises:
            ValueError: If the budget cannot hold the longest pair, or there are fewer pairs than processes.
        """
        lengths = np.asarray(lengths, dtype=np.int64).reshape(-1, 2)
        self._num_tokens = int(lengths.sum())
        self.lengths = as_padded(lengths, max_tokens_per_batch, length_multiple)
        self.max_tokens_per_batch = max_tokens_per_batch
        self.seed = seed
        self.num_processes, self.process_index = num_processes, process_index
        mean = self.lengths.sum(axis=1).mean()
        self.pairs_per_window = max(1, int(batches_per_window * max_tokens_per_batch / mean))
        self.epoch = 0
        most = max(len(self._form(epoch)) for epoch in range(self._PROBED_EPOCHS))
        # Sorting all pairs together gives nearly the same batches for any order, which fit nearly always.
        least = len(self._form(0, is_whole=True))
        planned = max(math.ceil(most * (1 + self._SPARE)), least + 1) if most > 1 else most
        self.batches_per_process = math.ceil(min(planned, len(self.lengths)) / num_processes)
        self._filler = len(self.lengths) + int(self.lengths.sum(axis=1).argmin())
        self.num_fillers = max(0, self.batches_per_process * num_processes - len(self.lengths))
        # Refuse fewer pairs than processes.
        self.epoch_batches(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the batches. accelerate's loaders call this method."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches_per_process

    def _generator(self, epoch: int) -> torch.Generator:
        return seeded_generator(self.seed * 1_000_003 + epoch)

    def _form(self, epoch: int, is_whole: bool = False) -> list[list[int]]:
        window = None if is_whole else self.pairs_per_window
        return form_batches(self.lengths, self.max_tokens_per_batch, self._generator(epoch), window)

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        """Return the batches of all processes in an epoch. Process `i` takes each `num_processes`-th batch from `i` on."""
        count = self.batches_per_process * self.num_processes
        # A few pairs of very unequal length may need more batches than planned, which was done for the first epoch.
        candidates = (self._form(*options) for options in ((epoch,), (epoch, True), (0,)))
        batches = next(batches for batches in candidates if len(batches) <= count)
        batches = fill_to_count(batches, count, self.num_processes, self._filler)
        # Neighbours form one step and cost about the same, so that no process waits long.
        steps = torch.randperm(self.batches_per_process, generator=self._generator(epoch)).tolist()
        return [batches[step * self.num_processes + rank] for step in steps for rank in range(self.num_processes)]

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.epoch_batches(self.epoch)[self.process_index :: self.num_processes]

    def padding_share(self, epoch: int = 0) -> float:
        """Return the share of padding in the tokens of an epoch, from 0 to 1, if all batches are padded."""
        batches = (np.array(batch) % len(self.lengths) for batch in self.epoch_batches(epoch))
        return 1 - self._num_tokens / sum(padded_cost(*self.lengths[batch].T) for batch in batches)


class WithFillers(Dataset):
    """A data set of pairs that answers to indices above its own with the same pairs, which do not count."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Mapping[str, Sequence[int]]:
        return self.dataset[index] if index < len(self) else uncounted(self.dataset[index - len(self)])

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on, if the data set takes one."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


def uncounted(pair: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return a pair with all labels ignored, so that it adds nothing to a loss or to the number of labels."""
    return {**pair, "labels": [IGNORED_LABEL] * len(pair["labels"])}
