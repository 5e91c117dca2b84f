"""Batches by a token budget: of pairs in memory, and of a stream that sorts a buffer of pairs."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info
from transformers import trainer_pt_utils

from metaphrase.data.augmentation import Augmenter
from metaphrase.data.encoding import OUTCOMES, PairEncoder, file_fingerprint
from metaphrase.data.pairs import DROP_REASONS, DataReport, PairSource, generate_records, read_arrow
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.batches import cut_into_batches

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


class LengthGroupedSampler(trainer_pt_utils.LengthGroupedSampler):
    """transformers' order whose consecutive batches hold pairs of similar length, from seed and epoch alone."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int):
        super().__init__(batch_size, lengths=list(lengths))
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the order."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


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


def split_to_count(batches: list[list[int]], count: int) -> list[list[int]]:
    """Halve the batches with most pairs until there are `count`.

    Raises:
        ValueError: If there are fewer pairs than `count`.
    """
    if sum(map(len, batches)) < count:
        raise ValueError(f"There must be at least {count} pairs to make {count} batches, got {sum(map(len, batches))}.")
    while (missing := count - len(batches)) > 0:
        by_size = sorted(range(len(batches)), key=lambda number: len(batches[number]), reverse=True)
        largest, parts = {number for number in by_size[:missing] if len(batches[number]) > 1}, []
        for number, batch in enumerate(batches):
            half = len(batch) // 2
            parts += [batch[:half], batch[half:]] if number in largest else [batch]
        batches = parts
    return batches


def fill_to_count(batches: list[list[int]], count: int, num_processes: int, filler: int) -> list[list[int]]:
    """Split batches as `split_to_count`, and add batches of the index `filler` alone if there are too few pairs.

    Raises:
        ValueError: If there are fewer pairs than processes.
    """
    missing = max(0, count - max(sum(map(len, batches)), num_processes))
    return split_to_count(batches, count - missing) + [[filler] for _ in range(missing)]


