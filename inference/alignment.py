"""Alignment: where the decoder looks in the source when it predicts each token of the target."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from metaphrase.decoding.options import plain_options
from metaphrase.inference.generator import Generator
from metaphrase.inference.run import Run, check_single
from metaphrase.inference.scoring import (
    check_pairs,
    encode_forced,
    forced_inputs,
    pair_lengths,
    read_texts,
)
from metaphrase.inference.source_limits import check_sources, count_cut
from metaphrase.modeling.pipeline_support import batches_by_length, evaluating
from metaphrase.tokenization import (
    TextFrame,
    checked_texts,
    readable_tokens,
    shorten,
    words_of_decoded,
    words_of_source,
    words_of_target,
)

# A pass that keeps the weights of all layers and heads, of the encoder too, needs memory for the square of the length.
MAX_TOKENS_PER_BATCH = 2048


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention weights of one pair of texts.

    Attributes:
        weights: `(target, source)` in float32; each row adds up to 1 and belongs to the prediction of that target token.
        source_tokens: One for each column, in a readable form.
        target_tokens: One for each row; the end of sequence is a token too.
        source: The source text, without the generator's prefix.
        target: The target text.
        source_words: The words of the source text.
        target_words: Likewise, of the target.
        source_word_ids: For each column the index of its word, `None` for a special token or one of the prefix. `None` instead of
            the list where tokens cannot be told to words.
        target_word_ids: Likewise, for each row.
        head_weights: `(layers, heads, target, source)` in float32, if they were asked for.
    """

    weights: np.ndarray
    source_tokens: list[str]
    target_tokens: list[str]
    source: str
    target: str
    source_words: list[str]
    target_words: list[str]
    source_word_ids: list[int | None] | None
    target_word_ids: list[int | None] | None
    head_weights: np.ndarray | None = None


def cross_attention(
    generator: Generator,
    source: str,
    target: str | None = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    keep_heads: bool = False,
    **generation_kwargs,
) -> AttentionMap:
    """The cross-attention of a model between a source and a target, from one teacher-forced pass.

    Without a layer it is the mean over all heads of all layers, with a layer the mean over its heads, with both a single head.

    Args:
        generator: The model and its tokenizers. Its model is left in the mode and with the attention kernel that it had.
        source: The source text.
        target: The target text; by default the model's own, of a beam search the one that won.
        layer: A decoder layer, from 0; negative numbers count from the last.
        head: One of that layer's heads, likewise.
        keep_heads: Whether the map carries the weights of every head of every layer too.
        **generation_kwargs: As for `generate()`, for a target that the model is to make.

    Raises:
        ValueError: If the source is empty or white space, the layer or head does not exist, a head is given without a layer,
            generation options are given beside a target, or the model has no cross-attention to show.
    """
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"`source` must not be empty or white space, got {source!r}.")
    targets = None if target is None else [target]
    options = {"layer": layer, "head": head, "keep_heads": keep_heads}
    [attention] = cross_attentions(generator, [source], targets, **options, **generation_kwargs)
    return attention


def cross_attentions(
    generator: Generator,
    sources: Iterable[str],
    targets: Iterable[str] | None = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    keep_heads: bool = False,
    show_progress: bool | None = False,
    **generation_kwargs,
) -> list[AttentionMap]:
    """The cross-attention of many pairs, in batches of like length: for each the map that `cross_attention` gives it alone.

    Args:
        generator: As for `cross_attention`. A batch holds at most its `batch_size` pairs, and at most its `max_tokens_per_batch`
            or `MAX_TOKENS_PER_BATCH` tokens of either side, whichever is less.
        sources: Source texts.
        targets: Texts, one for each source; by default the model's own.
        layer: As for `cross_attention`.
        head: Likewise.
        keep_heads: Likewise.
        show_progress: Progress bars; `None` shows them on a terminal only.
        **generation_kwargs: As for `generate()`, for targets that the model is to make.

    Raises:
        ValueError: As `cross_attention`, or if sources and targets are not equally many or not texts.
    """
    if head is not None and layer is None:
        raise ValueError(
            f"`layer` must be given with `head`: heads of two layers have nothing in common, got head {head}."
        )
    if targets is not None and generation_kwargs:
        raise ValueError(
            f"`target` must be left out for the model to generate one, got a target and {', '.join(generation_kwargs)}."
        )
    generation_kwargs = plain_options(generation_kwargs)
    count = generation_kwargs.pop("num_return_sequences", 1)
    if count != 1:
        raise ValueError(f"`num_return_sequences` must be 1 for one map, got {count}.")
    check_single(generator, "generator")
    if targets is not None:
        targets = list(checked_texts(targets, "targets"))
    sources, targets = read_texts(sources, targets)
    _check_choice(generator.model, layer, head)
    tokenizers, prefix = generator.tokenizers, generator.source_prefix
    whole_ids = generator.encode_whole(sources)
    source_ids = generator.cut(whole_ids)
    check_sources(generator.model, source_ids, range(1, len(source_ids) + 1))
    if targets is None:
        target_ids, target_texts = _generate(generator, sources, show_progress, generation_kwargs)
        find_words = words_of_decoded
    else:
        target_ids, target_texts = encode_forced(tokenizers, targets), targets
        find_words = words_of_target
        # Where the model writes targets, they are counted there.
        generator.num_truncated += count_cut(whole_ids, source_ids)
    maps: list[AttentionMap | None] = [None] * len(source_ids)
    end = TextFrame.of(tokenizers.encode_sources).end
    start = generation_kwargs.get("decoder_start_token_id")
    for index, heads in _head_weights(generator, source_ids, target_ids, start, show_progress):
        ids = source_ids[index], target_ids[index]
        source_words, source_word_ids = words_of_source(tokenizers.source, sources[index], whole_ids[index], prefix)
        if source_word_ids is not None:
            source_word_ids = shorten(source_word_ids, len(ids[0]), [None] * len(end))
        target_words, target_word_ids = find_words(tokenizers.target, target_texts[index], ids[1])
        maps[index] = AttentionMap(
            weights=_choose(heads, layer, head),
            source_tokens=readable_tokens(tokenizers.source, ids[0]),
            target_tokens=readable_tokens(tokenizers.target, ids[1]),
            source=sources[index],
            target=target_texts[index],
            source_words=source_words,
            target_words=target_words,
            source_word_ids=source_word_ids,
            target_word_ids=target_word_ids,
            head_weights=heads.numpy() if keep_heads else None,
        )
    return maps


