"""Options of each verb. This file imports no heavy library, so that help and errors come at once.

The function `_VERB` adds the options of a verb. Its docstring is the description in the help.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from metaphrase.scripts.console import VerbParser, nearest, verb_parser
from metaphrase.scripts.options import (
    MAX_LINE_CHARACTERS,
    add_batch_options,
    add_engine_options,
    add_generation_options,
    add_line_option,
    add_loading_options,
    add_model_options,
    add_shortlist_options,
    input_file,
    model_name,
    output_path,
    recipe_fields,
    split_words,
)

# Verbs that take fields of a recipe as options.
RECIPE_VERBS = ("train", "tune", "demo")
METRICS = ("bleu", "chrf", "chrf++", "ter", "rouge", "exact_match", "wer", "cer")
UTILITIES = ("chrf", "bleu")
TOKENIZER_KINDS = ("byte_bpe", "bpe", "unigram", "wordpiece", "byte", "char", "word", "pretokenized")
TEXT_FORMATS = ("text", "html", "xml")
KEPT_PATTERNS = ("url", "email", "placeholder", "number")
TASKS = ("translation", "summarization", "text2text-generation")
# Limits of the server: name, type, default, help.
LIMITS = (
    ("max_body_kilobytes", int, 1024, "largest body of a request"),
    ("max_texts", int, 128, "maximum texts of a request"),
    ("max_text_characters", int, 100_000, "maximum characters of all texts of a request"),
    ("max_new_tokens_per_text", int, 1024, "maximum tokens of a target that a client may set"),
    ("max_beams", int, 16, "maximum beams, and targets of a source, that a client may set"),
    ("max_requests", int, 256, "maximum requests at once; further ones are refused with status 503"),
    ("timeout_seconds", float, 60.0, "longest time of a request; one that would take longer is refused at once"),
    ("max_wait_milliseconds", float, 0.0, "longest time that a free engine waits for more sentences of a batch"),
)
PAIR_SUFFIXES = (".tsv", ".csv", ".jsonl", ".json", ".parquet")
FILTER_RULES = (
    *("empty", "characters", "encoding", "letters", "script", "length_ratio", "copy", "end_punctuation", "numbers"),
    *("links", "brackets", "repetition", "duplicate", "language", "alignment", "targets_per_source"),
)
FAMILIES = ("t5", "mt5", "umt5", "bart", "mbart", "plbart", "pegasus", "marian", "m2m_100", "fsmt")
_shortlist = add_shortlist_options


def make_parser(verb: str) -> VerbParser:
    """Return the parser of a verb."""
    add_options = globals()[f"_{verb}"]
    parser = verb_parser(verb, add_options.__doc__)
    add_options(parser)
    return parser


def parse(verb: str, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line of a verb.

    Args:
        verb: Name of the verb.
        words: Words after the verb.

    Returns:
        Options of the verb, and the words that set fields of a recipe.

    Raises:
        SystemExit: After an error in the options of the verb, or its help.
        ValueError: If a word names no field of a recipe, an output would be lost, or a name for the Hub has no owner.
        OSError: If an input file does not exist.
    """
    parser, overrides = make_parser(verb), []
    if verb == "demo":
        arguments, overrides = parser.parse_known_args(words)
    else:
        if verb in RECIPE_VERBS:
            words, overrides = split_words(words, parser)
        arguments = parser.parse_args(words)
    for word in overrides:
        name = word.removeprefix("--").partition("=")[0].partition(".")[0].replace("-", "_")
        if word.startswith("--") and not {name, name.removeprefix("no_")} & set(recipe_fields()):
            hint = nearest(name, recipe_fields()) or " Fields of the network go below `model`."
            raise ValueError(f"Every field must be one that a recipe has, got `{name}` in the command line.{hint}")
    if verb == "generate" and not arguments.overwrite and not arguments.resume:
        _refuse_existing(arguments)
    if verb in ("train", "tune") and not any(word.startswith(("--data_dir", "--data-dir")) for word in overrides):
        _refuse_missing_pairs(arguments.recipe)
    if verb == "push" and "/" not in arguments.repo_id:
        raise ValueError(f"`repo_id` must be user/name or organization/name, got {arguments.repo_id!r}.")
    return arguments, overrides


