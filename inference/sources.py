"""Limits of sources, and target tokens that a caller sets for single texts."""

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from metaphrase.tokenization import TextFrame

# Most tokens of a source for a model without a limit, such as T5, unless a batch may have more. The memory for attention grows
# with the square of this number.
MAX_TOKENS_WITHOUT_POSITIONS = 8192
PROMPT = "decoder_input_ids"


class TooLongError(ValueError):
    """A source has more tokens than its model has positions, or than fit into memory.

    Attributes:
        number: Number of the source, from 1; in a file that of the line.
        num_tokens: Tokens of the source, with end of sequence.
        limit: Most tokens.
        side: `source`, or `target` for a target that was given.
        has_positions: True if the limit is that of the model's positions.
    """

    def __init__(self, number: int, num_tokens: int, limit: int, side: str = "source", has_positions: bool = True):
        # An error from another process is rebuilt from these arguments.
        super().__init__(number, num_tokens, limit, side, has_positions)
        self.number, self.num_tokens, self.limit, self.side = number, num_tokens, limit, side
        self.has_positions = has_positions

    def __str__(self) -> str:
        hint = f" Set `max_source_length` to {self.limit} or less to truncate it." if self.side == "source" else ""
        hint += "" if self.has_positions else " Set `max_tokens_per_batch` to read it whole, with more memory."
        reason = "than the model has positions" if self.has_positions else "than `max_tokens_per_batch` or the default"
        return (
            f"A {self.side} must not have more tokens {reason}, {self.limit}, got {self.num_tokens} in "
            f"number {self.number} (in a file: line {self.number}).{hint}"
        )


@contextlib.contextmanager
def numbering(numbers: Sequence[int]) -> Iterator[None]:
    """Replace the number in a `TooLongError`: source i of a selection has number `numbers[i - 1]`."""
    try:
        yield
    except TooLongError as error:
        raise TooLongError(numbers[error.number - 1], *error.args[1:]) from None


def check_sources(sources: Sequence[Sequence[int]], positions: int | None, max_tokens_per_batch: int) -> None:
    """Check the lengths of sources.

    Args:
        sources: Ids of each source.
        positions: Most tokens that the model can read; `None` if it has no limit.
        max_tokens_per_batch: Most tokens of a batch, which a single source may have without such a limit.

    Raises:
        TooLongError: If a source is longer.
    """
    limit = max(MAX_TOKENS_WITHOUT_POSITIONS, max_tokens_per_batch) if positions is None else positions
    for number, source in enumerate(sources, start=1):
        if len(source) > limit:
            raise TooLongError(number, len(source), limit, has_positions=positions is not None)


def check_source_length(length: int, encode: Callable[[list[str]], list[list[int]]], prefix: str) -> None:
    """Check a `max_source_length`.

    Args:
        length: The value to check.
        encode: Encodes source texts.
        prefix: Text before every source.

    Raises:
        ValueError: If the length has no room for a token of the text beside special tokens and prefix.
    """
    frame = TextFrame.of(encode)
    if length <= frame.length:
        raise ValueError(
            f"`max_source_length` must be at least {frame.length + 1}, one token and the special tokens, got {length}."
        )
    # Count the tokens of the prefix: those that different texts share at their beginning.
    texts = encode([prefix + text for text in ("a", "1", ".")])
    num_shared = sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*texts, strict=False)))
    if prefix and num_shared < min(map(len, texts)) - len(frame.end) and length <= num_shared + len(frame.end):
        raise ValueError(
            f"`max_source_length` must be above {num_shared + len(frame.end)}, the tokens of `source_prefix` with special "
            f"tokens, got {length}."
        )


def count_cut(uncut: Sequence[Sequence[int]], cut: Sequence[Sequence[int]]) -> int:
    """Return the number of truncated sources."""
    return sum(map(operator.ne, uncut, cut))


def read_prompts(options: Mapping[str, Any], num_texts: int | None) -> dict[str, Any]:
    """Return the options of `generate()` with `decoder_input_ids` as a tensor `(texts, length)` or `(1, length)`.

    Args:
        options: Arguments of `generate()`.
        num_texts: Number of texts; `None` for a stream.

    Raises:
        ValueError: If prompts are not ids of one length, or their number is neither 1 nor `num_texts`; or for
            `prefix_allowed_tokens_fn`, whose rows would be those of a batch.
    """
    if options.get("prefix_allowed_tokens_fn") is not None:
        raise ValueError(
            "`prefix_allowed_tokens_fn` sees rows of a batch, and no texts. Call `model.generate()` with it."
        )
    if options.get(PROMPT) is None:
        return dict(options)
    try:
        rows = torch.as_tensor(options[PROMPT])
    except (TypeError, ValueError):
        rows = None
    if rows is None or rows.ndim != 2 or rows.shape[1] < 1 or rows.is_floating_point():
        raise ValueError(f"`{PROMPT}` must be rows of ids of one length, got {options[PROMPT]!r}.")
    if len(rows) not in (1, num_texts):
        expected = "one row for all texts in a stream" if num_texts is None else "1 row or one for each text"
        raise ValueError(f"`{PROMPT}` must have {expected}, got {len(rows)}{f' for {num_texts}' if num_texts else ''}.")
    return {**options, PROMPT: rows}


def prompts_of(options: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    """Return the options, from `read_prompts`, for the texts at some indices."""
    rows = options.get(PROMPT)
    if rows is None or len(rows) == 1:
        return dict(options)
    return {**options, PROMPT: rows[list(indices)]}


def with_start(model: PreTrainedModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the start token in front of the prompts, on the model's device.

    `generate()` adds the token only if no row of a batch has it, so that a text would depend on its batch.

    Raises:
        ValueError: If some rows begin with the start token and others do not.
    """
    config, rows = model.generation_config, options.get(PROMPT)
    if rows is None:
        return dict(options)
    names = ("decoder_start_token_id", "bos_token_id")
    tokens = (token for name in names for token in (options.get(name), getattr(config, name)))
    start = next((token for token in tokens if token is not None), None)
    has_start = rows[:, 0] == start if start is not None else torch.ones(len(rows), dtype=torch.bool)
    if bool(has_start.any()) and not bool(has_start.all()):
        raise ValueError(
            f"`{PROMPT}` must begin with the start token, {start}, in all rows or in none, "
            f"got it in {int(has_start.sum())} of {len(rows)}."
        )
    if not bool(has_start.all()):
        rows = torch.nn.functional.pad(rows, (1, 0), value=start)
    return {**options, PROMPT: rows.to(model.device)}


def longest_source(model: Any) -> int | None:
    """Return the most tokens of a source, with the end of sequence, or None if the model has no limit."""
    return _num_positions(model, "get_encoder")


def longest_target(model: Any) -> int | None:
    """Return the most tokens of the decoder's input, with the start token, or None if the model has no limit."""
    return _num_positions(model, "get_decoder")


def _num_positions(model: Any, method: str) -> int | None:
    if not hasattr(model, method):
        return None
    # FSMT's stacks have no configuration of their own.
    config = getattr(getattr(model, method)(), "config", model.config)
    return getattr(config, "position_limit" if config.model_type == "metaphrase" else "max_position_embeddings", None)


@contextlib.contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Set models to evaluation mode, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        # A module comes before its submodules, whose modes `train` changes. A stack also acts on a call of `train`.
        for module, was_training in modes:
            if module.training != was_training:
                module.train(was_training)
