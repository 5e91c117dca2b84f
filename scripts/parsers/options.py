"""Options of the command line that several verbs share: model and loading, generation.

Help and errors must come at once, so that this file imports no other room, torch or transformers at its top. A test compares the
names and defaults with those of the rooms.
"""

import argparse
import ast
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from metaphrase.scripts.parsers.console import VerbParser
from metaphrase.storage.generation_options import GENERATION_OPTIONS, complete_sampling

ENGINES = ("auto", "torch", "ctranslate2")
ENSEMBLE_MEANS = ("linear", "log_linear")
METRICS = ("bleu", "chrf", "chrf++", "ter", "rouge", "exact_match", "wer", "cer")
DEFAULT_BATCH_SIZE, DEFAULT_MAX_TOKENS_PER_BATCH, MAX_LINE_CHARACTERS = 64, 8192, 100_000
_LAST_PORT = 65_535
_LOADING_OPTIONS = {
    *("source_prefix", "max_source_length", "source_lang", "target_lang", "device", "dtype", "trust_remote_code"),
    *("ensemble_mean", "batch_size", "max_tokens_per_batch", "engine", "use_vmap"),
}


def parse_bool(word: str) -> bool:
    """Parse a truth value."""
    values = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)
    if word.lower() not in values:
        raise argparse.ArgumentTypeError(f"the value must be true or false, got {word!r}")
    return values[word.lower()]


def parse_bool_or_never(word: str) -> bool | str:
    """Parse a value of `early_stopping`."""
    return word if word == "never" else parse_bool(word)


def input_file(name: str) -> Callable[[str], str]:
    """Return a parser of the path of a file to read, for the option of this name.

    Raises:
        OSError: By the parser, if there is no such file.
    """

    def check(word: str) -> str:
        if not Path(word).exists():
            raise FileNotFoundError(f"`{name}` must be a file that exists, got {word!r}.")
        if Path(word).is_dir():
            raise IsADirectoryError(f"`{name}` must be a file, got the folder {word!r}.")
        return word

    return check


def model_name(name: str) -> Callable[[str], str]:
    """Return a parser of the folder or Hub id of a model, for the option of this name.

    Raises:
        OSError: By the parser, if there is no such folder and no model on the Hub can have the name.
    """

    def check(word: str) -> str:
        owner, *rest = word.split("/")
        is_path = word.startswith((".", "/", "~")) or len(rest) > 1
        if not Path(word).exists() and (is_path or (rest and Path(owner).is_dir())):
            hint = "" if is_path else f" The folder {owner!r} here has no {rest[0]!r}."
            raise FileNotFoundError(f"`{name}` must be a folder that exists, or a name on the Hub, got {word!r}.{hint}")
        if Path(word).is_file():
            raise FileNotFoundError(f"`{name}` must be a folder, got the file {word!r}.")
        return word

    return check


def output_path(word: str) -> str:
    """Parse the path of a file or folder to write."""
    if word == "-":
        raise argparse.ArgumentTypeError("the value must be a path, got '-'")
    return word


def layer_or_mean(word: str) -> int | None:
    """Parse a value of `layer`; `None` is the mean."""
    if word == "mean":
        return None
    if not word.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f"the value must be a whole number or mean, got {word!r}")
    return int(word)


def port(word: str) -> int:
    """Parse a port to listen on."""
    if not word.isdecimal() or int(word) > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"the value must be a whole number from 0 to {_LAST_PORT}, got {word!r}")
    return int(word)


def shard(word: str) -> tuple[int, int]:
    """Parse a part of the input: its number, from 1, and the number of parts; or `auto`."""
    if word == "auto":
        return _shard_of_task()
    numbers = re.fullmatch(r"(\d+)/(\d+)", word, re.ASCII)
    number, num_shards = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= number <= num_shards:
        raise argparse.ArgumentTypeError(f"the value must be K/N with K from 1 to N, or auto, got {word!r}")
    return number, num_shards


def _shard_of_task() -> tuple[int, int]:
    """Return the part of this task of a Slurm array, or of this process of a distributed run."""
    names = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "COUNT")]
    if names[0] in os.environ:
        number, first, last, count = (int(os.environ[name]) for name in names)
        # Some tasks of an array that are submitted again would take the parts of other tasks.
        if first > 1 or last - first + 1 != count:
            text = f"auto needs an array that counts from 0 or 1 without gaps, got {count} tasks from {first} to {last}"
            raise argparse.ArgumentTypeError(f"{text}; pass --shard K/N")
        return number - first + 1, count
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]) + 1, int(os.environ["WORLD_SIZE"])
    raise argparse.ArgumentTypeError("auto needs a Slurm array, or RANK and WORLD_SIZE, got neither; pass --shard K/N")


