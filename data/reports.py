"""Data fingerprints: a short name of an encoded training set, by which a resumed run knows that it reads the same pairs.

The account of a data set's pairs: how many were read, how many are used, and why each other one is not.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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


# Each pair that is not used is counted under exactly one of these.
DROP_REASONS = {
    "malformed": "malformed",
    "invalid_utf8": "invalid UTF-8",
    "beyond_max_samples": "beyond max_samples",
    "other_splits": "in other splits",
    "empty_source": "empty source",
    "empty_target": "empty target",
    "source_too_long": "source too long",
    "target_too_long": "target too long",
}


@dataclass(frozen=True)
class LengthStatistics:
    """Lengths of one side in tokens, end-of-sequence token included."""

    mean: float
    percentile_95: float
    longest: int

    @classmethod
    def of(cls, lengths: np.ndarray) -> "LengthStatistics":
        """Summarizes the lengths of at least one sequence."""
        return cls(float(np.mean(lengths)), float(np.percentile(lengths, 95)), int(np.max(lengths)))

    def __str__(self) -> str:
        return f"mean {self.mean:.1f}, 95% within {self.percentile_95:.0f}, longest {self.longest}"


@dataclass
class DataReport:
    """Counts of pairs. `read` is always `kept` plus the pairs under one of `DROP_REASONS`.

    Truncated pairs are kept; a pair cut on both sides is counted on both.
    """

    read: int = 0
    malformed: int = 0
    invalid_utf8: int = 0
    beyond_max_samples: int = 0
    other_splits: int = 0
    empty_source: int = 0
    empty_target: int = 0
    source_too_long: int = 0
    target_too_long: int = 0
    source_truncated: int = 0
    target_truncated: int = 0
    source_lengths: LengthStatistics | None = None
    target_lengths: LengthStatistics | None = None

    @property
    def dropped(self) -> int:
        """The number of pairs read that are not used."""
        return sum(getattr(self, reason) for reason in DROP_REASONS)

    @property
    def kept(self) -> int:
        """The number of pairs that are used."""
        return self.read - self.dropped

    def to_dict(self) -> dict[str, Any]:
        """Returns all counts and statistics as plain values, ready for JSON."""
        return {**asdict(self), "kept": self.kept, "dropped": self.dropped}

    def __str__(self) -> str:
        parts = [f"{self.kept} of {self.read} pairs kept"]
        reasons = [
            f"{getattr(self, field)} {words}" for field, words in DROP_REASONS.items() if getattr(self, field) > 0
        ]
        if reasons:
            parts.append(f"not used: {', '.join(reasons)}")
        cut = [f"{getattr(self, f'{side}_truncated')} {side}s" for side in ("source", "target")]
        if self.source_truncated or self.target_truncated:
            parts.append(f"truncated: {', '.join(cut)}")
        for side in ("source", "target"):
            if (statistics := getattr(self, f"{side}_lengths")) is not None:
                parts.append(f"{side} tokens: {statistics}")
        return "; ".join(parts) + "."
