"""Options of the subcommands outside the core. The docstring of a function is the summary of its subcommand."""

import argparse
import dataclasses
import os
import re
from collections.abc import Callable

from metaphrase.scripts.parsers import options
from metaphrase.scripts.parsers.options import check, count, file, path


def layer(word: str) -> int | None:
    """Parse the number of a layer; None is the mean of all."""
    check(re.fullmatch(r"-?\d+|mean", word, re.ASCII), "a whole number or mean", word)
    return None if word == "mean" else int(word)


def layers(word: str) -> list[int]:
    """Parse numbers and ranges of layers, of at most four digits: longer ones would make lists that fill the memory."""
    part = r"\d{1,4}(-\d{1,4})?"
    check(re.fullmatch(f"{part}(,{part})*", word, re.ASCII), "numbers of layers, such as 0-5,8", word)
    ends = [[*map(int, span.split("-"))] for span in word.split(",")]
    return [number for span in ends for number in range(span[0], span[-1] + 1)]


def demo(parser: argparse.ArgumentParser) -> None:
    """Train and show a small English-German model on a generated corpus."""
    add = parser.add_argument
    add("--output_dir", default="runs/demo", help="folder for the run; an earlier demo is replaced")
    add("--num_train", type=int, default=30_000, help="number of training pairs")
    add("--resume", action="store_true", help="resume a stopped run from its last checkpoint")


def tokenize(parser: argparse.ArgumentParser) -> None:
    """Train a tokenizer for AutoTokenizer on text files, plain or .gz."""
    add = parser.add_argument
    add("--files", type=file, nargs="+", help="texts for a joint tokenizer of both sides")
    add("--source_files", type=file, nargs="+", help="texts for a separate source tokenizer")
    add("--target_files", type=file, nargs="+", help="texts for a separate target tokenizer")
    add("--output", type=path, required=True, help="folder to write")
    add("--kind", default="byte_bpe", help="byte_bpe, bpe, unigram, byte, char, word or pretokenized")
    add("--target_kind", help="kind of a separate target tokenizer, if different")
    add("--vocab_size", type=int, help="maximum entries [8000 for byte_bpe, bpe, unigram; else no limit]")
    add("--min_frequency", type=int, help="minimum number of occurrences of a learned piece")
    add("--normalization", help="Unicode normalization, nfc, nfd, nfkc or nfkd [none]")
    add("--lowercase", action="store_true", help="lowercase all text")
    add("--joiner", help="for pretokenized: mark at the end of a piece inside a word [@@]")
    add("--additional_special_tokens", metavar="TOKEN", nargs="+", default=[], help="such as language codes")
    options.add_shared(parser, "max_line_characters")
    options.add_overwrite(parser, "tokenizer")


def filter(parser: argparse.ArgumentParser) -> None:
    """Drop pairs that are noise, and count the dropped pairs of each rule."""
    parser.usage = "%(prog)s [file] --output FILE [option ...]"
    add = parser.add_argument
    text = "pairs in one .tsv, .csv, .jsonl, .json or .parquet file, or with .gz after it"
    add("file", type=file, nargs="?", help=text)
    add("--source", type=file, help="file with one source in each line, in place of FILE")
    add("--target", type=file, help="file with one target in each line, in place of FILE")
    text = "a .tsv or .jsonl file, or two text files; may end in .gz"
    add("--output", type=path, nargs="+", required=True, help=text)
    add("--report", type=path, help="JSON file to write: counts by rule, and examples")
    add("--rejected", type=path, help="TSV file to write: rule, source and target of each dropped pair")
    for side, code in (("source", "en"), ("target", "de")):
        text = f"language of the {side}s, such as {code}; switches the rule `language` on"
        add(f"--{side}_lang", metavar="CODE", help=text)
    add("--normalize", action="store_true", help="repair encoding, quotes and spaces, and apply NFC, before any rule")
    options.add_overwrite(parser, "output")
    add("--resume", action="store_true", help="resume a stopped run of the same command, or start one")
    add = parser.add_argument_group("rules and thresholds").add_argument
    text = (
        "rules to apply [all]: empty, characters, encoding, letters, script, length_ratio, copy, end_punctuation, "
        "numbers, links, brackets, repetition, duplicate, language, alignment, dual_cross_entropy, quality, "
        "targets_per_source"
    )
    add("--rules", metavar="RULE", nargs="+", help=text)
    add("--skip_rules", metavar="RULE", nargs="+", default=[], help="rules to leave out")
    add("--max_characters", type=int, default=3000, help="maximum characters of a text")
    add("--max_length_ratio", type=float, default=3.0, help="maximum ratio of lengths, relative to the median")
    add("--min_letter_share", type=float, default=0.4, help="minimum share of letters in a text, without its spaces")
    add("--min_language_probability", type=float, default=0.05, help="minimum probability of the language")
    add("--min_dual_score", type=float, default=0.01, help="minimum score of the two models, from 0 to 1")
    add("--max_targets_per_source", type=int, default=50, help="maximum pairs with the same source")
    text = "near: equal but for case, punctuation and digits"
    add("--duplicates", choices=("near", "exact"), default="near", help=text)
    group = parser.add_argument_group("models of the rule dual_cross_entropy")
    options.add_model(group, "--forward_model", help="folder or Hub id of a model from source to target")
    options.add_model(group, "--backward_model", help="folder or Hub id of a model from target to source")
    options.add_shared(group, "device")
    group = parser.add_argument_group("judge of the rule quality")
    options.add_judge(group, "score of a pair without a reference")
    group.add_argument("--worst_score", type=float, help="score of the worst pair to keep")
    text = "multiply the weight of a pair by its score, and write it; an error counts as 1 / (1 + error)"
    group.add_argument("--add_weights", action="store_true", help=text)
    group = parser.add_argument_group("columns, lines and parts")
    options.add_shared(group, *options.COLUMNS, "weight_column")
    text = "most characters of a line; longer lines are dropped"
    group.add_argument("--max_line_characters", type=int, default=100_000, help=text)
    options.add_shared(group, "shard")


