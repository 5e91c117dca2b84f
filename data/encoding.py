"""The data set a model trains on: pairs as token ids, filtered by length, with a report on every pair left out."""

import copy
import json
import logging
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import datasets
import numpy as np
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from metaphrase.data.reports import DataReport, LengthStatistics
from metaphrase.tokenization import TextFrame, shorten

logger = logging.getLogger(__name__)

TooLong = Literal["skip", "truncate", "error"]
Empty = Literal["skip", "error", "keep"]
# Values of the column `outcome`, in the order in which they are looked for; a pair counts under the first that holds.
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
KEPT_COLUMNS = ("input_ids", "labels", "source_length", "target_length")
# Part of every cache key: raise it whenever the same pairs would be encoded into other columns.
CACHE_VERSION = 2


class PairEncoder(Protocol):
    """What is asked of a pair of tokenizers: ids for each text, each list ending in the same ids (see `TextFrame`)."""

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
    num_proc: int | None = None,
    keep_text: bool = False,
    report: DataReport | None = None,
) -> tuple[datasets.Dataset, DataReport]:
    """Turns pairs of text into token ids.

    The result is cached by the data set, the tokenizers and the arguments, on disk where `dataset` is on disk.

    Args:
        dataset: The text columns `source` and `target`.
        tokenizers: The source and target tokenizer.
        max_source_length: The most tokens of a source, end-of-sequence token included; None for no limit.
        max_target_length: The most tokens of a target, end-of-sequence token included; None for no limit.
        too_long: What to do with a pair that has a side over its limit. "truncate" keeps the end-of-sequence token.
        empty: What to do with a pair that has an empty side: only white space, or nothing left after tokenization.
        num_proc: The number of processes; None for the present one alone.
        keep_text: Keep the columns `source` and `target`, such as to score against the text itself.
        report: The report of reading these pairs; it is not changed. If it speaks of more pairs than `dataset` holds, the
            others count as being in other splits.

    Returns:
        The columns `input_ids`, `labels`, `source_length` and `target_length` (in tokens) in the order of the pairs,
        and the report.

    Raises:
        ValueError: If an argument is out of range, a pair is refused by `too_long` or `empty`, a tokenizer does not end
            all its lists alike, or no pair is left.
    """
    limits = (max_source_length, max_target_length)
    _check_arguments(dataset, limits, too_long, empty)
    report = _report_of(dataset, report)
    frames = find_frames(tokenizers)
    arguments = {"tokenizers": tokenizers, "limits": limits, "frames": frames, "too_long": too_long, "empty": empty}
    keys = (limits, frames, too_long, empty, keep_text, CACHE_VERSION)
    removed = [name for name in dataset.column_names if not (keep_text and name in ("source", "target"))]
    texts = {name: datasets.Value("string") for name in dataset.column_names if name not in removed}
    encoded = dataset.map(
        encode_batch,
        batched=True,
        with_indices=True,
        input_columns=["source", "target"],
        remove_columns=removed,
        features=datasets.Features({**texts, **FEATURES}),
        fn_kwargs=arguments,
        num_proc=num_proc,
        new_fingerprint=Hasher.hash((dataset._fingerprint, tokenizer_fingerprint(tokenizers), keys)),
        desc="Tokenizing",
    )
    encoded = _kept_pairs(encoded, report)
    logger.debug("%s", report)
    return encoded, report


def _check_arguments(
    dataset: datasets.Dataset, limits: tuple[int | None, int | None], too_long: str, empty: str
) -> None:
    if missing := {"source", "target"} - set(dataset.column_names):
        raise ValueError(
            f"`dataset` must have the columns source and target, got {dataset.column_names}: no {missing}."
        )
    for name, limit in zip(("max_source_length", "max_target_length"), limits, strict=True):
        if limit is not None and limit < 2:
            raise ValueError(f"`{name}` must be at least 2, one token and the end of sequence, got {limit}.")
    for name, given, choices in (("too_long", too_long, TooLong), ("empty", empty, Empty)):
        if given not in choices.__args__:
            raise ValueError(f"`{name}` must be one of {', '.join(choices.__args__)}, got {given!r}.")


def _report_of(dataset: datasets.Dataset, report: DataReport | None) -> DataReport:
    if report is None:
        return DataReport(read=len(dataset))
    report = copy.copy(report)
    if report.kept < len(dataset):
        raise ValueError(f"`report` must speak of all {len(dataset)} pairs of `dataset`, got one on {report.kept}.")
    report.other_splits += report.kept - len(dataset)
    return report