def _refuse_existing(arguments: argparse.Namespace) -> None:
    path = arguments.output
    # The input as output has an error of its own.
    if path not in (None, arguments.input) and Path(path).is_file() and Path(path).stat().st_size:
        raise ValueError(
            f"`output` must be a new file, got {path!r}, which is not empty. Pass --overwrite to replace the file, or --resume "
            "to go on with a stopped run."
        )


def _refuse_missing_pairs(words: Sequence[str]) -> None:
    is_file = len(words) == 2 or (words and Path(words[0].removesuffix(".gz")).suffix in PAIR_SUFFIXES)
    for word in words if is_file else ():
        if not Path(word).expanduser().exists():
            raise FileNotFoundError(
                f"A file of pairs must exist, got {word!r}. Pass --data_dir FOLDER if it is not in this folder."
            )


def complete(verbs: Iterable[str]) -> None:
    """Answer a shell that completes a command line, and exit. The package argcomplete does this by the parsers."""
    import argcomplete

    parser = argparse.ArgumentParser(prog="metaphrase", add_help=False)
    subparsers = parser.add_subparsers()
    for verb in verbs:
        options = make_parser(verb)
        for name in recipe_fields() if verb in RECIPE_VERBS else ():
            if f"--{name}" not in options._option_string_actions:
                options.add_argument(f"--{name}")
        subparsers.add_parser(verb, parents=[options], add_help=False)
    argcomplete.autocomplete(parser)


