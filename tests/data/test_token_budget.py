import itertools
import json
from itertools import islice

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from letter_pair import LetterPair
from torch.utils.data import DataLoader

from metaphrase.data import pairs as data_pairs
from metaphrase.data import token_budget
from metaphrase.data.encoding import encode_pairs
from metaphrase.data.pairs import DataReport, PairSource, load_pairs
from metaphrase.data.token_budget import LengthGroupedSampler, PairStream, TokenBudgetSampler, TokenBudgetStream
from metaphrase.tokenization.texts import cut_into_batches


def random_lengths(pairs=3000, seed=0):
    generator = np.random.default_rng(seed)
    sources = generator.lognormal(2.5, 0.5, pairs).astype(int) + 1
    return np.stack([sources, np.maximum(1, (sources * generator.normal(1, 0.2, pairs)).astype(int))], axis=1)


def padded_cost(lengths):
    return len(lengths) * int(lengths.max(axis=0).sum())


def test_batches_are_as_large_as_the_budget_allows_and_no_larger():
    lengths = [[3, 2], [3, 3], [5, 2], [1, 1]]
    assert cut_into_batches([0, 1, 2, 3], lengths, 12) == [[0, 1], [2], [3]]
    assert cut_into_batches([0, 1, 2, 3], lengths, 11) == [[0], [1], [2], [3]]
    # A long pair does not widen the batches behind its own.
    assert cut_into_batches([2, 3, 0], [lengths[index] for index in (2, 3, 0)], 12) == [[2], [3, 0]]


def test_order_depends_on_seed_and_epoch_alone():
    lengths = random_lengths()

    def order(seed, epoch):
        sampler = TokenBudgetSampler(lengths, 600, seed)
        sampler.set_epoch(epoch)
        torch.rand(3)  # what else draws random numbers must not matter
        return list(sampler)

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)
    assert {frozenset(batch) for batch in order(1, 2)} != {frozenset(batch) for batch in order(1, 3)}


def test_little_is_padded_and_batches_do_not_run_from_short_to_long():
    lengths = random_lengths()
    batches = list(TokenBudgetSampler(lengths, 2000, 0))
    assert 1 - lengths.sum() / sum(padded_cost(lengths[batch]) for batch in batches) < 0.15
    widths = [lengths[batch].sum(axis=1).max() for batch in batches]
    assert abs(np.corrcoef(np.arange(len(widths)), widths)[0, 1]) < 0.4


def test_longest_pair_that_no_batch_can_hold_is_refused_by_name():
    lengths = np.array([[3, 2], [300, 250], [5, 2]])
    with pytest.raises(ValueError, match=r"number 2 of .*, with 300 source and 250 target tokens, 550 in all, got 549"):
        TokenBudgetSampler(lengths, 549, 0)
    assert len(TokenBudgetSampler(lengths, 550, 0)) >= 1


