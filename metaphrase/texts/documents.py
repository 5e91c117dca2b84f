"""Whole texts: sentences to generate from, the layout between them, and targets that repeat themselves."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import sentencex
from torch.nn import Module

from metaphrase.inference.batches import Hypothesis, longest_source
from metaphrase.inference.generator import Document, EncodedTexts, Generator, Plan

_GAP = re.compile(r"\s+")
# White space with one of these ends a line, or parts its columns.
_BREAK = re.compile(r"[\n\r\t\v\f\x1c-\x1f\x85\u2028\u2029]")
# Indentation, and marks of lists, quotes and headings.
_MARKS = re.compile(r"\s*(?:(?:[-*+•‣▪◦–—·]|#{1,6}|>+|\(?\d{1,3}[.)]|\(?[A-Za-z]\))\s+)*")
_SPACE = re.compile(r"\s")
_HAS_TEXT = re.compile(r"[^\W_]")
# Places to cut a sentence that is too long, the best first: behind marks of a clause, then between words, then anywhere.
_CUTS = (
    re.compile(r"(?<=[;:])\s+|(?<=[；：])"),
    re.compile(r"(?<=[,،])\s+|(?<=[，、])|(?<!\s)\s+(?=[–—(])"),
    re.compile(r"\s+"),
)
_Part = tuple[bool, str]  # True and a sentence, or False and layout
# ISO 639-1 code, ISO 639-3 code (as in NLLB's tokenizer), English name, and a sentence for a few languages.
LANGUAGES = [line.split("\t") for line in Path(__file__).with_name("languages.tsv").read_text("utf-8").splitlines()]
_SHORT = {long: code for code, long, *_ in LANGUAGES}


def base_code(code: str) -> str:
    """Return the language of a code without script and region, in two letters where they exist: en for EN-US and eng_Latn."""
    base = code.strip().replace("_", "-").split("-")[0].lower()
    return _SHORT.get(base, base)


def split_texts(
    generators: Sequence[Generator], texts: list[str], split_sentences: bool | str, has_lines: bool = True
) -> tuple[list[Document], int]:
    """Return the sentences and the layout of texts, and the number of sentences that were too long and were cut.

    `Document.join` of the sentences returns the text, character by character. The splitter is sentencex. Its rules and
    abbreviations cover some 300 languages. An unknown language gets the rules of English.

    Args:
        split_sentences: A language; True for that of a multilingual tokenizer, or else English; False for the whole texts.
        has_lines: False if a line break is a space, and no mark of a list begins a line.
    """
    if not split_sentences:
        return [Document([text], ["", ""]) if text.strip() else Document() for text in texts], 0
    if not isinstance(split_sentences, str):
        split_sentences = getattr(generators[0].tokenizers.source, "src_lang", None) or "en"
    language = base_code(split_sentences)

    def find_long(texts: list[str]) -> list[bool]:
        is_long = [False] * len(texts)
        for generator in generators:
            limits = [generator.max_source_length, longest_source(generator.model)]
            if limits := [limit for limit in limits if limit is not None]:
                lengths = map(len, generator.encode_uncut(texts))
                is_long = [flag or length > min(limits) for flag, length in zip(is_long, lengths, strict=True)]
        return is_long

    find_parts = _find_parts if has_lines else _find_sentences
    rows = [list(find_parts(text, language)) for text in texts]
    long = find_long([part for row in rows for is_sentence, part in row if is_sentence])
    flags, documents = iter(long), []
    for row in rows:
        documents.append(Document())
        for is_sentence, part in row:
            pieces = [(is_sentence, part)]
            if is_sentence and next(flags):
                pieces = [stripped for piece in _halve(part, find_long) for stripped in _strip(piece)]
            for is_text, piece in pieces:
                if is_text:
                    documents[-1].sentences.append(piece)
                    documents[-1].layout.append("")
                else:
                    documents[-1].layout[-1] += piece
    return documents, sum(long)


def _find_parts(text: str, language: str) -> Iterator[_Part]:
    start = 0
    gaps = [gap for gap in _GAP.finditer(text) if _BREAK.search(gap.group())]
    for gap in [*gaps, None]:
        line = text[start : gap.start() if gap else None]
        marks = _MARKS.match(line).group()
        yield False, marks
        yield from _find_sentences(line[len(marks) :], language)
        if gap:
            yield False, gap.group()
            start = gap.end()


def _find_sentences(line: str, language: str) -> Iterator[_Part]:
    end = 0
    # sentencex fails on some white space other than a plain space.
    for part in sentencex.segment(language, _SPACE.sub(" ", line)):
        start, end = end, end + len(part)
        yield from _strip(line[start:end])


def _strip(text: str) -> Iterator[_Part]:
    """Yield a text with the white space around it as layout. A text without letters and digits is layout as a whole."""
    if not _HAS_TEXT.search(text):
        yield False, text
        return
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    yield from ((False, text[:start]), (True, text[start:end]), (False, text[end:]))


def _halve(text: str, find_long: Callable[[list[str]], list[bool]]) -> Iterator[str]:
    """Cut a text near its middle, and each part again while it is too long."""
    if len(text) < 2:
        yield text
        return
    third, middle = len(text) // 3, len(text) // 2
    offsets = ([match.end() for match in pattern.finditer(text)] for pattern in _CUTS)
    inside = ([offset for offset in row if third <= offset <= len(text) - third] for row in offsets)
    cut = next((min(row, key=lambda offset: abs(offset - middle)) for row in inside if row), middle)
    parts = [text[:cut], text[cut:]]
    for part, is_long in zip(parts, find_long(parts), strict=True):
        yield from _halve(part, find_long) if is_long else [part]


_LOOP = re.compile(r"(\S.{0,79}?)(?:\s*\1){3,}", re.DOTALL)
_SHORTEST_LOOP = 12  # dots and laughter are no loops


def find_loop(source: str, target: str) -> str | None:
    """Return a part of a target that follows itself three times or more, if the source has no such part."""
    match = next((match for match in _LOOP.finditer(target) if len(match.group()) >= _SHORTEST_LOOP), None)
    return match.group(1) if match and not _LOOP.search(source) else None


def end_loops(generator: Generator, plan: Plan, encoded: EncodedTexts, hypotheses: list[list[Hypothesis]]) -> None:
    """Replace the hypotheses of sentences whose best target repeats itself, if others do not."""
    sentences = [sentence for document in encoded.documents for sentence in document.sentences]

    def find_looping(rows: Mapping[int, list[Hypothesis]]) -> list[int]:
        targets = generator.tokenizers.decode_targets([best.ids for best, *_ in rows.values()])
        return [i for i, target in zip(rows, targets, strict=True) if find_loop(sentences[i], target)]

    looping = find_looping(dict(enumerate(hypotheses)))
    if not looping:
        return
    # Now no phrase of three tokens may stand in a target twice.
    options = {"no_repeat_ngram_size": 3, "renormalize_logits": not isinstance(generator.model, Module)}
    again = replace(plan, options=plan.options | options)
    part = EncodedTexts([[ids[i] for i in looping] for ids in encoded.ids], [], {})
    rows = dict(zip(looping, generator.generate_encoded(again, part), strict=True))
    still_looping = find_looping(rows)
    for i in {*looping} - {*still_looping}:
        hypotheses[i], rows[i] = rows[i], hypotheses[i]
    # The hypotheses that are left out count no longer.
    num_unfinished = sum(not hypothesis.is_finished for row in rows.values() for hypothesis in row)
    counts = {"num_loops": len(looping), "num_looping": len(still_looping), "num_unfinished": -num_unfinished}
    generator.count(counts)