def _generate(parser: VerbParser) -> None:
    """Write one target line for each source line, in the same order."""
    text = "file with one source in each line, UTF-8 [standard input]"
    parser.add_argument("--input", type=input_file("input"), metavar="FILE", help=text)
    parser.add_argument(
        "--output", type=file_or_standard_output, metavar="FILE", help="file to write, or - [standard output]"
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace an existing output")
    text = "resume a stopped run of the same command; start from scratch if there is no output yet"
    existing.add_argument("--resume", action="store_true", default=None, help=text)
    text = "write `index ||| target ||| score` for every target; implied by num_return_sequences above 1"
    parser.add_argument("--n_best", action="store_true", help=text)
    add_model_options(parser)
    group = add_batch_options(parser, engine="auto")
    add_line_option(group)
    text = "sources that are sorted and decoded together [%(default)s]"
    group.add_argument("--chunk_size", "--window", type=int, default=4096, help=text)
    text = "processes that decode chunks in parallel [%(default)s]; they share the cores of a CPU, or take the "
    text += "accelerators in turn"
    group.add_argument("--num_processes", type=int, default=1, help=text)
    group = parser.add_argument_group("whole texts")
    text = "decode each sentence of a line alone, and keep the layout between them; LANG is the language of the lines, such "
    text += "as de [that of a multilingual tokenizer, or English]"
    group.add_argument("--split_sentences", nargs="?", const=True, default=False, metavar="LANG", help=text)
    text = "format of the input [%(default)s]; html and xml are read as a whole, and tags return to their words"
    group.add_argument("--format", choices=TEXT_FORMATS, default="text", help=text)
    text = f"parts that every target keeps: {', '.join(KEPT_PATTERNS)}, or a regular expression"
    group.add_argument("--keep", nargs="+", default=[], metavar="NAME", help=text)
    text = "file with a source term, a tab and a target term on each line; targets contain the target terms"
    group.add_argument("--glossary", type=input_file("glossary"), metavar="FILE", help=text)
    add_generation_options(parser)
    group = parser.add_argument_group("speculative and minimum Bayes risk decoding")
    text = "smaller model that drafts tokens for the model to check: same output, less time"
    group.add_argument("--assistant_model", type=model_name("assistant_model"), metavar="MODEL", help=text)
    for name, text in (
        ("num_assistant_tokens", "tokens in a draft"),
        ("mbr_candidates", "number of samples for minimum Bayes risk decoding"),
        ("mbr_references", "number of pseudo-references [the candidates themselves]"),
    ):
        group.add_argument(f"--{name}", type=int, metavar="INT", help=text)
    text = "similarity of a candidate and a pseudo-reference [chrf]"
    group.add_argument("--mbr_utility", choices=UTILITIES, help=text)
    group = parser.add_argument_group("phrases")
    text = "phrase that every target contains; of several phrases one is enough; may be given several times"
    group.add_argument("--must_contain", action="append", nargs="+", metavar="PHRASE", help=text)
    text = "phrases that no target contains"
    group.add_argument("--never_contain", action="extend", nargs="+", metavar="PHRASE", help=text)


def file_or_standard_output(word: str) -> str | None:
    """Parse the path of a file to write; `-` and `None` are standard output."""
    return None if word == "-" else word


def _evaluate(parser: VerbParser) -> None:
    """Decode a test set, score it, and write metrics.json with the signature of every score."""
    text = "file with one source in each line"
    parser.add_argument("--source", type=input_file("source"), metavar="FILE", help=text)
    text = "file with one reference in each line"
    parser.add_argument("--target", type=input_file("target"), metavar="FILE", help=text)
    text = "sources and references in one .tsv, .csv, .jsonl or .parquet file"
    parser.add_argument("--file", type=input_file("file"), metavar="FILE", help=text)
    text = f"scores: {', '.join(METRICS)} [bleu chrf]"
    parser.add_argument("--metrics", nargs="+", metavar="NAME", default=["bleu", "chrf"], help=text)
    text = "file to write, or folder for metrics.json; an existing file is replaced [metrics.json beside the model, or in this "
    text += "folder if that file has scores of training, other pairs or other settings]"
    parser.add_argument("--output", type=output_path, metavar="FILE", help=text)
    parser.add_argument("--predictions", type=output_path, metavar="FILE", help="file to write the decoded targets to")
    add_model_options(parser)
    group = parser.add_argument_group("pairs and scores")
    text = "column of sources in --file: a name, or a number from 0 in a .tsv file"
    group.add_argument("--source_column", type=column, metavar="COLUMN", help=text)
    group.add_argument("--target_column", type=column, metavar="COLUMN", help="column of references in --file")
    for name, rows in (("malformed", "lines without a pair"), ("invalid_utf8", "pairs that are not UTF-8")):
        text = f"how to treat {rows} [%(default)s]"
        group.add_argument(f"--{name}", choices=("error", "skip"), default="error", help=text)
    add_line_option(group)
    group.add_argument("--bleu_tokenize", help="sacreBLEU's tokenizer [13a]; none for tokenized text")
    group.add_argument("--lowercase", action="store_true", help="ignore case, as sacreBLEU's -lc")
    text = "mark that joins subwords of the references, such as @@ [that of the tokenizer]"
    group.add_argument("--joiner", help=text)
    # Scores of a model should not depend on the packages that are installed.
    add_batch_options(parser, engine="torch")
    add_generation_options(parser)


def column(word: str) -> str | int:
    """Parse a column: a number or a name."""
    return int(word) if word.isascii() and word.isdecimal() else word


def _attention(parser: VerbParser) -> None:
    """Show the cross-attention of sources and targets: of one layer or head, or the mean over all. png is a picture of
    one sentence, pharaoh a word alignment with one line of links `source word-target word` for each sentence.
    `metaphrase explain` writes a page with all kinds of attention."""
    parser.add_argument("--source", action="append", metavar="TEXT", help="source text; may be given several times")
    parser.add_argument("--target", action="append", metavar="TEXT", help="target text for each --source [generated]")
    text = "file with one source in each line [standard input, without --source]"
    parser.add_argument("--input", type=input_file("input"), metavar="FILE", help=text)
    text = "file with one target in each line [generated]"
    parser.add_argument("--target_input", type=input_file("target_input"), metavar="FILE", help=text)
    text = "decoder layer to show; -1 is the last, mean is the mean of all layers [%(default)s]"
    # Models of few layers align best with their last layer, see `word_alignment`.
    parser.add_argument("--layer", type=layer_or_mean, default=-1, metavar="INT|mean", help=text)
    parser.add_argument("--head", type=int, help="head of that layer [mean of all heads]")
    text = "file to write: .png, .align or .txt [attention.png, or standard output for pharaoh]"
    parser.add_argument("--output", type=output_path, metavar="FILE", help=text)
    text = "format [by the suffix of the output, or png]"
    parser.add_argument("--format", choices=("png", "pharaoh"), help=text)
    add_model_options(parser)
    add_line_option(parser.add_argument_group("texts"))
    add_generation_options(parser)


def layer_or_mean(word: str) -> int | None:
    """Parse a value of `layer`; `None` is the mean."""
    return None if word == "mean" else int(word)


def _average(parser: VerbParser) -> None:
    """Average the weights of several checkpoints. Tokenizers and settings are those of the last one."""
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="folder of a run, or the checkpoints to average")
    parser.add_argument("--output", required=True, type=output_path, metavar="DIR", help="folder to write the model to")
    parser.add_argument("--last", type=int, metavar="N", help="average the last N checkpoints of a run")
    parser.add_argument("--best", type=int, metavar="N", help="average the N checkpoints of a run with the best metric")
    parser.add_argument("--metric", help="metric for --best, as the trainer logs it [eval_bleu]")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing average")


