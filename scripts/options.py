"""Options of the command line that several verbs share: model and loading, generation."""

import argparse

from transformers.hf_argparser import string_to_bool

from metaphrase.decoding.options import GENERATION_OPTIONS, bool_or_never, complete_sampling
from metaphrase.decoding.searches.joint_search import ENSEMBLE_MEANS
from metaphrase.inference import ENGINES
from metaphrase.modeling.pipeline_support import DEFAULT_BATCH_SIZE, DEFAULT_MAX_TOKENS_PER_BATCH

_LOADING_OPTIONS = {
    *("source_prefix", "max_source_length", "source_lang", "target_lang", "device", "dtype", "trust_remote_code"),
    *("ensemble_mean", "batch_size", "max_tokens_per_batch", "engine"),
}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the model, its device and type, languages, prefix and maximum length of sources, and the seed."""
    parser.add_argument("model", help="folder or Hub id of any encoder-decoder model")
    for side in ("source", "target"):
        text = f"language code of the {side} for a multilingual model (mBART, M2M100, NLLB), such as eng_Latn"
        parser.add_argument(f"--{side}_lang", metavar="CODE", help=text)
    parser.add_argument("--source_prefix", default="", help="text before every source, such as 'summarize: '")
    parser.add_argument(
        "--max_source_length",
        type=int,
        metavar="INT",
        help="maximum tokens of a source, end of sequence included; longer sources are truncated and counted [no limit]",
    )
    parser.add_argument("--device", help="device to run on [the accelerator if there is one]")
    text = "type of the weights [%(default)s: as saved]; int8 and float16 are faster on a CPU"
    parser.add_argument("--dtype", default="auto", help=text)
    text = "run code that comes with the model or its tokenizer"
    parser.add_argument("--trust_remote_code", action="store_true", help=text)
    parser.add_argument("--seed", type=int, default=42, help="random seed for sampling [%(default)s]")


def add_ensemble_options(parser: argparse.ArgumentParser) -> None:
    """Add the other models of an ensemble, sizes of batches and the engine."""
    parser.add_argument("--ensemble", nargs="+", metavar="MODEL", help="more models for an ensemble with the first")
    text = "mean of probabilities or of log-probabilities [linear]"
    parser.add_argument("--ensemble_mean", choices=ENSEMBLE_MEANS, help=text)
    for name, default, text in (
        ("batch_size", DEFAULT_BATCH_SIZE, "maximum sources in a batch"),
        ("max_tokens_per_batch", DEFAULT_MAX_TOKENS_PER_BATCH, "maximum source tokens in a batch, padding included"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} [%(default)s]")
    text = (
        "library that decodes [%(default)s]; ctranslate2 takes an exported folder, or converts a Metaphrase model first"
    )
    parser.add_argument("--engine", default=ENGINES[0], choices=ENGINES, help=text)


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
    for name, (kind, text) in GENERATION_OPTIONS.items():
        if kind in (bool, bool_or_never):
            convert, metavar = (string_to_bool, "BOOL") if kind is bool else (kind, "BOOL|never")
            group.add_argument(f"--{name}", type=convert, nargs="?", const=True, metavar=metavar, help=text)
        else:
            group.add_argument(f"--{name}", type=kind, metavar=kind.__name__.upper(), help=text)


def chosen_generation_options(arguments: argparse.Namespace) -> dict:
    """Return the generation options given on the command line."""
    return complete_sampling(given_options(arguments, GENERATION_OPTIONS))


def given_options(arguments: argparse.Namespace, names) -> dict:
    """Return those of the options that have a value."""
    return {name: value for name, value in vars(arguments).items() if name in names and value is not None}
