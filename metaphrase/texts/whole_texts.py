"""Decode whole texts, HTML, XML and files: sentences with layout, tags and terms; and by way of a third language."""

import argparse
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaphrase.analysis.alignment import AttentionMap, aligned_layer, cross_attentions, membership
from metaphrase.decoding.fast_generation import is_metaphrase
from metaphrase.errors import MetaphraseError
from metaphrase.inference.generator import Document, Generator, ScoredText, TextStream, read_chunks
from metaphrase.inference.line_files import OutputFile, as_lines
from metaphrase.storage.folders import file_in_one_step
from metaphrase.texts.documents import find_loop, split_texts
from metaphrase.texts.markup import MarkedText, parse_markup
from metaphrase.texts.plan import Links, Sentence, Terms, find_words, plan_text, read_glossary
from metaphrase.texts.subtitles import Subtitles
from metaphrase.tokenization import checked_texts, iterate_lines, word_ids_by_offsets

if TYPE_CHECKING:
    from metaphrase.texts.word_files import WordFile

logger = logging.getLogger(__name__)

_MAX_SHOWN = 10  # sentences with a term that attention put in, which the log shows
_SPACES = re.compile(r"[ \t\r\n\f]+")  # a line break of markup is a space
FORMATS = ("text", "html", "xml")
FILE_SUFFIXES = (".srt", ".vtt", ".ass", ".ssa", ".docx")


def read_file(name: str, data: bytes, most_bytes: int = 256 * 2**20) -> "Subtitles | WordFile":
    """Read subtitles or a Word document, by the suffix of the name. The `texts` are XML, in which a line break ends a line.

    Raises ImportError if a package for the format is missing, and `MetaphraseError` if the suffix is unknown, or the file is
    damaged, without text, or a document that unpacks to more than `most_bytes`.
    """
    suffix = Path(name).suffix.lower()
    if suffix not in FILE_SUFFIXES:
        raise MetaphraseError(f"A file must end in one of {', '.join(FILE_SUFFIXES)}, got {name!r}.")
    if suffix == ".docx":
        from metaphrase.texts.word_files import WordFile

        file = WordFile(name, data, most_bytes)
    else:
        file = Subtitles(name, data)
    if not file.texts:
        raise MetaphraseError(f"A file must hold text to decode, got none in {name!r}.")
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
        """Take the options. Tags and terms need a generator of one torch model, for the alignment.

        Args:
            keep_tags: Names of further elements whose content is no text to translate.
            has_lines: True if a line break in markup ends a line, as in plain text, and is no space.
        """
        if text_format not in FORMATS:
            raise MetaphraseError(f"`text_format` must be one of {', '.join(FORMATS)}, got {text_format!r}.")
        self.generator, self.text_format, self.split_sentences = generator, text_format, split_sentences
        self.terms, self.keep_tags = terms or Terms(), keep_tags
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
        plans = [plan_text(part, document, self.terms) for part, document in zip(marked, documents, strict=True)]
        rendered = self._decode_sentences([sentence for part, _ in plans for sentence in part], options)
        targets = iter([Document(layout=layout).join([next(rendered) for _ in part]) for part, layout in plans])
        self.counts["num_cut"] += num_cut
        return ["".join(part if isinstance(part, str) else next(targets) for part in page) for page in pages]

    def _decode_sentences(self, sentences: list[Sentence], options: dict[str, Any]) -> Iterator[str]:
        self.counts["num_sentences"] += len(sentences)
        sources = [sentence.text for sentence in sentences]
        if self.text_format != "text":
            sources = [_SPACES.sub(" ", source) for source in sources]
        options = {**options, "end_loops": True}
        targets = self.generator.generate(sources, **options)
        aligned = []
        for index, sentence in enumerate(sentences):
            target = targets[index] = self._mend(sentence, sources[index], targets[index], options)
            has_tags = sentence.elements or not all(atom.expected for atom in sentence.atoms)
            if target.strip() and (has_tags or sentence.find_atoms(target)[1]):
                aligned.append(index)
        pairs = [sentences[index] for index in aligned], [targets[index] for index in aligned]
        links = dict(zip(aligned, self.run_alone(lambda: self._align(*pairs)) if aligned else (), strict=True))
        for index, sentence in enumerate(sentences):
            text, num_placed = sentence.render(targets[index], links.get(index, Links([], [], [])))
            self.counts["num_placed"] += num_placed
            self.placed += [text] * bool(num_placed)
            yield text

    def _mend(self, sentence: Sentence, source: str, target: str, options: dict[str, Any]) -> str:
        """Decode a sentence again if its target lacks terms. Returns the better target."""
        _, missing = sentence.find_atoms(target)
        if not missing or not is_metaphrase(self.generator.model) or options.get("do_sample"):
            return target
        terms = [atom.expected for atom in sentence.atoms if atom.expected]
        beams = max(4, options.get("num_beams") or self.generator.model.generation_config.num_beams or 1)
        options = {**options, "must_contain": [*options.get("must_contain", []), *terms], "num_beams": beams}
        try:
            [other] = self.generator.generate([source], **options)
        except ValueError:
            # The tokenizer has no tokens for a term, the length no room, or other options rule it out. The alignment places
            # and counts the terms.
            return target
        # A model that does not know a term adds it to a full sentence. Then the alignment finds a better place.
        words = [(find_words(atom.expected), find_words(sentence.text[atom.start : atom.end])) for atom in missing]
        growth = sum(len(target_words) - len(source_words) for target_words, source_words in words)
        is_longer = len(find_words(other)) > len(find_words(target)) + max(growth, 0)
        if is_longer or len(sentence.find_atoms(other)[1]) == len(missing) or find_loop(source, other):
            return target
        self.counts["num_forced"] += 1
        return other

    def _align(self, sentences: Sequence[Sentence], targets: Sequence[str]) -> list[Links]:
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


