"""Position limits: how many tokens a model with tables of positions can read and write."""

from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase


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


def _rows(stack: nn.Module | None) -> int | None:
    table = getattr(stack, "embed_positions", None)
    # FSMT's table grows when it must.
    if not isinstance(table, nn.Embedding) or hasattr(table, "make_weight"):
        return None
    return table.num_embeddings - getattr(table, "offset", 0)
