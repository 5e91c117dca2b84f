"""Streamed pairs: the same pairs and counts as of reading a whole file."""

import datasets
import pytest
from letter_pair import LetterPair
from torch.utils.data import DataLoader

from metaphrase.data.encoding import encode_pairs
from metaphrase.data.pairs import DataReport, load_pairs
from metaphrase.data.token_budget import PairStream, TextStream, TokenBudgetStream

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
def test_a_stream_equals_reading_a_whole_file(file, too_long, prefix, tmp_path):
    place = {"file": file, "malformed": "skip", "source_prefix": prefix}
    report = DataReport()
    pairs = load_pairs(**place, report=report, cache_dir=tmp_path / "cache")
    expected, report = encode_pairs(pairs, LetterPair(), **LIMITS, too_long=too_long, report=report)
    stream = PairStream(TextStream(**place), LetterPair(), **LIMITS, too_long=too_long)
    for number in (0, 1):
        streamed = list(stream(number))
        assert [pair["input_ids"] for pair in streamed] == expected["input_ids"][:]
        assert [pair["labels"] for pair in streamed] == expected["labels"][:]
        assert {name: getattr(stream.report, name) for name in COUNTS} == {
            name: getattr(report, name) for name in COUNTS
        }


@pytest.mark.parametrize(("workers", "start"), [(2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow)])
def test_pairs_read_by_workers_are_counted(file, workers, start):
    counts = []
    for options in ({}, {"num_workers": workers, "multiprocessing_context": start}):
        stream = PairStream(TextStream(file=file, malformed="skip"), LetterPair(), **LIMITS)
        loader = DataLoader(TokenBudgetStream(stream, 12, seed=0), batch_size=None, collate_fn=list, **options)
        next(iter(loader))
        counts.append(stream.to_dict())
    assert counts[1] == counts[0] and (counts[0]["read"], counts[0]["kept"], counts[0]["malformed"]) == (9, 4, 2)


def test_malformed_lines_and_long_pairs_are_refused(file):
    with pytest.raises(ValueError, match="`malformed: skip`"):
        list(TextStream(file=file).pairs())
    stream = PairStream(TextStream(file=file, malformed="skip"), LetterPair(), **LIMITS, too_long="error")
    with pytest.raises(ValueError, match=r"got in row 1 5 and 5 tokens"):
        list(stream(0))


def test_the_first_samples_alone(file):
    texts = TextStream(file=file, malformed="skip", max_samples=2, source_prefix="t: ")
    assert list(texts.pairs()) == [("t: ab", "c"), ("t: abcd", "bcde")]
    assert list(texts.side(0)) == ["ab", "abcd"]
    assert list(texts.side(1)) == ["c", "bcde"]


def test_a_data_set_is_streamed(tmp_path):
    pairs = [{"translation": {"en": f"a{number}", "de": f"b{number}"}} for number in range(2500)]
    datasets.Dataset.from_list(pairs).to_parquet(str(tmp_path / "train.parquet"))
    texts = TextStream(dataset_name=str(tmp_path), source_column="en", target_column="de")
    assert list(texts.pairs()) == [(f"a{number}", f"b{number}") for number in range(2500)]


def test_arguments_are_checked_at_once():
    with pytest.raises(ValueError, match="exactly one of"):
        TextStream()