class PivotGenerator(TextStream):
    """Two generators, of which the second one reads the targets of the first: German to English, then English to French."""

    def __init__(self, first: Generator, second: Generator):
        self.generators = [first, second]

    def num_targets(self, **options) -> int:
        return self.generators[1].num_targets(**options)

    def generate_stream(
        self, lines: Iterable[str], *, split_sentences: bool | str = False, chunk_size: int, **options
    ) -> Iterator[list[ScoredText]]:
        first, second = self.generators
        first_options = options_of_first(options) | {"return_scores": False, "risk": None, "show_progress": False}
        rows = first.generate_stream(lines, split_sentences=split_sentences, chunk_size=chunk_size, **first_options)
        sources = (row[0].text for row in rows)
        # A language of `split_sentences` is that of the input.
        options |= {"split_sentences": bool(split_sentences), "chunk_size": chunk_size}
        return second.generate_stream(sources, **options)

    def log_counts(self, num_sources: int) -> None:
        for generator in self.generators:
            generator.log_counts(num_sources)


def load_pivot(arguments: argparse.Namespace, loading: dict[str, Any]) -> PivotGenerator:
    """Load the models of `--pivot`. Raises `MetaphraseError` if other options do not fit."""
    names = ("ensemble", "assistant_model", "glossary", "source_lang", "target_lang", "source_prefix")
    refused = {name: getattr(arguments, name) for name in names} | {"num_processes": arguments.num_processes > 1}
    if names := [name for name, value in refused.items() if value]:
        raise MetaphraseError(f"`{names[0]}` must be left out with `pivot`, which has two models of a pair each.")
    return PivotGenerator(*(Generator.from_pretrained([n], **loading) for n in (arguments.model, arguments.pivot)))


def options_of_first(options: dict) -> dict:
    """Return the generation options of a model whose targets another one reads: one for each source, in its own language."""
    refused = ("must_contain", "never_contain")
    return {name: value for name, value in options.items() if name not in refused} | {"num_return_sequences": 1}


def generate_whole_texts(arguments: argparse.Namespace, options: dict, load: Callable[..., Any]) -> None:
    """Write the target of a page, of a file of a known format, or of lines with terms, into the output, and log counts."""
    refused = {name: getattr(arguments, name) for name in ("ensemble", "mbr_candidates", "resume", "shard", "n_best")}
    refused["num_return_sequences"] = options.get("num_return_sequences", 1) > 1
    refused |= {"num_processes": arguments.num_processes > 1, "engine": arguments.engine == "ctranslate2"}
    if names := [name for name, value in refused.items() if value]:
        raise MetaphraseError(f"--format, --file, --keep and --glossary need one torch model. Leave out `{names[0]}`.")
    if arguments.file is not None:
        suffix, output = Path(arguments.file).suffix, arguments.output
        if arguments.input is not None or arguments.format != "text":
            raise MetaphraseError("`input` and `format` must be left out with `file`, whose suffix tells the format.")
        if output is None or Path(output).suffix.lower() != suffix.lower():
            raise MetaphraseError(f"`output` must be a file that ends in {suffix} as `file` does, got {output!r}.")
        Path(output).parent.stat()  # A missing folder is an error before any work.
    terms = Terms(arguments.keep, None if arguments.glossary is None else read_glossary(arguments.glossary))
    file = None if arguments.file is None else read_file(str(arguments.file), Path(arguments.file).read_bytes())
    is_page = arguments.format != "text"
    lines = iterate_lines(arguments.input, arguments.max_line_characters) if file is None else file.texts
    if is_page:
        lines = iter(["\n".join(lines)])
    split_sentences = arguments.split_sentences or is_page or file is not None
    layout = {"text_format": arguments.format if file is None else "xml", "has_lines": file is not None}
    with load(arguments, options) as generator:
        decoders = []
        for part in getattr(generator, "generators", [generator]):
            decoders.append(TextDecoder(part, terms=terms, split_sentences=split_sentences, **layout))
            # A language of `--split_sentences` is that of the input.
            split_sentences = bool(split_sentences)

        def generate(texts: list[str]) -> list[str]:
            for decoder in decoders[:-1]:
                texts = decoder.decode(texts, **options_of_first(options))
            return decoders[-1].decode(texts, **options)

        targets = (target for chunk in read_chunks(lines, arguments.chunk_size) for target in generate(chunk.texts))
        if file is not None:
            with file_in_one_step(Path(arguments.output)) as path:
                path.write_bytes(file.fill(list(targets)))
        else:
            with OutputFile(arguments.output) as output:
                for target in targets:
                    output.write(target + "\n" if is_page else as_lines([target]))
                output.finish()
    for decoder in decoders:
        decoder.generator.log_counts(decoder.counts["num_sentences"])
    counts = sum((decoder.counts for decoder in decoders), Counter())
    logger.info("Sentences: %d.", counts["num_sentences"])
    for name, text in (
        ("num_cut", "Sentences that were too long and were cut between clauses: %d."),
        ("num_forced", "Sentences generated again, so that they contain their terms: %d."),
        ("num_placed", "In %d places the model left out a term, which attention put in. Check the sentences below."),
    ):
        if counts[name]:
            logger.warning(text, counts[name])
    for sentence in [sentence for decoder in decoders for sentence in decoder.placed][:_MAX_SHOWN]:
        logger.warning("  %s", sentence)