def find_frames(tokenizers: PairEncoder) -> tuple[TextFrame, TextFrame]:
    """What stands around every source and every target."""
    frames = TextFrame.of(tokenizers.encode_sources), TextFrame.of(tokenizers.encode_targets)
    for side, frame in zip(("source", "target"), frames, strict=True):
        if not frame.end:
            raise ValueError(
                f"The {side} tokenizer must end each list of ids in the end-of-sequence token, got none that all texts share."
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
    source_ids, target_ids = tokenizers.encode_sources(list(sources)), tokenizers.encode_targets(list(targets))
    columns: dict[str, list[Any]] = {name: [] for name in FEATURES}
    for row, texts, ids in zip(
        rows, zip(sources, targets, strict=True), zip(source_ids, target_ids, strict=True), strict=True
    ):
        for side, side_ids, frame in zip(("source", "target"), ids, frames, strict=True):
            if side_ids[-len(frame.end) :] != frame.end:
                raise ValueError(
                    f"The {side} tokenizer must end each list of ids in {frame.end}, got {side_ids[-5:]} as end."
                )
        is_empty = [
            not text.strip() or len(side) <= frame.length for text, side, frame in zip(texts, ids, frames, strict=True)
        ]
        is_long = [limit is not None and len(side) > limit for limit, side in zip(limits, ids, strict=True)]
        outcome = _outcome(is_empty, is_long, too_long, empty)
        if (too_long == "error" and any(is_long)) or (empty == "error" and any(is_empty)):
            _refuse(row, texts, [len(side) for side in ids], limits, is_empty)
        kept = [[], []]
        if outcome == "kept":
            kept = [shorten(side, limit, frame.end) for side, limit, frame in zip(ids, limits, frames, strict=True)]
        is_cut = [outcome == "kept" and is_side_long for is_side_long in is_long]
        values = (*kept, *map(len, kept), OUTCOMES.index(outcome), *is_cut)
        for name, value in zip(FEATURES, values, strict=True):
            columns[name].append(value)
    return columns


def _outcome(is_empty: Sequence[bool], is_long: Sequence[bool], too_long: str, empty: str) -> str:
    found = [empty != "keep" and side for side in is_empty] + [too_long != "truncate" and side for side in is_long]
    return next((name for name, holds in zip(OUTCOMES[1:], found, strict=True) if holds), "kept")


def _refuse(
    row: int, texts: tuple[str, str], lengths: list[int], limits: tuple[int | None, int | None], is_empty: list[bool]
) -> None:
    rules = f"`max_source_length` {limits[0]} and `max_target_length` {limits[1]}"
    given = f"{lengths[0]} and {lengths[1]} tokens: {texts[0][:80]!r}, {texts[1][:80]!r}"
    if any(is_empty):
        raise ValueError(
            f"Neither side of a pair may be empty, got in row {row} {given}. `empty: skip` leaves such pairs out."
        )
    raise ValueError(f"Pairs must be within {rules}, got in row {row} {given}. `too_long: skip` leaves such pairs out.")


def _kept_pairs(encoded: datasets.Dataset, report: DataReport) -> datasets.Dataset:
    # Dropped pairs stay in the cache, so that a run that reads the cache can count them too.
    bookkeeping = encoded.select_columns([name for name in FEATURES if name not in ("input_ids", "labels")])
    columns = bookkeeping.with_format("numpy")[:]
    for index, reason in enumerate(OUTCOMES[1:], start=1):
        setattr(report, reason, getattr(report, reason) + int(np.sum(columns["outcome"] == index)))
    rows = np.flatnonzero(columns["outcome"] == 0)
    if rows.size == 0:
        raise ValueError(f"At least one pair must be left to train on, got none. {report}")
    for side in ("source", "target"):
        setattr(report, f"{side}_truncated", int(np.sum(columns[f"{side}_truncated"])))
        setattr(report, f"{side}_lengths", LengthStatistics.of(columns[f"{side}_length"][rows]))
    if rows.size < len(encoded):
        encoded = encoded.select(rows)
    texts = [name for name in encoded.column_names if name not in FEATURES]
    return encoded.select_columns([*texts, *KEPT_COLUMNS])


def tokenizer_fingerprint(tokenizers: PairEncoder) -> str:
    """Returns a key that is equal in another process when the tokenizers give equal ids.

    A tokenizer's pickle will not do: it holds what the last call left behind, such as its padding.
    """
    parts = getattr(tokenizers, "__dict__", {})
    if not any(isinstance(part, PreTrainedTokenizerBase) for part in parts.values()):
        return Hasher.hash(tokenizers)
    names = sorted(parts)
    return Hasher.hash((type(tokenizers).__qualname__, names, [_state_of(parts[name]) for name in names]))


def _state_of(part: Any) -> Any:
    if not isinstance(part, PreTrainedTokenizerBase):
        return part
    backend = getattr(part, "backend_tokenizer", None)
    if backend is None:
        return part
    state = json.loads(backend.to_str())
    state.pop("truncation", None)
    state.pop("padding", None)
    options = {name: str(value) for name, value in sorted(part.init_kwargs.items()) if name != "name_or_path"}
    return type(part).__qualname__, json.dumps(state), json.dumps(options), str(part.special_tokens_map)
