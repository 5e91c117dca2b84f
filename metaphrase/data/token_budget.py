"""Batches by a token budget: of pairs in memory, and of a stream that sorts a buffer of pairs."""

import hashlib
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from metaphrase.data.encoding import OUTCOMES, PairEncoder
from metaphrase.data.pairs import COLUMN_TYPES, DROP_REASONS, WEIGHT_COLUMN, DataReport, PairSource
from metaphrase.errors import MetaphraseError
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.texts import cut_into_batches

logger = logging.getLogger(__name__)

# Batches of a sorted chunk of pairs.
_BATCHES_PER_CHUNK = 200
# Batches of a chunk that is sorted by length, without a token budget.
_GROUPED_BATCHES = 50
# Training arguments that cannot keep their meaning beside a token budget, with the reason.
_NOT_WITH_A_BUDGET = {
    "train_sampling_strategy": "because the budget groups pairs of similar length",
    "dataloader_drop_last": "because every pair occurs once in an epoch",
    "auto_find_batch_size": "because the budget decides the batch size",
    # transformers divides the noise by the root of a row's length, and a packed row holds many pairs.
    "neftune_noise_alpha": "because a row holds many pairs, and its length would reduce the noise",
}


def check_beside_budget(arguments: Any, max_tokens_per_batch: int | None) -> None:
    """Refuse training arguments, or fields of a recipe, that lose their meaning beside a token budget.

    The budget is None if one is going to be chosen.
    """
    budget = max_tokens_per_batch or "no `per_device_train_batch_size`. Give it, or a budget is chosen"
    for name, reason in _NOT_WITH_A_BUDGET.items():
        value = getattr(getattr(arguments, name), "value", getattr(arguments, name))
        if value and value not in ("random", "group_by_length"):
            shown = "true" if value is True else value
            raise MetaphraseError(
                f"`{name}` must be left out with `max_tokens_per_batch`, {reason}, got {shown} and {budget}."
            )


