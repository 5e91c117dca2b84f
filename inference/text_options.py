"""Text options: arguments of `generate()` that are of each text, and stay so in whatever order texts are decoded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

ROW_OPTIONS = ("decoder_input_ids", "decoder_attention_mask")
FUNCTION_OPTION = "prefix_allowed_tokens_fn"


@dataclass(frozen=True)
class TextFunction:
    """A `prefix_allowed_tokens_fn` that is told the number of the text, not its place among those that are decoded together.

    It can be sent to another process if the function can.
    """

    function: Callable[[int, torch.Tensor], list[int]]
    numbers: Sequence[int]
    copies: int = 1

    def __call__(self, place: int, ids: torch.Tensor) -> list[int]:
        return self.function(self.numbers[place // self.copies], ids)


def read_text_options(options: Mapping[str, Any], count: int | None) -> dict[str, Any]:
    """The options with rows `(texts, length)`, or one row for all texts, in tensors.

    Args:
        options: Arguments of `generate()`.
        count: Texts that there are; `None` for a stream, of which nobody knows.

    Raises:
        ValueError: If rows are no rows of ids, or not as many as there are texts.
    """
    options = dict(options)
    for name in ROW_OPTIONS:
        if options.get(name) is not None:
            options[name] = rows = _read_rows(name, options[name])
            if count is None and len(rows) != 1:
                raise ValueError(f"`{name}` must have one row for all texts in a stream, got {len(rows)}.")
            if count is not None and len(rows) not in (1, count):
                raise ValueError(
                    f"`{name}` must have a row for each text, or one for all, got {len(rows)} for {count} texts."
                )
    start = options.get("decoder_start_token_id")
    if isinstance(start, list | tuple) or (isinstance(start, torch.Tensor) and start.ndim):
        raise ValueError(
            f"`decoder_start_token_id` must be one id for all texts, got {start}: give those of each as `decoder_input_ids`."
        )
    return options


def _read_rows(name: str, given: Any) -> torch.Tensor:
    try:
        rows = torch.as_tensor(given)
    except (TypeError, ValueError):
        rows = None
    if rows is None or rows.ndim != 2 or rows.shape[1] < 1 or rows.is_floating_point():
        raise ValueError(f"`{name}` must be rows of equally many ids, got {given!r}.")
    return rows


def options_of_texts(options: Mapping[str, Any], numbers: Sequence[int], copies: int = 1) -> dict[str, Any]:
    """The options for some of the texts.

    Args:
        options: From `read_text_options`.
        numbers: Of the texts, in the order in which they are decoded.
        copies: Rows of each text, where its hypotheses are no beams.
    """
    options = dict(options)
    for name in ROW_OPTIONS:
        if options.get(name) is not None and len(options[name]) > 1:
            options[name] = options[name][list(numbers)]
    if options.get(FUNCTION_OPTION) is not None:
        options[FUNCTION_OPTION] = TextFunction(options[FUNCTION_OPTION], numbers, copies)
    return options


def with_start(model: PreTrainedModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the start token in front of `decoder_input_ids`, on the model's device.

    `generate()` puts it there where no row of a batch has it, so that a text would depend on its batch.

    Raises:
        ValueError: If some rows begin with it and others do not.
    """
    own, rows = model.generation_config, options.get("decoder_input_ids")
    if rows is None:
        return dict(options)
    starts = [
        options.get("decoder_start_token_id"),
        own.decoder_start_token_id,
        options.get("bos_token_id"),
        own.bos_token_id,
    ]
    start = next((token for token in starts if token is not None), None)
    has_start = rows[:, 0] == start if start is not None else torch.ones(len(rows), dtype=torch.bool)
    if bool(has_start.any()) and not bool(has_start.all()):
        raise ValueError(
            f"`decoder_input_ids` must begin with the start token, {start}, in all rows or in none, "
            f"got it in {int(has_start.sum())} of {len(rows)}."
        )
    given = {name: options[name].to(model.device) for name in ROW_OPTIONS if options.get(name) is not None}
    if not bool(has_start.all()):
        fillings = {"decoder_input_ids": start, "decoder_attention_mask": 1}
        given = {name: torch.nn.functional.pad(value, (1, 0), value=fillings[name]) for name, value in given.items()}
    return {**options, **given}
