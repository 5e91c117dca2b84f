"""Options of each verb, as tables. This file imports no heavy library, so that help and errors come at once.

A test compares the names and defaults with those of the rooms.
"""

import argparse
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from metaphrase.serving.limits import Limits
from metaphrase.storage.generation_options import GENERATION_OPTIONS

METRICS = ("bleu", "chrf", "chrf++", "ter", "rouge", "exact_match", "wer", "cer")
PAIR_SUFFIXES = (".tsv", ".csv", ".jsonl", ".json", ".parquet")
FILTER_RULES = (
    *("empty", "characters", "encoding", "letters", "script", "length_ratio", "copy", "end_punctuation", "numbers"),
    *("links", "brackets", "repetition", "duplicate", "language", "alignment"),
    *("dual_cross_entropy", "targets_per_source"),
)
LOADING_OPTIONS = {
    *("source_prefix", "max_source_length", "source_lang", "target_lang", "device", "dtype", "trust_remote_code"),
    *("batch_size", "max_tokens_per_batch", "engine", "use_vmap"),
}


# A key names an option as a usage line does: `--name, --alias METAVAR... = DEFAULT`. The metavar stands for the type, or lists
# the choices with `|`. `...` is one or more values, `?` one or none, `*` any number, `!` a required option. Without a metavar, an
# option is true or false. The value is the help text, or a pair with more arguments of `add_argument`.
Options = dict[str, str | tuple[str, dict[str, Any]]]


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        summary: Its line in the list of all verbs, and the first line of its help.
        options: Its most used options.
        groups: Other options, by the title of their group.
        usage: Usage line, if that of the required options does not say enough.
        main: File and function in `scripts/`, if not the function `main` in the file of the verb's name.
    """

    summary: str
    options: Options
    groups: dict[str, Options] = {}
    usage: str | None = None
    main: str | None = None


# Values


def _refuse(text: str, word: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"must be {text}, got {word!r}")


def _matching(pattern: str, text: str, convert: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """Return a function that parses words of a pattern."""

    def parse(word: str) -> Any:
        if not re.fullmatch(pattern, word, re.ASCII):
            raise _refuse(text, word)
        return convert(word)

    return parse


def parse_bool(word: str) -> bool:
    """Parse a truth value."""
    values = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)
    if word.lower() not in values:
        raise _refuse("true or false", word)
    return values[word.lower()]


def bool_or_never(word: str) -> bool | str:
    """Parse a value of `early_stopping`."""
    return word if word == "never" else parse_bool(word)


def _input_file(word: str) -> str:
    if not Path(word).exists() or Path(word).is_dir():
        raise _refuse("a file that exists", word)
    return word


def _model_name(word: str) -> str:
    """Parse the folder or Hub id of a model."""
    is_path = word.startswith((".", "/", "~")) or word.count("/") > 1
    if Path(word).is_file() or (is_path and not Path(word).exists()):
        raise _refuse("a folder that exists, or a name on the Hub", word)
    return word


def _shard(word: str) -> tuple[int, int]:
    """Parse a part of the input: its number, from 1, and the number of parts."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", word, re.ASCII)
    number, num_shards = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= number <= num_shards:
        raise _refuse("K/N with K from 1 to N", word)
    return number, num_shards


