"""Cross-attention maps, and word alignment from them.

A link i-j joins source word i and target word j, both from 0: the format of Pharaoh and Moses.
"""

import contextlib
import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from metaphrase.analysis.scoring import encode_forced, forced_batches, read_texts
from metaphrase.analysis.words import words_of_decoded, words_of_source, words_of_target
from metaphrase.decoding.joint_search import check_single
from metaphrase.errors import MetaphraseError
from metaphrase.inference.batches import check_sources, evaluating, longest_source
from metaphrase.inference.generator import Generator
from metaphrase.tokenization import TextFrame, readable_tokens, shorten

# The pass keeps the attention weights of all layers and heads, whose size grows with the square of the length.
MAX_TOKENS_PER_BATCH = 2048
Link = tuple[int, int]


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention weights of one pair of texts.

    Attributes:
        weights: `(target, source)` in float32. Row i sums to 1 and is the attention while predicting target token i.
        source: The source text without `source_prefix`.
        source_word_ids: Index of the word of each column; `None` for special tokens and the prefix. The attribute is `None` if
            the tokens cannot be mapped to words. `target_word_ids` are those of the rows.
    """

    weights: np.ndarray
    source_ids: list[int]
    target_ids: list[int]
    source_tokens: list[str]
    target_tokens: list[str]
    source: str
    target: str
    source_words: list[str]
    target_words: list[str]
    source_word_ids: list[int | None] | None
    target_word_ids: list[int | None] | None


def cross_attention(generator: Generator, source: str, target: str | None = None, **options) -> AttentionMap:
    """Return the cross-attention between a source and a target. The options are those of `cross_attentions`."""
    [attention] = cross_attentions(generator, [source], None if target is None else [target], **options)
    return attention


def cross_attentions(
    generator: Generator,
    sources: Iterable[str],
    targets: Iterable[str] | None = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    show_progress: bool | None = False,
    **generation_kwargs,
) -> list[AttentionMap]:
    """Return the cross-attention of many pairs, from teacher-forced passes over batches of similar length.

    The weights are the mean over all heads of all layers, the mean over the heads of `layer`, or those of `head` in `layer`.

    Args:
        generator: Model and tokenizers. The model keeps its mode and its attention kernel. A batch has at most `batch_size`
            pairs, and at most `MAX_TOKENS_PER_BATCH` or `max_tokens_per_batch` tokens of either side.
        targets: One for each source. By default the model generates them.
        layer: A decoder layer, from 0. `head` is one of its heads. Negative numbers count from the last.
        **generation_kwargs: As for `generate()`, if the model generates the targets.

    Raises:
        MetaphraseError: If the numbers of sources and targets differ, a source without target is blank, there is no such layer
            or head, generation options are given with targets, or the model returns no cross-attention.
    """
    if targets is not None and generation_kwargs:
        raise MetaphraseError(f"Generation options have no effect with a target, got {', '.join(generation_kwargs)}.")
    check_single(generator, "generator")
    sources, targets = read_texts(sources, targets)
    model, tokenizers = generator.model, generator.tokenizers
    uncut_ids = generator.encode_uncut(sources)
    source_ids = generator.truncate(uncut_ids)
    check_sources(source_ids, longest_source(model), generator.max_tokens_per_batch)
    if targets is None:
        # `generate_ids` counts truncated sources.
        if any(not source.strip() for source in sources):
            raise MetaphraseError("`sources` must not be blank without targets, because a blank source has no target.")
        options = {**generation_kwargs, "num_return_sequences": 1}
        hypotheses = generator.generate_ids(sources, show_progress=show_progress, **options)
        target_ids = [best.ids for [best] in hypotheses]
        target_texts = tokenizers.decode_targets(target_ids)
        find_words = words_of_decoded
    else:
        target_ids, target_texts = encode_forced(tokenizers, targets), targets
        find_words = words_of_target
        generator.num_truncated += sum(map(operator.ne, uncut_ids, source_ids))
    maps: list[AttentionMap | None] = [None] * len(source_ids)
    end = TextFrame.of(tokenizers.encode_sources).end
    start = generation_kwargs.get("decoder_start_token_id")
    max_tokens = min(generator.max_tokens_per_batch, MAX_TOKENS_PER_BATCH)
    for batch, inputs in forced_batches(generator, source_ids, target_ids, max_tokens, show_progress, start):
        with showing_attention(model), torch.inference_mode():
            output = model(**inputs, output_attentions=True, use_cache=False, return_dict=True)
        layers = getattr(output, "cross_attentions", None)
        if not layers or any(weights is None for weights in layers):
            raise MetaphraseError(f"A model must return cross-attentions, got a {type(model).__name__} without.")
        # (batch, heads, target, source)
        layers = [weights.float().cpu() for weights in layers]
        for row, index in enumerate(batch):
            ids = source_ids[index], target_ids[index]
            heads = torch.stack([weights[row, :, : len(ids[1]), : len(ids[0])] for weights in layers])
            texts = sources[index], uncut_ids[index], generator.source_prefix
            source_words, source_word_ids = words_of_source(tokenizers.source, *texts)
            if source_word_ids is not None:
                source_word_ids = shorten(source_word_ids, len(ids[0]), [None] * len(end))
            target_words, target_word_ids = find_words(tokenizers.target, target_texts[index], ids[1])
            maps[index] = AttentionMap(
                weights=_choose(heads, layer, head),
                source_ids=ids[0],
                target_ids=ids[1],
                source_tokens=readable_tokens(tokenizers.source, ids[0]),
                target_tokens=readable_tokens(tokenizers.target, ids[1]),
                source=sources[index],
                target=target_texts[index],
                source_words=source_words,
                target_words=target_words,
                source_word_ids=source_word_ids,
                target_word_ids=target_word_ids,
            )
    return maps


@contextlib.contextmanager
def showing_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use evaluation mode and the eager kernel, which alone returns weights, inside this context."""
    kernel = model.config._attn_implementation
    with evaluating([model]):
        try:
            model.set_attn_implementation("eager")
            yield
        finally:
            model.set_attn_implementation(kernel)


