"""Run: what stays the same for all sources of a call, however many windows they come in, and what comes of each window."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from metaphrase.decoding.options import plain_options
from metaphrase.decoding.searches.ensemble import EnsembleSearch
from metaphrase.decoding.searches.joint_search import Partner, check_partner, check_target_vocabulary, is_metaphrase
from metaphrase.decoding.searches.phrase_constraints import encode_phrases
from metaphrase.decoding.searches.speculative_decoding import DEFAULT_NUM_ASSISTANT_TOKENS, SpeculativeSearch
from metaphrase.inference.batches import decode
from metaphrase.inference.engine import Engine, Hypothesis
from metaphrase.inference.source_limits import check_sources, count_cut, cut_to_positions, numbering
from metaphrase.inference.text_options import options_of_texts, read_text_options


@dataclass(frozen=True)
class ScoredText:
    """One target text and its score (see `Hypothesis.score`)."""

    text: str
    score: float | None


@dataclass(frozen=True, eq=False)
class EncodedSources:
    """Texts as models read them.

    Attributes:
        ids: For each generator those of each text.
        num_truncated: Texts of which the end was cut off.
    """

    ids: list[list[list[int]]]
    num_truncated: int


@dataclass(frozen=True, eq=False)
class Run:
    """Who decodes, and how.

    Attributes:
        generators: Who reads the sources, the one that was called first.
        method: The search that joins them.
        options: What is left for `decode`.
    """

    generators: list[Any]
    method: EnsembleSearch | SpeculativeSearch | None
    options: dict[str, Any]

    @classmethod
    def of(cls, generator: Any, options: Mapping[str, Any], count: int | None = None) -> "Run":
        """What the options ask of a generator.

        Args:
            generator: The one that is called.
            options: Arguments of `generate()`.
            count: Texts that there are, as far as that is known.

        Raises:
            ValueError: If an assistant does not fit, or as `read_text_options` and `encode_phrases` do.
        """
        options = read_text_options(options, count)
        partners, search, options = _join(generator, plain_options(options))
        own = generator.model.generation_config
        return cls([generator, *partners], search, encode_phrases(generator.tokenizers.target, own, options))

    def encode(self, texts: list[str]) -> EncodedSources:
        """The ids of the texts that are not white space.

        Raises:
            TooLongError: If one is longer than a model can read.
        """
        written = written_texts(texts)
        whole = [generator.encode_whole([texts[index] for index in written]) for generator in self.generators]
        sources = [generator.cut(ids) for generator, ids in zip(self.generators, whole, strict=True)]
        # A source is one, however many models read it.
        by_source = (list(zip(*ids, strict=True)) for ids in (whole, sources))
        num_truncated = count_cut(*by_source)
        if isinstance(self.method, SpeculativeSearch):
            # What a draft model reads decides over the time alone, so that it may be the beginning.
            first, *drafts = sources
            sources = [first, *map(cut_to_positions, self.generators[1:], drafts)]
        for generator, ids in zip(self.generators, sources, strict=True):
            check_sources(generator.model, ids, [index + 1 for index in written])
        return EncodedSources(sources, num_truncated)

    def search(
        self,
        sources: EncodedSources,
        numbers: list[int],
        return_scores: bool,
        *,
        show_progress: bool | None = False,
        on_batch: Callable[[int], object] | None = None,
    ) -> list[list[Hypothesis]]:
        """The hypotheses of sources, which have these numbers in the call. The generator counts drafts and what was cut off."""
        generator, *others = self.generators
        # It counts its drafts.
        search = copy.copy(self.method)
        generator.num_truncated += sources.num_truncated
        own, *rest = sources.ids
        partners = [Partner(each.model, ids) for each, ids in zip(others, rest, strict=True)]
        with numbering([number + 1 for number in numbers]):
            hypotheses = decode(
                generator.model,
                own,
                batch_size=generator.batch_size,
                max_tokens_per_batch=generator.max_tokens_per_batch,
                return_scores=return_scores,
                show_progress=show_progress,
                on_batch=on_batch,
                partners=partners,
                search=search,
                **options_of_texts(self.options, numbers),
            )
        if isinstance(search, SpeculativeSearch):
            generator.num_drafted += search.num_drafted
            generator.num_accepted += search.num_accepted
        return hypotheses

    def scored_texts(
        self, texts: list[str], hypotheses: list[list[Hypothesis]], return_scores: bool
    ) -> list[list[ScoredText]]:
        """What hypotheses say, for all texts, those that were not decoded among them."""
        generator = self.generators[0]
        count = generator.num_targets(**self.options)
        results = [[ScoredText("", 0.0 if return_scores else None)] * count for _ in texts]
        for index, candidates in zip(written_texts(texts), hypotheses, strict=True):
            generator.num_unfinished += sum(not candidate.is_finished for candidate in candidates)
            decoded = generator.tokenizers.decode_targets([candidate.ids for candidate in candidates])
            results[index] = [ScoredText(text, c.score) for text, c in zip(decoded, candidates, strict=True)]
        return results


def written_texts(texts: list[str]) -> list[int]:
    """The indices of the texts that are not white space."""
    return [index for index, text in enumerate(texts) if text.strip()]


def is_single(generator: Any) -> bool:
    """Whether a generator has one model, of torch."""
    return not isinstance(generator.model, Engine) and not generator.members


def check_single(generator: Any, name: str) -> None:
    """Checks that a generator has one model, of torch.

    Raises:
        ValueError: If it is an ensemble, or has another engine.
    """
    if isinstance(generator.model, Engine):
        raise ValueError(f"`{name}` must run in torch for that, got a {type(generator.model).__name__}.")
    if generator.members:
        raise ValueError(f"`{name}` must be one model, got an ensemble of {1 + len(generator.members)}.")


def _join(
    generator: Any, options: dict[str, Any]
) -> tuple[list[Any], EnsembleSearch | SpeculativeSearch | None, dict[str, Any]]:
    """Who else takes part, what joins them, and the options that are left."""
    assistant = options.get("assistant_model")
    if assistant is None:
        return generator.members, generator.ensemble if generator.members else None, options
    if generator.members:
        raise ValueError("`assistant_model` must be left out for an ensemble, got one.")
    if not isinstance(assistant, type(generator)):
        if not (is_metaphrase(generator.model) and is_metaphrase(assistant)):
            # transformers knows how to do it, one source at a time.
            return [], None, options
        given, expected = assistant.config.vocab_size, generator.model.config.vocab_size
        if given != expected:
            raise ValueError(
                f"`vocab_size` of `assistant_model` must be that of the model, {expected}, got {given}: pass a generator "
                "with its own tokenizers."
            )
        of_sources = {"source_prefix": generator.source_prefix, "max_source_length": generator.max_source_length}
        assistant = type(generator)(assistant, generator.tokenizers, **of_sources)
    check_single(assistant, "assistant_model")
    check_target_vocabulary(generator.tokenizers, assistant.tokenizers, "assistant_model")
    check_partner(generator.model, assistant.model, "assistant_model")
    del options["assistant_model"]
    count = options.pop("num_assistant_tokens", None)
    search = SpeculativeSearch(DEFAULT_NUM_ASSISTANT_TOKENS if count is None else count)
    return [assistant], search, options