def backtranslate(parser: argparse.ArgumentParser) -> None:
    """Make pairs of a synthetic source and a real target, from target texts."""
    output = "a .tsv or .jsonl file to write, or - [standard output, with tabs]"
    options.add_stream(parser, "file with one target in each line, UTF-8", output)
    parser.add_argument("--tag", help="text before each synthetic source, such as '<BT>'")
    options.add_loaded_model(parser, help="folder or Hub id of a model from the target to the source language")
    options.add_shared(options.add_batches(parser, "ensemble"), "split_sentences")
    options.add_generation(parser)


def distill(parser: argparse.ArgumentParser) -> None:
    """Make pairs of a source and the target that one teacher or several write."""
    output = "a .tsv or .jsonl file to write, or - [standard output, with tabs]"
    options.add_stream(parser, "pairs in one file, or one source in each line", output)
    add = parser.add_argument
    add("--target", type=file, help="file with one reference in each line, for an input of sources")
    group = parser.add_mutually_exclusive_group()
    text = "write the target nearest to the reference [write all]"
    group.add_argument("--select", choices=("bleu", "chrf"), help=text)
    options.add_judge(group, "write the target with the best score")
    text = "also write the target with the worst score, as prompt, chosen and rejected"
    add("--preferences", action="store_true", help=text)
    options.add_loaded_model(parser, "teachers", nargs="+")
    options.add_shared(options.add_batches(parser), "split_sentences", *options.COLUMNS)
    options.add_generation(parser)


def classify(parser: argparse.ArgumentParser) -> None:
    """Write which of several answers a model expects for each text, and their probabilities."""
    parser.add_argument("--choices", metavar="TEXT", nargs="+", required=True, help="two answers or more")
    _add_reader(parser, "file to write: the answer and the probability of each choice, with tabs [standard output]")


def embed(parser: argparse.ArgumentParser) -> None:
    """Write an embedding of each text, the mean of the encoder's output."""
    _add_reader(parser, "file to write: a matrix in numpy's format, .npy", required=True)


def _add_reader(parser: argparse.ArgumentParser, output: str, required: bool = False) -> None:
    parser.add_argument("--input", type=file, required=required, help="file with one text in each line, UTF-8")
    parser.add_argument("--output", type=path, required=required, help=output)
    options.add_loaded_model(parser)
    group = parser.add_argument_group("batches")
    options.add_shared(group, "batch_size", "max_tokens_per_batch", "max_line_characters")


def rerank(parser: argparse.ArgumentParser) -> None:
    """Choose among the candidates of `generate --n_best` by more scores, or tune the weights of the scores."""
    add = parser.add_argument
    add("candidates", type=file, help="file with `index ||| text ||| score` on each line")
    add("--source", type=file, required=True, help="file with one source in each line")
    text = "JSON file of the weights, which --target writes and --output reads"
    add("--weights", type=path, required=True, help=text)
    either = parser.add_mutually_exclusive_group(required=True).add_argument
    either("--target", type=file, help="file with one reference in each line, to tune the weights")
    either("--output", type=path, help="file to write the best candidate of each source to")
    options.add_model(parser, "--reverse_model", help="folder or Hub id of a model from target to source")
    options.add_judges(parser)
    text = "files with one score in each line, one line for each candidate"
    add("--scores", type=file, nargs="+", default=[], help=text)
    metrics = ("bleu", "chrf", "exact_match", "wer", "cer")
    add("--tuned_metric", choices=metrics, default="bleu", help="score to tune for")
    group = parser.add_argument_group("batches")
    options.add_shared(group, "device", "batch_size", "max_tokens_per_batch", "max_line_characters")


