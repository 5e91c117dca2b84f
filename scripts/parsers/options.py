"""Options that several subcommands share, one function for each group of options."""

import argparse
from collections.abc import Callable
from typing import Any

from metaphrase.scripts.parsers.values import boolean, boolean_or_never, column, file, model, part, path_or_dash
from metaphrase.storage.generation_options import GENERATION_OPTIONS

# A parser, or a group of its options.
Options = Any
LOADING_OPTIONS = {
    *("source_prefix", "max_source_length", "source_lang", "target_lang", "device", "dtype", "trust_remote_code"),
    *("batch_size", "max_tokens_per_batch", "engine", "use_vmap"),
}
_TYPES: dict[type, Callable[[str], Any]] = {bool: boolean, str: boolean_or_never, int: int, float: float}


def add_overwrite(options: Options, what: str) -> None:
    options.add_argument("--overwrite", action="store_true", help=f"replace an existing {what}")


def add_device(options: Options) -> None:
    options.add_argument("--device", help="device to run on [the accelerator if there is one]")


def add_line_limit(options: Options) -> None:
    text = "most characters of a line; a longer line is an error"
    options.add_argument("--max_line_characters", type=int, default=100_000, help=text)


def add_shard(options: Options) -> None:
    options.add_argument(
        "--shard", type=part, metavar="K/N", help="work on part K of N of the input; cat joins the outputs"
    )


def add_columns(options: Options) -> None:
    for side in ("source", "target"):
        text = f"column of {side}s in a file of pairs: a name, or a number from 0 in a .tsv file"
        options.add_argument(f"--{side}_column", type=column, help=text)


def add_languages(options: Options) -> None:
    for side in ("source", "target"):
        text = f"{side} language of a multilingual model, such as eng_Latn"
        options.add_argument(f"--{side}_lang", metavar="CODE", help=text)
    options.add_argument("--source_prefix", default="", help="text before every source, such as 'summarize: '")


def add_model(options: Options, name: str = "model", **settings: Any) -> None:
    settings = {"help": "folder or Hub id of any encoder-decoder model"} | settings
    options.add_argument(name, type=model, **settings)


def add_stream(options: Options, inputs: str, output: str) -> None:
    """Add input and output of a subcommand that writes one line or more for each line that it reads."""
    add = options.add_argument
    add("--input", type=file, help=f"{inputs} [standard input]")
    add("--output", type=path_or_dash, metavar="FILE|-", help=output)
    add_overwrite(options, "output")
    add("--resume", action="store_true", help="resume a stopped run of the same command, or start one")


def add_loading(parser: argparse.ArgumentParser, with_seed: bool = True) -> None:
    group = parser.add_argument_group("loading")
    add_device(group)
    add = group.add_argument
    add("--dtype", default="auto", help="type of the weights [auto: as saved]; int8 is faster on a CPU")
    text = "maximum tokens of a source; longer ones are truncated and counted [none]"
    add("--max_source_length", type=int, help=text)
    add("--trust_remote_code", action="store_true", help="run code that comes with the model or its tokenizer")
    if with_seed:
        add("--seed", type=int, default=42, help="random seed for sampling")


def add_ensemble(options: Options) -> None:
    options.add_argument("--ensemble", type=model, nargs="+", help="more models for an ensemble with the first")


def add_engine(options: Options, default: str = "auto") -> None:
    add = options.add_argument
    add("--batch_size", type=int, default=64, help="maximum sources in a batch")
    add("--max_tokens_per_batch", type=int, default=8192, help="maximum source tokens in a batch, padding included")
    engines, text = ("auto", "torch", "ctranslate2"), "library that decodes; auto: the faster one"
    add("--engine", choices=engines, default=default, help=text)
    text = "select among the target tokens that vmap.txt of the model permits; see `metaphrase shortlist`"
    add("--use_vmap", action="store_true", help=text)


def add_chunks(options: Options) -> None:
    add_line_limit(options)
    add = options.add_argument
    add("--chunk_size", "--window", type=int, default=4096, help="sources that are sorted and decoded together")
    text = "processes that decode chunks in parallel, on cores or accelerators"
    add("--num_processes", type=int, default=1, help=text)
    add_shard(options)


def add_sentences(options: Options) -> None:
    text = (
        "decode each sentence of a line alone, and keep the layout between them; LANG is the language of the lines, such "
        "as de [that of a multilingual tokenizer, or English]"
    )
    options.add_argument("--split_sentences", metavar="LANG", nargs="?", default=False, const=True, help=text)


def add_generation(parser: argparse.ArgumentParser) -> Options:
    """Add the options of `generate()` in a group of their own, and return the group."""
    group = parser.add_argument_group("generation")
    for name, option in GENERATION_OPTIONS.items():
        # A truth value may stand alone.
        alone: dict[str, Any] = {"nargs": "?", "const": True} if option.type in (bool, str) else {}
        alone |= {"metavar": "BOOLEAN|never"} if option.type is str else {}
        group.add_argument(f"--{name}", type=_TYPES[option.type], help=option.help, **alone)
    return group


def add_metrics(options: Options) -> None:
    text = "scores: bleu, chrf, chrf++, ter, rouge, exact_match, wer, cer [bleu chrf]"
    options.add_argument("--metrics", metavar="NAME", nargs="+", default=["bleu", "chrf"], help=text)


def add_scoring(options: Options) -> None:
    add = options.add_argument
    add("--bleu_tokenize", help="sacreBLEU's tokenizer [13a]; none for tokenized text")
    add("--lowercase", action="store_true", help="ignore case, as sacreBLEU's -lc")
