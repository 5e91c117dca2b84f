"""Readers of public corpora, and the demo corpus.

| folder | corpus |
|---|---|
| `g2p_2021` | words and phonemes of SIGMORPHON 2021, task 1: `fre_train.tsv`, `fre_dev.tsv`, `fre_test.tsv` and so on |
| `java_cs` | functions in Java and C# of CodeXGLUE: `train.java`, `train.cs`, `valid.java` and so on |
| `multi30k_en_de` | Multi30k, task 1: `train.en`, `train.de`, `val.en`, `test_2016_flickr.en` and so on |
| `tatoeba_en_es` | sentences of Tatoeba: `en_es.tsv` |
"""

import random
from pathlib import Path

from metaphrase.demo.corpus import make_demo_corpus

Pairs = list[tuple[str, str]]
G2P_LANGUAGES = ("fre", "dut", "kor", "hun")
_HELD_OUT_SOURCES = 1000  # in each of validation and test


def make_demo(num_train: int) -> dict[str, Pairs]:
    """Return the splits of the demo corpus."""
    return make_demo_corpus(num_train=num_train)


def read_g2p(data_dir: Path, language: str, num_train: int | None = None) -> dict[str, Pairs]:
    """Return words with their phonemes."""
    files = {"train": "train", "validation": "dev", "test": "test"}
    splits = {split: _read_tsv(data_dir / f"g2p_2021/{language}_{file}.tsv") for split, file in files.items()}
    return _with_fewer(splits, num_train)


def read_functions(data_dir: Path, source: str, target: str) -> dict[str, Pairs]:
    """Return functions in two programming languages."""
    files = {"train": "train", "validation": "valid", "test": "test"}
    return _read_parallel(data_dir / "java_cs", files, source, target)


def read_multi30k(data_dir: Path) -> dict[str, Pairs]:
    """Return English and German captions."""
    files = {"train": "train", "validation": "val", "test": "test_2016_flickr"}
    return _read_parallel(data_dir / "multi30k_en_de", files, "en", "de")


def read_tatoeba(data_dir: Path, num_train: int | None = None) -> dict[str, Pairs]:
    """Return English and Spanish sentences. No source of validation and test occurs in training."""
    pairs = _read_tsv(data_dir / "tatoeba_en_es/en_es.tsv")
    targets: dict[str, list[str]] = {}
    for source, target in pairs:
        targets.setdefault(source, []).append(target)
    draw = random.Random(5)
    held_out = draw.sample(sorted(targets), 2 * _HELD_OUT_SOURCES)
    sources = {"validation": held_out[:_HELD_OUT_SOURCES], "test": held_out[_HELD_OUT_SOURCES:]}
    excluded = set(held_out)
    splits = {"train": [pair for pair in pairs if pair[0] not in excluded]}
    for split, texts in sources.items():
        splits[split] = [(source, draw.choice(targets[source])) for source in texts]
    return _with_fewer(splits, num_train)


def _read_tsv(path: Path) -> Pairs:
    return [tuple(line.split("\t")[:2]) for line in path.read_text("utf-8").splitlines()]


def _read_parallel(folder: Path, files: dict[str, str], source: str, target: str) -> dict[str, Pairs]:
    def read_side(file: str, side: str) -> list[str]:
        lines = (folder / f"{file}.{side}").read_text("utf-8").split("\n")[:-1]
        return [" ".join(line.split()) for line in lines]

    return {
        split: list(zip(read_side(file, source), read_side(file, target), strict=True)) for split, file in files.items()
    }


def _with_fewer(splits: dict[str, Pairs], num_train: int | None) -> dict[str, Pairs]:
    # A smaller subset is part of a larger subset.
    if num_train is None:
        return splits
    return {**splits, "train": random.Random(0).sample(splits["train"], len(splits["train"]))[:num_train]}
