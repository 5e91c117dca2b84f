"""Fingerprints: keys by which a cache or a resumed run recognizes the same data and the same tokenizers."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from metaphrase.data.pairs import LENGTH_COLUMNS

_ID_COLUMNS = ("input_ids", "labels")
_SAMPLED_ROWS = 1000
# At the start of a file, and at its end.
_SAMPLED_BYTES = 2**16


def data_fingerprint(dataset: Any) -> dict[str, Any] | None:
    """Return the number of pairs and a hash of all lengths and of the ids of some evenly spread pairs.

    Args:
        dataset: Pairs with the columns of `encode_pairs`, blocks of text, or a stream with a fingerprint of its files.

    Returns:
        Plain values for JSON, or None for any other data set.
    """
    if hasattr(stream := getattr(dataset, "read", None), "fingerprint"):
        return stream.fingerprint()
    # Noise and changes are drawn anew in each epoch, but blocks and plain pairs stay.
    rows = getattr(dataset, "blocks", getattr(dataset, "pairs", dataset))
    if not isinstance(rows, datasets.Dataset) or not set(_ID_COLUMNS) & set(rows.column_names):
        return None
    columns = rows.column_names
    digest = hashlib.blake2b(digest_size=16)
    for name in (name for name in LENGTH_COLUMNS if name in columns):
        digest.update(np.asarray(rows[name][:], dtype=np.int64).tobytes())
    indices = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _SAMPLED_ROWS)).astype(np.int64))
    sampled = rows.select_columns([name for name in _ID_COLUMNS if name in columns])[indices]
    for name in sorted(sampled):
        for ids in sampled[name]:
            digest.update(np.asarray([len(ids), *ids], dtype=np.int64).tobytes())
    return {"num_pairs": len(rows), "hash": digest.hexdigest()}


def file_fingerprint(paths: Sequence[str | Path], rules: Any) -> dict[str, Any]:
    """Return the sizes of files, and a hash of their first and last bytes and of the rules.

    Args:
        paths: The files, in order. Their folders do not count.
        rules: The settings that turn the files into pairs.
    """
    digest, sizes = hashlib.blake2b(repr(rules).encode(), digest_size=16), []
    for path in map(Path, paths):
        sizes.append(path.stat().st_size)
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED_BYTES))
            file.seek(max(0, sizes[-1] - _SAMPLED_BYTES))
            digest.update(file.read(_SAMPLED_BYTES))
    return {"num_bytes": sum(sizes), "sizes": sizes, "hash": digest.hexdigest()}


def tokenizer_fingerprint(tokenizers: Any) -> str:
    """Return a key that is equal in all processes for tokenizers that give equal ids.

    A pickle would not do: it holds state of the last call, such as the padding.
    """
    parts = getattr(tokenizers, "__dict__", {})
    if not any(isinstance(part, PreTrainedTokenizerBase) for part in parts.values()):
        return Hasher.hash(tokenizers)
    names = sorted(parts)
    return Hasher.hash((type(tokenizers).__qualname__, names, [_tokenizer_state(parts[name]) for name in names]))


def _tokenizer_state(part: Any) -> Any:
    backend = getattr(part, "backend_tokenizer", None) if isinstance(part, PreTrainedTokenizerBase) else None
    if backend is None:
        return part
    state = json.loads(backend.to_str())
    state.pop("truncation", None)
    state.pop("padding", None)
    options = {name: str(value) for name, value in sorted(part.init_kwargs.items()) if name != "name_or_path"}
    return type(part).__qualname__, json.dumps(state), json.dumps(options), str(part.special_tokens_map)
