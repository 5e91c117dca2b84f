"""Cases with a broken file of texts or pairs, for every verb that reads such files."""

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from cases import Case, mutate, write_world
from recipes import BASE, train_words
from tiny_generator import SOURCES, TARGETS, save_generator, tiny_generator

KINDS = ("tsv", "csv", "jsonl", "json", "parquet", "txt")
# Texts that are no mistake, but unusual. The time of attention grows with the square of their length.
ODD_TEXTS = [
    "",
    " ",
    "\u2028",
    "\x00",
    "\u202eabc",
    "e\u0301" * 40,
    "\U0001f9d1\u200d\U0001f680",
    '"',
    "a" * 2000,
    "b " * 900,
]


def write(path: Path, pairs: list[tuple[str, str]]) -> Path:
    """Write pairs, or for `.txt` the sources, by the suffix of the path."""
    rows = [{"source": source, "target": target} for source, target in pairs]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    text = {
        ".tsv": "".join(f"{source}\t{target}\n" for source, target in pairs),
        ".csv": "source,target\n" + "".join(f'"{source}","{target}"\n' for source, target in pairs),
        ".jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        ".json": json.dumps(rows),
        ".txt": "".join(f"{source}\n" for source, _ in pairs),
    }[path.suffix]
    path.write_text(text, encoding="utf-8")
    return path


def break_file(path: Path, pairs: list[tuple[str, str]], rng: random.Random) -> tuple[str, Path]:
    """Write pairs and break the file. Return the name of the fault, and the path, which may have changed."""
    kind = rng.choices(("bytes", "long line", "odd texts", "compressed", "folder"), (8, 2, 3, 3, 1))[0]
    if kind == "odd texts":
        texts = [rng.choice(ODD_TEXTS + SOURCES) for _ in range(2 * len(pairs))]
        return kind, write(path, list(zip(texts[::2], texts[1::2], strict=True)))
    if kind == "long line":
        length = rng.choice((2000, 101_000, 10**6))
        pairs = [*pairs, rng.choice(((rng.choice("a ") * length, "b"), ("a", "b" * length)))]
        return f"{kind} {length}", write(path, pairs)
    content = write(path, pairs).read_bytes()
    if kind == "bytes":
        kind, content = mutate(content, rng)
    elif kind == "compressed" and path.suffix != ".parquet":
        fault, content = rng.choice((("bomb", gzip.compress(b"a " * 10**7)), mutate(gzip.compress(content), rng)))
        kind, path = f"{kind} {fault}", path.with_name(path.name + ".gz")
    elif kind == "folder":
        path.unlink()
        path.mkdir()
        return kind, path
    path.write_bytes(content)
    return kind, path


# Each of them reads sources alone from a text file, others a file for each side.
VERBS_OF_TEXT = ("generate", "attention", "tokenize", "backtranslate", "compare")
VERBS = (*VERBS_OF_TEXT, "evaluate", "train", "distill", "filter", "shortlist")


def cases(seed: int, number: int, folder: Path) -> Iterator[Case]:
    """Yield command lines with a broken file of texts or pairs."""
    rng, pairs = random.Random(seed), list(zip(SOURCES, TARGETS, strict=True))
    model, whole = str(write_world(folder) / "model"), folder / "in"
    for index in range(number):
        root, verb = folder / str(index), rng.choice(VERBS)
        root.mkdir()
        out = str(root / "out")
        kind = "txt" if verb in VERBS_OF_TEXT else rng.choice(KINDS)
        fault, path = break_file(root / f"pairs.{kind}", pairs, rng)
        skips = [word for name in ("malformed", "invalid_utf8") for word in (f"--{name}", "skip")] * rng.randrange(2)
        two = [str(path), str(whole)] if kind == "txt" else [str(path)]
        if verb == "shortlist":
            two.insert(0, str(save_generator(tiny_generator(kind="byte_bpe"), root / "model")))
        other = ["--source", str(path), "--target", str(whole)] if kind == "txt" else ["--file", str(path)]
        train = train_words(folder, BASE, root / "run") + skips
        pair_files = ["--train_source_file", str(path), "--train_target_file", str(whole), "--train_file", "null"]
        words = {
            "generate": ["generate", model, "--input", str(path), "--output", out],
            "attention": ["attention", model, "--input", str(path), "--output", out, "--format", "pharaoh"],
            "tokenize": ["tokenize", "--files", str(path), "--output", out],
            "evaluate": ["evaluate", model, *other, *skips, "--output", out],
            "backtranslate": ["backtranslate", model, "--input", str(path), "--output", f"{out}.tsv"],
            "distill": ["distill", model, "--input", *other[1:], "--output", f"{out}.tsv"],
            "filter": ["filter", *(other if kind == "txt" else two), "--output", f"{out}.tsv"],
            "shortlist": ["shortlist", *two],
            "compare": ["compare", str(whole), str(path), "--target", str(whole), "--output", f"{out}.json"],
            "train": train + (pair_files if kind == "txt" else ["--train_file", str(path)]),
        }[verb]
        yield Case(f"{verb} {kind}: {fault}", words)
