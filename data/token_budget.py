"""Batches by a budget of tokens: which pairs share a batch, so that each costs about the same and little of it is padding."""

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

# Arguments of a training that would act otherwise than they say.
_NOT_WITH_A_BUDGET = {
    "dataloader_drop_last": "by which every pair comes once an epoch",
    "auto_find_batch_size": "which decides what a batch takes: after a lack of memory, the same batches would come again",
    # transformers divides the noise by the root of a row's length, which is that of all pairs in it.
    "neftune_noise_alpha": "by which many pairs share a row, whose length would lessen the noise",
}


def check_beside_budget(arguments: Any, max_tokens_per_batch: int) -> None:
    """Refuses what cannot be had beside a budget.

    Args:
        arguments: Of a training, or a recipe.
        max_tokens_per_batch: The budget.

    Raises:
        ValueError: Naming the field.
    """
    strategy = getattr(arguments.train_sampling_strategy, "value", arguments.train_sampling_strategy)
    if strategy in ("sequential", "batch_rebalance"):
        raise ValueError(
            f"`train_sampling_strategy` must not be {strategy} with `max_tokens_per_batch`, by which pairs of like length share "
            f"a batch, got {max_tokens_per_batch}."
        )
    for name, why in _NOT_WITH_A_BUDGET.items():
        if value := getattr(arguments, name):
            shown = "true" if value is True else value
            raise ValueError(
                f"`{name}` must be left out with `max_tokens_per_batch`, {why}, got {shown} and {max_tokens_per_batch}."
            )


def padded_cost(source_lengths: np.ndarray | Sequence[int], target_lengths: np.ndarray | Sequence[int]) -> int:
    """Tokens of a batch, both sides, padding counted: what `max_tokens_per_batch` bounds.

    Args:
        source_lengths: Tokens of each source in the batch.
        target_lengths: Tokens of each target in the batch.
    """
    return len(source_lengths) * (int(max(source_lengths)) + int(max(target_lengths)))