def column(word: str) -> str | int:
    """Parse a column: a number or a name."""
    return int(word) if word.isascii() and word.isdecimal() else word


def count_or_zero(word: str) -> int:
    """Parse a whole number of at least 0."""
    if not (word.isascii() and word.isdecimal()):
        raise argparse.ArgumentTypeError(f"the value must be a whole number of at least 0, got {word!r}")
    return int(word)


def add_model_options(parser: argparse.ArgumentParser, name: str = "model", **options) -> None:
    """Add the model, its languages and prefix, and a group for loading.

    Args:
        parser: Parser of a verb.
        name: Name of the argument for the model.
        **options: More arguments of `add_argument` for the model.
    """
    options = {"help": "folder or Hub id of any encoder-decoder model"} | options
    parser.add_argument(name, type=model_name(name), **options)
    for side in ("source", "target"):
        text = f"{side} language of a multilingual model, such as eng_Latn"
        parser.add_argument(f"--{side}_lang", metavar="CODE", help=text)
    parser.add_argument(
        "--source_prefix", default="", metavar="TEXT", help="text before every source, such as 'summarize: '"
    )
    group = add_loading_options(parser)
    group.add_argument("--seed", type=int, default=42, help="random seed for sampling [%(default)s]")


def add_loading_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add a group for loading."""
    group = parser.add_argument_group("loading")
    group.add_argument("--device", help="device to run on [the accelerator if there is one]")
    text = "type of the weights [%(default)s: as saved]; int8 and float16 are faster on a CPU"
    group.add_argument("--dtype", default="auto", help=text)
    text = "maximum tokens of a source, end of sequence included; longer sources are truncated and counted "
    text += "[none: a source that the model cannot read is an error]"
    group.add_argument("--max_source_length", type=int, metavar="INT", help=text)
    text = "run code that comes with the model or its tokenizer"
    group.add_argument("--trust_remote_code", action="store_true", help=text)
    return group


def add_batch_options(
    parser: argparse.ArgumentParser, engine: str, takes_models: bool = True
) -> argparse._ArgumentGroup:
    """Add a group with the other models of an ensemble, sizes of batches and the engine, with its default.

    Args:
        parser: Parser of a verb.
        engine: Default of the engine.
        takes_models: False if the verb has another option for several models.
    """
    group = parser.add_argument_group("ensemble, batches and engine")
    if takes_models:
        text = "more models for an ensemble with the first"
        group.add_argument("--ensemble", nargs="+", type=model_name("ensemble"), metavar="MODEL", help=text)
    text = "mean of probabilities or of log-probabilities [linear]"
    group.add_argument("--ensemble_mean", choices=ENSEMBLE_MEANS, help=text)
    add_engine_options(group, engine)
    return group


def add_engine_options(group: argparse._ArgumentGroup, engine: str) -> None:
    """Add sizes of batches and the engine, with its default."""
    for name, default, text in (
        ("batch_size", DEFAULT_BATCH_SIZE, "maximum sources in a batch"),
        ("max_tokens_per_batch", DEFAULT_MAX_TOKENS_PER_BATCH, "maximum source tokens in a batch, padding included"),
    ):
        group.add_argument(f"--{name}", type=int, default=default, help=f"{text} [%(default)s]")
    text = (
        "library that decodes [%(default)s]; auto: ctranslate2 where it is faster and writes the same tokens, else torch; "
        "ctranslate2 takes an exported folder, or converts a Metaphrase model first"
    )
    group.add_argument("--engine", default=engine, choices=ENGINES, help=text)
    text = (
        "select target tokens among those that vmap.txt in the folder of the model permits; see `metaphrase shortlist`"
    )
    group.add_argument("--use_vmap", action="store_true", help=text)


def add_score_options(parser: argparse._ActionsContainer, group: argparse._ActionsContainer) -> None:
    """Add the names of scores to a parser, and their options to a group."""
    text = f"scores: {', '.join(METRICS)} [bleu chrf]"
    parser.add_argument("--metrics", nargs="+", metavar="NAME", default=["bleu", "chrf"], help=text)
    group.add_argument("--bleu_tokenize", help="sacreBLEU's tokenizer [13a]; none for tokenized text")
    group.add_argument("--lowercase", action="store_true", help="ignore case, as sacreBLEU's -lc")


def add_stream_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of verbs that decode a file of any length."""
    add_line_option(group)
    text = "sources that are sorted and decoded together [%(default)s]"
    group.add_argument("--chunk_size", "--window", type=int, default=4096, help=text)
    text = "processes that decode chunks in parallel [%(default)s]; they share the cores of a CPU, or take the "
    text += "accelerators in turn"
    group.add_argument("--num_processes", type=int, default=1, help=text)
    add_shard_option(group)