class LengthGroupedSampler(Sampler[int]):
    """Indices in an order whose batches hold pairs of similar length, and follow each other in random order.

    The order depends on the seed and the epoch alone. transformers' sampler leaves the batches of a chunk sorted, from long to
    short, by which the demo's model learns more slowly and ends almost one BLEU lower.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int):
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:  # accelerate's loaders call it.
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        shuffled = torch.randperm(len(self.lengths), generator=generator).tolist()
        chunk_size = _GROUPED_BATCHES * self.batch_size
        order = []
        for start in range(0, len(shuffled), chunk_size):
            order += sorted(shuffled[start : start + chunk_size], key=lambda index: -self.lengths[index])
        # Chunks end where batches end, so only the last batch may be smaller. It stays last, where the loader cuts it.
        num_full = len(order) // self.batch_size
        for number in torch.randperm(num_full, generator=generator).tolist():
            yield from order[number * self.batch_size : (number + 1) * self.batch_size]
        yield from order[num_full * self.batch_size :]


def as_padded(lengths: np.ndarray | Sequence[Sequence[int]], max_tokens_per_batch: int, multiple: int) -> np.ndarray:
    """Return lengths `(pairs, 2)` rounded up to a multiple. A pair that exceeds the budget only by rounding gets its own batch.

    A longer pair is refused by its number.
    """
    array = np.asarray(lengths, dtype=np.int64)
    longest = int(array.sum(axis=1).argmax())
    source, target = array[longest].tolist()
    if source + target > max_tokens_per_batch:
        raise MetaphraseError(
            f"`max_tokens_per_batch` must hold the longest pair, number {longest + 1} of those to train on, with "
            f"{source} source and {target} target tokens, {source + target} in all, got {max_tokens_per_batch}. Raise it, or "
            "lower `max_source_length` and `max_target_length`."
        )
    return -(-array // multiple) * multiple


def form_steps(
    batches: list[list[int]], count: int, filler: int, num_processes: int, generator: torch.Generator
) -> list[list[int]]:
    """Return `count` batches in random order, of which process `i` takes each `num_processes`-th from `i` on.

    The batches with most pairs are halved until there are so many. Where pairs do not suffice, a batch holds `filler` alone.
    Neighbors form a step and cost about the same, so that no process waits long.
    """
    most = min(count, sum(map(len, batches)))
    while (missing := most - len(batches)) > 0:
        by_size = sorted(range(len(batches)), key=lambda number: len(batches[number]), reverse=True)
        largest, parts = {number for number in by_size[:missing] if len(batches[number]) > 1}, []
        for number, batch in enumerate(batches):
            half = len(batch) // 2
            parts += [batch[:half], batch[half:]] if number in largest else [batch]
        batches = parts
    batches = batches + [[filler] for _ in range(count - len(batches))]
    steps = torch.randperm(count // num_processes, generator=generator).tolist()
    return [batches[step * num_processes + rank] for step in steps for rank in range(num_processes)]


def form_batches(
    lengths: np.ndarray, max_tokens_per_batch: int, generator: torch.Generator, pairs_per_chunk: int | None = None
) -> list[list[int]]:
    """Shuffle pairs, sort them by both lengths in chunks, and cut each chunk into batches.

    A chunk is sorted by source length and cut into about as many strips as a strip has batches. Each strip is sorted by target
    length, up and down in turn. Larger chunks mean less padding and less mixing; None sorts all pairs together.
    """
    shuffled = torch.randperm(len(lengths), generator=generator).numpy()
    size = pairs_per_chunk or len(shuffled)
    batches: list[list[int]] = []
    for start in range(0, len(shuffled), size):
        indices = shuffled[start : start + size]
        num_strips = max(1, round(math.sqrt(math.ceil(lengths[indices].sum() / max_tokens_per_batch))))
        strips = np.array_split(indices[np.argsort(lengths[indices, 0], kind="stable")], num_strips)
        for number, strip in enumerate(strips):
            targets = lengths[strip, 1]
            strips[number] = strip[np.argsort(targets if number % 2 == 0 else -targets, kind="stable")]
        order = np.concatenate(strips)
        batches += cut_into_batches(order, lengths[order], max_tokens_per_batch)
    return batches


def form_round(
    lengths: np.ndarray, max_tokens_per_batch: int, seed: int, num_processes: int, pairs_per_chunk: int | None = None
) -> list[list[int]]:
    """Return the batches of some pairs, equally many for each process, in random order. The index `len(lengths)` is a filler."""
    # torch takes no larger seed.
    generator = torch.Generator().manual_seed(seed if seed < 2**64 else seed % 2**63)
    batches = form_batches(lengths, max_tokens_per_batch, generator, pairs_per_chunk)
    count = -(-len(batches) // num_processes) * num_processes
    return form_steps(batches, count, len(lengths), num_processes, generator)


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
        length_multiple: int = 1,
    ):
        """Take the tokens of each pair, `(pairs, 2)`, and the multiple to which the collator rounds up widths.

        The budget bounds the padded tokens of both sides, and must hold the longest pair.
        """
        self.lengths = as_padded(lengths, max_tokens_per_batch, length_multiple)
        self.max_tokens_per_batch, self.seed, self.epoch = max_tokens_per_batch, seed, 0
        self.num_processes, self.process_index = num_processes, process_index
        self.pairs_per_chunk = max(1, int(_BATCHES_PER_CHUNK * max_tokens_per_batch / self.lengths.sum(axis=1).mean()))
        self.batches_per_process = self._count_batches()
        self.num_fillers = max(0, self.batches_per_process * num_processes - len(self.lengths))

    def _count_batches(self) -> int:
        """Return the number of batches of each process in an epoch."""
        most = max(len(self._form(epoch)) for epoch in range(self._PROBED_EPOCHS))
        # Sorting all pairs together gives nearly the same batches for any order, which fit nearly always.
        least = len(self._form(0, is_whole=True))
        planned = max(math.ceil(most * (1 + self._SPARE)), least + 1) if most > 1 else most
        return math.ceil(min(planned, len(self.lengths)) / self.num_processes)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches_per_process

    def _form(self, epoch: int, is_whole: bool = False) -> list[list[int]]:
        size = None if is_whole else self.pairs_per_chunk
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return form_batches(self.lengths, self.max_tokens_per_batch, generator, size)

    def epoch_batches(self, epoch: int) -> Iterable[list[int]]:
        """Return the batches of all processes in an epoch."""
        count = self.batches_per_process * self.num_processes
        # A few pairs of very unequal length may need more batches than planned, which was done for the first epoch.
        candidates = (self._form(*options) for options in ((epoch,), (epoch, True), (0,)))
        batches = next(batches for batches in candidates if len(batches) <= count)
        filler = len(self.lengths) + int(self.lengths.sum(axis=1).argmin())
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return form_steps(batches, count, filler, self.num_processes, generator)

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.epoch_batches(self.epoch), self.process_index, None, self.num_processes)


class WithFillers(Dataset):
    """A data set of pairs that answers to indices above its own with the same pairs, which do not count."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Mapping[str, Sequence[int]]:
        if index < len(self):
            return self.dataset[index]
        pair = self.dataset[index - len(self)]
        # Without labels, a pair adds nothing to a loss or to the number of labels.
        return {**pair, "labels": [IGNORED_LABEL] * len(pair["labels"])}

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


def announce_epoch(loader: DataLoader, epoch: int) -> None:
    """Call `set_epoch` of a loader, of its data set, and of its samplers at any depth.

    The loaders of accelerate stop at the first sampler that takes an epoch.
    """
    parts = [loader, loader.dataset]
    sampler = loader.batch_sampler
    while sampler is not None:
        parts += [sampler, getattr(sampler, "sampler", None)]
        sampler = getattr(sampler, "batch_sampler", None)
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