def _generate(
    generator: Generator, sources: list[str], show_progress: bool | None, generation_kwargs: dict
) -> tuple[list[list[int]], list[str]]:
    """Ids and texts of the model's own targets: of a beam search those that won."""
    run = Run.of(generator, {**generation_kwargs, "num_return_sequences": 1}, len(sources))
    found = run.search(run.encode(sources), list(range(len(sources))), False, show_progress=show_progress)
    hypotheses = [best for [best] in found]
    generator.num_unfinished += sum(not hypothesis.is_finished for hypothesis in hypotheses)
    ids = [hypothesis.ids for hypothesis in hypotheses]
    return ids, generator.tokenizers.decode_targets(ids)


def _head_weights(
    generator: Generator,
    source_ids: list[list[int]],
    target_ids: list[list[int]],
    start: int | None,
    show_progress: bool | None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """For each pair, in the order of the batches, its index and its weights `(layers, heads, target, source)`."""
    model = generator.model
    check_pairs(model, source_ids, target_ids)
    max_tokens = min(generator.max_tokens_per_batch, MAX_TOKENS_PER_BATCH)
    batches = batches_by_length(pair_lengths(source_ids, target_ids), generator.batch_size, max_tokens)
    bar = tqdm(total=len(source_ids), unit="pair", disable=None if show_progress is None else not show_progress)
    with bar:
        for batch in batches:
            inputs = forced_inputs(model, [source_ids[i] for i in batch], [target_ids[i] for i in batch], start)
            layers = _weights_of_layers(model, inputs)
            for row, index in enumerate(batch):
                num_target, num_source = len(target_ids[index]), len(source_ids[index])
                yield index, torch.stack([weights[row, :, :num_target, :num_source] for weights in layers])
            bar.update(len(batch))


def _weights_of_layers(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """For each decoder layer the weights `(batch, heads, target, source)` in float32.

    Query i reads the token before target token i, and predicts that token.
    """
    with _showing_attention(model), torch.inference_mode():
        output = model(**inputs, output_attentions=True, use_cache=False, return_dict=True)
    layers = getattr(output, "cross_attentions", None)
    if not layers or any(weights is None for weights in layers):
        raise ValueError(
            f"The model must be an encoder-decoder that returns cross-attentions, got {type(model).__name__}."
        )
    return [weights.float().cpu() for weights in layers]


@contextlib.contextmanager
def _showing_attention(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode and the eager kernel, the only one that keeps its weights; what was there before is put back."""
    kernels = _kernels(model.config)
    with evaluating([model]):
        try:
            model.set_attn_implementation("eager")
            yield
        finally:
            model.set_attn_implementation(kernels)


def _kernels(config) -> dict | str:
    """The attention kernel of a configuration, and of those inside it, as `set_attn_implementation` takes them."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    inner = {name: _kernels(part) for name, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **inner} if inner else config._attn_implementation


def _check_choice(model: PreTrainedModel, layer: int | None, head: int | None) -> None:
    """Finds a layer or head that is not there before targets are made: families count them under names of their own."""
    if layer is not None:
        layers = _weights_of_layers(model, forced_inputs(model, [[0]], [[0]]))
        _choose(torch.cat(layers), layer, head)


def _choose(heads: torch.Tensor, layer: int | None, head: int | None) -> np.ndarray:
    """`(target, source)` out of the weights `(layers, heads, target, source)`."""
    if layer is None:
        return heads.mean(dim=(0, 1)).numpy()
    chosen = heads[_checked_index("layer", layer, len(heads))]
    return (chosen.mean(dim=0) if head is None else chosen[_checked_index("head", head, len(chosen))]).numpy()


def _checked_index(name: str, index: int, count: int) -> int:
    if not -count <= index < count:
        raise ValueError(f"`{name}` must be from {-count} to {count - 1}, got {index}.")
    return index