def _convert(parser: VerbParser) -> None:
    """Convert a checkpoint of a known family to a Metaphrase model that computes the same. With --to, convert a
    Metaphrase model to a family, whose models need no code of Metaphrase. Tokenizers and generation settings are
    copied."""
    text = "folder or Hub id, with weights in safetensors"
    parser.add_argument("source", type=model_name("source"), metavar="SOURCE", help=text)
    parser.add_argument("output", type=output_path, metavar="OUTPUT", help="folder to write")
    text = f"family to convert a Metaphrase model to: {', '.join(FAMILIES)}"
    parser.add_argument("--to", metavar="FAMILY", help=text)
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing conversion")
    text = "maximum size of a file of weights, such as 500MB [%(default)s]"
    parser.add_argument("--max_shard_size", default="5GB", metavar="SIZE", help=text)


def _explain(parser: VerbParser) -> None:
    """Show what each stage of an encoder-decoder computes for a pair: tokens, shapes, position encodings, masks,
    attention, teacher forcing, and the next tokens of greedy search, beam search, top-k and top-p. The page is one
    HTML file."""
    text = "source text; may be given several times, for a page of at most 50 pairs"
    parser.add_argument("--source", action="append", metavar="TEXT", required=True, help=text)
    parser.add_argument("--target", action="append", metavar="TEXT", help="target text for each --source [generated]")
    text = "HTML file to write [explanation.html, or none with --text]"
    parser.add_argument("--output", type=output_path, metavar="FILE", help=text)
    parser.add_argument("--text", action="store_true", help="write the explanation as text to standard output")
    add_model_options(parser)
    add_generation_options(parser)


def _export(parser: VerbParser) -> None:
    """Export a Metaphrase model with tokenizers and generation settings. A model that the format does not support is an
    error."""
    text = "folder or Hub id of a Metaphrase model"
    parser.add_argument("model", type=model_name("model"), metavar="MODEL", help=text)
    parser.add_argument("output", type=output_path, metavar="DIR", help="folder to write")
    parser.add_argument("--format", required=True, choices=("ctranslate2", "onnx"), help="format to write")
    text = "type of CTranslate2's weights: float32, float16, bfloat16, int16, int8, int8_float32, int8_float16 or "
    text += "int8_bfloat16 [as saved]; ONNX is always float32"
    parser.add_argument("--quantization", metavar="TYPE", help=text)
    # --force is the name in CTranslate2's converters.
    parser.add_argument("--overwrite", "--force", action="store_true", help="replace an existing export")