def _choose(heads: torch.Tensor, layer: int | None, head: int | None) -> np.ndarray:
    """Reduce weights `(layers, heads, target, source)` to `(target, source)`."""
    for name, index, count in (("layer", layer, heads.shape[0]), ("head", head, heads.shape[1])):
        if index is not None and not -count <= index < count:
            raise MetaphraseError(f"`{name}` must be from {-count} to {count - 1}, got {index}.")
    if layer is None and head is not None:
        raise MetaphraseError(f"`layer` must be given with `head`, got head {head} alone.")
    if layer is None:
        return heads.mean(dim=(0, 1)).numpy()
    return (heads[layer].mean(dim=0) if head is None else heads[layer, head]).numpy()


def aligned_layer(model: PreTrainedModel) -> int:
    """Return the decoder layer that aligns best: of many the next-to-last one (Garg et al. 2019), of few the last one."""
    return -2 if model.config.get_text_config(decoder=True).num_hidden_layers > 3 else -1


def word_weights(attention: AttentionMap) -> np.ndarray:
    """Return the attention from target words to source words, `(target words, source words)` in float32.

    Weights are summed over the tokens of a source word and averaged over the tokens of a target word. Special tokens and the
    prefix are left out, so a row may sum to less than 1. A word without a token of its own has zeros.

    Raises:
        MetaphraseError: If the tokens cannot be mapped to words.

    Source: section 4.1 of Clark et al. 2019 (arXiv 1906.04341), there for an encoder's self-attention.
    """
    for side in ("source", "target"):
        if getattr(attention, f"{side}_word_ids") is None:
            text = getattr(attention, side)
            raise MetaphraseError(f"The tokens of the {side} must make up its words, got {text!r}, where they do not.")
    into_source = membership(attention.source_word_ids, len(attention.source_words))
    into_target = membership(attention.target_word_ids, len(attention.target_words))
    # (target words, target) @ (target, source) @ (source, source words)
    summed = into_target.T @ attention.weights @ into_source
    return summed / np.maximum(into_target.sum(axis=0), 1)[:, None]


def word_alignment(attention: AttentionMap) -> list[Link]:
    """Link each target word to the source word that it attends to most. Returns sorted pairs (source word, target word).

    A target word without attention to a source word has no link. The first of equal source words wins. Choose the layer when
    making the map: models of six layers align best with `layer=-2`, the demo's of two with `layer=-1`.
    `benchmarks/alignment.py` measures each layer.

    Source: the baseline of Garg et al. 2019 (arXiv 1909.02074), for six layers.
    """
    weights = word_weights(attention)
    if not weights.size:
        return []
    best = weights.argmax(axis=1).tolist()
    return sorted((source, target) for target, source in enumerate(best) if weights[target, source] > 0)


def format_pharaoh(links: Iterable[Link]) -> str:
    """Return links as one line of text: `0-0 1-2 2-1`.

    Source: Koehn 2004, "Pharaoh: a beam search decoder for phrase-based statistical machine translation models".
    """
    return " ".join(f"{source}-{target}" for source, target in links)


def alignment_error_rate(
    predicted: Iterable[Collection[Link]], sure: Iterable[Collection[Link]], possible: Iterable[Collection[Link]]
) -> float:
    """Return the alignment error rate of a corpus, 0 at best: `1 - (|A & S| + |A & P|) / (|A| + |S|)`.

    For each sentence, A are the predicted links, S those that it must have, and P those that it may have. S links are P, too.

    Source: section 2.3 of Och and Ney 2003, "A systematic comparison of various statistical alignment models".
    """
    right = total = 0
    for links, required, allowed in zip(predicted, sure, possible, strict=True):
        links, required = set(links), set(required)
        right += len(links & required) + len(links & (required | set(allowed)))
        total += len(links) + len(required)
    return 1 - right / total


def membership(word_ids: list[int | None], num_words: int) -> np.ndarray:
    """Return `(tokens, words)` with 1 where a token belongs to a word."""
    return np.array([[word == column for column in range(num_words)] for word in word_ids], dtype=np.float32)
