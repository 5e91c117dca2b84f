"""Encoding: turn pairs of text into token ids, filter them by length, and report every dropped pair."""

import copy
import logging
from typing import Any, Literal, Protocol

import datasets
import numpy as np
from datasets.fingerprint import Hasher

from metaphrase.data.fingerprints import tokenizer_fingerprint
from metaphrase.data.pairs import LENGTH_COLUMNS, SIDES
from metaphrase.data.reports import DataReport, LengthStatistics
from metaphrase.tokenization import TextFrame, shorten

logger = logging.getLogger(__name__)

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


class PairEncoder(Protocol):
    """Source and target tokenizer. Each list of ids ends in the same ids (see `TextFrame`)."""

    def encode_sources(self, texts: list[str]) -> list[list[int]]: ...

    def encode_targets(self, texts: list[str]) -> list[list[int]]: ...


def encode_pairs(
    dataset: datasets.Dataset,
    tokenizers: PairEncoder,
    *,
    max_source_length: int | None,
    max_target_length: int | None,
    too_long: TooLong = "skip",
    empty: Empty = "skip",
    keep_text: bool = False,
    report: DataReport | None = None,
) -> tuple[datasets.Dataset, DataReport]:
    """Turn pairs of text into token ids.

    `datasets` caches the result by data set, tokenizers and arguments, on disk if `dataset` is on disk.

    Args:
        dataset: The text columns `source` and `target`.
        tokenizers: Source and target tokenizer.
        max_source_length: Most tokens of a source with its end-of-sequence token; None for no limit.
        max_target_length: The same for a target.
        too_long: Policy for pairs over a limit. "truncate" keeps the end-of-sequence token.
        empty: Policy for pairs with an empty side: only white space, or no token left after tokenization.
        keep_text: Keep the columns `source` and `target`, for scoring.
        report: Report of reading these pairs; it is not changed. Pairs beyond those of `dataset` count as in other splits.

    Returns:
        The columns `input_ids`, `labels`, `source_length` and `target_length` (in tokens) in the order of the pairs,
        and the report.

    Raises:
        ValueError: If an argument is out of range, `too_long` or `empty` refuses a pair, a tokenizer has no common end,
            or no pair is left.
    """
    limits = (max_source_length, max_target_length)
    _check_arguments(dataset, limits, too_long, empty)
    report = _start_report(dataset, report)
    frames = find_frames(tokenizers)
    arguments = {"tokenizers": tokenizers, "limits": limits, "frames": frames, "too_long": too_long, "empty": empty}
    keys = (limits, frames, too_long, empty, keep_text, CACHE_VERSION)
    removed = [name for name in dataset.column_names if not (keep_text and name in SIDES)]
    texts = {name: datasets.Value("string") for name in dataset.column_names if name not in removed}
    encoded = dataset.map(
        encode_batch,
        batched=True,
        with_indices=True,
        input_columns=["source", "target"],
        remove_columns=removed,
        features=datasets.Features({**texts, **FEATURES}),
        fn_kwargs=arguments,
        new_fingerprint=Hasher.hash((dataset._fingerprint, tokenizer_fingerprint(tokenizers), keys)),
        desc="Tokenizing",
    )
    encoded = _select_kept_pairs(encoded, report)
    logger.debug("%s", report)
    return encoded, report


def _check_arguments(
    dataset: datasets.Dataset, limits: tuple[int | None, int | None], too_long: str, empty: str
) -> None:
    if not set(SIDES) <= set(dataset.column_names):
        raise ValueError(f"`dataset` must have the columns source and target, got {dataset.column_names}.")
    for name, limit in zip(("max_source_length", "max_target_length"), limits, strict=True):
        if limit is not None and limit < 2:
            raise ValueError(f"`{name}` must be at least 2 (one token and the end-of-sequence token), got {limit}.")
    for name, policy, choices in (("too_long", too_long, TooLong), ("empty", empty, Empty)):
        if policy not in choices.__args__:
            raise ValueError(f"`{name}` must be one of {', '.join(choices.__args__)}, got {policy!r}.")


def _start_report(dataset: datasets.Dataset, report: DataReport | None) -> DataReport:
    if report is None:
        return DataReport(read=len(dataset))
    report = copy.copy(report)
    if report.kept < len(dataset):
        raise ValueError(f"`report` must count all {len(dataset)} pairs of `dataset`, got {report.kept}.")
    report.other_splits += report.kept - len(dataset)
    return report


