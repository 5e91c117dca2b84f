"""Joint searches: several models read a source and write one target.

Models of an ensemble vote for each token (Sutskever et al. 2014, arXiv 1409.3215). In speculative decoding, a small model drafts
some tokens, and the large model checks all of them in one pass (Leviathan et al. 2023, algorithm 1, arXiv 2211.17192, for greedy
search). The result is that of the large model alone.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from metaphrase.decoding import fast_generation
from metaphrase.decoding.beam_search import BeamState, beam_search
from metaphrase.decoding.decoder_state import DecoderState
from metaphrase.decoding.options import are_ends, process
from metaphrase.errors import MetaphraseError
from metaphrase.inference.batches import longest_source
from metaphrase.inference.generator import Generator
from metaphrase.modeling.configuration_metaphrase import SSRU

DEFAULT_NUM_ASSISTANT_TOKENS = 5
# Other models, with `input_ids` and `attention_mask` (sources, S) of the same sources.
Models = Sequence[tuple[PreTrainedModel, dict[str, torch.Tensor]]]


def join_generators(generator: Generator, options: dict[str, Any]) -> tuple[list[Generator], Callable]:
    """Return the partners of a generator and the search of all: the members of its ensemble, or the draft model of the options.

    Takes the options of drafts out of `options`. Raises `MetaphraseError` if the models cannot write a target together.
    """
    assistant = options.get("assistant_model")
    if assistant is None:
        for number, member in enumerate(generator.members, start=2):
            _check_partner(generator, member, f"model {number} of the ensemble")
        return generator.members, EnsembleSearch()
    if generator.members:
        raise MetaphraseError("`assistant_model` must be left out for an ensemble, got one.")
    if not isinstance(assistant, Generator):
        reading = {"source_prefix": generator.source_prefix, "max_source_length": generator.max_source_length}
        assistant = Generator(assistant, generator.tokenizers, **reading)
    _check_partner(generator, assistant, "assistant_model")
    del options["assistant_model"]
    num_tokens = options.pop("num_assistant_tokens", None)
    # The draft model may read only the beginning: its drafts change the time, never the result.
    assistant, limits = copy.copy(assistant), (assistant.max_source_length, longest_source(assistant.model))
    assistant.max_source_length = min((limit for limit in limits if limit is not None), default=None)
    return [assistant], SpeculativeSearch(DEFAULT_NUM_ASSISTANT_TOKENS if num_tokens is None else num_tokens)


def _check_partner(generator: Generator, partner: Generator, name: str) -> None:
    """Raise `MetaphraseError` if another generator, set by the option `name`, cannot write a target together with this one."""
    check_single(partner, name)
    for model in (generator.model, partner.model):
        if not fast_generation.is_metaphrase(model):
            raise MetaphraseError(
                f"`{name}` and the first model must both be Metaphrase models, got {type(model).__name__}: "
                "convert it with `metaphrase convert`."
            )
    expected, actual = (item.tokenizers.target.get_vocab() for item in (generator, partner))
    if different := [token for token in {**expected, **actual} if expected.get(token) != actual.get(token)]:
        token = min(different)
        raise MetaphraseError(
            f"The target vocabulary of `{name}` must be that of the first model, got {len(different)} tokens that differ: "
            f"{token!r} is {actual.get(token)} in place of {expected.get(token)}."
        )
    # Equal fields give the ids of targets the same meaning.
    for field in ("decoder_vocab_size", "decoder_start_token_id", "eos_token_id"):
        expected, actual = (getattr(item.model.config, field) for item in (generator, partner))
        if actual != expected:
            raise MetaphraseError(f"`{field}` of `{name}` must be that of the first model, {expected}, got {actual}.")


def start_search(
    state_class: type[DecoderState], model: PreTrainedModel, input_ids: torch.Tensor, partners: Models, **kwargs
) -> tuple[list[Callable[[torch.Tensor], torch.Tensor]], list[DecoderState]]:
    """Return for each model a function from the decoder's output to logits, and its state before the prompt."""
    models, config = [model, *(partner for partner, _ in partners)], kwargs["generation_config"]
    obstacles = [fast_generation.find_obstacle(model, input_ids, **kwargs)]
    obstacles += [fast_generation.find_obstacle_of_model(partner, config) for partner in models[1:]]
    if state_class is BlockState and any(item.config.decoder_self_attention == SSRU for item in models):
        # A recurrence cannot forget its last tokens.
        obstacles.append("`decoder_self_attention` ssru with `assistant_model`")
    if obstacle := next(filter(None, obstacles), None):
        raise MetaphraseError(
            "A search with several models must be greedy, by beams or sampling, in float32 or bfloat16, with a dynamic "
            f"cache, and without streamers and hooks. Not supported here: {obstacle}."
        )
    encoded = [fast_generation.encoded_sources(kwargs, max(config.num_beams, config.num_return_sequences))]
    for partner, inputs in partners:
        encoded.append((partner.get_encoder()(**inputs).last_hidden_state, inputs["attention_mask"]))
    states = [state_class(item.get_decoder(), *source) for item, source in zip(models, encoded, strict=True)]
    return [fast_generation.prepared_projections(item)[0] for item in models], states