@pytest.mark.parametrize(("pairs", "processes"), [(5, 2), (7, 3), (6, 3), (2, 3)])
def test_pairs_that_take_a_batch_each_are_filled_up_to_whole_steps(pairs, processes):
    lengths = np.array([[1000, 100]] * pairs)
    lengths[1] = 999, 100
    shards = [TokenBudgetSampler(lengths, 2048, 0, processes, rank) for rank in range(processes)]
    assert {shard.num_fillers for shard in shards} == {-pairs % processes}
    for epoch in range(3):
        for shard in shards:
            shard.set_epoch(epoch)
        shares = [list(shard) for shard in shards]
        assert {len(batches) for batches in shares} == {-(-pairs // processes)}
        indices = [index for batches in shares for batch in batches for index in batch]
        assert sorted(indices) == [*range(pairs), *[pairs + 1] * (-pairs % processes)]
        # No step holds fillers only.
        assert all(any(batch[0] < pairs for batch in step) for step in zip(*shares, strict=True))


def test_lengths_are_rounded_up_as_the_collator_pads():
    sampler = TokenBudgetSampler(np.full((2000, 2), 9), 4096, 0, length_multiple=8)
    assert max(len(batch) * 32 for batch in sampler) <= 4096
    # A pair that the budget holds before its widths are rounded is not refused.
    sampler = TokenBudgetSampler([[9, 9], [4, 4], [3, 2]], 20, 0, length_multiple=8)
    # Rounded, two of the short ones exceed it as well.
    assert sorted(sampler) == [[0], [1], [2]]
    with pytest.raises(ValueError, match="18 in all, got 17"):
        TokenBudgetSampler([[9, 9]], 17, 0, length_multiple=8)


def test_grouped_batches_hold_similar_lengths_in_an_order_of_seed_and_epoch():
    lengths = random_lengths(800).sum(axis=1).tolist()
    orders = []
    for seed, epoch in ((1, 0), (1, 1), (5, 0), (1, 0)):
        sampler = LengthGroupedSampler(lengths, batch_size=8, seed=seed)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        assert sorted(orders[-1]) == list(range(800)) and len(sampler) == 800
    assert orders[0] == orders[3] and len({str(order) for order in orders}) == 3
    batches = [[lengths[index] for index in orders[0][start : start + 8]] for start in range(0, 800, 8)]
    spreads = [max(batch) - min(batch) for batch in batches]
    assert sum(spreads) / 100 < 0.2 * (max(lengths) - min(lengths))
    # Long and short batches alternate: an order from long to short teaches worse.
    falls = sum(max(batch) >= max(later) for batch, later in itertools.pairwise(batches))
    assert 35 < falls < 65


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=60),
    processes=st.integers(1, 4),
    more=st.integers(0, 300),
    seed=st.integers(0, 2**31),
)
def test_no_pair_of_any_corpus_is_lost(lengths, processes, more, seed):
    lengths = np.array(lengths)
    budget = int(lengths.sum(axis=1).max()) + more
    shards = [TokenBudgetSampler(lengths, budget, seed, processes, rank) for rank in range(processes)]
    for epoch in range(2):
        for shard in shards:
            shard.set_epoch(epoch)
        shares = list(map(list, shards))
        assert set(map(len, shares)) == {len(shards[0])}
        batches = list(itertools.chain(*shares))
        indices = sorted(index for batch in batches for index in batch)
        # Indices behind the last pair are fillers, which have no labels.
        assert [index for index in indices if index < len(lengths)] == list(range(len(lengths)))
        pairs = [[index for index in batch if index < len(lengths)] for batch in batches]
        assert all(padded_cost(lengths[batch]) <= budget for batch in pairs if batch)


PAIRS, FIRST = 700, 0x4E00


@pytest.fixture
def stream_of(tmp_path, monkeypatch):
    """Make streams of pairs whose source is a letter of its own, repeated, in blocks of a few lines."""
    monkeypatch.setattr(token_budget, "_PAIRS_PER_CHUNK", 3)
    monkeypatch.setattr(data_pairs, "BLOCK_BYTES", 300)
    lines = [
        chr(FIRST + number) * max(1, source - 1) + "\t" + "t" * max(1, target - 1) + "\n"
        for number, (source, target) in enumerate(random_lengths(PAIRS).tolist())
    ]
    (tmp_path / "pairs.tsv").write_text("".join(lines), encoding="utf-8")

    def make(seed=3, file="pairs.tsv", **options):
        limits = {"max_source_length": None, "max_target_length": None}
        pairs = PairStream(PairSource(file=str(tmp_path / file), malformed="skip"), LetterPair(), seed=seed, **limits)
        return TokenBudgetStream(pairs, 300, seed, **{"pairs_in_buffer": 200, **options})

    return make


def numbers(item):
    return [pair["input_ids"][0] - FIRST for pair in item[0]]


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("block_bytes", [300, 4000])
def test_every_pair_occurs_once_in_a_pass(stream_of, processes, block_bytes, monkeypatch):
    monkeypatch.setattr(data_pairs, "BLOCK_BYTES", block_bytes)
    passes = [[], []]
    for rank in range(processes):
        for pairs, place in stream_of(num_processes=processes, process_index=rank):
            if place[1] == 2:
                break
            assert padded_cost(np.array([[len(pair["input_ids"]), len(pair["labels"])] for pair in pairs])) <= 300
            passes[place[1]] += numbers((pairs,))
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(PAIRS))
    assert passes[0] != passes[1]


def test_the_seed_decides_and_blocks_are_mixed(stream_of):
    first = [numbers(item) for item in islice(stream_of(), 30)]
    assert first == [numbers(item) for item in islice(stream_of(), 30)]
    assert first != [numbers(item) for item in islice(stream_of(seed=20240602), 30)]
    passes = [[pair["input_ids"][0] for _, chunk in stream_of().read.chunks(n) for pair in chunk] for n in (0, 0, 1)]
    assert passes[0] == passes[1] != passes[2] and sorted(passes[0]) == sorted(passes[2])
    # The first buffer holds pairs of the whole file.
    assert np.std(first[0] + first[1] + first[2]) > PAIRS / 5


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("num_done", [1, 60, 150])
def test_a_stream_resumes_where_it_was(stream_of, workers, num_done):
    options = {"batch_size": None, "num_workers": workers, "collate_fn": list}
    whole, places = list(islice(DataLoader(stream_of(), **options), num_done + 100)), {}
    for _, (worker, *place) in whole[:num_done]:
        places[str(worker)] = place
    resumed = stream_of()
    resumed.resume(num_done, json.loads(json.dumps(places)))
    assert list(islice(DataLoader(resumed, **options), num_done, num_done + 100)) == whole[num_done:]