def _serve(parser: VerbParser) -> None:
    """Serve models by HTTP, for the clients of Hugging Face, LibreTranslate, DeepL, OpenAI and the Open Inference
    Protocol. /ui is a page to try the models, /docs describes the API."""
    text = "folders or Hub ids; en-de=FOLDER gives a model a name and its languages [those of its recipe]"
    parser.add_argument("models", nargs="+", metavar="MODEL", help=text)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on [%(default)s]; 0.0.0.0 is all networks"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on [%(default)s]")
    text = "file with one key of a client on each line [METAPHRASE_API_KEYS, keys with commas between; else no keys]"
    parser.add_argument("--api_keys", type=input_file("api_keys"), metavar="FILE", help=text)
    text = "origins of web pages that may call the server; * is all"
    parser.add_argument("--cors_origins", nargs="+", default=[], metavar="URL", help=text)
    text = "files of terms, as for generate; their id in requests is NAME"
    parser.add_argument("--glossaries", nargs="+", default=[], metavar="NAME=FILE", help=text)
    parser.add_argument("--task", choices=TASKS, help="task of the models [translation for a model with two languages]")
    add_loading_options(parser)
    add_engine_options(parser.add_argument_group("batches and engine"), engine="auto")
    group = parser.add_argument_group("limits")
    for name, kind, default, text in LIMITS:
        group.add_argument(
            f"--{name}", type=kind, default=default, metavar=kind.__name__.upper(), help=f"{text} [%(default)s]"
        )
    add_generation_options(parser)


def _push(parser: VerbParser) -> None:
    """Upload a trained folder to the Hub: model, code, tokenizers, card, licence, recipe, scores and predictions, and no
    other files. Secrets in the recipe are left out, and absolute paths cut to their last part."""
    parser.add_argument("folder", help="folder with a trained model")
    parser.add_argument("repo_id", help="user/name or organization/name; created if it does not exist")
    text = "create a private repository; an existing public one is an error"
    parser.add_argument("--private", action="store_true", help=text)
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="only list what would be uploaded, offline")
    parser.add_argument("--commit_message", default="Upload the model", metavar="TEXT", help="[%(default)s]")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to upload to, created if it does not exist [main]")
    parser.add_argument("--token", help="access token [HF_TOKEN, or that of `hf auth login`]")
    parser.add_argument("--overwrite_card", action="store_true", help="replace your own README.md by a model card")
    parser.add_argument("--license", metavar="NAME", help="licence of the weights for the card, such as apache-2.0")
    parser.add_argument("--base_model", metavar="NAME", help="model that this one was fine-tuned from, for the card")
    parser.add_argument("--datasets", nargs="+", metavar="NAME", help="training data, for the card")
    text = "also write handler.py and requirements.txt, for Inference Endpoints of the Hub"
    parser.add_argument("--endpoint_handler", action="store_true", help=text)
    text = "also write a Gradio Space, a page to try the model [its name is that of the model with -space]"
    parser.add_argument("--space", nargs="?", const="", metavar="USER/NAME", help=text)
    parser.add_argument(
        "--space_examples", nargs="+", default=[], metavar="TEXT", help="sources on the page of the Space"
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


def _train(parser: VerbParser) -> None:
    """Train a model by a recipe. Each field of the recipe is an option too: --field value."""
    parser.usage = "%(prog)s [recipe] [option ...] [--field value ...]"
    text = "a YAML file, the name of a recipe of the package, a file of pairs, two parallel files, or a data set: a "
    text += "folder or OWNER/NAME on the Hub; what a recipe leaves open is chosen from the pairs"
    parser.add_argument("recipe", nargs="*", help=text)
    parser.add_argument("--help_fields", action="store_true", help="list all fields of a recipe and exit")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in output_dir")
    parser.add_argument("--dry_run", action="store_true", help="print what the run needs, and do not train")


def _tune(parser: VerbParser) -> None:
    """Search for better values of the fields that a recipe lists in `search`. Each field is an option too."""
    parser.usage = "%(prog)s [recipe] [--time_budget 30m] [option ...] [--field value ...]"
    parser.add_argument("recipe", nargs="*", help="a recipe or files of pairs, as for `metaphrase train`")
    parser.add_argument("--trials", type=int, help="maximum number of trials [all that fit into the time budget]")
    parser.add_argument("--resume", action="store_true", help="resume the search in output_dir")


def _demo(parser: VerbParser) -> None:
    """Train and show a small English-German model. Recipe fields are options too: --num_train_epochs 2."""
    text = "new folder for the run, or that of an earlier demo, which is replaced [%(default)s]"
    parser.add_argument("--output_dir", "--output-dir", default="runs/demo", help=text)
    parser.add_argument("--num_train", type=int, default=30000, help="number of training pairs [%(default)s]")
    parser.add_argument("--resume", action="store_true", help="resume a stopped run from its last checkpoint")
