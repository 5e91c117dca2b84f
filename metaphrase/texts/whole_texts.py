"""Decode whole texts, HTML, XML and files: sentences one by one, with layout, tags and terms in their places."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaphrase.analysis.alignment import AttentionMap, aligned_layer, cross_attentions, membership
from metaphrase.decoding.fast_generation import is_metaphrase
from metaphrase.inference.generator import Generator
from metaphrase.texts.documents import split_texts
from metaphrase.texts.loops import find_loop
from metaphrase.texts.markup import MarkedText, parse_markup
from metaphrase.texts.plan import Links, Sentence, Terms, TextPlan, find_words
from metaphrase.texts.subtitles import Subtitles
from metaphrase.tokenization import checked_texts, encode_phrase, word_ids_by_offsets

if TYPE_CHECKING:
    from metaphrase.texts.word_files import WordFile

# A line break of markup is a space.
_SPACES = re.compile(r"[ \t\r\n\f]+")
FORMATS = ("text", "html", "xml")
FILE_SUFFIXES = (".srt", ".vtt", ".ass", ".ssa", ".docx")


def read_file(path: Path, most_bytes: int | None = None) -> "Subtitles | WordFile":
    """Read subtitles or a Word document, by the suffix. The `texts` are XML, in which a line break ends a line.

    A document that unpacks to more than `most_bytes` is refused, by default 256 MB.

    Raises:
        ImportError: If a package for the format is missing.
        ValueError: If the suffix is unknown, or the file is damaged or without text.
    """
    suffix = path.suffix.lower()
    if suffix not in FILE_SUFFIXES:
        raise ValueError(f"A file must end in one of {', '.join(FILE_SUFFIXES)}, got {str(path)!r}.")
    if suffix == ".docx":
        from metaphrase.texts.word_files import WordFile

        file = WordFile(path) if most_bytes is None else WordFile(path, most_bytes)
    else:
        file = Subtitles.read(path)
    if not file.texts:
        raise ValueError(f"A file must hold text to decode, got none in {str(path)!r}.")
    return file


class TextDecoder:
    """Decodes whole texts with a generator.

    Attributes:
        counts: `num_sentences` sentences; `num_cut` that were too long and were cut into parts; `num_forced` that were decoded
            again so that they contain their terms; `num_placed` terms and kept parts that still were missing, and took the place
            of the words aligned to them.
        placed: Decoded sentences with such terms, for a reader to check.
        run_alone: Calls a function while no other thread decodes, because an alignment changes the kernels of the model.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        text_format: str = "text",
        split_sentences: bool | str = True,
        terms: Terms | None = None,
        keep_tags: Collection[str] = (),
        has_lines: bool = False,
    ):
        """Join the parts.

        Args:
            generator: Decodes the sentences. Tags and terms need one torch model, for the alignment.
            text_format: `text`, `html` or `xml`.
            split_sentences: As for `Generator.generate()`.
            terms: Parts that targets keep, and terms with a given translation.
            keep_tags: As for `parse_markup`.
            has_lines: True if a line break in markup ends a line, as in plain text, and is no space.

        Raises:
            ValueError: If the format is unknown.
        """
        if text_format not in FORMATS:
            raise ValueError(f"`text_format` must be one of {', '.join(FORMATS)}, got {text_format!r}.")
        self.generator = generator
        self.text_format = text_format
        self.split_sentences = split_sentences
        self.terms = Terms() if terms is None else terms
        self.keep_tags = keep_tags
        self.has_lines = has_lines or text_format == "text"
        self.counts: Counter[str] = Counter()
        self.placed: list[str] = []
        self.run_alone: Callable[[Callable[[], list[Links]]], list[Links]] = lambda function: function()

    def decode(self, texts: Iterable[str], **options: Any) -> list[str]:
        """Return the target of each text; the options are those of `Generator.generate()`."""
        if self.text_format == "text":
            pages = [[MarkedText(text, is_markup=False)] for text in checked_texts(texts)]
        else:
            pages = [parse_markup(text, self.text_format == "html", self.keep_tags) for text in checked_texts(texts)]
        marked = [part for page in pages for part in page if isinstance(part, MarkedText)]
        parts = [part.text for part in marked]
        documents, num_cut = split_texts([self.generator], parts, self.split_sentences, self.has_lines)
        self.counts["num_cut"] += num_cut
        plans = [TextPlan.of(part, document, self.terms) for part, document in zip(marked, documents, strict=True)]
        rows = iter(
            self._decode_sentences([(plan, sentence) for plan in plans for sentence in plan.sentences], options)
        )
        targets = iter([plan.join([next(rows) for _ in plan.sentences]) for plan in plans])
        return ["".join(part if isinstance(part, str) else next(targets) for part in page) for page in pages]

    def _decode_sentences(self, planned: list[tuple[TextPlan, Sentence]], options: dict[str, Any]) -> list[str]:
        sources = [sentence.text for _, sentence in planned]
        if self.text_format != "text":
            sources = [_SPACES.sub(" ", source) for source in sources]
        options = {**options, "end_loops": True}
        targets = self.generator.generate(sources, **options)
        self.counts["num_sentences"] += len(sources)
        for index, (_, sentence) in enumerate(planned):
            targets[index] = self._mend(sentence, sources[index], targets[index], options)
        aligned = [
            index
            for index, ((_, sentence), target) in enumerate(zip(planned, targets, strict=True))
            if target.strip()
            and (
                sentence.elements or sentence.find_atoms(target)[1] or not all(atom.expected for atom in sentence.atoms)
            )
        ]
        sentences, aligned_targets = [planned[i][1] for i in aligned], [targets[i] for i in aligned]
        links = self.run_alone(lambda: self._align(sentences, aligned_targets)) if aligned else []
        links, rendered = dict(zip(aligned, links, strict=True)), []
        for index, (plan, sentence) in enumerate(planned):
            text, num_placed = sentence.render(targets[index], links.get(index, Links([], [], [])), plan.marked.escape)
            self.counts["num_placed"] += num_placed
            self.placed += [text] * bool(num_placed)
            rendered.append(text)
        return rendered

    def _mend(self, sentence: Sentence, source: str, target: str, options: dict[str, Any]) -> str:
        """Decode a sentence again if its target lacks terms. Returns the better target."""
        _, missing = sentence.find_atoms(target)
        if not missing or not is_metaphrase(self.generator.model) or options.get("do_sample"):
            return target
        terms = [atom.expected for atom in sentence.atoms if atom.expected and self._can_write(atom.expected)]
        beams = max(4, options.get("num_beams") or self.generator.model.generation_config.num_beams or 1)
        options = {**options, "must_contain": [*options.get("must_contain", []), *terms], "num_beams": beams}
        try:
            [other] = self.generator.generate([source], **options)
        except ValueError:
            # The terms do not fit into the length, or other options rule them out. The alignment places and counts them.
            return target
        # A model that does not know a term adds it to a full sentence. Then the alignment finds a better place.
        growth = sum(
            len(find_words(atom.expected)) - len(find_words(sentence.text[atom.start : atom.end])) for atom in missing
        )
        is_longer = len(find_words(other)) > len(find_words(target)) + max(growth, 0)
        if is_longer or len(sentence.find_atoms(other)[1]) == len(missing) or find_loop(source, other):
            return target
        self.counts["num_forced"] += 1
        return other

    def _can_write(self, term: str) -> bool:
        """Return True if the tokenizer has tokens for a term. Any other term is placed by the alignment, and counted."""
        try:
            encode_phrase(self.generator.tokenizers.target, term)
        except ValueError:
            return False
        return True

    def _align(self, sentences: Sequence[Sentence], targets: Sequence[str]) -> list[Links]:
        """Return the alignment of words of each sentence and its target."""
        texts = [sentence.text for sentence in sentences]
        maps = cross_attentions(self.generator, texts, targets, layer=aligned_layer(self.generator.model))
        return [_find_links(self.generator, attention) for attention in maps]


