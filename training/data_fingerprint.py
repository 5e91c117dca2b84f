"""Data fingerprints: a short name of an encoded training set, by which a resumed run knows that it reads the same pairs."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np

_LENGTHS = ("source_length", "target_length")
_SIDES = ("input_ids", "labels")
_SAMPLED_ROWS = 1000
# Of a file, at its start and at its end.
_SAMPLED_BYTES = 2**16


def data_fingerprint(dataset: Any) -> dict[str, Any] | None:
    """The number of pairs, and a hash of all their lengths and of the ids of some, evenly spread.

    Args:
        dataset: Pairs with the columns of `encode_pairs`, or blocks of text, or a stream of batches whose pairs know their
            files; another one has no fingerprint.

    Returns:
        What fits into JSON, or `None`.
    """
    if hasattr(stream := getattr(dataset, "read", None), "fingerprint"):
        return stream.fingerprint()
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


def file_fingerprint(paths: Sequence[str | Path], rules: Any) -> dict[str, Any]:
    """The number of bytes of files that are read as a stream, and a hash of where they begin and end and of the rules.

    Args:
        paths: The files, in order; where they lie does not count.
        rules: What decides which pairs are made of them; what fits into a text.
    """
    digest, sizes = hashlib.blake2b(repr(rules).encode(), digest_size=16), []
    for path in map(Path, paths):
        sizes.append(path.stat().st_size)
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED_BYTES))
            file.seek(max(0, sizes[-1] - _SAMPLED_BYTES))
            digest.update(file.read(_SAMPLED_BYTES))
    return {"num_bytes": sum(sizes), "sizes": sizes, "hash": digest.hexdigest()}
