"""Types of options, options that several subcommands share, and those of the core. This file imports no heavy library.

A type parses a word, and gives its name to the help. The docstring of a subcommand's function is its summary.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metaphrase.storage.generation_options import GENERATION_OPTIONS

# A parser, or a group of its options.
Options = Any


def check(is_valid: object, text: str, word: str) -> None:
    if not is_valid:
        raise argparse.ArgumentTypeError(f"must be {text}, got {word!r}")


def boolean(word: str) -> bool:
    values = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)
    check(word.lower() in values, "true or false", word)
    return values[word.lower()]


def boolean_or_never(word: str) -> bool | str:
    """Parse a value of `early_stopping`."""
    return word if word == "never" else boolean(word)


def count(word: str) -> int:
    check(re.fullmatch(r"\d+", word, re.ASCII), "a whole number of at least 0", word)
    return int(word)


def file(word: str) -> str:
    check(Path(word).exists() and not Path(word).is_dir(), "a file that exists", word)
    return word


def path(word: str) -> str:
    check(word not in ("", "-"), "a path", word)
    return word


def path_or_dash(word: str) -> str | None:
    """Parse a file to write; None is standard output."""
    return None if word == "-" else word


def model(word: str) -> str:
    is_path = word.startswith((".", "/", "~")) or word.count("/") > 1
    is_valid = Path(word).is_dir() if is_path else not Path(word).is_file()
    check(is_valid, "a folder that exists, or a name on the Hub", word)
    return word


def column(word: str) -> int | str:
    return int(word) if word.isascii() and word.isdecimal() else word


def part(word: str) -> tuple[int, int]:
    """Parse a part of the input: its number, from 1, and the number of parts."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", word, re.ASCII)
    number, num_parts = map(int, numbers.groups()) if numbers else (0, 0)
    check(1 <= number <= num_parts, "K/N with K from 1 to N", word)
    return number, num_parts


def repo_id(word: str) -> str:
    check("/" in word, "user/name or organization/name", word)
    return word


_COLUMN = "column of {}s in a file of pairs: a name, or a number from 0 in a .tsv file"
_SPLIT = (
    "decode each sentence of a line alone, and keep the layout between them; LANG is the language of the lines, such "
    "as de [that of a multilingual tokenizer, or English]"
)
_USE_VMAP = "select among the target tokens that vmap.txt of the model permits; see `metaphrase shortlist`"
_METRICS = "scores: bleu, chrf, chrf++, ter, rouge, exact_match, wer, cer [bleu chrf]"
_ENGINES = {"choices": ("auto", "torch", "ctranslate2")}
# Type, default, help and, if needed, more arguments of `add_argument`. The type bool is a switch.
_SHARED: dict[str, tuple] = {
    "device": (str, None, "device to run on [the accelerator if there is one]"),
    "dtype": (str, "auto", "type of the weights [auto: as saved]; int8 is faster on a CPU"),
    "max_source_length": (int, None, "maximum tokens of a source; longer ones are truncated and counted [none]"),
    "trust_remote_code": (bool, False, "run code that comes with the model or its tokenizer"),
    "seed": (int, 42, "random seed for sampling"),
    "source_column": (column, None, _COLUMN.format("source")),
    "target_column": (column, None, _COLUMN.format("target")),
    "weight_column": (column, None, _COLUMN.format("weight") + ", which the output keeps"),
    "source_lang": (str, None, "source language of a multilingual model, such as eng_Latn", {"metavar": "CODE"}),
    "target_lang": (str, None, "target language of a multilingual model, such as eng_Latn", {"metavar": "CODE"}),
    "source_prefix": (str, "", "text before every source, such as 'summarize: '"),
    "resume": (bool, False, "resume a stopped run of the same command, or start one"),
    "max_line_characters": (int, 100_000, "most characters of a line; a longer line is an error"),
    "shard": (part, None, "work on part K of N of the input; cat joins the outputs", {"metavar": "K/N"}),
    "ensemble": (model, None, "more models for an ensemble with the first", {"nargs": "+"}),
    "batch_size": (int, 64, "maximum sources in a batch"),
    "max_tokens_per_batch": (int, 8192, "maximum source tokens in a batch, padding included"),
    "engine": (str, "auto", "library that decodes; auto: the faster one", _ENGINES),
    "use_vmap": (bool, False, _USE_VMAP),
    "num_processes": (int, 1, "processes that decode chunks in parallel, on cores or accelerators"),
    "split_sentences": (str, False, _SPLIT, {"metavar": "LANG", "nargs": "?", "const": True}),
    "bleu_tokenize": (str, None, "sacreBLEU's tokenizer [13a]; none for tokenized text"),
    "lowercase": (bool, False, "ignore case, as sacreBLEU's -lc"),
    "metrics": (str, ["bleu", "chrf"], _METRICS, {"metavar": "NAME", "nargs": "+"}),
    "max_shard_size": (str, "5GB", "maximum size of a file of weights, such as 500MB", {"metavar": "SIZE"}),
}
COLUMNS = ("source_column", "target_column")
LANGUAGES = ("source_lang", "target_lang", "source_prefix")
LOADING = ("device", "dtype", "max_source_length", "trust_remote_code")
ENGINE = ("batch_size", "max_tokens_per_batch", "engine", "use_vmap")
SCORING = ("bleu_tokenize", "lowercase")