def add_shard_option(parser: argparse._ActionsContainer) -> None:
    """Add the part of the input that one of several commands works on."""
    text = "work on part K of N of the input; cat joins the outputs; auto takes K and N from a Slurm array, or from RANK and "
    text += "WORLD_SIZE"
    parser.add_argument("--shard", type=shard, metavar="K/N|auto", help=text)


def add_output_options(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the output of a stream, and what becomes of an existing one.

    Args:
        parser: Parser of a verb.
        text: Help text of the output.
    """
    parser.add_argument("--output", type=file_or_standard_output, metavar="FILE", help=text)
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace an existing output")
    text = "resume a stopped run of the same command; start from scratch if there is no output yet"
    existing.add_argument("--resume", action="store_true", default=None, help=text)


def file_or_standard_output(word: str) -> str | None:
    """Parse the path of a file to write; `-` and `None` are standard output."""
    return None if word == "-" else word


def add_split_option(parser: argparse._ActionsContainer) -> None:
    """Add the option that decodes each sentence of a line alone."""
    text = "decode each sentence of a line alone, and keep the layout between them; LANG is the language of the lines, such "
    text += "as de [that of a multilingual tokenizer, or English]"
    parser.add_argument("--split_sentences", nargs="?", const=True, default=False, metavar="LANG", help=text)


def add_line_option(parser: argparse._ActionsContainer) -> None:
    """Add the limit of verbs that read texts."""
    text = "maximum characters of a line to read; a longer line is an error [%(default)s]"
    parser.add_argument("--max_line_characters", type=int, default=MAX_LINE_CHARACTERS, metavar="INT", help=text)


def split_words(words: Sequence[str], parser: VerbParser) -> tuple[list[str], list[str]]:
    """Return the words of a verb itself, and those that set fields of a recipe."""
    actions = {name: action for action in parser._actions for name in action.option_strings}
    verb_words, overrides = [], []
    for before, word in zip((None, *words), words, strict=False):
        # Recipe or files are the first words, or follow another word of the verb.
        is_value = not word.startswith("-") and (before in (None, *actions) or before in verb_words)
        (verb_words if is_value or word in actions else overrides).append(word)
    return verb_words, overrides


@functools.cache
def recipe_fields() -> tuple[str, ...]:
    """Return the names of all fields of a recipe.

    The names are read from the sources of the classes: importing the classes takes seconds.
    """
    library, rooms = Path(importlib.util.find_spec("transformers").origin).parent, Path(__file__).parents[2]
    files = {
        rooms / "training" / "recipe" / "fields.py": "OwnFields",
        library / "training_args.py": "TrainingArguments",
        library / "training_args_seq2seq.py": "Seq2SeqTrainingArguments",
    }
    names = []
    for path, class_name in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
        names += [node.target.id for node in body if isinstance(node, ast.AnnAssign)]
    return tuple(dict.fromkeys(names))


def chosen_models(arguments: argparse.Namespace) -> list[str]:
    """Return the names of all models, the first one in front."""
    return [arguments.model, *(arguments.ensemble or [])]


def chosen_loading_options(arguments: argparse.Namespace) -> dict:
    """Return arguments of `Generator.from_pretrained`."""
    return given_options(arguments, _LOADING_OPTIONS)


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """Add a group with all generation options."""
    group = parser.add_argument_group(
        "generation", "names and meanings are those of transformers' generate(); defaults are those of the model"
    )
    for name, option in GENERATION_OPTIONS.items():
        if option.type in (bool, str):
            convert, metavar = (parse_bool, "BOOL") if option.type is bool else (parse_bool_or_never, "BOOL|never")
            group.add_argument(f"--{name}", type=convert, nargs="?", const=True, metavar=metavar, help=option.help)
        else:
            group.add_argument(f"--{name}", type=option.type, metavar=option.type.__name__.upper(), help=option.help)


def chosen_generation_options(arguments: argparse.Namespace) -> dict:
    """Return the generation options given on the command line."""
    return complete_sampling(given_options(arguments, GENERATION_OPTIONS))


def given_options(arguments: argparse.Namespace, names) -> dict:
    """Return those of the options that have a value."""
    return {name: value for name, value in vars(arguments).items() if name in names and value is not None}