def tune(parser: argparse.ArgumentParser) -> None:
    """Search for better values of the fields that a recipe lists in `search`."""
    parser.usage = "%(prog)s [recipe] [--time_budget 30m] [option ...] [--field value ...]"
    add = parser.add_argument
    add("recipe", nargs="*", help="a recipe or files of pairs, as for `metaphrase train`")
    add("--trials", type=int, help="maximum number of trials [all that fit into the time budget]")
    add("--resume", action="store_true", help="resume the search in output_dir")


def compare(parser: argparse.ArgumentParser) -> None:
    """Compare outputs of systems: scores, tests of significance, largest differences."""
    add = parser.add_argument
    add("outputs", type=file, nargs="+", help="files with one output in each line; the first one is the baseline")
    add("--target", type=file, required=True, help="file with one reference in each line")
    add("--source", type=file, help="file with one source in each line, to show beside the outputs")
    add("--train_target_file", type=file, help="training targets, for the frequency of words [the references]")
    add("--names", metavar="NAME", nargs="+", help="names of the systems [those of the files]")
    add("--output", type=path, nargs="+", default=[], help="report to write beside the text: .json, .html or both")
    options.add_shared(parser, "metrics", *options.SCORING)
    add("--paired_bs_n", type=count, default=1000, help="paired bootstrap resamples, as in sacreBLEU")
    add("--paired_ar_n", type=count, default=10_000, help="approximate randomization trials, as in sacreBLEU")
    add("--num_sentences", type=count, default=20, help="sentences of largest differences in --output")
    options.add_shared(parser, "max_line_characters")
    add = parser.add_argument_group("external scores").add_argument
    add("--scores", type=file, nargs="+", help="files with one score in each line, one for each system")
    add("--scores_name", metavar="NAME", help="name of the external scores [external]")
    add("--scores_lower_is_better", action="store_true", help="as for error rates")
    options.add_judges(parser)


def convert(parser: argparse.ArgumentParser) -> None:
    """Convert weights of T5, BART, Marian and others, or back with --to."""
    add = parser.add_argument
    text = "folder or Hub id, or Marian's .npz or .bin file"
    add("source", type=lambda word: word if os.path.isfile(word) else options.model(word), help=text)
    add("output", type=path, help="folder to write")
    text = (
        "convert to t5, mt5, umt5, longt5, bart, mbart, plbart, mvp, led, blenderbot, blenderbot-small, pegasus, marian, "
        "m2m_100, fsmt, encoder-decoder, t5gemma, t5gemma2 or marian-npz"
    )
    add("--to", metavar="FAMILY", help=text)
    add("--trim_vocabulary", type=file, nargs="+", help="keep only tokens of these text files, and special ones")
    add("--revision", help="branch, tag or commit on the Hub")
    options.add_overwrite(parser, "conversion")
    options.add_shared(parser, "max_shard_size")


def adapt(parser: argparse.ArgumentParser) -> None:
    """Make an encoder-decoder, to be trained, of a decoder-only model such as Llama, Qwen or Gemma."""
    options.add_model(parser, "base", help="folder or Hub id of a Llama, Qwen 2 or 3, or Gemma 2 or 3")
    add = parser.add_argument
    add("output", type=path, help="folder to write")
    options.add_model(parser, "--encoder", help="another model for the encoder, such as a smaller one [the same]")
    add("--encoder_layers", type=layers, help="layers that the encoder takes, such as 0-5,8 [all]")
    add("--decoder_layers", type=layers, help="layers that the decoder takes [all]")
    text = (
        "copied from the self-attention; new, with an output of zero; or merged with the self-attention [copied, or new "
        "for models of different widths]"
    )
    add("--cross_attention", choices=("copied", "new", "merged"), help=text)
    add("--dropout", type=float, default=0.1, help="dropout probability of the new model")
    options.add_overwrite(parser, "output")
    options.add_shared(parser, "max_shard_size")


def shortlist(parser: argparse.ArgumentParser) -> None:
    """Learn the target tokens of each source token, for faster decoding by --use_vmap."""
    options.add_model(parser, help="folder of a Metaphrase model")
    add = parser.add_argument
    add("pairs", type=file, nargs="+", help="training pairs: one file of pairs, or two parallel files")
    options.add_shared(parser, *options.COLUMNS)
    add("--num_per_token", type=int, default=200, help="target tokens that a source token permits")
    add("--num_frequent", type=int, default=100, help="most frequent target tokens, which all sources permit")
    options.add_overwrite(parser, "vmap.txt")


