"""Split a file of English-Spanish pairs for the pipeline: `python prepare.py en_es.tsv runs/pipeline/data`.

No source of the validation and test pairs occurs in another file, and no target of them in the Spanish text.
"""

import random
import sys
from pathlib import Path

NUM_VALIDATION, NUM_TEST, NUM_SMALL, NUM_TEXTS = 500, 2000, 10_000, 100_000


def main() -> None:
    rows = [line.split("\t") for line in Path(sys.argv[1]).read_text("utf-8").split("\n") if "\t" in line]
    pairs = [(row[0], row[1]) for row in rows]
    folder, draw = Path(sys.argv[2]), random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    targets: dict[str, list[str]] = {}
    for source, target in pairs:
        targets.setdefault(source, []).append(target)
    held_out = draw.sample(sorted(targets), NUM_VALIDATION + NUM_TEST)
    scored = [(source, draw.choice(targets[source])) for source in held_out]
    excluded_sources = set(held_out)
    excluded_targets = {target for source in held_out for target in targets[source]}
    train = [pair for pair in pairs if pair[0] not in excluded_sources]
    small = draw.sample(train, NUM_SMALL)
    known = {target for _, target in small} | excluded_targets
    texts = [text for text in dict.fromkeys(target for _, target in train) if text not in known]
    splits = {"validation": scored[:NUM_VALIDATION], "test": scored[NUM_VALIDATION:], "train": train, "small": small}
    for name, split in splits.items():
        write(folder / f"{name}.tsv", ["\t".join(pair) for pair in split])
        write(folder / f"{name}_reverse.tsv", ["\t".join(reversed(pair)) for pair in split])
    write(folder / "text.es", draw.sample(texts, min(NUM_TEXTS, len(texts))))
    for side, language in enumerate(("en", "es")):
        write(folder / f"test.{language}", [pair[side] for pair in splits["test"]])


def write(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
