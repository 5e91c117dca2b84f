"""State of one `generate()` call, shared by all its chunks."""

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metaphrase.decoding.fast_generation import is_metaphrase
from metaphrase.decoding.options import complete_sampling, plain_options
from metaphrase.decoding.searches.constrained_beam_search import encode_phrases
from metaphrase.decoding.searches.joint_search import EnsembleSearch, Partner
from metaphrase.decoding.searches.speculative_decoding import DEFAULT_NUM_ASSISTANT_TOKENS, SpeculativeSearch
from metaphrase.inference.batches import decode
from metaphrase.inference.engine import Engine, Hypothesis
from metaphrase.inference.source_limits import check_sources, count_cut, cut_to_positions, numbering
from metaphrase.inference.text_options import options_of_texts, read_text_options
from metaphrase.inference.texts.documents import Document, SentenceSplitter, keep_whole
from metaphrase.modeling.pipeline_support import longest_source

if TYPE_CHECKING:
    from metaphrase.inference.generator import Generator


@dataclass(frozen=True)
class EncodedSources:
    """Sources as the models read them.

    Attributes:
        ids: For each generator of a run the ids of each sentence.
        documents: For each text its sentences and its layout.
        counts: Amounts to add to the counters of the caller.
    """

    ids: list[list[list[int]]]
    documents: list[Document]
    counts: dict[str, int]

    def indices(self) -> list[int]:
        """Return for each sentence the index of its text."""
        return [index for index, document in enumerate(self.documents) for _ in document.sentences]


@dataclass(frozen=True)
class ScoredText:
    """One target text and its score (see `Hypothesis.score`)."""

    text: str
    score: float | None


@dataclass(frozen=True, eq=False)
class Run:
    """Generators, search and options of one call. A run changes none of its generators.

    Attributes:
        generators: The called generator first, then the members of its ensemble or its draft model.
        joint_search: The search that all of them take part in; `None` for a single model.
        options: Remaining options, for `decode`.
    """

    generators: list["Generator"]
    joint_search: EnsembleSearch | SpeculativeSearch | None
    options: dict[str, Any]

    @classmethod
    def of(cls, generator: "Generator", options: Mapping[str, Any], num_texts: int | None = None) -> "Run":
        """Prepare a call.

        Args:
            generator: The called generator.
            options: Arguments of `generate()`.
            num_texts: Number of sources; `None` for a stream.

        Raises:
            ValueError: If an assistant does not fit, or as `read_text_options` and `encode_phrases` do.
        """
        options = plain_options(read_text_options(complete_sampling(dict(options)), num_texts))
        partners, joint_search = generator.members, generator.ensemble if generator.members else None
        if options.get("assistant_model") is not None:
            partners, joint_search = _read_assistant(generator, options)
        config = generator.model.generation_config
        return cls([generator, *partners], joint_search, encode_phrases(generator.tokenizers.target, config, options))

    def encode(self, texts: list[str], split_sentences: bool | str = False) -> EncodedSources:
        """Return the ids of the texts that are not blank, or of their sentences.

        Raises:
            TooLongError: If a source has more tokens than a model has positions.
        """
        documents, counts = keep_whole(texts), {}
        if split_sentences:
            splitter = make_splitter(self.generators, split_sentences)
            documents, counts = splitter.split(texts), {"num_cut": splitter.num_cut}
        sentences = [sentence for document in documents for sentence in document.sentences]
        uncut = [generator.encode_uncut(sentences) for generator in self.generators]
        sources = [generator.truncate(ids) for generator, ids in zip(self.generators, uncut, strict=True)]
        # Compare tuples of all models' ids, so that a source counts once.
        counts["num_truncated"] = count_cut(*(list(zip(*ids, strict=True)) for ids in (uncut, sources)))
        if isinstance(self.joint_search, SpeculativeSearch):
            # A draft model may read only the beginning: its drafts change the time, never the result.
            first, *drafts = sources
            sources = [first, *map(cut_to_positions, self.generators[1:], drafts)]
        encoded = EncodedSources(sources, documents, counts)
        numbers = [index + 1 for index in encoded.indices()]
        for generator, ids in zip(self.generators, sources, strict=True):
            check_sources(generator, ids, numbers)
        return encoded

    def search(
        self,
        sources: EncodedSources,
        indices: Sequence[int],
        return_scores: bool,
        *,
        show_progress: bool | None = False,
        on_batch: Callable[[int], object] | None = None,
    ) -> tuple[list[list[Hypothesis]], Counter[str]]:
        """Decode encoded sources.

        Args:
            sources: From `encode`.
            indices: Index of each sentence's text in the call.
            return_scores: True if hypotheses carry their score.
            show_progress: As for `decode`.
            on_batch: As for `decode`.

        Returns:
            The hypotheses of each sentence, and the amounts to add to the counters of the caller.
        """
        generator, *partners = self.generators
        # A copy, because the search counts its drafts.
        joint_search = copy.copy(self.joint_search)
        ids, *partner_ids = sources.ids
        options = options_of_texts(self.options, indices)
        model = generator.model
        if generator.engine_choice is not None and ids and not partners:
            limits = {"batch_size": generator.batch_size, "return_scores": return_scores}
            model = generator.engine_choice.choose(model, options, ids, **limits)
        with numbering([index + 1 for index in indices]):
            hypotheses = decode(
                model,
                ids,
                batch_size=generator.batch_size,
                max_tokens_per_batch=generator.max_tokens_per_batch,
                return_scores=return_scores,
                show_progress=show_progress,
                on_batch=on_batch,
                partners=[Partner(p.model, rows) for p, rows in zip(partners, partner_ids, strict=True)],
                search=joint_search,
                vocabulary_map=generator.vocabulary_map,
                **options,
            )
        counts = Counter(
            **sources.counts,
            num_unfinished=sum(not hypothesis.is_finished for row in hypotheses for hypothesis in row),
        )
        if isinstance(joint_search, SpeculativeSearch):
            counts.update(num_drafted=joint_search.num_drafted, num_accepted=joint_search.num_accepted)
        return hypotheses, counts

    def decode_texts(
        self, documents: list[Document], hypotheses: list[list[Hypothesis]], return_scores: bool
    ) -> list[list[ScoredText]]:
        """Return target texts for all sources. A blank source has empty ones.

        The score of a text is the mean of its sentences.
        """
        generator, rows = self.generators[0], iter(hypotheses)
        num_targets = generator.num_targets(**self.options)
        results = []
        for document in documents:
            # Candidate i of a text has candidate i of each sentence.
            candidates = list(zip(*(next(rows) for _ in document.sentences), strict=True)) or [()] * num_targets
            texts = [
                document.join(generator.tokenizers.decode_targets([part.ids for part in row])) for row in candidates
            ]
            scores = [
                sum(part.score for part in row) / max(len(row), 1) if return_scores else None for row in candidates
            ]
            results.append([ScoredText(*pair) for pair in zip(texts, scores, strict=True)])
        return results


