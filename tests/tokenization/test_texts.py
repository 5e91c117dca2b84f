"""Tests of `tokenization.texts`: reading of lines."""

import gzip

import pytest

from metaphrase.tokenization import iterate_lines


def test_iterate_lines_splits_at_line_feeds_only(tmp_path):
    first, second, third = (tmp_path / name for name in ("first.txt", "second.txt", "third.gz"))
    first.write_bytes("\ufeffä b\r\n\nc\u2028d\u0085e\x0cf\rg\n".encode())
    second.write_bytes(b"last")
    third.write_bytes(gzip.compress("\ufeffä b\r\nc".encode()))
    lines = ["ä b", "", "c\u2028d\u0085e\x0cf\rg", "last", "ä b", "c"]
    assert list(iterate_lines([first, str(second), third])) == lines
    assert list(iterate_lines(str(second))) == ["last"]


def test_iterate_lines_names_file_and_line_of_invalid_bytes(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes("good\nschön\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin1\.txt` must be UTF-8, but line 2 has the byte 0xf6 at position 3"):
        list(iterate_lines(path))
