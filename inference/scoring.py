"""Forced decoding: what a model says of targets that it is given, in one pass for each batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from metaphrase.inference.batches import pad_sources
from metaphrase.inference.source_limits import TooLongError, TooLongTargetError
from metaphrase.modeling.pipeline_support import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_MAX_TOKENS_PER_BATCH,
    batches_by_length,
    evaluating,
    longest_source,
    longest_target,
)
from metaphrase.tokenization import TextFrame, TokenizerPair, checked_texts


@dataclass(frozen=True)
class ForcedScore:
    """The log-probability of each token of one target, given its source.

    Attributes:
        ids: Token ids without the start token; the end of sequence is one of them.
        tokens: The same in a readable form.
        log_probabilities: One for each token, in nats.
    """

    ids: list[int]
    tokens: list[str]
    log_probabilities: list[float]

    @property
    def total(self) -> float:
        """The log-probability of the whole target."""
        return sum(self.log_probabilities)

    @property
    def mean(self) -> float:
        """The total divided by the number of tokens, as beam search scores hypotheses with a `length_penalty` of 1."""
        return self.total / len(self.log_probabilities)


def score_targets(
    model: PreTrainedModel,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    max_tokens_per_batch: int = DEFAULT_MAX_TOKENS_PER_BATCH,
    show_progress: bool | None = False,
) -> list[list[float]]:
    """The log-probability of each token of each target, by the model alone.

    What decoding may add, such as tokens that are forced, a minimum length or a penalty of repetitions, has no part in it.

    Args:
        model: Any encoder-decoder; its mode (training or not) is left as it was.
        sources: Token ids of each source, with its end of sequence.
        targets: Token ids of each target, without the start token.
        batch_size: Most pairs in a batch.
        max_tokens_per_batch: Most tokens of either side in a batch, padding counted.
        show_progress: A progress bar; `None` shows it on a terminal only.

    Returns:
        For each pair, in order, as many log-probabilities in nats as its target has tokens.

    Raises:
        ValueError: If sources and targets are not equally many, one has no tokens, an id is none of the model's, or no start
            token is configured, or a side has more tokens than the model has positions.
    """
    results: list[list[float]] = [[] for _ in sources]
    check_pairs(model, sources, targets)
    batches = batches_by_length(pair_lengths(sources, targets), batch_size, max_tokens_per_batch)
    bar = tqdm(total=len(sources), unit="pair", disable=None if show_progress is None else not show_progress)
    with evaluating([model]), torch.inference_mode(), bar:
        for batch in batches:
            chosen = [targets[index] for index in batch]
            inputs = forced_inputs(model, [sources[index] for index in batch], chosen)
            logits = model(**inputs, use_cache=False, return_dict=True).logits
            for row, ids, index in zip(logits, chosen, batch, strict=True):
                # (target, vocab); row by row, so that no second copy of all logits is made
                log_probabilities = row[: len(ids)].float().log_softmax(dim=-1)
                places = torch.tensor(ids, device=row.device)[:, None]
                results[index] = log_probabilities.gather(1, places)[:, 0].tolist()
            bar.update(len(batch))
    return results


def pair_lengths(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[int]:
    """Of each pair the tokens of its longer side, which bound what either side of a batch is padded to."""
    return [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]


def check_pairs(model: PreTrainedModel, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> None:
    """Checks pairs of ids before anything is computed.

    Raises:
        ValueError: As `score_targets`.
    """
    if len(sources) != len(targets):
        raise ValueError(f"`sources` and `targets` must be equally many, got {len(sources)} and {len(targets)}.")
    sizes = {
        "sources": getattr(model.get_input_embeddings(), "num_embeddings", None),
        "targets": getattr(model.get_output_embeddings(), "out_features", None),
    }
    limits = {"sources": longest_source(model), "targets": longest_target(model)}
    for name, rows in (("sources", sources), ("targets", targets)):
        for number, ids in enumerate(rows, start=1):
            if not ids:
                raise ValueError(f"`{name}` must have a token each, got none in number {number}.")
            if (limit := limits[name]) is not None and len(ids) > limit:
                raise (TooLongError if name == "sources" else TooLongTargetError)(number, len(ids), limit)
            size = sizes[name]
            if min(ids) < 0 or (size is not None and max(ids) >= size):
                wrong = min(ids) if min(ids) < 0 else max(ids)
                most = "" if size is None else f" and below {size}"
                raise ValueError(f"`{name}` must hold ids from 0{most}, got {wrong} in number {number}.")


def read_texts(sources: Iterable[str], targets: Iterable | None) -> tuple[list[str], list | None]:
    """Lists of sources, and of targets if there are any, checked before they are encoded.

    Args:
        sources: Texts.
        targets: Texts or token ids, if there are any.

    Raises:
        ValueError: If either is a single string, they are not equally many, a source is empty, white space or no text, or a
            target is neither a text nor ids.
    """
    sources = list(checked_texts(sources, "sources"))
    if targets is not None:
        # Ids are checked later; a single string is refused in the same words.
        targets = list(checked_texts(targets, "targets") if isinstance(targets, str) else targets)
    if targets is not None and len(sources) != len(targets):
        raise ValueError(f"`sources` and `targets` must be equally many, got {len(sources)} and {len(targets)}.")
    for number, source in enumerate(sources, start=1):
        if not source.strip():
            raise ValueError(f"`sources` must not be empty or white space, got {source!r} in number {number}.")
    for number, target in enumerate(targets or [], start=1):
        if not isinstance(target, str | Iterable):
            raise ValueError(f"`targets` must hold texts or lists of ids, got {target!r} in number {number}.")
    return sources, targets


def encode_forced(tokenizers: TokenizerPair, targets: Sequence[str | Sequence[int]]) -> list[list[int]]:
    """Ids of targets to force: texts are encoded up to their end of sequence, ids are taken as they are."""
    texts = [target for target in targets if isinstance(target, str)]
    # A tokenizer of many languages may not know that of the targets, which ids do not need.
    encoded = iter(tokenizers.encode_targets(texts) if texts else [])
    # Some tokenizers put the code of the language behind the end, with which the decoder starts.
    num_behind = _num_behind_end(tokenizers) if texts else 0
    rows = []
    for target in targets:
        if isinstance(target, str):
            ids = next(encoded)
            rows.append(ids[: len(ids) - num_behind])
        else:
            rows.append([int(token) for token in target])
    return rows


def _num_behind_end(tokenizers: TokenizerPair) -> int:
    """Ids that the tokenizer of the targets puts behind the end of sequence. One inside the text is the text's own."""
    frame_end, end = TextFrame.of(tokenizers.encode_targets).end, tokenizers.target.eos_token_id
    return len(frame_end) - 1 - frame_end.index(end) if end in frame_end else 0


def forced_inputs(
    model: PreTrainedModel, sources: list[Sequence[int]], targets: list[Sequence[int]], start: int | None = None
) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask` `(batch, source)` and `decoder_input_ids` `(batch, target)`, padded on the right.

    The decoder reads what it reads in `generate()`: the start token, then each target but its last token. Nothing is said of its
    padding, which stands behind all that is looked at.

    Args:
        model: Which reads them.
        sources: Ids of each source.
        targets: Ids of each target, without the start token.
        start: The start token, if it is not the model's own.

    Raises:
        ValueError: If no start token is given or configured.
    """
    start, pad = _start_token(model) if start is None else start, model.config.pad_token_id or 0
    width = max(len(target) for target in targets)
    rows = [[start, *target[:-1], *[pad] * (width - len(target))] for target in targets]
    return {**pad_sources(sources, model), "decoder_input_ids": torch.tensor(rows, device=model.device)}


def _start_token(model: PreTrainedModel) -> int:
    """What `generate()` starts with."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        for config in (getattr(model, "generation_config", None), model.config):
            start = getattr(config, name, None)
            if isinstance(start, int):
                return start
    raise ValueError(
        "`decoder_start_token_id` must be set in the configuration of the model or of its generation, got None."
    )