def add_shared(options: Options, *names: str) -> None:
    """Add options that several subcommands share, by name."""
    for name in names:
        kind, default, text, *more = _SHARED[name]
        settings: dict[str, Any] = {"action": "store_true"} if kind is bool else {"default": default}
        if kind not in (bool, str):
            settings["type"] = kind
        options.add_argument(f"--{name}", help=text, **settings, **(more[0] if more else {}))


def add_overwrite(options: Options, what: str) -> None:
    options.add_argument("--overwrite", action="store_true", help=f"replace an existing {what}")


def add_model(options: Options, name: str = "model", **settings: Any) -> None:
    settings = {"help": "folder or Hub id of any encoder-decoder model"} | settings
    options.add_argument(name, type=model, **settings)


def add_loaded_model(parser: argparse.ArgumentParser, name: str = "model", **settings: Any) -> None:
    """Add a model that reads single texts, its languages, and how it is loaded."""
    add_model(parser, name, **settings)
    add_shared(parser, *LANGUAGES)
    add_shared(parser.add_argument_group("loading"), *LOADING, "seed")


def add_stream(options: Options, inputs: str, output: str) -> None:
    """Add input and output of a subcommand that writes one line or more for each line that it reads."""
    add = options.add_argument
    add("--input", type=file, help=f"{inputs} [standard input]")
    add("--output", type=path_or_dash, metavar="FILE|-", help=output)
    add_overwrite(options, "output")
    add_shared(options, "resume")


def add_batches(parser: argparse.ArgumentParser, *before: str) -> Options:
    """Add how a subcommand of `add_stream` decodes, in a group with more options before, and return the group."""
    group = parser.add_argument_group("ensemble, batches and engine")
    add_shared(group, *before, *ENGINE, "max_line_characters")
    text = "sources that are sorted and decoded together"
    group.add_argument("--chunk_size", "--window", type=int, default=4096, help=text)
    add_shared(group, "num_processes", "shard")
    return group


_JUDGE = "a folder or Hub id of a MetricX model, or package.module:function"


def add_judges(options: Options) -> None:
    """Add scores by a model or a function."""
    options.add_argument("--metric", metavar="NAME", nargs="+", default=[], help=f"more scores: {_JUDGE}")


def add_judge(options: Options, purpose: str, name: str = "--metric") -> None:
    """Add one score by a model or a function."""
    options.add_argument(name, metavar="NAME", help=f"{purpose}: {_JUDGE}")


def add_generation(parser: argparse.ArgumentParser) -> Options:
    """Add the options of `generate()` in a group of their own, and return the group."""
    types: dict[type, Callable[[str], Any]] = {bool: boolean, str: boolean_or_never, int: int, float: float}
    group = parser.add_argument_group("generation")
    for name, option in GENERATION_OPTIONS.items():
        # A truth value may stand alone.
        alone: dict[str, Any] = {"nargs": "?", "const": True} if option.type in (bool, str) else {}
        alone |= {"metavar": "BOOLEAN|never"} if option.type is str else {}
        group.add_argument(f"--{name}", type=types[option.type], help=option.help, **alone)
    return group


def train(parser: argparse.ArgumentParser) -> None:
    """Train a model by a recipe, or from files of pairs alone."""
    parser.usage = "%(prog)s [recipe] [option ...] [--field value ...]"
    add = parser.add_argument
    text = "recipe (file or name), one or two files of pairs, or a data set (folder or OWNER/NAME)"
    add("recipe", nargs="*", help=text)
    add("--help_fields", action="store_true", help="list all fields of a recipe and exit")
    add("--resume", action="store_true", help="resume from the last checkpoint in output_dir, if there is one")
    add("--dry_run", action="store_true", help="print what the run needs, and do not train")


