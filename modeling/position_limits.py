"""Position limits: how many tokens a model with tables of positions can read and write."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from .cache_name import CACHE_NAMES

_PLAIN_TABLES = {"position_embeddings", "wpe"}


def longest_source(model: Any) -> int | None:
    """Most tokens of a source, the end of sequence counted; `None` where the model itself sets no limit, or is an engine."""
    return _rows(model.get_encoder() if hasattr(model, "get_encoder") else None)


def longest_target(model: Any) -> int | None:
    """Likewise, of what the decoder reads: the start token and the target but for its last token."""
    return _rows(model.get_decoder() if hasattr(model, "get_decoder") else None)


def check_length(model: Any, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> None:
    """Checks a text that a pipeline has encoded.

    Raises:
        ValueError: If the model cannot read so many tokens.
    """
    limit = longest_source(model)
    if limit is not None and num_tokens > limit:
        raise ValueError(
            f"A text must not have more tokens than the model has positions, {limit}, got {num_tokens}: `truncation=True` cuts "
            f"it at the tokenizer's `model_max_length`, which is {tokenizer.model_max_length}."
        )


@contextlib.contextmanager
def checking_targets(model: Any) -> Iterator[None]:
    """Refuses a target that grows past the table of a family that does not look: Metaphrase models do so themselves.

    Raises:
        ValueError: If the decoder would read more tokens than it has positions.
    """
    limit = None if hasattr(model, "search_with_scores") else longest_target(model)
    if limit is None:
        yield
        return

    def check(decoder: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
        ids = named.get("input_ids")
        past = next((named[name] for name in CACHE_NAMES if named.get(name) is not None), None)
        length = 0 if ids is None else ids.shape[1] + (0 if past is None else int(past.get_seq_length()))
        if length > limit:
            raise ValueError(
                f"`max_new_tokens` must not let a target have more tokens than the decoder has positions, {limit}, "
                f"got a target of {length} that goes on."
            )

    handle = model.get_decoder().register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _rows(stack: nn.Module | None) -> int | None:
    table = getattr(stack, "embed_positions", None)
    if table is None and stack is not None:
        # As BERT and GPT-2 have it, which may be joined to an encoder-decoder.
        named = ((name.rpartition(".")[2], module) for name, module in stack.named_modules())
        table = next((m for name, m in named if name in _PLAIN_TABLES and type(m) is nn.Embedding), None)
    # FSMT's table grows when it must.
    if not isinstance(table, nn.Embedding) or hasattr(table, "make_weight"):
        return None
    # RoBERTa's positions begin behind that of padding.
    first = 0 if type(table) is not nn.Embedding or table.padding_idx is None else table.padding_idx + 1
    return table.num_embeddings - getattr(table, "offset", first)