def export(parser: argparse.ArgumentParser) -> None:
    """Export a model to CTranslate2, ONNX, a web page or Argos Translate, with tokenizers and settings."""
    options.add_model(parser, help="folder or Hub id of a Metaphrase model")
    add = parser.add_argument
    add("output", type=path, help="folder to write; for argos a file, such as en_de.argosmodel")
    text = "format to write; web is for browsers and Node, with a page; argos is for LibreTranslate"
    add("--format", choices=("ctranslate2", "onnx", "web", "argos"), required=True, help=text)
    text = "type of CTranslate2's weights: float32, float16, int8, int8_float16 ..."
    add("--quantization", metavar="TYPE", help=text)
    add("--source_lang", metavar="CODE", help="source language of --format argos, such as en")
    add("--target_lang", metavar="CODE", help="target language of --format argos")
    add("--library", type=path, help="node_modules with @huggingface/transformers, to copy for --format web")
    add("--overwrite", "--force", action="store_true", help="replace an existing export")


def attention(parser: argparse.ArgumentParser) -> None:
    """Show cross-attention: png of one sentence, or word alignment (pharaoh)."""
    sources, targets = parser.add_mutually_exclusive_group(), parser.add_mutually_exclusive_group()
    sources.add_argument("--source", action="append", help="source text; may be given several times")
    targets.add_argument("--target", action="append", help="target text for each --source [generated]")
    text = "file with one source in each line [standard input, without --source]"
    sources.add_argument("--input", type=file, help=text)
    targets.add_argument("--target_input", type=file, help="file with one target in each line [generated]")
    add = parser.add_argument
    add("--layer", type=layer, default=-1, help="decoder layer to show; -1 is the last, mean is the mean of all layers")
    add("--head", type=int, help="head of that layer [mean of all heads]")
    add("--output", type=path, help="file to write: .png, .align or .txt [attention.png, or standard output]")
    add("--format", choices=("png", "pharaoh"), help="format [by the suffix of the output, or png]")
    options.add_loaded_model(parser)
    options.add_shared(parser.add_argument_group("texts"), "max_line_characters")
    options.add_generation(parser)


def explain(parser: argparse.ArgumentParser) -> None:
    """Write a page that shows what each stage of a model computes for a pair."""
    add = parser.add_argument
    add("--source", action="append", required=True, help="source text; may be given several times")
    add("--target", action="append", help="target text for each --source [generated]")
    add("--output", type=path, default="explanation.html", help="HTML file to write")
    options.add_loaded_model(parser)
    options.add_generation(parser)


def average(parser: argparse.ArgumentParser) -> None:
    """Average the weights of several checkpoints, with the settings of the last one."""
    add = parser.add_argument
    add("folders", nargs="+", help="folder of a run, or the checkpoints to average")
    add("--output", type=path, required=True, help="folder to write the model to")
    add("--last", type=int, help="average the last N checkpoints of a run")
    add("--best", type=int, help="average the N checkpoints of a run with the best metric")
    add("--metric", help="metric for --best, as the trainer logs it [eval_bleu]")
    options.add_overwrite(parser, "average")


def serve(parser: argparse.ArgumentParser) -> None:
    """Serve models by HTTP, with a page to try them at /ui and the API at /docs."""
    from metaphrase.serving import Limits

    add = parser.add_argument
    add("models", nargs="+", help="folders or Hub ids; en-de=FOLDER gives a model a name and its languages")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is all networks")
    add("--port", type=count, default=8000, help="port to listen on")
    add("--api_keys", type=file, help="file with one key of a client on each line [METAPHRASE_API_KEYS; else no keys]")
    add("--cors_origins", metavar="URL", nargs="+", default=[], help="origins of web pages that may call; * is all")
    add("--glossaries", metavar="NAME=FILE", nargs="+", default=[], help="files of terms; NAME is their id in requests")
    tasks, text = ("translation", "summarization", "text2text-generation"), "task of the models"
    add("--task", choices=tasks, help=f"{text} [translation with two languages]")
    options.add_shared(parser.add_argument_group("loading"), *options.LOADING)
    options.add_shared(parser.add_argument_group("batches and engine"), *options.ENGINE)
    add = parser.add_argument_group("limits").add_argument
    for field in dataclasses.fields(Limits):
        kind = count if field.type is int else field.type
        add(f"--{field.name}", type=kind, default=field.default, help=field.metadata["help"])
    options.add_generation(parser)


def subcommands() -> tuple[Callable[[argparse.ArgumentParser], None], ...]:
    """Return the functions of this file."""
    makers = (demo, tokenize, filter, backtranslate, distill, classify, embed, rerank, tune, compare, convert)
    return (*makers, adapt, shortlist, export, attention, explain, average, serve)
