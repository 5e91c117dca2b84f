"""Options of the verbs about data. This file imports no heavy library, so that help and errors come at once."""

import argparse

from metaphrase.scripts.parsers.console import VerbParser
from metaphrase.scripts.parsers.options import (
    MAX_LINE_CHARACTERS,
    add_batch_options,
    add_generation_options,
    add_line_option,
    add_model_options,
    add_output_options,
    add_shard_option,
    add_split_option,
    add_stream_options,
    column,
    input_file,
    model_name,
    output_path,
)

TOKENIZER_KINDS = ("byte_bpe", "bpe", "unigram", "wordpiece", "byte", "char", "word", "pretokenized")
FILTER_RULES = (
    *("empty", "characters", "encoding", "letters", "script", "length_ratio", "copy", "end_punctuation", "numbers"),
    *("links", "brackets", "repetition", "duplicate", "language", "alignment"),
    *("dual_cross_entropy", "targets_per_source"),
)
PAIR_OUTPUT = "a .tsv or .jsonl file to write, or - [standard output, with tabs]"


def _tokenize(parser: VerbParser) -> None:
    """Train a tokenizer for AutoTokenizer on text files (.gz or not) with one text in each line."""
    for name, text in (
        ("files", "texts for a joint tokenizer of both sides"),
        ("source_files", "texts for a separate source tokenizer"),
        ("target_files", "texts for a separate target tokenizer"),
    ):
        parser.add_argument(f"--{name}", nargs="+", type=input_file(name), metavar="FILE", help=text)
    parser.add_argument("--output", required=True, type=output_path, metavar="DIR", help="folder to write")
    parser.add_argument("--kind", default="byte_bpe", help=f"one of {', '.join(TOKENIZER_KINDS)} [%(default)s]")
    parser.add_argument("--target_kind", help="kind of a separate target tokenizer, if different")
    text = "maximum entries, special tokens included [8000 for byte_bpe, bpe, unigram, wordpiece; else no limit]"
    parser.add_argument("--vocab_size", type=int, help=text)
    parser.add_argument("--min_frequency", type=int, help="minimum number of occurrences of a learned piece")
    parser.add_argument("--normalization", help="Unicode normalization, nfc, nfd, nfkc or nfkd [none]")
    parser.add_argument("--lowercase", action="store_true", help="lowercase all text")
    parser.add_argument("--joiner", help="for pretokenized: mark at the end of a piece inside a word [@@]")
    text = "such as language codes"
    parser.add_argument("--additional_special_tokens", nargs="+", default=[], metavar="TOKEN", help=text)
    add_line_option(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing tokenizer")


def _filter(parser: VerbParser) -> None:
    """Write the pairs that break no rule, in the same order, and report how many fell by which rule."""
    parser.usage = "%(prog)s [file] --output FILE [option ...]"
    text = "pairs in one .tsv, .csv, .jsonl, .json or .parquet file; all but Parquet may end in .gz"
    parser.add_argument("file", nargs="?", type=input_file("file"), metavar="FILE", help=text)
    for side in ("source", "target"):
        text = f"file with one {side} in each line, in place of FILE"
        parser.add_argument(f"--{side}", type=input_file(side), metavar="FILE", help=text)
    text = "a .tsv or .jsonl file to write, or two text files; each may end in .gz"
    parser.add_argument("--output", nargs="+", required=True, type=output_path, metavar="FILE", help=text)
    text = "JSON file to write: counts by rule, and examples"
    parser.add_argument("--report", type=output_path, metavar="FILE", help=text)
    text = "TSV file to write: rule, source and target of each dropped pair"
    parser.add_argument("--rejected", type=output_path, metavar="FILE", help=text)
    for side in ("source", "target"):
        text = f"language of the {side}s, such as en; switches the rule `language` on"
        parser.add_argument(f"--{side}_lang", metavar="CODE", help=text)
    text = "repair the encoding, straighten quotes, apply NFC, and reduce spaces, before the rules see a text"
    parser.add_argument("--normalize", action="store_true", help=text)
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace existing outputs")
    text = "resume a stopped run of the same command; start from scratch if there is none"
    existing.add_argument("--resume", action="store_true", help=text)
    group = parser.add_argument_group("rules and thresholds")
    chosen = group.add_mutually_exclusive_group()
    text = f"rules to apply [all]: {', '.join(FILTER_RULES)}"
    chosen.add_argument("--rules", nargs="+", choices=FILTER_RULES, metavar="RULE", help=text)
    chosen.add_argument("--skip_rules", nargs="+", choices=FILTER_RULES, metavar="RULE", help="rules to leave out")
    for name, kind, default, text in (
        ("max_characters", int, 3000, "maximum characters of a text"),
        ("max_length_ratio", float, 3.0, "maximum ratio of lengths, in relation to the median of all pairs"),
        ("min_letter_share", float, 0.4, "minimum share of letters in a text, without its spaces"),
        ("min_language_probability", float, 0.05, "minimum probability of the language"),
        ("min_dual_score", float, 0.01, "minimum score of the two models, from 0 to 1"),
        ("max_targets_per_source", int, 50, "maximum pairs with the same source"),
    ):
        metavar = kind.__name__.upper()
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=f"{text} [%(default)s]")
    text = "pairs that are duplicates [%(default)s]; near: equal but for case, punctuation, spaces and digits"
    group.add_argument("--duplicates", choices=("near", "exact"), default="near", help=text)
    group = parser.add_argument_group("models of the rule dual_cross_entropy")
    for name, text in (("forward_model", "from source to target"), ("backward_model", "from target to source")):
        text = f"folder or Hub id of a model {text}"
        group.add_argument(f"--{name}", type=model_name(name), metavar="MODEL", help=text)
    group.add_argument("--device", help="device to run on [the accelerator if there is one]")
    group = parser.add_argument_group("columns, lines and parts")
    for side in ("source", "target"):
        text = f"column of {side}s in FILE: a name, or a number from 0 in a .tsv file"
        group.add_argument(f"--{side}_column", type=column, metavar="COLUMN", help=text)
    text = "maximum characters of a line to read; longer lines are dropped [%(default)s]"
    group.add_argument("--max_line_characters", type=int, default=MAX_LINE_CHARACTERS, metavar="INT", help=text)
    add_shard_option(group)


