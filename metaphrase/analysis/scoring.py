"""Score given targets: log-probabilities of their tokens, by one forward pass for each batch."""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from metaphrase.decoding.joint_search import check_single
from metaphrase.errors import MetaphraseError
from metaphrase.inference.batches import TooLongError, evaluating, longest_source, longest_target, pad_sources
from metaphrase.inference.generator import Generator
from metaphrase.inference.progress import progress_bar
from metaphrase.tokenization import TextFrame, TokenizerPair, checked_texts, readable_tokens
from metaphrase.tokenization.texts import batches_by_length


@dataclass(frozen=True)
class ForcedScore:
    """Log-probabilities of the tokens of one target, given its source.

    Attributes:
        ids: Token ids without the start token, with the end of sequence.
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
    generator: Generator,
    sources: Iterable[str],
    targets: Iterable[str | Sequence[int]],
    show_progress: bool | None = False,
) -> list[ForcedScore]:
    """Return the log-probability in nats of each token of each target: see `Generator.score`."""
    check_single(generator, "generator")
    sources, targets = read_texts(sources, targets)
    model, tokenizers = generator.model, generator.tokenizers
    ids, uncut = encode_forced(tokenizers, targets), generator.encode_uncut(sources)
    cut = generator.truncate(uncut)
    scores: list[list[float]] = [[] for _ in ids]
    with evaluating([model]), torch.inference_mode():
        for batch, inputs in forced_batches(generator, cut, ids, generator.max_tokens_per_batch, show_progress):
            logits = model(**inputs, use_cache=False, return_dict=True).logits
            for row, index in zip(logits, batch, strict=True):
                # (target, vocab); row by row, to avoid a second copy of all logits
                log_probabilities = row[: len(ids[index])].float().log_softmax(dim=-1)
                columns = torch.tensor(ids[index], device=row.device)[:, None]
                scores[index] = log_probabilities.gather(1, columns)[:, 0].tolist()
    generator.num_truncated += sum(map(operator.ne, uncut, cut))
    return [ForcedScore(row, readable_tokens(tokenizers.target, row), s) for row, s in zip(ids, scores, strict=True)]


def forced_batches(
    generator: Generator,
    sources: list[list[int]],
    targets: list[list[int]],
    max_tokens_per_batch: int,
    show_progress: bool | None,
    start: int | None = None,
) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
    """Yield the indices and the inputs of each batch of pairs of similar length. `start` is that of `forced_inputs`.

    Sources have an end of sequence, and targets no start token. `TooLongError` for more tokens than the model has positions.
    """
    model, limits = generator.model, (longest_source(generator.model), longest_target(generator.model))
    for side, rows, limit in zip(("source", "target"), (sources, targets), limits, strict=True):
        for number, ids in enumerate(rows, start=1):
            if limit is not None and len(ids) > limit:
                raise TooLongError(number, len(ids), limit, side)
    lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    with progress_bar(len(sources), "pair", show_progress) as bar:
        for batch in batches_by_length(lengths, generator.batch_size, max_tokens_per_batch):
            sides = ([rows[index] for index in batch] for rows in (sources, targets))
            yield batch, forced_inputs(model, *sides, start)
            bar.update(len(batch))


def read_texts(sources: Iterable[str], targets: Iterable | None) -> tuple[list[str], list | None]:
    """Return sources, and targets if there are any, as lists, which must be equally many."""
    sources = list(checked_texts(sources, "sources"))
    if targets is None:
        return sources, None
    # `checked_texts` refuses a single string.
    targets = list(checked_texts(targets, "targets") if isinstance(targets, str) else targets)
    if len(sources) != len(targets):
        raise MetaphraseError(f"`sources` and `targets` must be equally many, got {len(sources)} and {len(targets)}.")
    return sources, targets


def encode_forced(tokenizers: TokenizerPair, targets: Sequence[str | Sequence[int]]) -> list[list[int]]:
    """Return the ids of targets: texts are encoded up to their end of sequence, ids stay as they are."""
    rows = [[] if isinstance(target, str) else [int(token) for token in target] for target in targets]
    texts = {index: target for index, target in enumerate(targets) if isinstance(target, str)}
    if texts:  # A multilingual tokenizer without target language could not encode, and need not.
        # Some tokenizers write the language code after the end of sequence. The decoder starts with it instead.
        frame_end, end = TextFrame.of(tokenizers.encode_targets).end, tokenizers.target.eos_token_id
        num_after_end = len(frame_end) - 1 - frame_end.index(end) if end in frame_end else 0
        for index, ids in zip(texts, tokenizers.encode_targets(list(texts.values())), strict=True):
            rows[index] = ids[: len(ids) - num_after_end]
    return rows


def forced_inputs(
    model: PreTrainedModel, sources: list[Sequence[int]], targets: list[Sequence[int]], start: int | None = None
) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask` `(batch, source)`, and `decoder_input_ids` `(batch, target)`, padded on the right.

    The decoder reads the start token, by default the model's, then each target without its last token. Its padding needs no
    mask, because the causal mask hides later positions.
    """
    configs = getattr(model, "generation_config", None), model.config
    starts = [getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id") for config in configs]
    start = next((token for token in (start, *starts) if isinstance(token, int)), None)
    if start is None:
        raise MetaphraseError("`decoder_start_token_id` must be set in a config of the model, got None.")
    pad = model.config.pad_token_id or 0
    width = max(len(target) for target in targets)
    rows = [[start, *target[:-1], *[pad] * (width - len(target))] for target in targets]
    return {**pad_sources(sources, model), "decoder_input_ids": torch.tensor(rows, device=model.device)}


def dual_scores(forward: Generator, backward: Generator, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Return for each pair a score from 0 to 1, which is high if two models expect the pair, and equally so.

    With the mean negative log-probability F of a target token in nats, and B of a source token by the model from target to
    source, the score is exp(-|F - B| - (F + B) / 2). Pairs have no blank sides. One that is too long has the score 0.

    Source: Junczys-Dowmunt 2018, Dual Conditional Cross-Entropy Filtering of Noisy Parallel Corpora.
    """
    entropies = []
    for generator, texts in ((forward, pairs), (backward, [pair[::-1] for pair in pairs])):
        sources = generator.encode([source for source, _ in texts])
        targets = encode_forced(generator.tokenizers, [target for _, target in texts])
        limits = longest_source(generator.model) or math.inf, longest_target(generator.model) or math.inf
        rows = enumerate(zip(sources, targets, strict=True))
        fitting = [i for i, (source, target) in rows if len(source) <= limits[0] and len(target) <= limits[1]]
        scores = generator.score([texts[index][0] for index in fitting], [targets[index] for index in fitting])
        entropies.append([math.inf] * len(texts))
        for index, score in zip(fitting, scores, strict=True):
            entropies[-1][index] = -score.mean
    # Infinite minus infinite would be no number.
    return [
        math.exp(-abs(first - second) - (first + second) / 2) if math.isfinite(first + second) else 0.0
        for first, second in zip(*entropies, strict=True)
    ]