def check_longest_pair(lengths: np.ndarray, max_tokens_per_batch: int, num_before: int = 0) -> None:
    """Refuses a budget that the longest pair alone exceeds.

    Args:
        lengths: Tokens of source and target of each pair, `(pairs, 2)`.
        max_tokens_per_batch: The budget.
        num_before: Pairs that came before these.

    Raises:
        ValueError: Naming the longest pair.
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


def round_up(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Lengths as a collator pads them that rounds widths up to a multiple."""
    return -(-lengths // multiple) * multiple


def as_padded(lengths: np.ndarray, max_tokens_per_batch: int, multiple: int, num_before: int = 0) -> np.ndarray:
    """Lengths rounded up to a multiple. A pair that the budget holds only without that has a batch for itself.

    For arguments, see `check_longest_pair`.

    Raises:
        ValueError: If the longest pair alone exceeds the budget as it is.
    """
    check_longest_pair(lengths, max_tokens_per_batch, num_before)
    return round_up(lengths, multiple)


def sort_by_both_lengths(indices: np.ndarray, lengths: np.ndarray, num_batches: int) -> np.ndarray:
    """Orders pairs so that neighbours are alike in source and in target length.

    Sorted by source length, the pairs are cut into about as many strips as a strip has batches, and each strip is sorted by
    target length, up and down in turn.

    Args:
        indices: Of the pairs to order; equal pairs keep this order.
        lengths: Of all pairs, `(pairs, 2)`.
        num_batches: About how many batches the pairs will make.
    """
    indices = indices[np.argsort(lengths[indices, 0], kind="stable")]
    strips = np.array_split(indices, max(1, round(math.sqrt(num_batches))))
    for number, strip in enumerate(strips):
        targets = lengths[strip, 1]
        strips[number] = strip[np.argsort(targets if number % 2 == 0 else -targets, kind="stable")]
    return np.concatenate(strips)


def cut_into_batches(order: Iterable[int], lengths: np.ndarray, max_tokens_per_batch: int) -> list[list[int]]:
    """Cuts an order into consecutive batches, each as large as the budget allows."""
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
    """Halves the batches of most pairs until there are `count`.

    Raises:
        ValueError: If there are fewer pairs than that.
    """
    if sum(map(len, batches)) < count:
        raise ValueError(f"There must be at least {count} pairs to make {count} batches, got {sum(map(len, batches))}.")
    if len(batches) >= count:
        return list(batches)
    # The place of a half is that of the whole and one number more, so that places are in the order of the batches.
    heap = [(-len(batch), (number,), batch) for number, batch in enumerate(batches)]
    heapq.heapify(heap)
    while len(heap) < count:
        size, place, batch = heap[0]
        half = len(batch) // 2
        heapq.heapreplace(heap, (-half, (*place, 0), batch[:half]))
        heapq.heappush(heap, (size + half, (*place, 1), batch[half:]))
    return [batch for _, _, batch in sorted(heap, key=lambda item: item[1])]


def fill_to_count(batches: list[list[int]], count: int, num_processes: int, filler: int) -> list[list[int]]:
    """As `split_to_count`; the batches for which there are no pairs, at most one for each further process, hold `filler` alone.

    Raises:
        ValueError: If there are fewer pairs than processes.
    """
    missing = max(0, count - max(sum(map(len, batches)), num_processes))
    return split_to_count(batches, count - missing) + [[filler] for _ in range(missing)]


def seeded_generator(seed: int) -> torch.Generator:
    """A generator of any seed, those above torch's limit brought below it."""
    return torch.Generator().manual_seed(seed if seed < 2**64 else seed % 2**63)


def form_batches(
    lengths: np.ndarray, max_tokens_per_batch: int, generator: torch.Generator, pairs_per_window: int | None = None
) -> list[list[int]]:
    """Shuffles pairs, sorts them in windows by both lengths and cuts batches, which stay in this order.

    Args:
        lengths: Tokens of source and target of each pair, `(pairs, 2)`.
        max_tokens_per_batch: Bound of `padded_cost`.
        generator: Of the shuffling.
        pairs_per_window: Pairs that are sorted together; `None` sorts all.
    """
    shuffled = torch.randperm(len(lengths), generator=generator).numpy()
    window = pairs_per_window or len(shuffled)
    batches: list[list[int]] = []
    for start in range(0, len(shuffled), window):
        indices = shuffled[start : start + window]
        expected = math.ceil(lengths[indices].sum() / max_tokens_per_batch)
        batches += cut_into_batches(sort_by_both_lengths(indices, lengths, expected), lengths, max_tokens_per_batch)
    return batches


class TokenBudgetSampler(Sampler[list[int]]):
    """Batches of like length within a budget of tokens, in random order, for one of several processes.

    Every pair stands in one batch of one process in each epoch. All processes get the same number of batches, and all epochs
    have the same number, so that a schedule can be planned. What an epoch looks like depends on the seed and its number alone.

    Where batches are to hold a pair each and processes do not share the pairs evenly, the last ones get a filler: the index of
    the shortest pair plus the number of all pairs. `WithFillers` makes it a pair that does not count.

    Attributes:
        num_fillers: In an epoch, of all processes together; always fewer than processes.
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
        seed: Of the order.
        num_processes: How many share an epoch.
        process_index: Which of them this is.
        batches_per_window: More pad less, fewer mix more.
        length_multiple: What the collator rounds the widths of a batch up to a multiple of.

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
        # Sorted as a whole, pairs of any order make nearly the same batches: that fits nearly always.
        least = len(self._form(0, is_whole=True))
        planned = max(math.ceil(most * (1 + self._SPARE)), least + 1) if most > 1 else most
        planned = min(planned, len(self.lengths))
        self.batches_per_process = math.ceil(planned / num_processes)
        self._filler = len(self.lengths) + int(self.lengths.sum(axis=1).argmin())
        self.num_fillers = max(0, self.batches_per_process * num_processes - len(self.lengths))
        # Fewer pairs than processes are refused here.
        self._to_count(self._form(0))

    def set_epoch(self, epoch: int) -> None:
        """Chooses the batches of an epoch; accelerate's loaders call it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches_per_process

    def _generator(self, epoch: int) -> torch.Generator:
        return seeded_generator(self.seed * 1_000_003 + epoch)

    def _form(self, epoch: int, is_whole: bool = False) -> list[list[int]]:
        window = None if is_whole else self.pairs_per_window
        return form_batches(self.lengths, self.max_tokens_per_batch, self._generator(epoch), window)

    def _to_count(self, batches: list[list[int]]) -> list[list[int]]:
        return fill_to_count(batches, self.batches_per_process * self.num_processes, self.num_processes, self._filler)

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        """The batches of all processes in an epoch, in order; process `i` takes each `num_processes`-th from `i` on."""
        count = self.batches_per_process * self.num_processes
        batches = self._form(epoch)
        if len(batches) > count:
            batches = self._form(epoch, is_whole=True)
        if len(batches) > count:
            # A few pairs of very unequal length may need more in any form: these batches the number was made for.
            batches = self._form(0)
        batches = self._to_count(batches)
        assert len(batches) == count, f"An epoch must have {count} batches, got {len(batches)}."
        generator = self._generator(epoch)
        # Batches of one step are neighbours, so that no process waits long for another.
        steps = torch.randperm(self.batches_per_process, generator=generator).tolist()
        return [batches[step * self.num_processes + rank] for step in steps for rank in range(self.num_processes)]

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.epoch_batches(self.epoch)[self.process_index :: self.num_processes]

    def padding_share(self, epoch: int = 0) -> float:
        """The share of an epoch's tokens that would be padding if its batches were padded, from 0 to 1."""
        batches = (np.array(batch) % len(self.lengths) for batch in self.epoch_batches(epoch))
        return 1 - self._num_tokens / sum(padded_cost(*self.lengths[batch].T) for batch in batches)


class WithFillers(Dataset):
    """A data set of pairs, and under indices above its own the same pairs once more, which do not count."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Mapping[str, Sequence[int]]:
        return self.dataset[index] if index < len(self) else uncounted(self.dataset[index - len(self)])

    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch on, if the data set takes one."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


def uncounted(pair: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """A pair whose labels are all ignored, so that it adds nothing to a loss, nor to the number of labels."""
    return {**pair, "labels": [IGNORED_LABEL] * len(pair["labels"])}
