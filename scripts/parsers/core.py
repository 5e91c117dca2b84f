"""Options of the subcommands of the core. The docstring of a function is the summary of its subcommand."""

import argparse

from metaphrase.scripts.parsers import options
from metaphrase.scripts.parsers.values import count, file, path, repo_id


def train(parser: argparse.ArgumentParser) -> None:
    """Train a model by a recipe, or from files of pairs alone."""
    parser.usage = "%(prog)s [recipe] [option ...] [--field value ...]"
    add = parser.add_argument
    text = "recipe (file or name), one or two files of pairs, or a data set (folder or OWNER/NAME)"
    add("recipe", nargs="*", help=text)
    add("--help_fields", action="store_true", help="list all fields of a recipe and exit")
    add("--resume", action="store_true", help="resume from the last checkpoint in output_dir, if there is one")
    add("--dry_run", action="store_true", help="print what the run needs, and do not train")
    add("--num_seeds", type=int, default=1, help="models to train with a seed each, for an ensemble")


def evaluate(parser: argparse.ArgumentParser) -> None:
    """Score a model on a test set, and write metrics.json with signatures."""
    add = parser.add_argument
    add("--source", type=file, help="file with one source in each line")
    add("--target", type=file, help="file with one reference in each line")
    add("--file", type=file, help="sources and references in one .tsv, .csv, .jsonl or .parquet file")
    add("--output", type=path, help="file to write, or folder for metrics.json [metrics.json beside the model]")
    add("--predictions", type=path, help="file to write the decoded targets to")
    options.add_model(parser)
    options.add_languages(parser)
    options.add_metrics(parser)
    options.add_loading(parser)
    group = parser.add_argument_group("pairs and scores")
    options.add_columns(group)
    add, kinds = group.add_argument, ("error", "skip")
    add("--malformed", choices=kinds, default="error", help="how to treat lines without a pair")
    add("--invalid_utf8", choices=kinds, default="error", help="how to treat pairs that are not UTF-8")
    options.add_line_limit(group)
    options.add_scoring(group)
    add("--confidence_n", type=count, default=1000, help="bootstrap resamples for 95 %% intervals; 0 for none")
    add("--joiner", help="mark that joins subwords of references, such as @@ [that of the tokenizer]")
    group = parser.add_argument_group("ensemble, batches and engine")
    options.add_ensemble(group)
    options.add_engine(group, "torch")
    options.add_generation(parser)


def generate(parser: argparse.ArgumentParser) -> None:
    """Translate, summarize, ...: write one target line for each source line."""
    options.add_stream(parser, "file with one source in each line, UTF-8", "file to write, or - [standard output]")
    parser.add_argument("--n_best", action="store_true", help="write `index ||| target ||| score` for every target")
    options.add_model(parser)
    text = "second model, which reads the targets of the first: German to English, then English to French"
    options.add_model(parser, "--pivot", help=text)
    options.add_languages(parser)
    options.add_loading(parser)
    group = parser.add_argument_group("ensemble, batches and engine")
    options.add_ensemble(group)
    options.add_engine(group)
    options.add_chunks(group)
    group = parser.add_argument_group("whole texts")
    options.add_sentences(group)
    add = group.add_argument
    add("--format", choices=("text", "html", "xml"), default="text", help="format of the input, with its tags")
    text = "subtitles (.srt, .vtt, .ass, .ssa) or a .docx file, in place of the input; layout and times stay"
    add("--file", type=file, help=text)
    text = "parts to keep: url, email, placeholder, number, or a regular expression"
    add("--keep", metavar="NAME", nargs="+", default=[], help=text)
    add("--glossary", type=file, help="file with a source term, a tab and a target term on each line")
    group = options.add_generation(parser)
    group.add_argument("--end_loops", action="store_true", help="decode a target again that repeats a part of itself")
    group = parser.add_argument_group("speculative and minimum Bayes risk decoding")
    options.add_model(
        group, "--assistant_model", help="smaller model that drafts tokens for the model: same output, less time"
    )
    add = group.add_argument
    add("--num_assistant_tokens", type=int, help="tokens in a draft")
    add("--mbr_candidates", type=int, help="number of samples for minimum Bayes risk decoding")
    add("--mbr_references", type=int, help="number of pseudo-references [the candidates themselves]")
    add("--mbr_utility", choices=("chrf", "bleu"), help="similarity of a candidate and a pseudo-reference [chrf]")
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