Pair = Mapping[str, Sequence[int]]
_PAIRS_PER_CHUNK, _MOST_WORKERS = 1000, 256
# With fewer blocks for each reader, all read all blocks, and take turns with the pairs.
_BLOCKS_PER_READER = 8
# A pair is numbered by its block and its place in it.
_MOST_PAIRS_OF_BLOCK = 10**6
# At the start of a file, and at its end.
_SAMPLED_BYTES = 2**16
# The counts of a report, in the order of the shared tensor.
_COUNTS = ("read", *DROP_REASONS, "source_truncated", "target_truncated")
# Place of the first pair: block, chunk and counts.
_START = [0, 0, *[0] * len(_COUNTS)]


class PairStream:
    """Encoded pairs of a source that is streamed, the same in each pass, but for their order and changes by an augmenter.

    Pairs are dropped and counted as by `encode_pairs`. Blocks of files come in random order. `held_out` are sources, without
    white space around them, whose pairs belong to other splits. `rules` are the other fields of `PairEncoder`.
    """

    def __init__(
        self,
        texts: PairSource,
        tokenizers: TokenizerPair,
        augmenter: Callable | None = None,
        held_out: Iterable[str] = (),
        seed: int = 0,
        **rules: Any,
    ):
        self.texts, self.encode, self.augmenter = texts, PairEncoder(tokenizers, **rules), augmenter
        self.held_out, self.seed = frozenset(held_out), seed
        # Shared memory: the workers of a loader read, each with a copy of this stream and a row of its own.
        self.counts = torch.zeros(_MOST_WORKERS, len(_COUNTS), dtype=torch.int64).share_memory_()

    @property
    def report(self) -> DataReport:
        """Counts of the present pass, or of the last one."""
        return DataReport(**dict(zip(_COUNTS, self.counts.sum(dim=0).tolist(), strict=True)))

    def share_counts(self, reduce: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        """Add the counts of all processes. `reduce` is that of an `Accelerator`."""
        self.counts[0] = reduce(self.counts.sum(dim=0).to(device)).cpu()
        self.counts[1:] = 0

    def chunks(
        self, pass_number: int, place: Sequence[int] = _START, reader: int = 0, num_readers: int = 1
    ) -> Iterator[tuple[list[int], list[Pair]]]:
        """Yield the pairs of one of several readers in a pass, chunk by chunk, each with the place behind it.

        A place is where to begin: the number of the block, the chunk in it, and the counts of the pass so far.
        """
        first, num_skipped, *counts = place
        blocks: list[int | None] = [None]
        if self.texts.offsets is not None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + pass_number)
            blocks = torch.randperm(len(self.texts.offsets) - 1, generator=generator).tolist()
        takes_turns = len(blocks) < _BLOCKS_PER_READER * num_readers
        blocks = blocks if takes_turns else blocks[reader::num_readers]
        report = DataReport()
        for number in range(first, len(blocks)):
            # The first of several readers of a block counts what is read.
            reading = DataReport() if takes_turns and reader else report
            first_row = (blocks[number] or 0) * _MOST_PAIRS_OF_BLOCK
            turns = (reader, None, num_readers) if takes_turns else (None,)
            pairs = islice(enumerate(self.texts.pairs(reading, blocks[number]), first_row), *turns)
            for chunk in itertools.count():
                if not (rows := list(islice(pairs, _PAIRS_PER_CHUNK))):
                    break
                if number > first or chunk >= num_skipped:
                    encoded = self._encode(rows, pass_number, report)
                    yield [number, chunk + 1, *self._publish(report)], encoded
                if (number, chunk + 1) == (first, num_skipped):
                    report.__dict__.update(zip(_COUNTS, counts, strict=True))
        self._publish(report)
        logger.info("Pass %d: %s", pass_number + 1, report)

    def _encode(self, rows: list[tuple[int, tuple[Any, ...]]], pass_number: int, report: DataReport) -> list[Pair]:
        training = [(row, *pair) for row, pair in rows if pair[0].strip() not in self.held_out]
        report.add(other_splits=len(rows) - len(training))
        if not training:
            return []
        numbers, *texts = map(list, zip(*training, strict=True))
        columns = self.encode(texts[0], texts[1], numbers)
        outcomes = Counter(columns["outcome"])
        report.add(**{reason: outcomes[number] for number, reason in enumerate(OUTCOMES) if number})
        report.add(**{name: sum(columns[name]) for name in ("source_truncated", "target_truncated")})
        columns |= {**dict(zip(COLUMN_TYPES, texts, strict=False)), "row": numbers}
        encoded = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        encoded = [pair for pair in encoded if pair["outcome"] == 0]
        if self.augmenter is not None and encoded:
            return list(self.augmenter(encoded, pass_number, [pair["row"] for pair in encoded]))
        names = [name for name in ("input_ids", "labels", WEIGHT_COLUMN) if name in columns]
        return [{name: pair[name] for name in names} for pair in encoded]

    def _publish(self, report: DataReport) -> list[int]:
        worker = get_worker_info()
        counts = [getattr(report, name) for name in _COUNTS]
        self.counts[0 if worker is None else worker.id] = torch.tensor(counts)
        return counts

    def fingerprint(self) -> dict[str, Any] | None:
        """Return sizes of the files, and a hash of their first and last bytes and of columns and prefix; None without files.

        A resumed run compares fingerprints. Length limits do not count, because they may leave the same pairs.
        """
        texts, sizes = self.texts, []
        digest = hashlib.blake2b(repr((texts.columns, texts.source_prefix or "")).encode(), digest_size=16)
        for path in map(Path, texts.paths):
            sizes.append(path.stat().st_size)
            with path.open("rb") as file:
                digest.update(file.read(_SAMPLED_BYTES))
                file.seek(max(0, sizes[-1] - _SAMPLED_BYTES))
                digest.update(file.read(_SAMPLED_BYTES))
        return {"num_bytes": sum(sizes), "sizes": sizes, "hash": digest.hexdigest()} if sizes else None

    def to_dict(self) -> dict[str, Any]:
        return self.report.to_dict()


