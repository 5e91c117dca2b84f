"""Models that read texts and write none: embeddings by the encoder, and probabilities of given answers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from metaphrase.analysis.scoring import encode_forced, forced_inputs
from metaphrase.decoding.decoder_state import FirstStep, prepared_rows
from metaphrase.decoding.fast_generation import find_obstacle_of_model, is_metaphrase
from metaphrase.decoding.joint_search import check_single
from metaphrase.errors import MetaphraseError
from metaphrase.inference.batches import check_sources, evaluating, longest_source, longest_target, pad_sources
from metaphrase.inference.generator import Generator
from metaphrase.inference.progress import progress_bar
from metaphrase.tokenization import checked_texts
from metaphrase.tokenization.texts import batches_by_length


def _encode(generator: Generator, texts: Iterable[str]) -> list[list[int]]:
    """Return the ids of texts. One that is too long is truncated, or a `TooLongError`."""
    check_single(generator, "generator")
    uncut = generator.encode_uncut(list(checked_texts(texts)))
    ids = generator.truncate(uncut)
    generator.num_truncated += sum(len(row) > len(cut) for row, cut in zip(uncut, ids, strict=True))
    check_sources(ids, longest_source(generator.model), generator.max_tokens_per_batch)
    return ids


def _read(
    generator: Generator,
    ids: list[list[int]],
    compute: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    show_progress: bool | None,
) -> np.ndarray:
    """Return what a function of `input_ids` and `attention_mask` computes for each text, in batches of similar length."""
    rows: dict[int, np.ndarray] = {}
    with evaluating([generator.model]), torch.inference_mode(), progress_bar(len(ids), "text", show_progress) as bar:
        for batch in batches_by_length([*map(len, ids)], generator.batch_size, generator.max_tokens_per_batch):
            output = compute(pad_sources([ids[index] for index in batch], generator.model))
            rows.update(zip(batch, output.float().cpu().numpy(), strict=True))
            bar.update(len(batch))
    return np.stack([rows[index] for index in range(len(rows))]) if rows else np.zeros((0, 0), np.float32)


def embed(generator: Generator, texts: Iterable[str], show_progress: bool | None = False) -> np.ndarray:
    """Return the mean of the encoder's output over the tokens of each text: see `Generator.embed`."""
    encoder = generator.model.get_encoder()

    def compute(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        output, mask = encoder(**inputs, return_dict=True).last_hidden_state, inputs["attention_mask"][:, :, None]
        return (output.float() * mask).sum(dim=1) / mask.sum(dim=1)

    return _read(generator, _encode(generator, texts), compute, show_progress)


def first_logits(
    generator: Generator, ids: list[list[int]], tokens: Sequence[int], show_progress: bool | None = False
) -> np.ndarray:
    """Return the logits of some tokens in the first step of the decoder, (texts, tokens)."""
    model, columns = generator.model, torch.tensor(tokens, device=generator.model.device)

    def compute(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        start, head = _start(model, inputs), None
        has_step = is_metaphrase(model) and find_obstacle_of_model(model, model.generation_config) is None
        if has_step and FirstStep.supports(model.get_decoder()):
            head = prepared_rows(model.get_output_embeddings(), columns)
        if head is None:
            return model(**inputs, decoder_input_ids=start, use_cache=False, return_dict=True).logits[:, 0, columns]
        output = model.get_encoder()(**inputs, return_dict=True).last_hidden_state
        states = FirstStep(model.get_decoder(), output, inputs["attention_mask"]).step(start[:, 0])
        return model.project(states, head)

    return _read(generator, ids, compute, show_progress)


def _start(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the start token of each row of a batch, (batch, 1)."""
    rows = len(inputs["input_ids"])
    return forced_inputs(model, [[0]] * rows, [[0]] * rows)["decoder_input_ids"]


def choice_scores(
    generator: Generator, texts: Iterable[str], choices: Sequence[str], show_progress: bool | None = False
) -> np.ndarray:
    """Return the probability of each answer among the choices: see `Generator.choice_scores`."""
    if isinstance(choices, str) or len(set(choices)) != len(choices) or len(choices) < 2:
        raise MetaphraseError(f"`choices` must be two or more different answers, got {choices!r}.")
    model, ids = generator.model, _encode(generator, texts)
    answers = encode_forced(generator.tokenizers, list(checked_texts(choices, "choices")))
    limit = longest_target(model)
    if limit is not None and (longest := max(map(len, answers))) > limit:
        raise MetaphraseError(f"`choices` must have at most {limit} tokens each, got one with {longest}.")
    # An answer of one token has an end behind it.
    firsts = [answer[0] for answer in answers]
    if len({*firsts}) == len(answers) and max(map(len, answers)) <= 2:
        scores = first_logits(generator, ids, firsts, show_progress)
    else:

        def compute(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            encoded, start = model.get_encoder()(**inputs, return_dict=True), _start(model, inputs)
            shared = {"encoder_outputs": encoded, "attention_mask": inputs["attention_mask"], "use_cache": False}
            return torch.stack([_log_probability(model, start, answer, shared) for answer in answers], dim=1)

        scores = _read(generator, ids, compute, show_progress)
    return torch.from_numpy(scores).softmax(dim=1).numpy() if len(ids) else np.zeros((0, len(answers)), np.float32)


def _log_probability(
    model: PreTrainedModel, start: torch.Tensor, answer: list[int], shared: dict[str, Any]
) -> torch.Tensor:
    """Return the log-probability of one answer for each row of a batch, (batch,)."""
    target = torch.tensor([answer], device=start.device).expand(len(start), -1)
    logits = model(decoder_input_ids=torch.cat((start, target[:, :-1]), dim=1), **shared).logits
    return logits.float().log_softmax(dim=-1).gather(2, target[:, :, None])[:, :, 0].sum(dim=1)
