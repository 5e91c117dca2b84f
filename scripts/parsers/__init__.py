"""Options of each verb. This folder imports no heavy library, so that help and errors come at once.

A function for each verb adds its options. The docstring of the function is the description in the help.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from metaphrase.scripts.parsers.console import VerbParser, nearest, verb_parser
from metaphrase.scripts.parsers.data_verbs import DATA_VERBS
from metaphrase.scripts.parsers.options import (
    add_batch_options,
    add_engine_options,
    add_generation_options,
    add_line_option,
    add_loading_options,
    add_model_options,
    add_output_options,
    add_score_options,
    add_split_option,
    add_stream_options,
    column,
    count_or_zero,
    input_file,
    layer_or_mean,
    model_name,
    output_path,
    port,
    recipe_fields,
    split_words,
)

# Verbs that take fields of a recipe as options.
RECIPE_VERBS = ("train", "tune", "demo")
# Verbs that write a line or more for each line that they read.
STREAM_VERBS = ("generate", "backtranslate", "distill")
UTILITIES = ("chrf", "bleu")
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
FAMILIES = ("t5", "mt5", "umt5", "bart", "mbart", "plbart", "pegasus", "marian", "m2m_100", "fsmt")


def make_parser(verb: str) -> VerbParser:
    """Return the parser of a verb."""
    add_options = DATA_VERBS[verb] if verb in DATA_VERBS else globals()[f"_{verb}"]
    parser = verb_parser(verb, add_options.__doc__)
    add_options(parser)
    return parser


def parse(verb: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of a verb.

    Args:
        verb: Name of the verb.
        words: Words after the verb.

    Returns:
        Options of the verb. Those of a verb with a recipe have `fields`, the words that set fields of the recipe.

    Raises:
        SystemExit: After an error in the options of the verb, or its help.
        ValueError: If a word names no field of a recipe, an output would be lost, or a name for the Hub has no owner.
        OSError: If an input file does not exist.
    """
    parser, overrides = make_parser(verb), []
    if verb in RECIPE_VERBS:
        words = parser.with_underscores(words)
    if verb == "demo":
        arguments, overrides = parser.parse_known_args(words)
        if overrides and not overrides[0].startswith("--"):
            raise ValueError(f"`metaphrase demo` makes its own pairs and takes no file, got {overrides[0]!r}.")
    else:
        if verb in RECIPE_VERBS:
            words, overrides = split_words(words, parser)
        arguments = parser.parse_args(words)
    for word in overrides:
        name = word.removeprefix("--").partition("=")[0].partition(".")[0].replace("-", "_")
        if word.startswith("--") and not {name, name.removeprefix("no_")} & set(recipe_fields()):
            options = [option.removeprefix("--") for option in parser._option_string_actions]
            hint = nearest(name, [*recipe_fields(), *options]) or " Fields of the network go below `model`."
            raise ValueError(f"Every field must be one that a recipe has, got `{name}` in the command line.{hint}")
    if verb in STREAM_VERBS and not arguments.overwrite and not arguments.resume:
        _refuse_existing(arguments)
    if verb in ("train", "tune") and not any(word.startswith(("--data_dir", "--data-dir")) for word in overrides):
        _refuse_missing_pairs(arguments.recipe)
    if verb == "push" and "/" not in arguments.repo_id:
        raise ValueError(f"`repo_id` must be user/name or organization/name, got {arguments.repo_id!r}.")
    arguments.fields = overrides
    return arguments


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


def _generate(parser: VerbParser) -> None:
    """Write one target line for each source line, in the same order."""
    text = "file with one source in each line, UTF-8 [standard input]"
    parser.add_argument("--input", type=input_file("input"), metavar="FILE", help=text)
    add_output_options(parser, "file to write, or - [standard output]")
    text = "write `index ||| target ||| score` for every target; implied by num_return_sequences above 1"
    parser.add_argument("--n_best", action="store_true", help=text)
    add_model_options(parser)
    group = add_batch_options(parser, engine="auto")
    add_stream_options(group)
    group = parser.add_argument_group("whole texts")
    add_split_option(group)
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


def _evaluate(parser: VerbParser) -> None:
    """Decode a test set, score it, and write metrics.json with the signature of every score."""
    for name, text in (("source", "source"), ("target", "reference")):
        text = f"file with one {text} in each line"
        parser.add_argument(f"--{name}", type=input_file(name), metavar="FILE", help=text)
    text = "sources and references in one .tsv, .csv, .jsonl or .parquet file"
    parser.add_argument("--file", type=input_file("file"), metavar="FILE", help=text)
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
    add_score_options(parser, group)
    text = "bootstrap resamples for the 95 %% interval of each score, as in sacreBLEU [%(default)s]; 0 for no interval"
    group.add_argument("--confidence_n", type=count_or_zero, default=1000, metavar="INT", help=text)
    group.add_argument("--joiner", help="mark that joins subwords of references, such as @@ [that of the tokenizer]")
    # Scores of a model should not depend on the packages that are installed.
    add_batch_options(parser, engine="torch")
    add_generation_options(parser)


