"""Token ids of pairs, and a fingerprint that shows whether data sets changed."""

import copy
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from metaphrase.data.pairs import COLUMN_TYPES, LENGTH_COLUMNS, REJECTED_COLUMN, SIDES, WEIGHT_COLUMN, DataReport
from metaphrase.errors import MetaphraseError
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.tokenization import TokenizerPair, shorten
from metaphrase.tokenization.tokenizer_pair import WordEncoder

_ID_COLUMNS = ("input_ids", "labels")
_SAMPLED_ROWS = 1000


def data_fingerprint(dataset: Any) -> dict[str, Any] | None:
    """Return the number of pairs and a hash of all lengths and weights, and of ids of evenly spread pairs, as values for JSON.

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
    for name in (name for name in (*LENGTH_COLUMNS, WEIGHT_COLUMN) if name in columns):
        digest.update(np.asarray(rows[name][:], dtype=np.float64 if name == WEIGHT_COLUMN else np.int64).tobytes())
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
FEATURES: dict[str, Any] = {name: datasets.List(datasets.Value("int32")) for name in _ID_COLUMNS}
FEATURES |= {name: datasets.Value("int32") for name in LENGTH_COLUMNS} | {"outcome": datasets.Value("int8")}
FEATURES |= {f"{side}_truncated": datasets.Value("bool") for side in SIDES}
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
        source, target = (getattr(self.tokenizers, side, None) for side in SIDES)
        self.source = WordEncoder(source, self.tokenizers.encode_sources)
        self.target = WordEncoder(target, self.tokenizers.encode_targets)
        self.frames = self.source.frame, self.target.frame

    def __call__(self, sources: list[str], targets: list[str], rows: list[int]) -> dict[str, list[Any]]:
        """Return the columns `FEATURES` of a batch of pairs, dropped pairs included."""
        texts, ids = (sources, targets), (self.source(sources), self.target(targets))
        lengths = np.array([[*map(len, side)] for side in ids])
        is_long = ([math.inf if limit is None else limit for limit in self.limits] < lengths.T).T
        is_empty = ([frame.length for frame in self.frames] >= lengths.T).T
        is_empty |= [[not text.strip() for text in side] for side in texts]
        columns = dict(zip(FEATURES, [*ids, *lengths.tolist(), [0] * len(rows), *is_long.tolist()], strict=True))
        # Most pairs stay as they are.
        for index in np.flatnonzero(np.any(is_empty | is_long, axis=0)).tolist():
            sides = [side[index] for side in ids]
            counts = f"{len(sides[0])} and {len(sides[1])} tokens"
            shown = f"row {rows[index]} {counts}: {sources[index][:80]!r}, {targets[index][:80]!r}."
            if self.empty == "error" and is_empty[:, index].any():
                text = f"Neither side of a pair may be empty, got in {shown} Set `empty: skip` to drop such pairs."
                raise MetaphraseError(text)
            if self.too_long == "error" and is_long[:, index].any():
                limits = "`max_source_length` {} and `max_target_length` {}".format(*self.limits)
                text = f"Pairs must be within {limits}, got in {shown} Set `too_long: skip` to drop such pairs."
                raise MetaphraseError(text)
            drops = [self.empty != "keep" and side for side in is_empty[:, index].tolist()]
            drops += [self.too_long != "truncate" and side for side in is_long[:, index].tolist()]
            if True in drops:
                values: list[Any] = [[], [], 0, 0, drops.index(True) + 1, False, False]
            else:
                sides = [shorten(*side) for side in zip(sides, self.limits, [f.end for f in self.frames], strict=True)]
                values = [*sides, *map(len, sides), 0, *is_long[:, index].tolist()]
            for column, value in zip(columns.values(), values, strict=True):
                column[index] = value
        return columns


def _join_targets(columns: dict[str, list[Any]], rejected: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the columns of pairs, with the labels of rejected targets of the same sources behind -100. Both must be kept."""
    joined: dict[str, list[Any]] = {name: [*map(max, columns[name], rejected[name])] for name in columns}
    rows = zip(columns["labels"], rejected["labels"], strict=True)
    joined["labels"] = [[*row, IGNORED_LABEL, *other] for row, other in rows]
    return joined | {"target_length": [*map(len, joined["labels"])]}


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
        The columns `input_ids`, `labels`, `source_length` and `target_length` (in tokens), and `weight` if there is one, in
        the order of the pairs, and the report. The labels are those of the target, and behind -100 those of a rejected one.
    """
    encoder = PairEncoder(tokenizers, **rules)
    report = DataReport(read=len(dataset)) if report is None else copy.copy(report)
    report.other_splits += report.kept - len(dataset)
    keys = (encoder.limits, encoder.frames, encoder.too_long, encoder.empty, keep_text, CACHE_VERSION)
    read = [name for name in COLUMN_TYPES if name in dataset.column_names]
    names = read if keep_text else [name for name in read[2:] if name == WEIGHT_COLUMN]
    types = {name: datasets.Value(COLUMN_TYPES[name]) for name in names}
    features = datasets.Features({**types, **FEATURES})

    def encode(*inputs: list[Any]) -> pa.Table:
        encoded = encoder(inputs[0], inputs[1], inputs[-1])
        if read[-1] == REJECTED_COLUMN:
            encoded = _join_targets(encoded, encoder(inputs[0], inputs[2], inputs[-1]))
        columns = {**dict(zip(read, inputs, strict=False)), **encoded}
        # A dictionary would be searched for the types of its values.
        return pa.table({name: columns[name] for name in features}, features.arrow_schema)

    encoded = dataset.map(
        encode,
        batched=True,
        with_indices=True,
        input_columns=read,
        remove_columns=dataset.column_names,
        features=features,
        new_fingerprint=Hasher.hash((dataset._fingerprint, tokenizer_fingerprint(tokenizers), keys)),
        desc="Tokenizing",
    )
    # The cache holds dropped pairs too, so that every run can count them.
    columns = encoded.select_columns([*FEATURES][len(_ID_COLUMNS) :]).with_format("numpy")[:]
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
    return encoded.select_columns([*types, *_ID_COLUMNS, *LENGTH_COLUMNS]), report
