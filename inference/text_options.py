"""Arguments of `generate()` that differ from text to text. They follow their text into any batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

ROW_OPTIONS = ("decoder_input_ids", "decoder_attention_mask")
FUNCTION_OPTION = "prefix_allowed_tokens_fn"


@dataclass(frozen=True)
class TextFunction:
    """A `prefix_allowed_tokens_fn` that receives the number of the text instead of its row in the batch.

    Picklable if the function is.
    """

    function: Callable[[int, torch.Tensor], list[int]]
    numbers: Sequence[int]
    copies: int = 1

    def __call__(self, row: int, ids: torch.Tensor) -> list[int]:
        return self.function(self.numbers[row // self.copies], ids)


def read_text_options(options: Mapping[str, Any], count: int | None) -> dict[str, Any]:
    """Return the options with rows as tensors `(texts, length)` or `(1, length)`.

    Args:
        options: Arguments of `generate()`.
        count: Number of texts; `None` for a stream.

    Raises:
        ValueError: If rows are not ids of one length, or their number is neither 1 nor `count`.
    """
    options = dict(options)
    for name in ROW_OPTIONS:
        if options.get(name) is not None:
            options[name] = rows = _read_rows(name, options[name])
            if count is None and len(rows) != 1:
                raise ValueError(f"`{name}` must have one row for all texts in a stream, got {len(rows)}.")
            if count is not None and len(rows) not in (1, count):
                raise ValueError(f"`{name}` must have 1 row or one for each text, got {len(rows)} for {count} texts.")
    start = options.get("decoder_start_token_id")
    if isinstance(start, list | tuple) or (isinstance(start, torch.Tensor) and start.ndim):
        raise ValueError(
            f"`decoder_start_token_id` must be one id for all texts, got {start}. Set `decoder_input_ids` for several."
        )
    return options


def _read_rows(name: str, value: Any) -> torch.Tensor:
    try:
        rows = torch.as_tensor(value)
    except (TypeError, ValueError):
        rows = None
    if rows is None or rows.ndim != 2 or rows.shape[1] < 1 or rows.is_floating_point():
        raise ValueError(f"`{name}` must be rows of ids of one length, got {value!r}.")
    return rows


def options_of_texts(options: Mapping[str, Any], numbers: Sequence[int], copies: int = 1) -> dict[str, Any]:
    """Return the options for some of the texts.

    Args:
        options: From `read_text_options`.
        numbers: Index of each text, in decoding order.
        copies: Rows of each text in a batch of samples.
    """
    options = dict(options)
    for name in ROW_OPTIONS:
        if options.get(name) is not None and len(options[name]) > 1:
            options[name] = options[name][list(numbers)]
    if options.get(FUNCTION_OPTION) is not None:
        options[FUNCTION_OPTION] = TextFunction(options[FUNCTION_OPTION], numbers, copies)
    return options


def with_start(model: PreTrainedModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the start token in front of `decoder_input_ids`, on the model's device.

    `generate()` adds the token only if no row of a batch has it, so that a text would depend on its batch.

    Raises:
        ValueError: If some rows begin with the start token and others do not.
    """
    config, rows = model.generation_config, options.get("decoder_input_ids")
    if rows is None:
        return dict(options)
    names = ("decoder_start_token_id", "bos_token_id")
    tokens = (token for name in names for token in (options.get(name), getattr(config, name)))
    start = next((token for token in tokens if token is not None), None)
    has_start = rows[:, 0] == start if start is not None else torch.ones(len(rows), dtype=torch.bool)
    if bool(has_start.any()) and not bool(has_start.all()):
        raise ValueError(
            f"`decoder_input_ids` must begin with the start token, {start}, in all rows or in none, "
            f"got it in {int(has_start.sum())} of {len(rows)}."
        )
    tensors = {name: options[name].to(model.device) for name in ROW_OPTIONS if options.get(name) is not None}
    if not bool(has_start.all()):
        fill = {"decoder_input_ids": start, "decoder_attention_mask": 1}
        tensors = {name: torch.nn.functional.pad(value, (1, 0), value=fill[name]) for name, value in tensors.items()}
    return {**options, **tensors}