class EnsembleState:
    """Decoder states of several models for the same targets: a method of `DecoderState` is called for all of them."""

    def __init__(self, states: Sequence[DecoderState]):
        self._states = states

    def __getattr__(self, name: str) -> Callable[..., list]:
        return lambda *arguments: [getattr(state, name)(*arguments) for state in self._states]


class EnsembleSearch:
    """Greedy search, sampling and beam search over the mean probability, for `generate(custom_generate=...)`."""

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        partners: Models = (),
        return_scores: bool = True,
        **kwargs,
    ) -> GenerateBeamEncoderDecoderOutput:
        """Search with the model and its partners as `fast_generation.generate` does."""
        config, processors = kwargs["generation_config"], kwargs["logits_processor"]
        state_class = BeamState if config.num_beams > 1 else DecoderState
        projections, states = start_search(state_class, model, input_ids, partners, **kwargs)

        def project(hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
            logits = torch.stack([head(part) for head, part in zip(projections, hidden_states, strict=True)]).float()
            mean = logits.log_softmax(dim=-1).logsumexp(dim=0) - math.log(len(logits))
            if config.num_beams > 1 or not processors:
                # The processors of beam search read log-probabilities.
                return mean
            # Restore the size of logits, which matters for processors such as the repetition penalty.
            return mean + logits.logsumexp(dim=-1, keepdim=True).mean(dim=0)

        copies, state = max(config.num_beams, config.num_return_sequences), EnsembleState(states)
        if config.num_beams > 1:
            ids, scores = beam_search(project, state, input_ids[::copies], processors, config)
        else:
            ids, scores = fast_generation.sample(
                project, state, input_ids[::copies], copies, processors, config, return_scores
            )
        return GenerateBeamEncoderDecoderOutput(sequences=ids, sequences_scores=scores)


class BlockState(DecoderState):
    """The state of one target. A step reads a block of tokens, and a smaller `length` lets it forget the last tokens again."""

    def step(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Read tokens behind the target, (width,), and return the decoder's output (width, D)."""
        self.width = self.copies = self._rows_per_cache_row = len(input_ids)
        return super().step(input_ids)

    def _prepare_step(self) -> None:
        past = self.length + self.width
        self._new_entries = self._target_cache.extend(self.length, self.width)
        self._target_views = self._target_cache.views(past)
        positions = torch.arange(past, device=self.device)
        # (1, width, past), below 0 for later tokens of the block.
        distances = (positions[self.length :, None] - positions)[None]
        mask = torch.zeros_like(distances, dtype=self.dtype)
        mask.masked_fill_(distances < 0, torch.finfo(self.dtype).min)
        self._target_biases = self._masked_biases(mask, distances.clamp(min=0))


class SpeculativeSearch:
    """Greedy search for one source with a draft model, for `generate(custom_generate=...)` of the target model.

    A block of tokens is rounded differently than single tokens. In bfloat16, greedy search may choose the other of two
    tokens that are almost equally probable. `num_drafted` and `num_accepted` count the drafted tokens, and those in a target.
    """

    # Sources of a batch.
    batch_size = 1

    def __init__(self, num_assistant_tokens: int = DEFAULT_NUM_ASSISTANT_TOKENS):
        self.num_assistant_tokens = num_assistant_tokens
        self.num_drafted = self.num_accepted = 0

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        partners: Models = (),
        return_scores: bool = True,
        **kwargs,
    ) -> GenerateBeamEncoderDecoderOutput:
        """Search as `EnsembleSearch` does; the one partner drafts. Scores are sums of log-probabilities."""
        config, processors = kwargs["generation_config"], kwargs["logits_processor"]
        if config.num_beams > 1 or config.do_sample or len(input_ids) > 1:
            raise MetaphraseError(
                "`num_beams` must be 1, `do_sample` false and sources be given one by one with `assistant_model`, "
                f"got {config.num_beams}, {config.do_sample} and {len(input_ids)} sources."
            )
        projections, (state, draft) = start_search(BlockState, model, input_ids, partners, **kwargs)
        project, project_draft = projections
        # Tokens that each decoder can read. The draft model does not read its own last token.
        limits = (item.decoder.config.decoder_position_limit for item in (state, draft))
        most, most_of_draft = (config.max_length if limit is None else limit for limit in limits)
        end, total = min(config.max_length - 1, most, most_of_draft + 1), 0.0
        is_done, ids = input_ids.shape[1] >= config.max_length, input_ids
        while not is_done:
            length, unread, drafted = ids.shape[1], ids[0, draft.length :], ids
            for _ in range(min(self.num_assistant_tokens, end - length)):
                scores = project_draft(draft.step(unread)[-1:]).float()
                unread = process(processors, drafted, scores).argmax(dim=-1)
                drafted = torch.cat((drafted, unread[None]), dim=1)
            # The last token is unread; in the first round the whole prompt is.
            hidden_states = state.step(drafted[0, state.length :])[length - drafted.shape[1] - 1 :]
            rows = enumerate(project(hidden_states).float().split(1), start=length)
            scores = torch.cat([process(processors, drafted[:, :past], row) for past, row in rows])
            tokens = scores.argmax(dim=-1)
            num_accepted = int((tokens[:-1] == drafted[0, length:]).long().cumprod(dim=0).sum())
            # The accepted tokens and one more, up to the first end.
            tokens = tokens[: num_accepted + 1]
            is_end = are_ends(tokens, config._eos_token_tensor)
            if is_done := bool(is_end.any()):
                tokens = tokens[: int(is_end.long().argmax()) + 1]
            ids = torch.cat((ids, tokens[None]), dim=1)
            is_done |= ids.shape[1] >= config.max_length
            self.num_drafted += drafted.shape[1] - length
            self.num_accepted += min(num_accepted, len(tokens))
            log_probs = scores[: len(tokens)].log_softmax(dim=-1)
            total = total + log_probs.take_along_dim(tokens[:, None], dim=1).sum()
            # Forget refused tokens; the last token is still unread.
            state.length, draft.length = (min(item.length, ids.shape[1] - 1) for item in (state, draft))
        scores = torch.as_tensor(total, device=ids.device).view(1) if return_scores else None
        return GenerateBeamEncoderDecoderOutput(sequences=ids, sequences_scores=scores)


def check_single(generator: Generator, name: str) -> None:
    """Raise `MetaphraseError` if a generator is an ensemble or has another engine than torch."""
    if not generator.is_single:
        actual = f"an ensemble of {1 + len(generator.members)}" if generator.members else type(generator.model).__name__
        raise MetaphraseError(f"`{name}` must be a single torch model here, got {actual}.")
