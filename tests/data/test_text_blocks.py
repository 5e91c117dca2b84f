"""Text blocks: every token occurs once or is counted."""

import gzip
import json
from itertools import chain
from types import SimpleNamespace

import datasets
import pytest

from metaphrase.data.denoising import dataset as module
from metaphrase.data.denoising.dataset import load_texts, text_blocks
from metaphrase.tokenization import TokenizerPair, train_tokenizer

END = 1
TEXTS = ["abcde", "f", "", "gh ij", " \u3000", "\t", "klmnopqrstuvwxyzabc", "~", "xy"]


class Letters:
    """One id for each letter and tab (spaces and ~ have none), then the end."""

    is_joint = True

    def __init__(self):
        self.calls = 0

    def encode_sources(self, texts):
        self.calls += 1
        return [[ord(letter) for letter in text if letter not in " \u3000~"] + [END] for text in texts]


def dataset_of(texts):
    return datasets.Dataset.from_dict({"text": list(texts)})


def stream_of(texts, end_documents=True):
    """All tokens in one row, by the definition alone."""
    row = []
    for text in filter(str.strip, texts):
        letters = [ord(letter) for letter in text if letter not in " \u3000~"]
        row += letters + [END] * (end_documents and bool(letters))
    return row


def joined(rows):
    return list(chain.from_iterable(rows))


@pytest.mark.parametrize("end_documents", [True, False])
@pytest.mark.parametrize("remainder", ["drop", "keep"])
@pytest.mark.parametrize("length", [2, 7, 12])
def test_blocks_joined_are_the_text(length, remainder, end_documents):
    whole = stream_of(TEXTS, end_documents)
    options = {"end_documents": end_documents, "remainder": remainder}
    blocks, report = text_blocks(dataset_of(TEXTS), Letters(), length, **options)
    rows = blocks["input_ids"][:]
    full, rest = divmod(len(whole), length)
    assert joined(rows) == (whole if remainder == "keep" else whole[: full * length])
    assert [len(row) for row in rows] == [length] * full + [rest] * (remainder == "keep" and rest > 0)
    assert blocks.column_names == ["input_ids"]
    assert (report.tokens, report.full_blocks, report.remainder_tokens) == (len(whole), full, rest)
    assert (report.documents, report.empty_documents, report.blocks) == (len(TEXTS), 4, len(rows))


def test_the_report_counts_unused_texts():
    _, report = text_blocks(dataset_of(TEXTS), Letters(), 7)
    assert str(report) == (
        "9 documents, not used: 4 empty; 36 tokens; 5 blocks of 7 tokens; 1 tokens behind the last block not used."
    )
    values = json.loads(json.dumps(report.to_dict()))
    assert values["remainder_tokens"] == 1 and values["tokens"] == 36 and values["blocks"] == 5
    _, report = text_blocks(dataset_of(TEXTS), Letters(), 7, remainder="keep")
    assert str(report).endswith("1 tokens behind the last block kept as a shorter block.")


def test_a_remainder_too_short_for_a_block_is_left_out_and_counted():
    for remainder, kept in ((3, False), (2, True), (1, True)):
        rows, report = text_blocks(dataset_of(["abcdefghi"]), Letters(), 8, remainder="keep", least_length=remainder)
        assert (len(rows), report.blocks, report.remainder_tokens) == (1 + kept, 1 + kept, 2)
        assert ("2 tokens behind the last block not used" in str(report)) is not kept
    with pytest.raises(ValueError, match="must fill at least one block"):
        text_blocks(dataset_of(["a"]), Letters(), 8, remainder="keep", least_length=3)


def test_blocks_run_on_over_batches_of_documents(monkeypatch):
    monkeypatch.setattr(module, "TEXTS_PER_CALL", 3)
    texts = ["abc" * (number % 4) for number in range(50)]
    tokenizers = Letters()
    blocks, report = text_blocks(dataset_of(texts), tokenizers, 40, remainder="keep")
    assert tokenizers.calls == 17
    assert joined(blocks["input_ids"]) == stream_of(texts)
    assert (report.documents, report.empty_documents) == (50, 13)


