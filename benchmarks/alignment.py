"""How well words are aligned by the attention of a model of the demo, on test sentences whose structure is known.

The grammar of the demo builds each sentence once and says it in both languages, so for nouns, adjectives, verbs and adverbs that
occur once it is known which German word stands for which English one. `python benchmarks/alignment.py runs/demo` aligns
sentences of the test split by every layer, and compares with a guess by place.
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

from metaphrase.demo.corpus import split_of_sentence
from metaphrase.demo.english import third_person_singular, to_english
from metaphrase.demo.german import german_noun, german_present, to_german
from metaphrase.demo.grammar import Adjective, Case, Noun, Particle, Sentence, Verb
from metaphrase.demo.lexicon import BE, HAVE
from metaphrase.demo.sampler import Sampler
from metaphrase.inference import Generator, alignment_error_rate, cross_attentions, word_alignment

Link = tuple[int, int]
ADJECTIVE_ENDINGS = ("e", "en", "em", "er", "es")


def items_of(part: object) -> Iterator[Noun | Adjective | Verb | Particle]:
    """The words of a sentence's structure that mean something by themselves."""
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
        case Verb():  # of *look for* the first word
            return {form.split()[0] for form in (item.english, item.past, third_person_singular(item.english))}
    return {item.english}


def german_forms(item: Noun | Adjective | Verb | Particle) -> set[str]:
    match item:
        case Noun():
            numbers = (False, True) if item.german_plural else (False,)
            return {german_noun(item, is_plural, case) for is_plural in numbers for case in Case}
        case Adjective():
            return {item.german} | {item.stem + ending for ending in ADJECTIVE_ENDINGS}
        case Verb():
            particle = item.infinitive.rpartition("|")[0]
            present = {german_present(item, slot) for slot in range(4)}
            past = set(item.preterite_forms or ()) | {item.participle}
            return present | {particle + form for form in present} | past | {item.infinitive.replace("|", "")}
    return {item.german}


def known_links(sentence: Sentence, english: str, german: str) -> list[Link]:
    """Pairs of places of an English and a German word, of items that each language says in one word, once."""
    sides = [[word.strip(",.?").lower() for word in text.split()] for text in (english, german)]
    items = list(items_of(sentence))
    found = []
    for item in items:
        places = [
            [place for place, word in enumerate(words) if word in {form.lower() for form in forms(item)}]
            for words, forms in zip(sides, (english_forms, german_forms), strict=True)
        ]
        if all(len(side) == 1 for side in places):
            found.append((places[0][0], places[1][0]))
    # A word that two items claim says nothing of either.
    for side in (0, 1):
        found = [link for link in found if sum(other[side] == link[side] for other in found) == 1]
    return sorted(found)


def sentences(split: str, count: int, seed: int) -> list[Sentence]:
    sampler, found, seen = Sampler(seed), [], set()
    while len(found) < count:
        sentence = sampler.sentence()
        english = to_english(sentence)
        if split_of_sentence(sentence) == split and english not in seen and len(english.split()) <= 18:
            seen.add(english)
            found.append(sentence)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder that `metaphrase demo` made")
    parser.add_argument("--count", type=int, default=1000, help="test sentences to draw [%(default)s]")
    parser.add_argument("--output", metavar="FILE", help="where to write the results")
    arguments = parser.parse_args()
    generator = Generator.from_pretrained(arguments.model, device="cpu")
    drawn = sentences("test", arguments.count, seed=1)
    pairs = [(to_english(sentence), to_german(sentence)) for sentence in drawn]
    sure = [known_links(sentence, *pair) for sentence, pair in zip(drawn, pairs, strict=True)]
    maps = cross_attentions(generator, *map(list, zip(*pairs, strict=True)), keep_heads=True)

    def error_rate(predicted: list[list[Link]]) -> float:
        """On those German words alone whose English word is known."""
        known = [{target for _, target in links} for links in sure]
        kept = [[link for link in links if link[1] in known[index]] for index, links in enumerate(predicted)]
        return round(100 * alignment_error_rate(kept, sure, sure), 2)

    def diagonal(source: list[str], target: list[str]) -> list[Link]:
        return [(min(place * len(source) // len(target), len(source) - 1), place) for place in range(len(target))]

    rates = {"guess by place": error_rate([diagonal(m.source_words, m.target_words) for m in maps])}
    for layer in (None, *range(maps[0].head_weights.shape[0])):
        axes = (0, 1) if layer is None else 0
        chosen = [
            dataclasses.replace(m, weights=(m.head_weights if layer is None else m.head_weights[layer]).mean(axes))
            for m in maps
        ]
        rates["all layers" if layer is None else f"layer {layer}"] = error_rate([word_alignment(m) for m in chosen])
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