def evaluate(parser: argparse.ArgumentParser) -> None:
    """Score a model on a test set, and write metrics.json with signatures."""
    add = parser.add_argument
    add("--source", type=file, help="file with one source in each line")
    add("--target", type=file, help="file with one reference in each line")
    add("--file", type=file, help="sources and references in one .tsv, .csv, .jsonl or .parquet file")
    add("--output", type=path, help="file to write, or folder for metrics.json [metrics.json beside the model]")
    add("--predictions", type=path, help="file to write the decoded targets to")
    add_loaded_model(parser)
    add("--metrics", metavar="NAME", nargs="+", help=f"{_METRICS} [those of the model's recipe, or else bleu chrf]")
    add_judges(parser)
    group = parser.add_argument_group("pairs and scores")
    add_shared(group, *COLUMNS)
    add, kinds = group.add_argument, ("error", "skip")
    add("--malformed", choices=kinds, default="error", help="how to treat lines without a pair")
    add("--invalid_utf8", choices=kinds, default="error", help="how to treat pairs that are not UTF-8")
    add_shared(group, "max_line_characters", *SCORING)
    add("--confidence_n", type=count, default=1000, help="bootstrap resamples for 95 %% intervals; 0 for none")
    add("--joiner", help="mark that joins subwords of references, such as @@ [that of the tokenizer]")
    group = parser.add_argument_group("ensemble, batches and engine")
    add_shared(group, "ensemble", *ENGINE)
    group.set_defaults(engine="torch")
    add_generation(parser)


def generate(parser: argparse.ArgumentParser) -> None:
    """Translate, summarize, ...: write one target line for each source line."""
    add_stream(parser, "file with one source in each line, UTF-8", "file to write, or - [standard output]")
    parser.add_argument("--n_best", action="store_true", help="write `index ||| target ||| score` for every target")
    text = "second model, which reads the targets of the first: German to English, then English to French"
    add_model(parser, "--pivot", help=text)
    add_loaded_model(parser)
    add_batches(parser, "ensemble")
    group = parser.add_argument_group("whole texts")
    add_shared(group, "split_sentences")
    add = group.add_argument
    add("--format", choices=("text", "html", "xml"), default="text", help="format of the input, with its tags")
    text = "subtitles (.srt, .vtt, .ass, .ssa) or a .docx file, in place of the input; layout and times stay"
    add("--file", type=file, help=text)
    text = "parts to keep: url, email, placeholder, number, or a regular expression"
    add("--keep", metavar="NAME", nargs="+", default=[], help=text)
    add("--glossary", type=file, help="file with a source term, a tab and a target term on each line")
    group = add_generation(parser)
    group.add_argument("--end_loops", action="store_true", help="decode a target again that repeats a part of itself")
    group = parser.add_argument_group("speculative and minimum Bayes risk decoding")
    add_model(group, "--assistant_model", help="smaller model that drafts tokens for the model: same output, less time")
    add = group.add_argument
    add("--num_assistant_tokens", type=int, help="tokens in a draft")
    add("--mbr_candidates", type=int, help="number of samples for minimum Bayes risk decoding")
    add("--mbr_references", type=int, help="number of pseudo-references [the candidates themselves]")
    add_judge(group, "score of a candidate by a pseudo-reference [chrf]: chrf, bleu", "--mbr_utility")
    add = parser.add_argument_group("phrases").add_argument
    text = "phrase that every target contains; of several phrases one is enough; may be given several times"
    add("--must_contain", metavar="PHRASE", nargs="+", action="append", help=text)
    add("--never_contain", metavar="PHRASE", nargs="+", action="extend", help="phrases that no target contains")


def push(parser: argparse.ArgumentParser) -> None:
    """Upload a model to the Hub: its files, card, recipe and scores, and no others."""
    add = parser.add_argument
    add("folder", help="folder with a trained model")
    add("repo_id", type=repo_id, help="user/name or organization/name; created if it does not exist")
    add("--private", action="store_true", help="create a private repository; an existing public one is an error")
    add("--dry_run", action="store_true", help="only list what would be uploaded, offline")
    add("--commit_message", default="Upload the model", help="message of the commit")
    add("--revision", metavar="BRANCH", help="branch to upload to, created if it does not exist [main]")
    add("--token", help="access token [HF_TOKEN, or that of `hf auth login`]")
    add("--overwrite_card", action="store_true", help="replace your own README.md by a model card")
    add("--license", metavar="NAME", help="licence of the weights for the card, such as apache-2.0")
    add("--base_model", metavar="NAME", help="model that this one was fine-tuned from, for the card")
    add("--datasets", metavar="NAME", nargs="+", help="training data, for the card")
