"""Fingerprints of data: equal for the same pairs, different for other pairs, None for other data sets."""

from types import SimpleNamespace

import datasets
from letter_pair import LetterPair
from small_runs import PAIRS

from metaphrase.data.encoding import data_fingerprint
from metaphrase.data.token_budget import PairStream, TextStream, TokenBudgetStream


def dataset_of(pairs):
    lengths = {"source_length": "input_ids", "target_length": "labels"}
    return datasets.Dataset.from_list(
        [pair | {name: len(pair[side]) for name, side in lengths.items()} for pair in pairs]
    )


def test_equal_pairs_have_the_same_fingerprint_and_other_pairs_another():
    first, again = data_fingerprint(dataset_of(PAIRS)), data_fingerprint(dataset_of(PAIRS).select(range(len(PAIRS))))
    assert first == again and first["num_pairs"] == len(PAIRS)
    hashes = {first["hash"]}
    others = [PAIRS[:-1], PAIRS[::-1], [*PAIRS[:-1], {"input_ids": [5, 2], "labels": [9, 2]}]]
    others.append([{"input_ids": pair["labels"], "labels": pair["input_ids"]} for pair in PAIRS])
    for pairs in others:
        hashes.add(data_fingerprint(dataset_of(pairs))["hash"])
    assert len(hashes) == 1 + len(others)


def test_all_lengths_count_and_where_a_block_of_text_ends():
    many = [{"input_ids": [5, 2], "labels": [6, 2]}] * 2500
    # The ids of this row are not sampled.
    other = [*many[:1], {"input_ids": [5, 2], "labels": [6, 7, 2]}, *many[2:]]
    assert data_fingerprint(dataset_of(many)) != data_fingerprint(dataset_of(other))
    blocks = [datasets.Dataset.from_dict({"input_ids": rows}) for rows in ([[1, 2], [3]], [[1], [2, 3]])]
    assert data_fingerprint(blocks[0]) != data_fingerprint(blocks[1])


def test_noise_does_not_count():
    blocks = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7]]})
    assert data_fingerprint(SimpleNamespace(blocks=blocks)) == data_fingerprint(blocks) is not None


def stream_of(files, **options):
    texts = TextStream(source_file=files[0], target_file=files[1], **options)
    return TokenBudgetStream(PairStream(texts, LetterPair(), max_source_length=9, max_target_length=9), 64, seed=0)


def test_the_fingerprint_of_a_stream_is_that_of_its_files_and_settings(tmp_path):
    files = [tmp_path / name for name in ("source", "target")]
    for file in files:
        file.write_text("ab\n" * 100_000, encoding="utf-8")
    first = data_fingerprint(stream_of(files))
    assert first["num_bytes"] == 600_000
    # The folder and the time of change do not count.
    moved = [file.rename(tmp_path / f"{file.name}.txt") for file in files]
    assert data_fingerprint(stream_of(moved)) == first
    assert data_fingerprint(stream_of(moved, source_prefix="x")) != first
    assert data_fingerprint(stream_of(moved[::-1])) == first
    for start, end, new in ((0, 0, "ab\n"), (0, 3, "cd\n"), (-3, None, "cd\n"), (150_000, 150_003, "")):
        text = moved[1].read_text(encoding="utf-8")
        changed = text[:start] + new + (text[end:] if end is not None else "")
        moved[1].write_text(changed, encoding="utf-8")
        assert data_fingerprint(stream_of(moved)) != first
        moved[1].write_text(text, encoding="utf-8")
    assert data_fingerprint(stream_of(moved)) == first


def test_other_data_sets_have_none(tmp_path):
    texts = TextStream(dataset_name=str(tmp_path), source_column="en", target_column="de")
    pairs = PairStream(texts, LetterPair(), max_source_length=9, max_target_length=9)
    assert data_fingerprint(TokenBudgetStream(pairs, 64, seed=0)) is None
    assert data_fingerprint(PAIRS) is None
    assert data_fingerprint(dataset_of(PAIRS).to_iterable_dataset()) is None
