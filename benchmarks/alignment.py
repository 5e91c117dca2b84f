"""Measures word alignment by attention of a demo model, on test sentences of known structure.

    python benchmarks/alignment.py runs/demo

The demo's grammar builds each sentence once and writes it in both languages, so the alignment of unique nouns, adjectives,
verbs and adverbs is known. The script aligns by each layer, and compares with a guess by position.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from machine import describe_machine

from metaphrase.demo.corpus import Sampler, split_of_sentence
from metaphrase.demo.grammar import (
    BE,
    CASES,
    HAVE,
    Adjective,
    Noun,
    Particle,
    Sentence,
    Verb,
    german_noun,
    german_present,
    third_person_singular,
    to_english,
    to_german,
)
from metaphrase.inference import Generator, alignment_error_rate, cross_attentions, word_alignment

Link = tuple[int, int]
ADJECTIVE_ENDINGS = ("e", "en", "em", "er", "es")


def items_of(part: object) -> Iterator[Noun | Adjective | Verb | Particle]:
    """Yield the content words of a sentence's structure."""
    if isinstance(part, Noun | Adjective | Particle) or (isinstance(part, Verb) and part not in (BE, HAVE)):
        yield part
    elif isinstance(part, tuple):
        for inner in part:
            yield from items_of(inner)
    elif dataclasses.is_dataclass(part) and not isinstance(part, Verb):
        for field in dataclasses.fields(part):
            yield from items_of(getattr(part, field.name))


def english_forms(item: Noun | Adjective | Verb | Particle) -> set[str]:
    match item:
        case Noun():
            forms = {item.english, item.plural or item.english}
            return forms | {form + "'s" for form in forms}
        case Verb():  # only the first word of *look for*
            return {form.split()[0] for form in (item.english, item.past, third_person_singular(item.english))}
    return {item.english.lstrip(", ")}


def german_forms(item: Noun | Adjective | Verb | Particle) -> set[str]:
    match item:
        case Noun():
            numbers = (False, True) if item.german_plural else (False,)
            return {german_noun(item, is_plural, case) for is_plural in numbers for case in CASES}
        case Adjective():
            return {item.german} | {item.stem + ending for ending in ADJECTIVE_ENDINGS}
        case Verb():
            particle = item.infinitive.rpartition("|")[0]
            present = {german_present(item, slot) for slot in range(4)}
            past = set(item.preterite_forms or ()) | {item.participle}
            return present | {particle + form for form in present} | past | {item.infinitive.replace("|", "")}
    return {item.german.lstrip(", ")}


def known_links(sentence: Sentence, english: str, german: str) -> list[Link]:
    """Return index pairs of English and German words, for items that are one unique word in both languages."""
    sides = [[word.strip(",.?").lower() for word in text.split()] for text in (english, german)]
    links = []
    for item in items_of(sentence):
        indices = [
            [index for index, word in enumerate(words) if word in {form.lower() for form in forms(item)}]
            for words, forms in zip(sides, (english_forms, german_forms), strict=True)
        ]
        if all(len(side) == 1 for side in indices):
            links.append((indices[0][0], indices[1][0]))
    # Drop words that match two items.
    for side in (0, 1):
        links = [link for link in links if sum(other[side] == link[side] for other in links) == 1]
    return sorted(links)


def sentences(split: str, count: int, seed: int) -> list[Sentence]:
    sampler, drawn = Sampler(seed), {}
    while len(drawn) < count:
        sentence = sampler.sentence()
        english = to_english(sentence)
        if split_of_sentence(sentence) == split and english not in drawn and len(english.split()) <= 18:
            drawn[english] = sentence
    return list(drawn.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder that `metaphrase demo` made")
    parser.add_argument("--count", type=int, default=1000, help="test sentences to draw [%(default)s]")
    parser.add_argument("--output", metavar="FILE", help="JSON file to write")
    arguments = parser.parse_args()
    generator = Generator.from_pretrained(arguments.model, device="cpu")
    drawn = sentences("test", arguments.count, seed=1)
    pairs = [(to_english(sentence), to_german(sentence)) for sentence in drawn]
    sure = [known_links(sentence, *pair) for sentence, pair in zip(drawn, pairs, strict=True)]
    sides = list(map(list, zip(*pairs, strict=True)))
    maps = cross_attentions(generator, *sides)

    def error_rate(predicted: list[list[Link]]) -> float:
        """Return the error rate in percent, over German words of known alignment."""
        known = [{target for _, target in links} for links in sure]
        links = [[link for link in row if link[1] in targets] for row, targets in zip(predicted, known, strict=True)]
        return round(100 * alignment_error_rate(links, sure, sure), 2)

    def diagonal(source: list[str], target: list[str]) -> list[Link]:
        return [(min(index * len(source) // len(target), len(source) - 1), index) for index in range(len(target))]

    rates = {"guess by place": error_rate([diagonal(m.source_words, m.target_words) for m in maps])}
    rates["all layers"] = error_rate(list(map(word_alignment, maps)))
    for layer in range(generator.model.config.decoder_layers):
        rates[f"layer {layer}"] = error_rate(
            list(map(word_alignment, cross_attentions(generator, *sides, layer=layer)))
        )
    result = {
        "alignment_error_rate_percent": rates,
        "sentences": len(pairs),
        "links": sum(map(len, sure)),
        "words_of_the_targets": int(np.sum([len(m.target_words) for m in maps])),
        "machine": describe_machine(torch.get_num_threads()),
    }
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    if arguments.output:
        Path(arguments.output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