def _backtranslate(parser: VerbParser) -> None:
    """Write pairs of a synthetic source and a real target: text in the target language goes through a model that writes
    the source language. A tag marks the synthetic sources, so that a model that is trained on both kinds can tell them
    apart."""
    text = "file with one target in each line, UTF-8 [standard input]"
    parser.add_argument("--input", type=input_file("input"), metavar="FILE", help=text)
    add_output_options(parser, PAIR_OUTPUT)
    text = "text before each synthetic source, such as '<BT>'; one token if the recipe of the new model lists it in "
    text += "additional_special_tokens"
    parser.add_argument("--tag", metavar="TEXT", help=text)
    add_model_options(parser, help="folder or Hub id of a model from the target to the source language")
    _add_synthesis_options(parser)


def _distill(parser: VerbParser) -> None:
    """Write pairs of a source and the target that teachers write for it, to train a small model on. Several teachers
    form an ensemble."""
    text = "pairs in one .tsv, .csv, .jsonl, .json or .parquet file, or one source in each line [standard input]"
    parser.add_argument("--input", type=input_file("input"), metavar="FILE", help=text)
    text = "file with one reference in each line, for an input of sources"
    parser.add_argument("--target", type=input_file("target"), metavar="FILE", help=text)
    add_output_options(parser, PAIR_OUTPUT)
    text = "of num_return_sequences targets, write the nearest to the reference by this score [write all]"
    parser.add_argument("--select", choices=("bleu", "chrf"), help=text)
    text = "folder or Hub id of any encoder-decoder model"
    add_model_options(parser, "teachers", nargs="+", metavar="TEACHER", help=text)
    group = _add_synthesis_options(parser, takes_models=False)
    for side in ("source", "target"):
        text = f"column of {side}s in a file of pairs: a name, or a number from 0 in a .tsv file"
        group.add_argument(f"--{side}_column", type=column, metavar="COLUMN", help=text)


def _add_synthesis_options(parser: VerbParser, takes_models: bool = True) -> argparse._ArgumentGroup:
    """Add the options of decoding a file into pairs. Return the group of chunks."""
    group = add_batch_options(parser, engine="auto", takes_models=takes_models)
    add_stream_options(group)
    add_split_option(group)
    add_generation_options(parser)
    # Drafts take no part in an ensemble, and sampling of many sources at a time is fast without them.
    parser.set_defaults(assistant_model=None)
    return group


DATA_VERBS = {"tokenize": _tokenize, "filter": _filter, "backtranslate": _backtranslate, "distill": _distill}