def test_a_second_run_reads_the_cache_with_all_counts(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(text + "\n" for text in TEXTS), encoding="utf-8")

    def cut(tokenizers, **options):
        return text_blocks(load_texts(file, cache_dir=tmp_path / "cache"), tokenizers, **{"block_length": 7, **options})

    again = Letters()
    blocks, report = cut(Letters())
    blocks_again, report_again = cut(again)
    assert again.calls == 0
    assert report_again == report and blocks_again["input_ids"][:] == blocks["input_ids"][:]
    kept_again = Letters()
    kept, _ = cut(kept_again, remainder="keep")
    assert kept_again.calls == 0 and len(kept) == len(blocks) + 1
    for options in ({"block_length": 8}, {"end_documents": False}):
        fresh = Letters()
        cut(fresh, **options)
        assert fresh.calls == 1
    file.write_text("another text altogether\n")
    assert cut(Letters())[1].documents == 1


def test_lines_of_several_files_are_read_up_to_a_number(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\u2028two\r\n\nthree".encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"four\n"))
    files = [tmp_path / "a.txt", tmp_path / "b.txt.gz"]
    assert load_texts(files, cache_dir=tmp_path / "cache")["text"][:] == ["one\u2028two", "", "three", "four"]
    assert load_texts(files, 2, cache_dir=tmp_path / "cache")["text"][:] == ["one\u2028two", ""]


def test_unreadable_files_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no file .*none\.txt"):
        load_texts(tmp_path / "none.txt")
    (tmp_path / "bad.txt").write_bytes(b"good\nb\xffd\n")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n")[:-9])
    with pytest.raises(EOFError, match="Compressed file ended"):
        load_texts(tmp_path / "cut.txt.gz", cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match="must be UTF-8, but line 2 has the byte 0xff"):
        load_texts(tmp_path / "bad.txt", cache_dir=tmp_path / "cache")
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="at least one line, got none"):
        load_texts(tmp_path / "empty.txt", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("texts_per_call", [1, 1000])
def test_lines_that_are_not_utf_8_are_left_out_and_counted(tmp_path, monkeypatch, texts_per_call):
    monkeypatch.setattr(module, "TEXTS_PER_CALL", texts_per_call)
    (tmp_path / "a.txt").write_bytes(b"ab\nb\xffd\n\ncde\n\xc3\n")
    texts = load_texts(tmp_path / "a.txt", cache_dir=tmp_path / "cache", invalid_utf8="skip")
    assert texts["text"][:] == ["ab", None, "", "cde", None]
    for _ in range(2):
        blocks, report = text_blocks(texts, Letters(), 7)
        assert joined(blocks["input_ids"][:]) == stream_of(["ab", "cde"])
        assert (report.documents, report.empty_documents, report.invalid_documents) == (5, 1, 2)
    assert str(report) == "5 documents, not used: 1 empty, 2 not UTF-8; 7 tokens; 1 blocks of 7 tokens."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizers": SimpleNamespace(is_joint=False)}, "`tokenizers` must be joint"),
        ({"block_length": 1000}, "must fill at least one block of 1000 tokens. 9 documents"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        text_blocks(**{"texts": dataset_of(TEXTS), "tokenizers": Letters(), "block_length": 7, **options})


def test_blocks_of_a_trained_tokenizer_read_as_the_text():
    texts = ["The cat is black.", "It rains.", "A longer sentence, with more words in it than the others."] * 3
    tokenizer = train_tokenizer(texts, kind="byte_bpe", show_progress=False)
    blocks, _ = text_blocks(dataset_of(texts), TokenizerPair(tokenizer, tokenizer), 10, remainder="keep")
    ids = joined(blocks["input_ids"])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(text + tokenizer.eos_token for text in texts)
