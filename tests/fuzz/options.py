"""Cases with options of any value, and with the same options in another form."""

import functools
import random
from collections.abc import Iterator
from pathlib import Path

from cases import VALUES, Case, Result, write_world
from recipes import BASE, train_words
from tiny_generator import SOURCES, save_generator, tiny_generator

from metaphrase.scripts.parsers import make_parser

# Their values are work that a user has chosen, other outputs, or other processes.
LEFT_OUT = ("length", "new_tokens", "num_processes", "output", "predictions", "token", "revision", "help", "quiet")
LEFT_OUT += ("verbose", "mbr_candidates", "num_return_sequences", "repo_id")
PAIR_VERBS = ("backtranslate", "distill", "filter")
MANY = 1000
DEVICES = ["meta", "cuda", "cuda:0", "cuda:99", "cuda:-1", "mps", "xpu", "npu", "hpu", "cpu:0", "cpu:1", "CPU"]
# Numbers as other programs write them, infinities, and numbers beyond those of a float.
ODD = ["-inf", "1e400", "1e-320", "-1e-320", "1e-9", "1000", "0x10", "1_0", "\u0661", "1,5", " 1", "+1", "1.0", "nan%"]
# Options that give others an effect.
SEARCHES = [[], ["--num_beams", "3"], ["--do_sample", "1"]]
SEARCHES += [["--num_beams", "3", "--num_return_sequences", "2"]]
SEARCHES += [["--engine", "ctranslate2", "--num_beams", "2"], ["--num_beams", "2", "--do_sample", "1"]]


def cases(seed: int, number: int, folder: Path) -> Iterator[Case]:
    """Yield command lines of all verbs, with a few options of random values."""
    rng = random.Random(seed)
    write_world(folder)
    pairs, model, bart = (str(folder / name) for name in ("pairs.tsv", "model", "bart"))
    base = {
        "generate": [model, "--input", str(folder / "in")],
        "evaluate": [model, "--file", pairs, "--source_column", "0", "--target_column", "1"],
        "attention": [model, "--source", SOURCES[0], "--format", "pharaoh"],
        "explain": [model, "--source", SOURCES[0]],
        "tokenize": ["--files", pairs],
        "average": [model, model],
        "export": [model, "--format", "ctranslate2"],
        "convert": [bart],
        "push": [model, "user/name", "--dry_run"],
        "backtranslate": [model, "--input", str(folder / "in")],
        "distill": [model, "--input", pairs],
        "filter": [pairs],
        "compare": [str(folder / "in")] * 2 + ["--target", str(folder / "in"), "--names", "a", "b"],
        "shortlist": [model, pairs],
    }
    for index in range(number):
        root, verb = folder / str(index), rng.choice([*base, "train"])
        root.mkdir()
        out = str(root / "out")
        words = [verb, *base[verb]] if verb != "train" else [*train_words(folder, BASE, root / "out"), "--dry_run"]
        if verb == "shortlist":
            words[1] = str(save_generator(tiny_generator(kind="byte_bpe"), root / "model"))
        if verb in ("export", "convert"):
            words.insert(2, out)
        elif verb in PAIR_VERBS:
            words += ["--output", f"{out}.tsv"]
        elif verb == "compare":
            words += ["--output", f"{out}.json"]
        elif verb not in ("push", "train", "shortlist"):
            words += ["--output", out]
        actions = [action for action in make_parser(verb)._actions if action.option_strings]
        actions = [action for action in actions if not any(part in str(action.option_strings) for part in LEFT_OUT)]
        drawn = rng.sample(actions, min(len(actions), rng.choice((1, 2, 3))))
        drawn += [action for action in actions if action.dest == "device" and rng.random() < 0.15]
        chosen = [word for action in drawn for word in option(action, rng)]
        check = None
        if verb in ("generate", "evaluate", "attention", "explain", "backtranslate", "distill"):
            known = {name for action in make_parser(verb)._actions for name in action.option_strings}
            searches = [search for search in SEARCHES if known.issuperset(search[::2])]
            chosen = [*rng.choice(searches), *chosen]
            has_lines = verb == "generate" and not {"--format", "--input", "--shard"} & set(chosen)
            check = functools.partial(check_targets, root / "out") if has_lines else None
        name = f"{verb} {' '.join(word[:40] for word in chosen)}"
        yield Case(name, [*words, *chosen], check=check)


def check_targets(path: Path, result: Result) -> str:
    """Return what is wrong with a file of targets: their number, or scores that are not finite."""
    if result.status != 0:
        return ""
    lines = path.read_bytes().decode("utf-8").split("\n")[:-1] if path.is_file() else []
    if len(lines) % len(SOURCES) or not lines:
        return f"{len(lines)} targets for {len(SOURCES)} sources"
    return next((line for line in lines if line.endswith((" ||| nan", " ||| inf", " ||| -inf"))), "")


def option(action, rng: random.Random) -> list[str]:
    """Return the words of an option with a random value."""
    name = rng.choice(action.option_strings)
    if action.nargs == 0:
        return [name]
    if action.choices and rng.random() < 0.8:
        # An export to ONNX takes a minute, most of it for imports and tracing.
        return [name, str(rng.choice([choice for choice in action.choices if choice != "onnx"]))]
    # Numbers of beams and groups take memory in proportion.
    is_size = any(part in action.dest for part in ("num_", "size", "top_k"))
    values = DEVICES if action.dest == "device" and rng.random() < 0.7 else VALUES + ODD
    values = [value for value in values if not (is_size and isinstance(value, int | float) and value > MANY)]
    return [name, *(str(rng.choice(values)) for _ in range(rng.choice((0, 1, 1, 1, 1, 2))))]