def find_frames(tokenizers: PairEncoder) -> tuple[TextFrame, TextFrame]:
    """Return the ids around every source and every target. Raise a `ValueError` if one side has no common end."""
    frames = TextFrame.of(tokenizers.encode_sources), TextFrame.of(tokenizers.encode_targets)
    for side, frame in zip(SIDES, frames, strict=True):
        if not frame.end:
            raise ValueError(
                f"The {side} tokenizer must end each list of ids in the end-of-sequence token, got no common end."
            )
    return frames


def encode_batch(
    sources: list[str],
    targets: list[str],
    rows: list[int],
    tokenizers: PairEncoder,
    limits: tuple[int | None, int | None],
    frames: tuple[TextFrame, TextFrame],
    too_long: str,
    empty: str,
) -> dict[str, list[Any]]:
    """Return the columns `FEATURES` of a batch of pairs, dropped pairs included."""
    source_ids, target_ids = tokenizers.encode_sources(list(sources)), tokenizers.encode_targets(list(targets))
    columns: dict[str, list[Any]] = {name: [] for name in FEATURES}
    for row, texts, ids in zip(
        rows, zip(sources, targets, strict=True), zip(source_ids, target_ids, strict=True), strict=True
    ):
        for side, side_ids, frame in zip(SIDES, ids, frames, strict=True):
            if side_ids[-len(frame.end) :] != frame.end:
                raise ValueError(
                    f"The {side} tokenizer must end each list of ids in {frame.end}, got {side_ids[-5:]} as end."
                )
        is_empty = [
            not text.strip() or len(side) <= frame.length for text, side, frame in zip(texts, ids, frames, strict=True)
        ]
        is_long = [limit is not None and len(side) > limit for limit, side in zip(limits, ids, strict=True)]
        drops = [empty != "keep" and side for side in is_empty] + [too_long != "truncate" and side for side in is_long]
        outcome = drops.index(True) + 1 if True in drops else 0
        if (too_long == "error" and any(is_long)) or (empty == "error" and any(is_empty)):
            _raise_refusal(row, texts, [len(side) for side in ids], limits, is_empty)
        if outcome == 0:
            ids = [shorten(side, limit, frame.end) for side, limit, frame in zip(ids, limits, frames, strict=True)]
        else:
            ids, is_long = [[], []], [False, False]
        values = (*ids, *map(len, ids), outcome, *is_long)
        for name, value in zip(FEATURES, values, strict=True):
            columns[name].append(value)
    return columns


def _raise_refusal(
    row: int, texts: tuple[str, str], lengths: list[int], limits: tuple[int | None, int | None], is_empty: list[bool]
) -> None:
    pair = f"got in row {row} {lengths[0]} and {lengths[1]} tokens: {texts[0][:80]!r}, {texts[1][:80]!r}."
    if any(is_empty):
        raise ValueError(f"Neither side of a pair may be empty, {pair} Set `empty: skip` to drop such pairs.")
    rules = f"`max_source_length` {limits[0]} and `max_target_length` {limits[1]}"
    raise ValueError(f"Pairs must be within {rules}, {pair} Set `too_long: skip` to drop such pairs.")


def _select_kept_pairs(encoded: datasets.Dataset, report: DataReport) -> datasets.Dataset:
    # The cache holds dropped pairs too, so that every run can count them.
    bookkeeping = encoded.select_columns([name for name in FEATURES if name not in ("input_ids", "labels")])
    columns = bookkeeping.with_format("numpy")[:]
    for index, reason in enumerate(OUTCOMES[1:], start=1):
        setattr(report, reason, getattr(report, reason) + int(np.sum(columns["outcome"] == index)))
    rows = np.flatnonzero(columns["outcome"] == 0)
    if rows.size == 0:
        raise ValueError(f"At least one pair must be left to train on, got none. {report}")
    for side in SIDES:
        setattr(report, f"{side}_truncated", int(np.sum(columns[f"{side}_truncated"])))
        setattr(report, f"{side}_lengths", LengthStatistics.of(columns[f"{side}_length"][rows]))
    if rows.size < len(encoded):
        encoded = encoded.select(rows)
    texts = [name for name in encoded.column_names if name not in FEATURES]
    return encoded.select_columns([*texts, "input_ids", "labels", *LENGTH_COLUMNS])
