"""Score given targets: log-probabilities of their tokens, by one forward pass for each batch."""

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
    """Log-probabilities of the tokens of one target, given its source.

    Attributes:
        ids: Token ids without the start token, with the end of sequence.
        tokens: The tokens in a readable form.
        log_probabilities: One for each token, in nats.
    """

    ids: list[int]
    tokens: list[str]
    log_probabilities: list[float]

    @property
    def total(self) -> float:
        """Log-probability of the target."""
        return sum(self.log_probabilities)

    @property
    def mean(self) -> float:
        """Mean log-probability of a token, the score of beam search with `length_penalty=1`."""
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
    """Return the log-probability of each token of each target. Options of `generate` do not apply.

    Args:
        model: Any encoder-decoder. It keeps its mode, training or evaluation.
        sources: Token ids of each source, with end of sequence.
        targets: Token ids of each target, without the start token.
        batch_size: Most pairs in a batch.
        max_tokens_per_batch: Most tokens of either side in a batch, padding included.
        show_progress: True for a progress bar; `None` shows it on a terminal only.

    Returns:
        For each pair, in order, a log-probability in nats for each target token.

    Raises:
        ValueError: If the numbers of sources and targets differ, one has no tokens, an id is not in the vocabulary, the start
            token is not configured, or a side has more tokens than the model has positions.
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
                # (target, vocab); row by row, to avoid a second copy of all logits
                log_probabilities = row[: len(ids)].float().log_softmax(dim=-1)
                columns = torch.tensor(ids, device=row.device)[:, None]
                results[index] = log_probabilities.gather(1, columns)[:, 0].tolist()
            bar.update(len(batch))
    return results


def pair_lengths(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[int]:
    """Return the length of the longer side of each pair."""
    return [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]


def check_pairs(model: PreTrainedModel, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> None:
    """Check pairs of ids.

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
                raise ValueError(f"`{name}` must have at least one token each, got none in number {number}.")
            if (limit := limits[name]) is not None and len(ids) > limit:
                raise (TooLongError if name == "sources" else TooLongTargetError)(number, len(ids), limit)
            size = sizes[name]
            if min(ids) < 0 or (size is not None and max(ids) >= size):
                wrong = min(ids) if min(ids) < 0 else max(ids)
                most = "" if size is None else f" and below {size}"
                raise ValueError(f"`{name}` must hold ids from 0{most}, got {wrong} in number {number}.")


def read_texts(sources: Iterable[str], targets: Iterable | None) -> tuple[list[str], list | None]:
    """Check sources, and targets if there are any, and return them as lists.

    Args:
        sources: Texts.
        targets: Texts or token ids, or `None`.

    Raises:
        ValueError: If either is a single string, their numbers differ, a source is blank or not a text, or a target is neither
            a text nor ids.
    """
    sources = list(checked_texts(sources, "sources"))
    if targets is not None:
        # `checked_texts` refuses a single string. `check_pairs` checks ids.
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
    """Return the ids of targets: texts are encoded up to their end of sequence, ids stay as they are."""
    texts = [target for target in targets if isinstance(target, str)]
    if not texts:  # A multilingual tokenizer without target language could not encode, and need not.
        return [[int(token) for token in target] for target in targets]
    encoded = iter(tokenizers.encode_targets(texts))
    # Some tokenizers write the language code after the end of sequence. The decoder starts with it instead.
    frame_end, end = TextFrame.of(tokenizers.encode_targets).end, tokenizers.target.eos_token_id
    num_after_end = len(frame_end) - 1 - frame_end.index(end) if end in frame_end else 0
    rows = []
    for target in targets:
        if isinstance(target, str):
            ids = next(encoded)
            rows.append(ids[: len(ids) - num_after_end])
        else:
            rows.append([int(token) for token in target])
    return rows


def forced_inputs(
    model: PreTrainedModel, sources: list[Sequence[int]], targets: list[Sequence[int]], start: int | None = None
) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask` `(batch, source)`, and `decoder_input_ids` `(batch, target)`, padded on the right.

    The decoder reads the start token, then each target without its last token. Its padding needs no mask, because the causal
    mask hides later positions.

    Args:
        model: The model that reads them.
        sources: Ids of each source.
        targets: Ids of each target, without the start token.
        start: The start token; by default the model's.

    Raises:
        ValueError: If `start` is `None` and the model has no start token.
    """
    start, pad = _start_token(model) if start is None else start, model.config.pad_token_id or 0
    width = max(len(target) for target in targets)
    rows = [[start, *target[:-1], *[pad] * (width - len(target))] for target in targets]
    return {**pad_sources(sources, model), "decoder_input_ids": torch.tensor(rows, device=model.device)}


def _start_token(model: PreTrainedModel) -> int:
    """Return the token that `generate()` starts with."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        for config in (getattr(model, "generation_config", None), model.config):
            start = getattr(config, name, None)
            if isinstance(start, int):
                return start
    raise ValueError("`decoder_start_token_id` must be set in the config or generation config of the model, got None.")