def make_splitter(generators: Sequence["Generator"], split_sentences: bool | str) -> SentenceSplitter:
    """Return a splitter for sources of generators.

    Args:
        generators: Readers of the sentences.
        split_sentences: A language; True for that of a multilingual tokenizer, or else English.
    """
    language = split_sentences
    if not isinstance(language, str):
        # Codes such as eng_Latn and en_XX begin with the language.
        language = re.split("[_-]", getattr(generators[0].tokenizers.source, "src_lang", None) or "en")[0]

    def find_long(texts: list[str]) -> list[bool]:
        is_long = [False] * len(texts)
        for generator in generators:
            limits = [generator.max_source_length, longest_source(generator.model)]
            limit = min((limit for limit in limits if limit is not None), default=None)
            if limit is not None:
                lengths = map(len, generator.encode_uncut(texts))
                is_long = [flag or length > limit for flag, length in zip(is_long, lengths, strict=True)]
        return is_long

    return SentenceSplitter(language, find_long)


def is_single(generator: "Generator") -> bool:
    """Return True if a generator has one torch model."""
    return not isinstance(generator.model, Engine) and not generator.members


def check_single(generator: "Generator", name: str) -> None:
    """Check that a generator has one torch model.

    Raises:
        ValueError: If the generator is an ensemble or has another engine.
    """
    if isinstance(generator.model, Engine):
        raise ValueError(f"`{name}` must have a torch model here, got a {type(generator.model).__name__}.")
    if generator.members:
        raise ValueError(f"`{name}` must be one model, got an ensemble of {1 + len(generator.members)}.")


def check_partner(generator: "Generator", partner: "Generator", name: str) -> None:
    """Check that another generator, set by the option `name`, can write a target together with this one.

    Raises:
        ValueError: If the partner is no single torch model, one is no Metaphrase model, or the two differ in target tokens, in
            special ids or in their device.
    """
    check_single(partner, name)
    expected, actual = (item.tokenizers.target.get_vocab() for item in (generator, partner))
    if different := [token for token in {**expected, **actual} if expected.get(token) != actual.get(token)]:
        token = min(different)
        raise ValueError(
            f"The target vocabulary of `{name}` must be that of the first model, got {len(different)} tokens that differ: "
            f"{token!r} is {actual.get(token)} in place of {expected.get(token)}."
        )
    models = generator.model, partner.model
    for model in models:
        if not is_metaphrase(model):
            raise ValueError(
                f"`{name}` and the first model must both be Metaphrase models, got {type(model).__name__}: "
                "convert it with `metaphrase convert`."
            )
    # Equal fields give the ids of targets the same meaning.
    for field in ("decoder_vocab_size", "decoder_start_token_id", "eos_token_id"):
        expected, actual = (getattr(model.config, field) for model in models)
        if actual != expected:
            raise ValueError(f"`{field}` of `{name}` must be that of the first model, {expected}, got {actual}.")
    expected, actual = (model.device for model in models)
    if actual != expected:
        raise ValueError(f"`{name}` must be on the device of the first model, {expected}, got {actual}.")


def _read_assistant(
    generator: "Generator", options: dict[str, Any]
) -> tuple[list["Generator"], SpeculativeSearch | None]:
    """Return the draft model and its search. Takes their options out of `options`."""
    assistant = options["assistant_model"]
    if generator.members:
        raise ValueError("`assistant_model` must be left out for an ensemble, got one.")
    if not isinstance(assistant, type(generator)):
        if not (is_metaphrase(generator.model) and is_metaphrase(assistant)):
            # transformers' own assisted decoding runs, one source at a time.
            return [], None
        vocab_size, expected = assistant.config.vocab_size, generator.model.config.vocab_size
        if vocab_size != expected:
            raise ValueError(
                f"`vocab_size` of `assistant_model` must be that of the model, {expected}, got {vocab_size}: pass a "
                "generator with its own tokenizers."
            )
        assistant = type(generator)(
            assistant,
            generator.tokenizers,
            source_prefix=generator.source_prefix,
            max_source_length=generator.max_source_length,
        )
    check_partner(generator, assistant, "assistant_model")
    del options["assistant_model"]
    num_tokens = options.pop("num_assistant_tokens", None)
    return [assistant], SpeculativeSearch(DEFAULT_NUM_ASSISTANT_TOKENS if num_tokens is None else num_tokens)
