"""Decoding: many sources in, their hypotheses out, in order; batches of like length inside."""

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from metaphrase.inference.generation_options import GENERATION_OPTIONS

DEFAULT_BATCH_SIZE = 64
DEFAULT_MAX_TOKENS_PER_BATCH = 8192


@dataclass(frozen=True)
class Hypothesis:
    """One decoded target.

    Attributes:
        ids: Token ids without the start token and without padding; the last one is the end of sequence if it was reached.
        score: For beam search its length-normalized score, else the sum of the log-probabilities; `None` if not asked for.
        is_finished: Whether the end of sequence was reached within the length limit.
    """

    ids: list[int]
    score: float | None
    is_finished: bool


# From the ids of the sources of a batch to the hypotheses of each.
BatchSearch = Callable[[list[Sequence[int]]], list[list[Hypothesis]]]


class Engine(abc.ABC):
    """What decodes in place of a model of transformers.

    Attributes:
        generation_config: What holds where a call says nothing else.
    """

    generation_config: GenerationConfig

    @abc.abstractmethod
    def searching(
        self, generation_kwargs: Mapping[str, Any], return_scores: bool
    ) -> AbstractContextManager[BatchSearch]:
        """What decodes the batches of one call.

        Args:
            generation_kwargs: As for `generate()`.
            return_scores: Whether hypotheses carry their score.

        Raises:
            ValueError: If the engine cannot do what an option asks for.
        """


def batches_by_length(lengths: Sequence[int], batch_size: int, max_tokens_per_batch: int) -> list[list[int]]:
    """Groups indices of like length, longest first, so that a batch that does not fit fails at once.

    Args:
        lengths: Tokens of each source.
        batch_size: Most sources in a batch.
        max_tokens_per_batch: Most tokens in a batch, padding counted; a longer source has a batch of its own.

    Returns:
        Lists of indices; each index stands in exactly one.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        batch = batches[-1] if batches else None
        # Sorted from the longest on, the first of a batch says how wide it is.
        if (
            batch is not None
            and len(batch) < batch_size
            and (len(batch) + 1) * lengths[batch[0]] <= max_tokens_per_batch
        ):
            batch.append(index)
        else:
            batches.append([index])
    return batches


def decode(
    model: PreTrainedModel | Engine,
    sources: Sequence[Sequence[int]],
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    max_tokens_per_batch: int = DEFAULT_MAX_TOKENS_PER_BATCH,
    return_scores: bool = False,
    show_progress: bool | None = False,
    **generation_kwargs,
) -> list[list[Hypothesis]]:
    """Runs `model.generate()`, or an engine, over all sources.

    Args:
        model: Any encoder-decoder with a generation mixin; its mode (training or not) is left as it was. Or an engine.
        sources: Token ids of each source, with its end of sequence.
        batch_size: Most sources in a batch.
        max_tokens_per_batch: Most source tokens in a batch, padding counted.
        return_scores: Whether hypotheses carry their score.
        show_progress: A progress bar; `None` shows it on a terminal only.
        **generation_kwargs: As for `generate()`.

    Returns:
        For each source, in order, its `num_return_sequences` hypotheses, best first where they are ranked.
    """
    results: list[list[Hypothesis] | None] = [None] * len(sources)
    batches = batches_by_length([len(source) for source in sources], batch_size, max_tokens_per_batch)
    bar = tqdm(total=len(sources), unit="sentence", disable=None if show_progress is None else not show_progress)
    if isinstance(model, Engine):
        searching = model.searching(generation_kwargs, return_scores)
    else:
        searching = _searching(model, generation_kwargs, return_scores)
    with searching as search, bar:
        for batch in batches:
            for index, hypotheses in zip(batch, search([sources[index] for index in batch]), strict=True):
                results[index] = hypotheses
            bar.update(len(batch))
    return results


@contextlib.contextmanager
def _searching(
    model: PreTrainedModel, generation_kwargs: Mapping[str, Any], return_scores: bool
) -> Iterator[BatchSearch]:
    def search(sources: list[Sequence[int]]) -> list[list[Hypothesis]]:
        inputs = _pad(sources, model)
        hypotheses = list(_generate(model, inputs, return_scores, dict(generation_kwargs)))
        count = len(hypotheses) // len(sources)
        return [hypotheses[start : start + count] for start in range(0, len(hypotheses), count)]

    with _evaluating(model), torch.inference_mode():
        yield search


@contextlib.contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _pad(sources: list[Sequence[int]], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Ids and mask `(batch, source)`, padded on the right."""
    width = max(len(source) for source in sources)
    pad = model.config.pad_token_id or 0
    ids = [list(source) + [pad] * (width - len(source)) for source in sources]
    mask = [[1] * len(source) + [0] * (width - len(source)) for source in sources]
    return {
        "input_ids": torch.tensor(ids, device=model.device),
        "attention_mask": torch.tensor(mask, device=model.device),
    }


def _generate(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], return_scores: bool, generation_kwargs: dict
) -> Iterator[Hypothesis]:
    options: dict = {"return_dict_in_generate": True, "output_scores": return_scores, "output_logits": False}
    if hasattr(model, "search_with_scores") and _is_plain(model, generation_kwargs):
        options = {"custom_generate": model.search_with_scores, "return_scores": return_scores}
    # In a run whose weights are shared out, it would else wait for what the other processes decode.
    output = model.generate(**inputs, **{"synced_gpus": False} | generation_kwargs | options)
    ends = model.generation_config.eos_token_id if "eos_token_id" not in generation_kwargs else None
    ends = generation_kwargs.get("eos_token_id") if ends is None else ends
    ends = set(ends if isinstance(ends, (list, tuple)) else [ends])
    rows = [_cut(row, ends) for row in output.sequences[:, 1:].tolist()]
    scores = _scores(model, output, [len(ids) for ids, _ in rows]) if return_scores else [None] * len(rows)
    for (ids, is_finished), score in zip(rows, scores, strict=True):
        yield Hypothesis(ids, score, is_finished)


def _is_plain(model: PreTrainedModel, generation_kwargs: dict) -> bool:
    """Whether the search is greedy, by beams or by sampling, with no options but those that can be told by name."""
    modes = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH)
    known = {*GENERATION_OPTIONS, "eos_token_id", "synced_gpus"}
    return known >= generation_kwargs.keys() and model.generation_config.get_generation_mode() in modes


def _cut(row: list[int], ends: set[int | None]) -> tuple[list[int], bool]:
    """The ids up to the first end of sequence, and whether there is one."""
    for place, token in enumerate(row):
        if token in ends:
            return row[: place + 1], True
    return row, False


def _scores(model: PreTrainedModel, output, lengths: list[int]) -> list[float]:
    sequences_scores = getattr(output, "sequences_scores", None)
    if sequences_scores is not None:
        return sequences_scores.tolist()
    per_token = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    # What stands after the end of sequence is padding and was never chosen.
    place = torch.arange(per_token.shape[1], device=per_token.device)
    chosen = place[None, :] < torch.tensor(lengths, device=per_token.device)[:, None]
    return per_token.masked_fill(~chosen, 0.0).sum(dim=1).tolist()
