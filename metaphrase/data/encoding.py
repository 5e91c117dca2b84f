"""Token ids of pairs, and a fingerprint that shows whether data sets changed."""

import copy
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

import datasets
import numpy as np
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from metaphrase.data.pairs import LENGTH_COLUMNS, SIDES, DataReport
from metaphrase.errors import MetaphraseError
from metaphrase.tokenization import TextFrame, TokenizerPair, shorten

_ID_COLUMNS = ("input_ids", "labels")
_SAMPLED_ROWS = 1000


def data_fingerprint(dataset: Any) -> dict[str, Any] | None:
    """Return the number of pairs and a hash of all lengths and of the ids of some evenly spread pairs, as values for JSON.

    The pairs have the columns of `encode_pairs`, are blocks of text, or come from a stream with a fingerprint of its files. The
    fingerprint of any other data set is None.
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


def tokenizer_fingerprint(tokenizers: Any) -> str:
    """Return a key that is equal in all processes for tokenizers that give equal ids.

    A pickle would not do: it holds state of the last call, such as the padding.
    """
    states = []
    for name, part in sorted(vars(tokenizers).items()):
        backend = getattr(part, "backend_tokenizer", None)
        if isinstance(part, PreTrainedTokenizerBase) and backend is not None:
            state = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
            options = {key: str(value) for key, value in sorted(part.init_kwargs.items()) if key != "name_or_path"}
            part = type(part).__qualname__, json.dumps(state), json.dumps(options), str(part.special_tokens_map)
        states.append((name, part))
    return Hasher.hash((type(tokenizers).__qualname__, states))


TooLong = Literal["skip", "truncate", "error"]
Empty = Literal["skip", "error", "keep"]
# Values of the column `outcome`. A pair counts under the first one that holds.
OUTCOMES = ("kept", "empty_source", "empty_target", "source_too_long", "target_too_long")
FEATURES = {
    "input_ids": datasets.List(datasets.Value("int32")),
    "labels": datasets.List(datasets.Value("int32")),
    "source_length": datasets.Value("int32"),
    "target_length": datasets.Value("int32"),
    "outcome": datasets.Value("int8"),
    "source_truncated": datasets.Value("bool"),
    "target_truncated": datasets.Value("bool"),
}
# Part of every cache key. Raise it when the same pairs would be encoded into other columns.
CACHE_VERSION = 2


@dataclass
class PairEncoder:
    """Tokenizers and rules that turn pairs of text into token ids.

    Attributes:
        max_source_length: Most tokens of a source with its end-of-sequence token; None for no limit.
        too_long: Policy for pairs over a limit. "truncate" keeps the end-of-sequence token.
        empty: Policy for pairs with an empty side: only white space, or no token left after tokenization.
    """

    tokenizers: TokenizerPair
    max_source_length: int | None
    max_target_length: int | None
    too_long: TooLong = "skip"
    empty: Empty = "skip"

    def __post_init__(self) -> None:
        self.limits = self.max_source_length, self.max_target_length
        # The ids around every source and every target.
        self.frames = TextFrame.of(self.tokenizers.encode_sources), TextFrame.of(self.tokenizers.encode_targets)

    def __call__(self, sources: list[str], targets: list[str], rows: list[int]) -> dict[str, list[Any]]:
        """Return the columns `FEATURES` of a batch of pairs, dropped pairs included."""
        source_ids, target_ids = self.tokenizers.encode_sources(sources), self.tokenizers.encode_targets(targets)
        encoded = []
        for row, texts, *ids in zip(rows, zip(sources, targets, strict=True), source_ids, target_ids, strict=True):
            sides = list(zip(texts, ids, self.frames, self.limits, strict=True))
            is_empty = [not text.strip() or len(side) <= frame.length for text, side, frame, _ in sides]
            is_long = [limit is not None and len(side) > limit for _, side, _, limit in sides]
            if self.empty == "error" and any(is_empty):
                raise MetaphraseError(
                    f"Neither side of a pair may be empty, got in {_shown(row, texts, ids)} Set `empty: skip` to drop such pairs."
                )
            if self.too_long == "error" and any(is_long):
                raise MetaphraseError(
                    f"Pairs must be within `max_source_length` {self.max_source_length} and `max_target_length` "
                    f"{self.max_target_length}, got in {_shown(row, texts, ids)} Set `too_long: skip` to drop such pairs."
                )
            drops = [self.empty != "keep" and side for side in is_empty]
            drops += [self.too_long != "truncate" and side for side in is_long]
            if True in drops:
                encoded.append(([], [], 0, 0, drops.index(True) + 1, False, False))
                continue
            ids = [shorten(side, limit, frame.end) for _, side, frame, limit in sides]
            encoded.append((*ids, *map(len, ids), 0, *is_long))
        return dict(zip(FEATURES, map(list, zip(*encoded, strict=True)), strict=True))


def _shown(row: int, texts: tuple[str, str], ids: list[list[int]]) -> str:
    return f"row {row} {len(ids[0])} and {len(ids[1])} tokens: {texts[0][:80]!r}, {texts[1][:80]!r}."


def encode_pairs(
    dataset: datasets.Dataset,
    tokenizers: TokenizerPair,
    *,
    keep_text: bool = False,
    report: DataReport | None = None,
    **rules: Any,
) -> tuple[datasets.Dataset, DataReport]:
    """Turn pairs of text into token ids, cached by data set, tokenizers and arguments.

    `rules` are the other fields of `PairEncoder`. The report of reading is not changed: pairs that it has more than `dataset`
    count as in other splits.

    Returns:
        The columns `input_ids`, `labels`, `source_length` and `target_length` (in tokens) in the order of the pairs,
        and the report.
    """
    encoder = PairEncoder(tokenizers, **rules)
    report = DataReport(read=len(dataset)) if report is None else copy.copy(report)
    report.other_splits += report.kept - len(dataset)
    keys = (encoder.limits, encoder.frames, encoder.too_long, encoder.empty, keep_text, CACHE_VERSION)
    removed = [name for name in dataset.column_names if not (keep_text and name in SIDES)]
    texts = {name: datasets.Value("string") for name in dataset.column_names if name not in removed}
    encoded = dataset.map(
        encoder,
        batched=True,
        with_indices=True,
        input_columns=["source", "target"],
        remove_columns=removed,
        features=datasets.Features({**texts, **FEATURES}),
        new_fingerprint=Hasher.hash((dataset._fingerprint, tokenizer_fingerprint(tokenizers), keys)),
        desc="Tokenizing",
    )
    # The cache holds dropped pairs too, so that every run can count them.
    bookkeeping = encoded.select_columns([name for name in FEATURES if name not in _ID_COLUMNS])
    columns = bookkeeping.with_format("numpy")[:]
    for index, reason in enumerate(OUTCOMES[1:], start=1):
        report.add(**{reason: int(np.sum(columns["outcome"] == index))})
    rows = np.flatnonzero(columns["outcome"] == 0)
    if rows.size == 0:
        raise MetaphraseError(f"At least one pair must be left to train on, got none. {report}")
    for side in SIDES:
        setattr(report, f"{side}_truncated", int(np.sum(columns[f"{side}_truncated"])))
        lengths = columns[f"{side}_length"][rows]
        statistics = {"mean": float(lengths.mean()), "percentile_95": float(np.percentile(lengths, 95))}
        setattr(report, f"{side}_lengths", statistics | {"longest": int(lengths.max())})
    if rows.size < len(encoded):
        encoded = encoded.select(rows)
    return encoded.select_columns([*texts, *_ID_COLUMNS, *LENGTH_COLUMNS]), report
