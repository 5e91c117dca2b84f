"""Commands of which only the result is known: the drawing of a robot that carries out the actions.

Training has the actions of commands with up to 22 of them, and the drawings of most longer commands. A drawing does not tell the
actions: several sequences of actions leave the same one. `same_drawing` is a reward for `metaphrase train --reward`, and reads
the drawings from `drawings.json` in the working directory.
"""

import functools
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .commands import make_length_splits

FILE = "drawings.json"
# Squares that each action goes forward. A look leaves a mark.
STEPS = {"I_WALK": 1, "I_RUN": 2, "I_JUMP": 3}
TURNS = {"I_TURN_LEFT": 1j, "I_TURN_RIGHT": -1j}


def draw(actions: str) -> str:
    """Return the drawing of a robot that carries out the actions: its end, and how often each line was drawn."""
    place, heading, drawing = 0j, 1j, Counter()
    for action in actions.split():
        heading *= TURNS.get(action, 1)
        if action == "I_LOOK":
            drawing[place, heading] += 1
        for _ in range(STEPS.get(action, 0)):
            drawing[place, heading] += 1
            place += heading
    lines = sorted((*_square(start), *_square(towards), times) for (start, towards), times in drawing.items())
    return json.dumps([_square(place), _square(heading), lines])


def _square(number: complex) -> tuple[int, int]:
    return round(number.real), round(number.imag)


@functools.cache
def _drawings() -> dict[str, str]:
    return json.loads(Path(FILE).read_text(encoding="utf-8"))


def same_drawing(sources: Sequence[str], targets: Sequence[str], references: Sequence[str]) -> list[float]:
    """Return 1 for each target whose drawing is that of its command, and 0 for all others."""
    return [float(draw(target) == _drawings()[source]) for source, target in zip(sources, targets, strict=True)]


def write_drawings(folder: Path) -> None:
    """Write pairs and drawings.

    `train.tsv` has the actions of short commands. `results.tsv` has long commands with a placeholder as target, and some of the
    short ones. Both are validation pairs in equal parts, and the test pairs are long commands.
    """
    splits, rng = make_length_splits(), random.Random(3)
    short, long = splits["train"], splits["test_systematic"]
    rng.shuffle(long)
    test, validation, others = long[:1000], long[1000:1100], long[1100:]
    known = rng.sample(short, 1000)
    results = [(command, "I_LOOK") for command, _ in others + known]
    rng.shuffle(results)
    files = {"train": short, "validation": splits["validation"][:100] + validation, "test": test}
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in {**files, "results": results}.items():
        (folder / f"{name}.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs), "utf-8")
    drawings = {command: draw(actions) for command, actions in others + known}
    (folder / FILE).write_text(json.dumps(drawings), encoding="utf-8")
