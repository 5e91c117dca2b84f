"""Data fingerprints: a short name of an encoded training set, by which a resumed run knows that it reads the same pairs."""

import hashlib
from typing import Any

import datasets
import numpy as np

_LENGTHS = ("source_length", "target_length")
_SIDES = ("input_ids", "labels")
_SAMPLED_ROWS = 1000


def data_fingerprint(dataset: Any) -> dict[str, Any] | None:
    """The number of pairs, and a hash of all their lengths and of the ids of some, evenly spread.

    Args:
        dataset: Pairs with the columns of `encode_pairs`, or blocks of text; another one has no fingerprint.

    Returns:
        What fits into JSON, or `None`.
    """
    # A denoising data set draws anew in each epoch; its blocks stay.
    rows = getattr(dataset, "blocks", dataset)
    if not isinstance(rows, datasets.Dataset) or not set(_SIDES) & set(rows.column_names):
        return None
    columns = rows.column_names
    digest = hashlib.blake2b(digest_size=16)
    for name in (name for name in _LENGTHS if name in columns):
        digest.update(np.asarray(rows[name][:], dtype=np.int64).tobytes())
    places = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _SAMPLED_ROWS)).astype(np.int64))
    sampled = rows.select_columns([name for name in _SIDES if name in columns])[places]
    for name in sorted(sampled):
        for ids in sampled[name]:
            digest.update(np.asarray([len(ids), *ids], dtype=np.int64).tobytes())
    return {"num_pairs": len(rows), "hash": digest.hexdigest()}