def _layers(word: str) -> list[int]:
    """Parse numbers and ranges of layers."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", word, re.ASCII):
        raise _refuse("numbers of layers, such as 0-5,8", word)
    ends = [[*map(int, part.split("-"))] for part in word.split(",")]
    return [number for part in ends for number in range(part[0], part[-1] + 1)]


_new_path = _matching("(?!-$).+", "a path")
TYPES: dict[str, Callable[[str], Any]] = {
    "INT": int,
    "FLOAT": float,
    "COUNT": _matching(r"\d+", "a whole number of at least 0", int),
    "BOOL": parse_bool,
    "BOOL|never": bool_or_never,
    "FILE": _input_file,
    "NEW_FILE": _new_path,
    # None is standard output.
    "NEW_FILE|-": lambda word: None if word == "-" else word,
    "DIR": _new_path,
    "MODEL": _model_name,
    # The number or the name of a column.
    "COLUMN": lambda word: int(word) if word.isascii() and word.isdecimal() else word,
    "K/N": _shard,
    "LAYERS": _layers,
    "INT|mean": _matching(r"-?\d+|mean", "a whole number or mean", lambda word: None if word == "mean" else int(word)),
    "OWNER/NAME": _matching(".*/.*", "user/name or organization/name"),
}
# Options of several verbs

_LINE = {"--max_line_characters INT = 100000": "maximum characters of a line to read; a longer line is an error"}
_SHARD = {"--shard K/N": "work on part K of N of the input; cat joins the outputs"}
_SPLIT = {
    "--split_sentences LANG?": (
        "decode each sentence of a line alone, and keep the layout between them; LANG is the language of "
        "the lines, such as de [that of a multilingual tokenizer, or English]",
        {"default": False, "const": True},
    )
}
_DEVICE = {"--device TEXT": "device to run on [the accelerator if there is one]"}
_COLUMNS = {
    "--source_column COLUMN": ("column of sources in a file of pairs: a name, or a number from 0 in a .tsv file"),
    "--target_column COLUMN": ("column of targets in a file of pairs: a name, or a number from 0 in a .tsv file"),
}
_STREAM_OUTPUT = {
    "--overwrite": "replace an existing output",
    "--resume": "resume a stopped run of the same command; start from scratch if there is no output yet",
}
_LANGUAGES = {
    "--source_lang CODE": "source language of a multilingual model, such as eng_Latn",
    "--target_lang CODE": "target language of a multilingual model, such as eng_Latn",
    '--source_prefix TEXT = ""': "text before every source, such as 'summarize: '",
}
_ENSEMBLE = {
    "--ensemble MODEL...": "more models for an ensemble with the first",
}


def _engine(default: str) -> Options:
    return {
        "--batch_size INT = 64": "maximum sources in a batch",
        "--max_tokens_per_batch INT = 8192": "maximum source tokens in a batch, padding included",
        f"--engine auto|torch|ctranslate2 = {default}": "library that decodes; auto: the faster one",
        "--use_vmap": "select among the target tokens that vmap.txt of the model permits; see `metaphrase shortlist`",
    }


_STREAM = {
    **_LINE,
    "--chunk_size, --window INT = 4096": "sources that are sorted and decoded together",
    "--num_processes INT = 1": "processes that decode chunks in parallel, on the cores or on the accelerators in turn",
    **_SHARD,
}
_METRICS = {"--metrics NAME... = bleu chrf": f"scores: {', '.join(METRICS)} [bleu chrf]"}
_SCORING = {
    "--bleu_tokenize TEXT": "sacreBLEU's tokenizer [13a]; none for tokenized text",
    "--lowercase": "ignore case, as sacreBLEU's -lc",
}
_LOADING_FILES = {
    **_DEVICE,
    "--dtype TEXT = auto": "type of the weights [auto: as saved]; int8 is faster on a CPU",
    "--max_source_length INT": "maximum tokens of a source; longer sources are truncated and counted [none]",
    "--trust_remote_code": "run code that comes with the model or its tokenizer",
}
_LOADING = {**_LOADING_FILES, "--seed INT = 42": "random seed for sampling"}
_METAVARS = {bool: "BOOL", str: "BOOL|never", int: "INT", float: "FLOAT"}
_LIMITS = {
    f"--{field.name} {_METAVARS[field.type]} = {field.default}": field.metadata["help"]
    for field in dataclasses.fields(Limits)
}
_GENERATION = {f"--{name} {_METAVARS[option.type]}": option.help for name, option in GENERATION_OPTIONS.items()}

VERBS = {
    "demo": Verb(
        "train and show a small English-German model on a generated corpus",
        {
            "--output_dir TEXT = runs/demo": "folder for the run; an earlier demo is replaced",
            "--num_train INT = 30000": "number of training pairs",
            "--resume": "resume a stopped run from its last checkpoint",
        },
    ),
    "tokenize": Verb(
        "train a tokenizer for AutoTokenizer on text files, plain or .gz",
        {
            "--files FILE...": "texts for a joint tokenizer of both sides",
            "--source_files FILE...": "texts for a separate source tokenizer",
            "--target_files FILE...": "texts for a separate target tokenizer",
            "--output DIR!": "folder to write",
            "--kind TEXT = byte_bpe": "byte_bpe, bpe, unigram, byte, char, word or pretokenized",
            "--target_kind TEXT": "kind of a separate target tokenizer, if different",
            "--vocab_size INT": "maximum entries [8000 for byte_bpe, bpe, unigram; else no limit]",
            "--min_frequency INT": "minimum number of occurrences of a learned piece",
            "--normalization TEXT": "Unicode normalization, nfc, nfd, nfkc or nfkd [none]",
            "--lowercase": "lowercase all text",
            "--joiner TEXT": "for pretokenized: mark at the end of a piece inside a word [@@]",
            '--additional_special_tokens TOKEN... = ""': "such as language codes",
            **_LINE,
            "--overwrite": "replace an existing tokenizer",
        },
    ),
    "filter": Verb(
        "drop pairs that are noise, and report how many fell by which rule",
        {
            "file FILE?": "pairs in one .tsv, .csv, .jsonl, .json or .parquet file; all but Parquet may end in .gz",
            "--source FILE": "file with one source in each line, in place of FILE",
            "--target FILE": "file with one target in each line, in place of FILE",
            "--output NEW_FILE...!": "a .tsv or .jsonl file to write, or two text files; each may end in .gz",
            "--report NEW_FILE": "JSON file to write: counts by rule, and examples",
            "--rejected NEW_FILE": "TSV file to write: rule, source and target of each dropped pair",
            "--source_lang CODE": "language of the sources, such as en; switches the rule `language` on",
            "--target_lang CODE": "language of the targets, such as en; switches the rule `language` on",
            "--normalize": "repair encoding and quotes, apply NFC, and reduce spaces, before the rules see a text",
            "--overwrite": "replace existing outputs",
            "--resume": "resume a stopped run of the same command; start from scratch if there is none",
        },
        {
            "rules and thresholds": {
                "--rules RULE...": f"rules to apply [all]: {', '.join(FILTER_RULES)}",
                "--skip_rules RULE...": "rules to leave out",
                "--max_characters INT = 3000": "maximum characters of a text",
                "--max_length_ratio FLOAT = 3.0": "maximum ratio of lengths, in relation to the median of all pairs",
                "--min_letter_share FLOAT = 0.4": "minimum share of letters in a text, without its spaces",
                "--min_language_probability FLOAT = 0.05": "minimum probability of the language",
                "--min_dual_score FLOAT = 0.01": "minimum score of the two models, from 0 to 1",
                "--max_targets_per_source INT = 50": "maximum pairs with the same source",
                "--duplicates near|exact = near": "near: pairs that are equal but for case, punctuation, spaces and digits",
            },
            "models of the rule dual_cross_entropy": {
                "--forward_model MODEL": "folder or Hub id of a model from source to target",
                "--backward_model MODEL": "folder or Hub id of a model from target to source",
                **_DEVICE,
            },
            "columns, lines and parts": {
                **_COLUMNS,
                "--max_line_characters INT = 100000": "maximum characters of a line; longer lines are dropped",
                **_SHARD,
            },
        },
        usage="%(prog)s [file] --output FILE [option ...]",
    ),
    "backtranslate": Verb(
        "make pairs of a synthetic source and a real target, from target texts",
        {
            "--input FILE": "file with one target in each line, UTF-8 [standard input]",
            "--output NEW_FILE|-": "a .tsv or .jsonl file to write, or - [standard output, with tabs]",
            **_STREAM_OUTPUT,
            "--tag TEXT": "text before each synthetic source, such as '<BT>'",
            "model MODEL": "folder or Hub id of a model from the target to the source language",
            **_LANGUAGES,
        },
        {
            "loading": _LOADING,
            "ensemble, batches and engine": {**_ENSEMBLE, **_engine("auto"), **_STREAM, **_SPLIT},
            "generation": _GENERATION,
        },
    ),
    "distill": Verb(
        "make pairs of a source and the target that one teacher or several write",
        {
            "--input FILE": "pairs in one file, or one source in each line [standard input]",
            "--target FILE": "file with one reference in each line, for an input of sources",
            "--output NEW_FILE|-": "a .tsv or .jsonl file to write, or - [standard output, with tabs]",
            **_STREAM_OUTPUT,
            "--select bleu|chrf": "of num_return_sequences targets, write the nearest to the reference [write all]",
            "teachers MODEL...": "folder or Hub id of any encoder-decoder model",
            **_LANGUAGES,
        },
        {
            "loading": _LOADING,
            "ensemble, batches and engine": {
                **_engine("auto"),
                **_STREAM,
                **_SPLIT,
                **_COLUMNS,
            },
            "generation": _GENERATION,
        },
    ),
    "train": Verb(
        "train a model by a recipe, or from files of pairs alone",
        {
            "recipe*": "YAML file or name of a recipe, one or two files of pairs, or a data set (folder or OWNER/NAME)",
            "--help_fields": "list all fields of a recipe and exit",
            "--resume": "resume from the last checkpoint in output_dir, if there is one",
            "--dry_run": "print what the run needs, and do not train",
            "--num_seeds INT = 1": "models to train, which differ in the seed, for an ensemble in one folder",
        },
        usage="%(prog)s [recipe] [option ...] [--field value ...]",
    ),
    "tune": Verb(
        "search for better values of the fields that a recipe lists in `search`",
        {
            "recipe*": "a recipe or files of pairs, as for `metaphrase train`",
            "--trials INT": "maximum number of trials [all that fit into the time budget]",
            "--resume": "resume the search in output_dir",
        },
        usage="%(prog)s [recipe] [--time_budget 30m] [option ...] [--field value ...]",
    ),
    "evaluate": Verb(
        "score a model on a test set, and write metrics.json with signatures",
        {
            "--source FILE": "file with one source in each line",
            "--target FILE": "file with one reference in each line",
            "--file FILE": "sources and references in one .tsv, .csv, .jsonl or .parquet file",
            "--output NEW_FILE": "file to write, or folder for metrics.json [metrics.json beside the model]",
            "--predictions NEW_FILE": "file to write the decoded targets to",
            "model MODEL": "folder or Hub id of any encoder-decoder model",
            **_LANGUAGES,
            **_METRICS,
        },
        {
            "loading": _LOADING,
            "pairs and scores": {
                **_COLUMNS,
                "--malformed error|skip = error": "how to treat lines without a pair",
                "--invalid_utf8 error|skip = error": "how to treat pairs that are not UTF-8",
                **_LINE,
                **_SCORING,
                "--confidence_n COUNT = 1000": "bootstrap resamples for the 95 %% interval of each score; 0 for no interval",
                "--joiner TEXT": "mark that joins subwords of references, such as @@ [that of the tokenizer]",
            },
            "ensemble, batches and engine": {**_ENSEMBLE, **_engine("torch")},
            "generation": _GENERATION,
        },
    ),
    "compare": Verb(
        "compare outputs of systems: scores, tests of significance, largest differences",
        {
            "outputs FILE...": "files with one output in each line, of any system; the first one is the baseline",
            "--target FILE!": "file with one reference in each line",
            "--source FILE": "file with one source in each line, to show beside the outputs",
            "--train_target_file FILE": "training targets, for the frequency of words [the references]",
            "--names NAME...": "names of the systems [those of the files]",
            '--output NEW_FILE... = ""': "report to write beside the text: .json, .html or both",
            **_METRICS,
            **_SCORING,
            "--paired_bs_n COUNT = 1000": "paired bootstrap resamples, as in sacreBLEU",
            "--paired_ar_n COUNT = 10000": "approximate randomization trials, as in sacreBLEU",
            "--num_sentences COUNT = 20": "sentences with the largest differences in --output, in each direction",
            **_LINE,
        },
        {
            "external scores": {
                "--scores FILE...": "files with one score in each line, such as of COMET, one for each system",
                "--scores_name NAME": "name of the external scores [external]",
                "--scores_lower_is_better": "as for MetricX",
            },
        },
    ),
    "generate": Verb(
        "translate, summarize, ...: one target line for each source line",
        {
            "--input FILE": "file with one source in each line, UTF-8 [standard input]",
            "--output NEW_FILE|-": "file to write, or - [standard output]",
            **_STREAM_OUTPUT,
            "--n_best": "write `index ||| target ||| score` for every target; implied by num_return_sequences",
            "model MODEL": "folder or Hub id of any encoder-decoder model",
            "--pivot MODEL": "second model, which reads the targets of the first: German to English, then English to French",
            **_LANGUAGES,
        },
        {
            "loading": _LOADING,
            "ensemble, batches and engine": {**_ENSEMBLE, **_engine("auto"), **_STREAM},
            "whole texts": {
                **_SPLIT,
                "--format text|html|xml = text": "format of the input; tags of html and xml return to their words",
                "--file FILE": "subtitles (.srt, .vtt, .ass, .ssa) or a .docx file, in place of the input; layout and times stay",
                '--keep NAME... = ""': "parts that every target keeps: url, email, placeholder, number, or a regular expression",
                "--glossary FILE": "file with a source term, a tab and a target term on each line",
            },
            "generation": {**_GENERATION, "--end_loops": "decode a target again that repeats a part of itself"},
            "speculative and minimum Bayes risk decoding": {
                "--assistant_model MODEL": "smaller model that drafts tokens for the model: same output, less time",
                "--num_assistant_tokens INT": "tokens in a draft",
                "--mbr_candidates INT": "number of samples for minimum Bayes risk decoding",
                "--mbr_references INT": "number of pseudo-references [the candidates themselves]",
                "--mbr_utility chrf|bleu": "similarity of a candidate and a pseudo-reference [chrf]",
            },
            "phrases": {
                "--must_contain PHRASE...": (
                    "phrase that every target contains; of several phrases one is enough; may be given several times",
                    {"action": "append"},
                ),
                "--never_contain PHRASE...": ("phrases that no target contains", {"action": "extend"}),
            },
        },
    ),
    "convert": Verb(
        "convert weights of T5, BART, Marian and others, or back with --to",
        {
            "source MODEL": "folder or Hub id, with weights in safetensors or pytorch_model.bin; or Marian's .npz or .bin file",
            "output DIR": "folder to write",
            "--to FAMILY": "convert to t5, mt5, umt5, longt5, bart, mbart, plbart, mvp, led, blenderbot, blenderbot-small, "
            "pegasus, marian, m2m_100, fsmt, encoder-decoder, t5gemma, t5gemma2 or marian-npz",
            "--trim_vocabulary FILE...": "keep only the tokens that these text files use, and special tokens",
            "--revision TEXT": "branch, tag or commit on the Hub",
            "--overwrite": "replace an existing conversion",
            "--max_shard_size SIZE = 5GB": "maximum size of a file of weights, such as 500MB",
        },
    ),
    "adapt": Verb(
        "make an encoder-decoder, to be trained, of a decoder-only model such as Llama, Qwen or Gemma",
        {
            "base MODEL": "folder or Hub id of a Llama, Qwen 2 or 3, or Gemma 2 or 3, with weights in safetensors",
            "output DIR": "folder to write",
            "--encoder MODEL": "another model for the encoder, such as a smaller one [the same]",
            "--encoder_layers LAYERS": "layers that the encoder takes, such as 0-5,8 [all]",
            "--decoder_layers LAYERS": "layers that the decoder takes [all]",
            "--cross_attention copied|new|merged": "copied from the self-attention; new, with an output of zero; or merged with "
            "the self-attention [copied, or new for models of different widths]",
            "--dropout FLOAT = 0.1": "dropout probability of the new model",
            "--overwrite": "replace an existing output",
            "--max_shard_size SIZE = 5GB": "maximum size of a file of weights, such as 500MB",
        },
        main="convert.adapt",
    ),
    "shortlist": Verb(
        "learn the target tokens of each source token, for faster decoding by --use_vmap",
        {
            "model MODEL": "folder of a Metaphrase model",
            "pairs FILE...": "training pairs: one file of pairs, or two parallel files",
            **_COLUMNS,
            "--num_per_token INT = 200": "target tokens that a source token permits",
            "--num_frequent INT = 100": "most frequent target tokens, which all sources permit",
            "--overwrite": "replace an existing vmap.txt",
        },
        usage="%(prog)s MODEL PAIRS [option ...]",
    ),
    "export": Verb(
        "export a model to CTranslate2, ONNX, a web page or Argos Translate, with tokenizers and settings",
        {
            "model MODEL": "folder or Hub id of a Metaphrase model",
            "output DIR": "folder to write; for argos a file, such as en_de.argosmodel",
            "--format ctranslate2|onnx|web|argos!": "format to write; web is for browsers and Node, with a page; argos is for "
            "LibreTranslate",
            "--quantization TYPE": "type of CTranslate2's weights: float32, float16, bfloat16, int16, int8, int8_float16 ...",
            "--source_lang CODE": "source language of --format argos, such as en",
            "--target_lang CODE": "target language of --format argos",
            "--library DIR": "node_modules with @huggingface/transformers, which the page of --format web gets a copy of",
            "--overwrite, --force": "replace an existing export",
        },
    ),
    "attention": Verb(
        "show cross-attention: png of one sentence, or word alignment (pharaoh)",
        {
            "--source TEXT": ("source text; may be given several times", {"action": "append"}),
            "--target TEXT": ("target text for each --source [generated]", {"action": "append"}),
            "--input FILE": "file with one source in each line [standard input, without --source]",
            "--target_input FILE": "file with one target in each line [generated]",
            "--layer INT|mean = -1": "decoder layer to show; -1 is the last, mean is the mean of all layers",
            "--head INT": "head of that layer [mean of all heads]",
            "--output NEW_FILE": "file to write: .png, .align or .txt [attention.png, or standard output]",
            "--format png|pharaoh": "format [by the suffix of the output, or png]",
            "model MODEL": "folder or Hub id of any encoder-decoder model",
            **_LANGUAGES,
        },
        {
            "loading": _LOADING,
            "texts": {**_LINE},
            "generation": _GENERATION,
        },
    ),
    "explain": Verb(
        "write a page that shows what each stage of a model computes for a pair",
        {
            "--source TEXT!": ("source text; may be given several times", {"action": "append"}),
            "--target TEXT": ("target text for each --source [generated]", {"action": "append"}),
            "--output NEW_FILE = explanation.html": "HTML file to write",
            "model MODEL": "folder or Hub id of any encoder-decoder model",
            **_LANGUAGES,
        },
        {
            "loading": _LOADING,
            "generation": _GENERATION,
        },
    ),
    "average": Verb(
        "average the weights of several checkpoints, with the settings of the last one",
        {
            "folders FOLDER...": "folder of a run, or the checkpoints to average",
            "--output DIR!": "folder to write the model to",
            "--last INT": "average the last N checkpoints of a run",
            "--best INT": "average the N checkpoints of a run with the best metric",
            "--metric TEXT": "metric for --best, as the trainer logs it [eval_bleu]",
            "--overwrite": "replace an existing average",
        },
    ),
    "serve": Verb(
        "serve models by HTTP, with a page to try them at /ui and the API at /docs",
        {
            "models [NAME=]MODEL...": "folders or Hub ids; en-de=FOLDER gives a model a name and its languages",
            "--host TEXT = 127.0.0.1": "address to listen on; 0.0.0.0 is all networks",
            "--port COUNT = 8000": "port to listen on",
            "--api_keys FILE": "file with one key of a client on each line [METAPHRASE_API_KEYS; else no keys]",
            '--cors_origins URL... = ""': "origins of web pages that may call the server; * is all",
            '--glossaries NAME=FILE... = ""': "files of terms, as for generate; their id in requests is NAME",
            "--task translation|summarization|text2text-generation": "task of the models [translation with two languages]",
        },
        {
            "loading": _LOADING_FILES,
            "batches and engine": _engine("auto"),
            "limits": _LIMITS,
            "generation": _GENERATION,
        },
    ),
    "push": Verb(
        "upload a model to the Hub: its files, card, recipe and scores, and no others",
        {
            "folder": "folder with a trained model",
            "repo_id OWNER/NAME": "user/name or organization/name; created if it does not exist",
            "--private": "create a private repository; an existing public one is an error",
            "--dry_run": "only list what would be uploaded, offline",
            "--commit_message TEXT = Upload the model": "message of the commit",
            "--revision BRANCH": "branch to upload to, created if it does not exist [main]",
            "--token TEXT": "access token [HF_TOKEN, or that of `hf auth login`]",
            "--overwrite_card": "replace your own README.md by a model card",
            "--license NAME": "licence of the weights for the card, such as apache-2.0",
            "--base_model NAME": "model that this one was fine-tuned from, for the card",
            "--datasets NAME...": "training data, for the card",
        },
    ),
}