def _compare(parser: VerbParser) -> None:
    """Compare outputs of systems on one test set: scores with 95 % intervals, paired tests of significance by sacreBLEU,
    scores by length and by word frequency, and the sentences that differ the most."""
    text = "files with one output in each line, of any system; the first one is the baseline"
    parser.add_argument("outputs", nargs="+", type=input_file("outputs"), metavar="FILE", help=text)
    for name, text in (
        ("target", "file with one reference in each line"),
        ("source", "file with one source in each line, to show beside the outputs"),
        ("train_target_file", "training targets, one in each line, for the frequency of words [the references]"),
    ):
        parser.add_argument(f"--{name}", required=name == "target", type=input_file(name), metavar="FILE", help=text)
    parser.add_argument("--names", nargs="+", metavar="NAME", help="names of the systems [those of the files]")
    text = "report to write beside the text on standard output: .json, .html or both; existing files are replaced"
    parser.add_argument("--output", nargs="+", type=output_path, default=[], metavar="FILE", help=text)
    add_score_options(parser, parser)
    for name, default, text in (
        ("paired_bs_n", 1000, "paired bootstrap resamples, as in sacreBLEU"),
        ("paired_ar_n", 10_000, "approximate randomization trials, as in sacreBLEU"),
        ("num_sentences", 20, "sentences with the largest differences in --output, in each direction"),
    ):
        text += " [%(default)s]"
        parser.add_argument(f"--{name}", type=count_or_zero, default=default, metavar="INT", help=text)
    add_line_option(parser)
    group = parser.add_argument_group("external scores")
    text = "files with one score in each line, such as of COMET, one for each system"
    group.add_argument("--scores", nargs="+", type=input_file("scores"), metavar="FILE", help=text)
    group.add_argument("--scores_name", metavar="NAME", help="name of the external scores [external]")
    group.add_argument("--scores_lower_is_better", action="store_true", default=None, help="as for MetricX")


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


def _shortlist(parser: VerbParser) -> None:
    """Write vmap.txt into the folder of a model: for each source token the target tokens that translations may hold, learned
    from pairs. The option --use_vmap then decodes faster."""
    parser.usage = "%(prog)s MODEL PAIRS [option ...]"
    parser.add_argument("model", type=model_name("model"), metavar="MODEL", help="folder of a Metaphrase model")
    text = "training pairs: one .tsv, .csv, .jsonl, .json or .parquet file, or two parallel files"
    parser.add_argument("pairs", nargs="+", type=input_file("pairs"), metavar="PAIRS", help=text)
    text = "column of sources in one file: a name, or a number from 0 in a .tsv file"
    parser.add_argument("--source_column", type=column, metavar="COLUMN", help=text)
    parser.add_argument("--target_column", type=column, metavar="COLUMN", help="column of targets in one file")
    for name, default, text in (
        ("num_per_token", 200, "target tokens that a source token permits"),
        ("num_frequent", 100, "most frequent target tokens, which all sources permit"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="INT", help=f"{text} [%(default)s]")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing vmap.txt")


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
    parser.add_argument("--port", type=port, default=8000, help="port to listen on [%(default)s]")
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
    parser.add_argument("--dry_run", action="store_true", help="only list what would be uploaded, offline")
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


def _train(parser: VerbParser) -> None:
    """Train a model by a recipe, or from files of pairs alone. Each field of a recipe is an option too: --field value.
    The most used are --output_dir DIR [runs/NAME], --time_budget 20m, --validation_file, --test_file and
    --model_name_or_path, a model to fine-tune."""
    parser.usage = "%(prog)s [recipe] [option ...] [--field value ...]"
    text = "a YAML file, the name of a recipe of the package, a file of pairs, two parallel files, or a data set: a "
    text += "folder or OWNER/NAME on the Hub; what a recipe leaves open is chosen from the pairs"
    parser.add_argument("recipe", nargs="*", help=text)
    parser.add_argument("--help_fields", action="store_true", help="list all fields of a recipe and exit")
    parser.add_argument(
        "--resume", action="store_true", help="resume from the last checkpoint in output_dir, if there is one"
    )
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
    parser.add_argument("--output_dir", default="runs/demo", help=text)
    parser.add_argument("--num_train", type=int, default=30000, help="number of training pairs [%(default)s]")
    parser.add_argument("--resume", action="store_true", help="resume a stopped run from its last checkpoint")
