"""Measures how often a model writes the terms that its sources ask for.

    metaphrase train train.tsv --augmentation.terms 0.3 --output_dir runs/terms
    python benchmarks/terms.py runs/terms --train train.tsv --test test.tsv --output terms.json

The model must have learned with `augmentation.terms`. In each test source, one word gets a term behind it: a word of
the reference, or another translation, which the model did not write by itself.
"""

import argparse
import json
from pathlib import Path
from random import Random

from machine import describe_machine
from sacrebleu.metrics import BLEU

from metaphrase.filtering.alignment import learn_terms
from metaphrase.filtering.rules import SPACED_WORD
from metaphrase.inference import Generator
from metaphrase.tokenization.texts import TERM_TOKENS

SEED = 1


def read_pairs(path: Path) -> list[tuple[str, ...]]:
    lines = path.read_text(encoding="utf-8").split("\n")
    return [tuple(line.split("\t")[:2]) for line in lines if "\t" in line]


def words_of(text: str) -> set[str]:
    return {word.casefold() for word in SPACED_WORD.findall(text)}


def mark(source: str, terms: dict[str, list[str]], is_wanted) -> tuple[str, str] | None:
    """Return a source with a term behind one of its words, and the term; None if no term is wanted.

    Args:
        source: The source.
        terms: Translations of each word.
        is_wanted: True for a translation that may be asked for.
    """
    options = [
        (match.end(), term)
        for match in SPACED_WORD.finditer(source)
        for term in terms.get(match.group().casefold(), ())
        if is_wanted(term)
    ]
    if not options:
        return None
    end, term = Random(f"{SEED} {source}").choice(options)
    opening, closing = TERM_TOKENS
    return f"{source[:end]} {opening} {term} {closing}{source[end:]}", term


def measure(generator: Generator, pairs: list, plain: list[str], terms: dict, name: str) -> dict:
    """Return shares of terms in the outputs, without and with the marks, and the BLEU of these sentences."""
    rows, sources, wanted = [], [], []
    for row, (source, target) in enumerate(pairs):
        written, reference = words_of(plain[row]), words_of(target)
        if name == "of the reference":
            marked = mark(source, terms, lambda term, reference=reference: term in reference)
        else:
            marked = mark(source, terms, lambda term, words=written | reference: term not in words)
        if marked is not None:
            rows.append(row)
            sources.append(marked[0])
            wanted.append(marked[1])
    outputs = generator.generate(sources, num_beams=4)
    references, before = ([side[row] for row in rows] for side in ([pair[1] for pair in pairs], plain))

    def share(texts: list[str]) -> float:
        return round(sum(term in words_of(text) for text, term in zip(texts, wanted, strict=True)) / len(texts), 4)

    return {
        "terms": name,
        "sentences": len(rows),
        "written_without_marks": share(before),
        "written_with_marks": share(outputs),
        "bleu_without_marks": round(BLEU().corpus_score(before, [references]).score, 2),
        "bleu_with_marks": round(BLEU().corpus_score(outputs, [references]).score, 2),
        "marks_in_outputs": sum(any(token in text for token in TERM_TOKENS) for text in outputs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument(
        "--train", type=Path, required=True, help=".tsv file of the training pairs, which give the terms"
    )
    parser.add_argument("--test", type=Path, required=True, help=".tsv file of test pairs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    pairs, generator = read_pairs(arguments.test), Generator.from_pretrained(arguments.model)
    terms = learn_terms(read_pairs(arguments.train))
    plain = generator.generate([source for source, _ in pairs], num_beams=4)
    names = ("of the reference", "that the model did not write")
    report = {
        "bleu": round(BLEU().corpus_score(plain, [[target for _, target in pairs]]).score, 2),
        "results": [measure(generator, pairs, plain, terms, name) for name in names],
        "machine": describe_machine(1),
    }
    text = json.dumps(report, indent=2, ensure_ascii=False)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
