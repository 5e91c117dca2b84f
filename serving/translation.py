"""Answer one request: texts through a model, whole texts sentence by sentence."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from metaphrase.decoding.options import GENERATION_OPTIONS, complete_sampling
from metaphrase.inference.texts.placement import Links, Sentence
from metaphrase.inference.texts.terms import Terms
from metaphrase.inference.whole_texts import TextDecoder
from metaphrase.serving.batcher import Ticket
from metaphrase.serving.languages import base_code
from metaphrase.serving.limits import Limits
from metaphrase.serving.models import QueuedGenerator, ServedModel
from metaphrase.storage.model_files import check_options

# A client may not choose special tokens.
CLIENT_OPTIONS = tuple(name for name in GENERATION_OPTIONS if not name.endswith("_token_id"))


@dataclass(frozen=True)
class Query:
    """Texts and options of a request.

    Attributes:
        texts: Sources.
        source_lang: Code of their language; `None` for that of the model.
        target_lang: The same for targets.
        text_format: `text`, `html` or `xml`.
        split_sentences: True to decode each sentence alone; `None` for translation only.
        terms: Parts that targets keep, and terms with a given translation.
        keep_tags: Elements of markup whose content stays as it is.
        num_targets: Targets for each source, of which all but the first are alternatives.
        options: Options of `generate()`.
    """

    texts: Sequence[str]
    source_lang: str | None = None
    target_lang: str | None = None
    text_format: str = "text"
    split_sentences: bool | None = None
    terms: Terms = field(default_factory=Terms)
    keep_tags: Collection[str] = ()
    num_targets: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """Targets of a request.

    Attributes:
        targets: For each source the best target and its alternatives.
        num_unfinished: Targets, or their sentences, that met the length limit.
    """

    targets: list[list[str]]
    num_unfinished: int


class _QueuedDecoder(TextDecoder):
    """Computes alignments in the thread of the models, since they change the kernels of a model for a moment."""

    generator: QueuedGenerator

    def _align(self, sentences: Sequence[Sentence], targets: Sequence[str]) -> list[Links]:
        if not sentences:
            # A call would wait for the batch that the models decode.
            return []
        align = super()._align
        return self.generator.batcher.call(self.generator.ticket, lambda: align(sentences, targets))


def check_query(query: Query, limits: Limits) -> None:
    """Check a request before it waits.

    Raises:
        ValueError: If a text or an option is beyond a limit.
    """
    if len(query.texts) > limits.max_texts:
        raise ValueError(f"A request must have at most {limits.max_texts} texts, got {len(query.texts)}.")
    if (total := sum(map(len, query.texts))) > limits.max_text_characters:
        raise ValueError(f"A request must have at most {limits.max_text_characters} characters, got {total}.")
    for name, value in query.options.items():
        if name not in CLIENT_OPTIONS:
            raise ValueError(f"An option must be one of {', '.join(CLIENT_OPTIONS)}, got {name!r}.")
        is_flag = name in ("do_sample", "early_stopping", "renormalize_logits")
        if isinstance(value, bool) != is_flag or not isinstance(value, int | float) or not abs(value) < math.inf:
            raise ValueError(f"`{name}` must be {'true or false' if is_flag else 'a finite number'}, got {value!r}.")
    bounds = {
        "max_new_tokens": limits.max_new_tokens_per_text,
        "max_length": limits.max_new_tokens_per_text,
        "min_length": limits.max_new_tokens_per_text,
        "min_new_tokens": limits.max_new_tokens_per_text,
        "num_beams": limits.max_beams,
        "num_return_sequences": limits.max_beams,
    }
    for name, most in bounds.items():
        value = query.options.get(name, 1)
        if not isinstance(value, int) or not 0 <= value <= most:
            raise ValueError(f"`{name}` must be a whole number from 0 to {most}, got {value}.")
    if not isinstance(query.num_targets, int) or not 1 <= query.num_targets <= limits.max_beams:
        raise ValueError(f"The number of targets must be from 1 to {limits.max_beams}, got {query.num_targets!r}.")
    check_options(query.options)


def splitting_language(model: ServedModel, query: Query) -> str | bool:
    """Return the language to split texts into sentences by, True for the generator's, or False to keep them whole."""
    if not (model.task == "translation" if query.split_sentences is None else query.split_sentences):
        return False
    return next((base_code(code) for code in [query.source_lang, *model.source_languages[:1]] if code), True)


def answer(model: ServedModel, query: Query, ticket: Ticket) -> Answer:
    """Decode the texts of a request.

    Raises:
        CancelledRequest: If the client has gone.
        TimeoutError: If the request takes too long.
        ValueError: As `Generator.generate()`, or if markup or terms come with alternatives.
    """
    generator, language_options = model.open(ticket, query.source_lang, query.target_lang)
    options = complete_sampling(dict(query.options)) | language_options
    split_sentences = splitting_language(model, query)
    needs_decoder = query.text_format != "text" or bool(query.terms)
    if query.num_targets > 1:
        if needs_decoder:
            raise ValueError("Alternatives must be left out with markup and terms, got both.")
        if not options.get("do_sample"):
            # Each target needs a beam.
            beams = options.get("num_beams") or generator.model.generation_config.num_beams or 1
            options["num_beams"] = max(beams, query.num_targets)
        options["num_return_sequences"] = query.num_targets
        rows = generator.generate_n_best(query.texts, return_scores=False, split_sentences=split_sentences, **options)
        targets = [[scored.text for scored in row] for row in rows]
    elif needs_decoder or split_sentences:
        decoder = _QueuedDecoder(
            generator,
            text_format=query.text_format,
            split_sentences=split_sentences,
            terms=query.terms,
            keep_tags=query.keep_tags,
        )
        targets = [[text] for text in decoder.decode(query.texts, **options)]
    else:
        targets = [[text] for text in generator.generate(query.texts, **options)]
    return Answer(targets, generator.num_unfinished)


def cut_at(text: str, stops: Sequence[str] | None) -> str:
    """Return a text up to the first of several strings."""
    ends = [text.find(stop) for stop in stops or () if stop and stop in text]
    return text[: min(ends)] if ends else text
