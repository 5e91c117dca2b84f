"""Data fingerprints: the same for the same pairs, another for others, and none where nothing can be said."""

from types import SimpleNamespace

import datasets
from small_runs import PAIRS

from metaphrase.training.data_fingerprint import data_fingerprint


def dataset_of(pairs):
    lengths = {"source_length": "input_ids", "target_length": "labels"}
    return datasets.Dataset.from_list(
        [pair | {name: len(pair[side]) for name, side in lengths.items()} for pair in pairs]
    )


def test_the_same_pairs_have_the_same_fingerprint():
    first, again = data_fingerprint(dataset_of(PAIRS)), data_fingerprint(dataset_of(PAIRS).select(range(len(PAIRS))))
    assert first == again and first["num_pairs"] == len(PAIRS)


def test_other_pairs_have_another():
    seen = {data_fingerprint(dataset_of(PAIRS))["hash"]}
    others = [PAIRS[:-1], PAIRS[::-1], [*PAIRS[:-1], {"input_ids": [5, 2], "labels": [9, 2]}]]
    others.append([{"input_ids": pair["labels"], "labels": pair["input_ids"]} for pair in PAIRS])
    for pairs in others:
        name = data_fingerprint(dataset_of(pairs))["hash"]
        assert name not in seen
        seen.add(name)


def test_all_lengths_count_and_where_a_block_of_text_ends():
    many = [{"input_ids": [5, 2], "labels": [6, 2]}] * 2500
    # One of those that are not looked at in detail.
    other = [*many[:1], {"input_ids": [5, 2], "labels": [6, 7, 2]}, *many[2:]]
    assert data_fingerprint(dataset_of(many)) != data_fingerprint(dataset_of(other))
    blocks = [datasets.Dataset.from_dict({"input_ids": rows}) for rows in ([[1, 2], [3]], [[1], [2, 3]])]
    assert data_fingerprint(blocks[0]) != data_fingerprint(blocks[1])


def test_noise_does_not_count():
    blocks = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7]]})
    assert data_fingerprint(SimpleNamespace(blocks=blocks)) == data_fingerprint(blocks) is not None


def test_what_has_no_columns_has_none():
    assert data_fingerprint(PAIRS) is None
    assert data_fingerprint(dataset_of(PAIRS).to_iterable_dataset()) is None