def shuffle_steps(batches: list[list[int]], num_processes: int, generator: torch.Generator) -> list[list[int]]:
    """Shuffle groups of `num_processes` neighbors, which form one step and cost about the same, so that no process waits long.

    Process `i` takes each `num_processes`-th batch from `i` on.
    """
    steps = torch.randperm(len(batches) // num_processes, generator=generator).tolist()
    return [batches[step * num_processes + rank] for step in steps for rank in range(num_processes)]


def seeded_generator(seed: int) -> torch.Generator:
    """Return a generator for a seed of any size, also above torch's limit."""
    return torch.Generator().manual_seed(seed if seed < 2**64 else seed % 2**63)


def form_batches(
    lengths: np.ndarray, max_tokens_per_batch: int, generator: torch.Generator, pairs_per_chunk: int | None = None
) -> list[list[int]]:
    """Shuffle pairs, sort them in chunks by both lengths, and cut each chunk into batches.

    Args:
        lengths: Tokens of source and target of each pair, `(pairs, 2)`.
        max_tokens_per_batch: Bound of `padded_cost`.
        generator: Randomness of the shuffling.
        pairs_per_chunk: Pairs of a chunk; None sorts all pairs together.
    """
    shuffled = torch.randperm(len(lengths), generator=generator).numpy()
    size = pairs_per_chunk or len(shuffled)
    batches: list[list[int]] = []
    for start in range(0, len(shuffled), size):
        indices = shuffled[start : start + size]
        expected = math.ceil(lengths[indices].sum() / max_tokens_per_batch)
        order = sort_by_both_lengths(indices, lengths, expected)
        batches += cut_into_batches(order.tolist(), lengths[order].tolist(), max_tokens_per_batch)
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
        batches_per_chunk: int = 200,
        length_multiple: int = 1,
    ):
        """Args:
        lengths: Tokens of source and target of each pair, `(pairs, 2)`.
        max_tokens_per_batch: Bound of the padded tokens of both sides of a batch.
        seed: Seed of the order.
        num_processes: Number of processes that share an epoch.
        process_index: Index of this process.
        batches_per_chunk: Batches of a sorted chunk. More of them means less padding and less mixing.
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
        self.pairs_per_chunk = max(1, int(batches_per_chunk * max_tokens_per_batch / mean))
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
        size = None if is_whole else self.pairs_per_chunk
        return form_batches(self.lengths, self.max_tokens_per_batch, self._generator(epoch), size)

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        """Return the batches of all processes in an epoch."""
        count = self.batches_per_process * self.num_processes
        # A few pairs of very unequal length may need more batches than planned, which was done for the first epoch.
        candidates = (self._form(*options) for options in ((epoch,), (epoch, True), (0,)))
        batches = next(batches for batches in candidates if len(batches) <= count)
        batches = fill_to_count(batches, count, self.num_processes, self._filler)
        return shuffle_steps(batches, self.num_processes, self._generator(epoch))

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


Pair = Mapping[str, Sequence[int]]
_ROWS_PER_READ = 1000
# The counts of a report, in the order of the shared tensor.
_COUNTS = ("read", *DROP_REASONS, "source_truncated", "target_truncated")


class TextStream(PairSource):
    """Good pairs of text, read again for each pass. A data set of the Hub is streamed."""

    def pairs(self, report: DataReport | None = None) -> Iterator[tuple[str, str]]:
        """Yield source and target of each good pair, and count all pairs in the report."""
        report = DataReport() if report is None else report
        num_good = 0
        for record in self._records():
            report.read += 1
            if record["problem"]:
                setattr(report, record["problem"], getattr(report, record["problem"]) + 1)
                continue
            num_good += 1
            yield record["source"], record["target"]
            if num_good == self.max_samples:
                return

    def _records(self) -> Iterator[dict[str, str]]:
        if self.paths:
            yield from generate_records(self)
            return
        row = 0
        for table in self.load_dataset(streaming=True).with_format("arrow").iter(_ROWS_PER_READ):
            for record in read_arrow(table, self.columns, self.name, row, self.max_line_characters):
                yield self.to_row(record)
            row += table.num_rows

    def side(self, index: int) -> Iterator[str]:
        """Yield the sources (0), without prefix, or the targets (1)."""
        start = len(self.source_prefix or "") if index == 0 else 0
        return (pair[index][start:] for pair in self.pairs())


class PairStream:
    """Encoded pairs of a text stream, the same in each pass. Pairs are dropped and counted as by `encode_pairs`.

    An augmenter changes the remaining pairs in each pass.
    """

    def __init__(self, texts: TextStream, tokenizers: TokenizerPair, augmenter: Augmenter | None = None, **rules: Any):
        """Args:
        texts: The pairs of text.
        tokenizers: Source and target tokenizer.
        augmenter: Changes the pairs of a pass.
        **rules: The other fields of `PairEncoder`.
        """
        self.texts, self.encode, self.augmenter = texts, PairEncoder(tokenizers, **rules), augmenter
        # Shared memory: the workers of a loader read, each with a copy of this stream.
        self._counts = torch.zeros(len(_COUNTS), dtype=torch.int64).share_memory_()

    @property
    def report(self) -> DataReport:
        """Counts of the present pass, or of the last one."""
        return DataReport(**dict(zip(_COUNTS, self._counts.tolist(), strict=True)))

    def _publish(self, report: DataReport) -> None:
        # Every worker reads all pairs: the first one counts for all.
        if (worker := get_worker_info()) is None or worker.id == 0:
            self._counts.copy_(torch.tensor([getattr(report, name) for name in _COUNTS]))

    def __call__(self, pass_number: int) -> Iterator[dict[str, Any]]:
        """Yield `input_ids` and `labels` of each pair of a pass."""
        report = DataReport()
        pairs, row = self.texts.pairs(report), count()
        while batch := list(islice(pairs, _ROWS_PER_READ)):
            sources, targets = zip(*batch, strict=True)
            rows = list(islice(row, len(batch)))
            columns = self.encode(list(sources), list(targets), rows)
            report.source_truncated += sum(columns["source_truncated"])
            report.target_truncated += sum(columns["target_truncated"])
            outcomes = columns["outcome"]
            for outcome, reason in enumerate(OUTCOMES[1:], start=1):
                setattr(report, reason, getattr(report, reason) + outcomes.count(outcome))
            self._publish(report)
            pairs_of_ids = zip(columns["input_ids"], columns["labels"], strict=True)
            encoded = [{"input_ids": input_ids, "labels": labels} for input_ids, labels in pairs_of_ids]
            remaining = [number for number, outcome in enumerate(outcomes) if outcome == 0]
            if self.augmenter is None:
                yield from (encoded[number] for number in remaining)
            elif remaining:
                texts = [
                    {"source": sources[number], "target": targets[number], **encoded[number]} for number in remaining
                ]
                yield from self.augmenter(texts, pass_number, [rows[number] for number in remaining])
        self._publish(report)
        logger.info("Pass %d: %s", pass_number + 1, report)

    def fingerprint(self) -> dict[str, Any] | None:
        """Return the fingerprint of the files, or None for a data set of the Hub.

        A resumed run compares fingerprints. Length limits do not count, because they may leave the same pairs.
        """
        texts = self.texts
        return file_fingerprint(texts.paths, (texts.columns, texts.source_prefix or "")) if texts.paths else None

    def to_dict(self) -> dict[str, Any]:
        """Return `report` as plain values."""
        return self.report.to_dict()


class TokenBudgetStream(IterableDataset):
    """Endless batches, as lists of pairs, for one of several processes.

    Pairs are read into a buffer, which is shuffled, sorted by both lengths and cut into batches. The batches come in random
    order. Each pair occurs in one batch of one process in each pass, and each buffer gives all processes the same number of
    batches. If the pairs do not suffice, some processes get a repeated pair with ignored labels. The batches depend on the
    seed and the pairs alone, so that a resumed run skips the batches it had.

    Attributes:
        length_multiple: Multiple to which the collator rounds up widths.
    """

    length_multiple: int = 1

    def __init__(
        self,
        read: Callable[[int], Iterable[Pair]],
        max_tokens_per_batch: int,
        seed: int,
        num_processes: int = 1,
        process_index: int = 0,
        pairs_in_buffer: int = 20_000,
    ):
        """Args:
        read: Returns the pairs of a pass, with `input_ids` and `labels`, by the number of the pass from 0.
        max_tokens_per_batch: Bound of the padded tokens of both sides of a batch.
        seed: Seed of the order.
        num_processes: Number of processes that share the batches. Each reads all pairs.
        process_index: Index of this process.
        pairs_in_buffer: Pairs in the buffer. More of them means less padding, more mixing, more memory.
        """
        self.read = read
        self.max_tokens_per_batch = max_tokens_per_batch
        self.seed = seed
        self.num_processes, self.process_index = num_processes, process_index
        self.pairs_in_buffer = pairs_in_buffer

    def __iter__(self) -> Iterator[list[Pair]]:
        """Yield the batches of this process. Each worker of a loader yields its share.

        Raises:
            ValueError: If a pair exceeds the budget, or a pass or the buffer holds fewer pairs than there are processes.
        """
        worker = get_worker_info()
        count, index = (1, 0) if worker is None else (worker.num_workers, worker.id)
        # The loader takes from its workers in turn, so that together they give the order of one.
        yield from islice(self._batches(), index, None, count)

    def _batches(self) -> Iterator[list[Pair]]:
        number = 0
        while True:
            num_read = 0
            for buffer in self._buffers(number):
                yield from self._cut(buffer, number, num_read)
                num_read += len(buffer)
            if num_read == 0:
                raise ValueError(f"A stream must hold at least one pair, got none in pass {number}.")
            logger.info("Pass %d over the stream: %d pairs.", number + 1, num_read)
            number += 1

    def _buffers(self, number: int) -> Iterator[list[Pair]]:
        pairs, ahead = iter(self.read(number)), []
        while buffer := ahead + list(islice(pairs, self.pairs_in_buffer - len(ahead))):
            ahead = list(islice(pairs, self.num_processes))
            if len(ahead) < self.num_processes:
                # Too few for a buffer with a pair for each process.
                buffer, ahead = buffer + ahead, []
            yield buffer

    def _cut(self, buffer: list[Pair], number: int, num_read: int) -> Iterator[list[Pair]]:
        lengths = np.array([[len(pair["input_ids"]), len(pair["labels"])] for pair in buffer])
        lengths = as_padded(lengths, self.max_tokens_per_batch, self.length_multiple, num_read)
        generator = seeded_generator((self.seed * 1_000_003 + number) * 1_000_003 + num_read)
        batches = form_batches(lengths, self.max_tokens_per_batch, generator)
        count = -(-len(batches) // self.num_processes) * self.num_processes
        batches = fill_to_count(batches, count, self.num_processes, len(buffer))
        if count > len(buffer):
            logger.info("%d batches hold a repeated pair alone, which does not count.", count - len(buffer))
        # The filler has the index `len(buffer)`.
        pairs = [*buffer, uncounted(buffer[int(lengths.sum(axis=1).argmin())])]
        for batch in shuffle_steps(batches, self.num_processes, generator)[self.process_index :: self.num_processes]:
            yield [pairs[index] for index in batch]