def _find_links(generator: Generator, attention: AttentionMap) -> Links:
    """Link each target word to the source word that its tokens attend to most."""
    words = [find_words(text) for text in (attention.source, attention.target)]
    pair = generator.tokenizers
    sides = (
        (pair.source, generator.source_prefix, attention.source, attention.source_ids, "text"),
        (pair.target, "", attention.target, attention.target_ids, "text_target"),
    )
    members = []
    for (tokenizer, prefix, text, ids, argument), spans in zip(sides, words, strict=True):
        word_ids = None
        if tokenizer.is_fast:
            pieces = [(start, index) for index, (start, _) in enumerate(spans)]
            word_ids = word_ids_by_offsets(tokenizer, prefix + text, ids, argument, len(prefix), pieces)
        if word_ids is None:
            # Without offsets, words at the same part of both texts belong together.
            source, target = map(len, words)
            best = [min(index * source // target, source - 1) if source else None for index in range(target)]
            return Links(*words, best)
        members.append(membership(word_ids, len(spans)))
    weights = members[1].T @ attention.weights @ members[0]
    best = [int(row.argmax()) if row.any() else None for row in weights]
    # Attention of a punctuation mark often goes to the word before it.
    is_word = [attention.target[start:end].isalnum() for start, end in words[1]]
    return Links(*words, [index if flag else None for index, flag in zip(best, is_word, strict=True)])