class TokenBudgetStream(IterableDataset):
    """Endless batches, as lists of pairs, each with the place behind it, for one of several processes.

    Pairs are read into a buffer, which is shuffled, sorted by both lengths and cut into batches. The batches come in random
    order. Each pair occurs in one batch of one reader in each pass. Readers are the processes, or the workers of their loaders.
    The batches depend on the seed, the pairs and the number of readers alone. A resumed run begins at the places it had.
    """

    # Multiple to which the collator rounds up widths.
    length_multiple: int = 1

    def __init__(
        self,
        read: PairStream,
        max_tokens_per_batch: int,
        seed: int,
        num_processes: int = 1,
        process_index: int = 0,
        pairs_in_buffer: int = 20_000,
    ):
        """Take the pairs to read. A larger buffer means less padding, more mixing, more memory."""
        self.read, self.max_tokens_per_batch, self.seed = read, max_tokens_per_batch, seed
        self.num_processes, self.process_index = num_processes, process_index
        self.pairs_in_buffer = pairs_in_buffer
        self.resume(0, {})

    def resume(self, num_skipped: int, places: Mapping[str, list[int]]) -> None:
        """Begin at the place of each worker, by its number. The batches before, which a loader skips, are placeholders."""
        self._num_skipped, self._places = num_skipped, places
        for worker, place in places.items():
            self.read.counts[int(worker)] = torch.tensor(place[-len(_COUNTS) :])

    def __iter__(self) -> Iterator[tuple[list[Pair], list[int]]]:
        """Yield the batches of this process, or of a worker of its loader, with places.

        A place holds the worker, the pass, the batches taken from the buffer, the place where the buffer begins, and the counts
        at its end.
        """
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        for _ in range(worker, self._num_skipped, workers):
            yield [{"input_ids": [0], "labels": [0]}], []
        readers = self.num_processes * workers, self.process_index * workers + worker
        for pairs, place in self._batches(*readers, self._places.get(str(worker), [0, 0, *_START])):
            yield pairs, [worker, *place]

    def _batches(self, num_readers: int, reader: int, place: list[int]) -> Iterator[tuple[list[Pair], list[int]]]:
        first, num_done, *start = place[: 2 + len(_START)]
        for number in itertools.count(first):
            chunks = self.read.chunks(number, start, reader, num_readers)
            is_empty = start == _START
            while True:
                buffer: list[Pair] = []
                begin = start
                for place, pairs in chunks:
                    start = place
                    buffer.extend(pairs)
                    if len(buffer) >= self.pairs_in_buffer:
                        break
                if not buffer:
                    break
                is_empty = False
                lengths = np.array([[len(pair["input_ids"]), len(pair["labels"])] for pair in buffer])
                lengths = as_padded(lengths, self.max_tokens_per_batch, self.length_multiple)
                seed = np.random.SeedSequence([self.seed, number, reader, *begin[:2]]).generate_state(1).item()
                batches = form_round(lengths, self.max_tokens_per_batch, seed, 1)
                for index in range(num_done, len(batches)):
                    yield [buffer[row] for row in batches[index]], [number, index + 1, *begin, *start[2:]]
                num_done = 0
            if is_empty:
                raise MetaphraseError(f"A stream must hold a pair for each of {num_readers} readers, got none for one.")
            start = _START
