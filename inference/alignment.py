"""Alignment: where the decoder looks in the source when it predicts each token of the target."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.inference.decoding import Engine, decode
from metaphrase.inference.generator import Generator

# Stands for a space at the beginning of a word, as in SentencePiece.
SPACE_MARK = "\u2581"
# What byte-level tokenizers write for a space, and what a decoder writes for bytes that are no character.
_BYTE_LEVEL_SPACE, _REPLACEMENT = "\u0120", "\ufffd"


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention weights of one pair of texts.

    Attributes:
        weights: `(target, source)` in float32; each row adds up to 1 and belongs to the prediction of that target token.
        source_tokens: One for each column, in a readable form.
        target_tokens: One for each row; the end of sequence is a token too.
        source: The source text, without the generator's prefix.
        target: The target text.
    """

    weights: np.ndarray
    source_tokens: list[str]
    target_tokens: list[str]
    source: str
    target: str


def cross_attention(
    generator: Generator,
    source: str,
    target: str | None = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    **generation_kwargs,
) -> AttentionMap:
    """The cross-attention of a model between a source and a target, from one teacher-forced pass.

    Without a layer it is the mean over all heads of all layers, with a layer the mean over its heads, with both a single head.

    Args:
        generator: The model and its tokenizers. Its model is left in the mode and with the attention kernel that it had.
        source: The source text.
        target: The target text; by default the model's own.
        layer: A decoder layer, from 0; negative numbers count from the last.
        head: One of that layer's heads, likewise.
        **generation_kwargs: As for `generate()`, for a target that the model is to make.

    Raises:
        ValueError: If the source is empty or white space, the layer or head does not exist, a head is given without a layer,
            generation options are given beside a target, or the model has no cross-attention to show.
    """
    if isinstance(generator.model, Engine):
        name = type(generator.model).__name__
        raise ValueError(f"`generator` must run in torch to show its attention, got a {name}.")
    if not source.strip():
        raise ValueError(f"`source` must not be empty or white space, got {source!r}.")
    if head is not None and layer is None:
        raise ValueError(
            f"`layer` must be given with `head`: heads of two layers have nothing in common, got head {head}."
        )
    if target is not None and generation_kwargs:
        raise ValueError(
            f"`target` must be left out for the model to generate one, got a target and {', '.join(generation_kwargs)}."
        )
    count = generation_kwargs.pop("num_return_sequences", 1)
    if count != 1:
        raise ValueError(f"`num_return_sequences` must be 1 for one map, got {count}.")
    tokenizers = generator.tokenizers
    [source_ids] = tokenizers.encode_sources([generator.source_prefix + source])
    if target is None:
        [[hypothesis]] = decode(generator.model, [source_ids], **generation_kwargs, num_return_sequences=1)
        generator.num_unfinished += not hypothesis.is_finished
        target_ids = hypothesis.ids
        [target] = tokenizers.decode_targets([target_ids])
    else:
        [target_ids] = tokenizers.encode_targets([target])
    return AttentionMap(
        weights=_choose(_weights(generator.model, source_ids, target_ids), layer, head),
        source_tokens=readable_tokens(tokenizers.source, source_ids),
        target_tokens=readable_tokens(tokenizers.target, target_ids),
        source=source,
        target=target,
    )


def readable_tokens(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Each token by itself, with a mark in place of a space.

    A byte-level tokenizer's token is decoded; one that is only a part of a character stays in the tokenizer's own alphabet, as
    do all tokens of the other kinds of tokenizers, which can be read as they are.
    """
    pieces = tokenizer.convert_ids_to_tokens(ids)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or "ByteLevel" not in repr(backend.decoder):
        return pieces
    shown = []
    for token, piece in zip(ids, pieces, strict=True):
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        is_whole = text and _REPLACEMENT not in text
        shown.append(text.replace(" ", SPACE_MARK) if is_whole else piece.replace(_BYTE_LEVEL_SPACE, SPACE_MARK))
    return shown


def _weights(model: PreTrainedModel, source_ids: list[int], target_ids: list[int]) -> list[torch.Tensor]:
    """For each decoder layer the weights `(heads, target, source)`."""
    source = torch.tensor([source_ids], device=model.device)
    # The model itself shifts labels: query i reads the token before target token i, and predicts that token.
    labels = torch.tensor([target_ids], device=model.device)
    with _showing_attention(model), torch.inference_mode():
        output = model(
            input_ids=source,
            attention_mask=torch.ones_like(source),
            labels=labels,
            output_attentions=True,
            use_cache=False,
            return_dict=True,
        )
    layers = getattr(output, "cross_attentions", None)
    if not layers or any(weights is None for weights in layers):
        raise ValueError(
            f"The model must be an encoder-decoder that returns cross-attentions, got {type(model).__name__}."
        )
    return [weights[0].float().cpu() for weights in layers]


@contextlib.contextmanager
def _showing_attention(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode and the eager kernel, the only one that keeps its weights; what was there before is put back."""
    was_training, kernels = model.training, _kernels(model.config)
    model.eval()
    try:
        model.set_attn_implementation("eager")
        yield
    finally:
        model.set_attn_implementation(kernels)
        model.train(was_training)


def _kernels(config) -> dict | str:
    """The attention kernel of a configuration, and of those inside it, as `set_attn_implementation` takes them."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    inner = {name: _kernels(part) for name, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **inner} if inner else config._attn_implementation


def _choose(layers: list[torch.Tensor], layer: int | None, head: int | None) -> np.ndarray:
    """`(target, source)` out of the weights `(heads, target, source)` of all layers."""
    if layer is None:
        return torch.stack([weights.mean(dim=0) for weights in layers]).mean(dim=0).numpy()
    heads = layers[_checked_index("layer", layer, len(layers))]
    return (heads.mean(dim=0) if head is None else heads[_checked_index("head", head, len(heads))]).numpy()


def _checked_index(name: str, index: int, count: int) -> int:
    if not -count <= index < count:
        raise ValueError(f"`{name}` must be from {-count} to {count - 1}, got {index}.")
    return index