def test_an_empty_stream_and_a_pair_that_no_batch_can_hold_are_refused(stream_of, tmp_path):
    (tmp_path / "empty.tsv").write_text("a\n", encoding="utf-8")
    with pytest.raises(ValueError, match="hold a pair for each of 1 readers"):
        next(iter(stream_of(file="empty.tsv")))
    (tmp_path / "long.tsv").write_text("a\ta\n" + 199 * "a" + "\t" + 100 * "a" + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="number 2 of those to train on, with 200 source and 101 target"):
        list(islice(stream_of(file="long.tsv"), PAIRS))


LINES = ["ab\tc", "abcd\tbcde", "", "a\tabc", "x\ty\tz", " \tb", "abcd\tbcd", "c\tcc", "d\td"]
LIMITS = {"max_source_length": 4, "max_target_length": 4}
COUNTS = ("read", "kept", "malformed", "empty_source", "empty_target", "source_too_long", "target_too_long")
COUNTS += ("source_truncated", "target_truncated")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(line + "\n" for line in LINES), encoding="utf-8")
    return path


@pytest.mark.parametrize("too_long", ["skip", "truncate"])
@pytest.mark.parametrize("prefix", [None, "x"])
def test_a_stream_equals_reading_a_whole_file(file, too_long, prefix):
    place = {"file": file, "malformed": "skip", "source_prefix": prefix}
    report = DataReport()
    pairs = load_pairs(**place, report=report)
    expected, report = encode_pairs(pairs, LetterPair(), **LIMITS, too_long=too_long, report=report)
    stream = PairStream(PairSource(**place), LetterPair(), **LIMITS, too_long=too_long)
    for number in (0, 1):
        streamed = [pair for _, chunk in stream.chunks(number) for pair in chunk]
        assert [pair["input_ids"] for pair in streamed] == expected["input_ids"][:]
        assert [pair["labels"] for pair in streamed] == expected["labels"][:]
        assert [getattr(stream.report, name) for name in COUNTS] == [getattr(report, name) for name in COUNTS]


@pytest.mark.parametrize(("workers", "start"), [(2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow)])
def test_pairs_read_by_workers_are_counted(file, workers, start):
    counts = []
    for options in ({}, {"num_workers": workers, "multiprocessing_context": start}):
        stream = PairStream(PairSource(file=file, malformed="skip"), LetterPair(), **LIMITS)
        loader = DataLoader(TokenBudgetStream(stream, 12, seed=0), batch_size=None, collate_fn=list, **options)
        # Each worker has read a pass.
        list(islice(loader, 4))
        counts.append(stream.to_dict())
    assert counts[1] == counts[0] and (counts[0]["read"], counts[0]["kept"], counts[0]["malformed"]) == (9, 4, 2)


def test_a_report_counts_the_pairs_of_all_workers_and_processes(file):
    stream = PairStream(PairSource(file=file, malformed="skip"), LetterPair(), **LIMITS)
    stream.counts[0, 0], stream.counts[1, 0] = 3, 4
    stream.share_counts(lambda counts: 2 * counts, torch.device("cpu"))
    assert stream.report.read == 14


def test_a_stream_refuses_pairs_and_takes_samples(file):
    with pytest.raises(ValueError, match="`malformed: skip`"):
        list(PairSource(file=file).pairs())
    stream = PairStream(PairSource(file=file, malformed="skip"), LetterPair(), **LIMITS, too_long="error")
    with pytest.raises(ValueError, match=r"got in row 1 5 and 5 tokens"):
        list(stream.chunks(0))
    texts = PairSource(file=file, malformed="skip", max_samples=2, source_prefix="t: ")
    assert list(texts.pairs()) == [("t: ab", "c"), ("t: abcd", "bcde")]


def test_a_data_set_is_streamed(tmp_path):
    pairs = [{"translation": {"en": f"a{number}", "de": f"b{number}"}} for number in range(2500)]
    datasets.Dataset.from_list(pairs).to_parquet(str(tmp_path / "train.parquet"))
    texts = PairSource(dataset_name=str(tmp_path), source_column="en", target_column="de")
    assert list(texts.pairs()) == [(f"a{number}", f"b{number}") for number in range(2500)]
