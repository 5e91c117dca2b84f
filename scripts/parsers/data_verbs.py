"""Options of the verbs about data. This file imports no heavy library, so that help and errors come at once."""

from metaphrase.scripts.console import VerbParser
from metaphrase.scripts.parsers.options import MAX_LINE_CHARACTERS, add_line_option, column, input_file, output_path

TOKENIZER_KINDS = ("byte_bpe", "bpe", "unigram", "wordpiece", "byte", "char", "word", "pretokenized")
FILTER_RULES = (
    *("empty", "characters", "encoding", "letters", "script", "length_ratio", "copy", "end_punctuation", "numbers"),
    *("links", "brackets", "repetition", "duplicate", "language", "alignment", "targets_per_source"),
)


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
        ("max_targets_per_source", int, 50, "maximum pairs with the same source"),
    ):
        metavar = kind.__name__.upper()
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=f"{text} [%(default)s]")
    text = "pairs that are duplicates [%(default)s]; near: equal but for case, punctuation, spaces and digits"
    group.add_argument("--duplicates", choices=("near", "exact"), default="near", help=text)
    group = parser.add_argument_group("columns and lines")
    for side in ("source", "target"):
        text = f"column of {side}s in FILE: a name, or a number from 0 in a .tsv file"
        group.add_argument(f"--{side}_column", type=column, metavar="COLUMN", help=text)
    text = "maximum characters of a line to read; longer lines are dropped [%(default)s]"
    group.add_argument("--max_line_characters", type=int, default=MAX_LINE_CHARACTERS, metavar="INT", help=text)


DATA_VERBS = {"tokenize": _tokenize, "filter": _filter}
