"""Options of the command line that several verbs share: model and loading, generation, phrases, languages."""

import argparse

from transformers.hf_argparser import string_to_bool

from metaphrase.decoding.options import GENERATION_OPTIONS, bool_or_never, complete_sampling
from metaphrase.decoding.searches.ensemble import ENSEMBLE_MEANS
from metaphrase.inference.loading import ENGINES
from metaphrase.modeling.pipeline_support import DEFAULT_BATCH_SIZE, DEFAULT_MAX_TOKENS_PER_BATCH

_LOADING_NAMES = (
    "engine",
    "device",
    "dtype",
    "trust_remote_code",
    "source_lang",
    "target_lang",
    "max_source_length",
    "batch_size",
    "max_tokens_per_batch",
)


def add_loading_options(parser: argparse.ArgumentParser) -> None:
    """Add the model, and the options that `chosen_loading_options` reads."""
    add_model_options(parser)
    parser.add_argument("--ensemble", nargs="+", metavar="MODEL", help="more models for an ensemble with the first")
    parser.add_argument(
        "--ensemble_mean", choices=ENSEMBLE_MEANS, help="mean of probabilities or of log-probabilities [linear]"
    )
    parser.add_argument(
        "--batch_size", type=int, default=DEFAULT_BATCH_SIZE, help="maximum sources in a batch [%(default)s]"
    )
    parser.add_argument(
        "--max_tokens_per_batch",
        type=int,
        default=DEFAULT_MAX_TOKENS_PER_BATCH,
        help="maximum source tokens in a batch, padding included [%(default)s]",
    )
    parser.add_argument(
        "--engine",
        default=ENGINES[0],
        choices=ENGINES,
        help="library that decodes [%(default)s]; ctranslate2 takes an exported folder, or converts a Metaphrase model first",
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the model, its device and type, languages and maximum source length."""
    parser.add_argument("model", help="folder or Hub id of any encoder-decoder model")
    for side in ("source", "target"):
        text = f"language code of the {side} for a multilingual model (mBART, M2M100, NLLB), such as eng_Latn"
        parser.add_argument(f"--{side}_lang", metavar="CODE", help=text)
    parser.add_argument(
        "--max_source_length",
        type=int,
        metavar="INT",
        help="maximum tokens of a source, end of sequence included; longer sources are truncated and counted [no limit]",
    )
    parser.add_argument("--device", help="device to run on [the accelerator if there is one]")
    parser.add_argument(
        "--dtype",
        default="auto",
        help="type of the weights [%(default)s: as saved]; int8 and float16 are faster on a CPU",
    )
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run code that comes with the model or its tokenizer"
    )


def chosen_models(arguments: argparse.Namespace) -> list[str]:
    """Return the names of all models, the first one in front.

    Raises:
        ValueError: If `ensemble_mean` is given for a single model.
    """
    if arguments.ensemble_mean is not None and arguments.ensemble is None:
        raise ValueError(f"`ensemble` must be given with `ensemble_mean`, got None and {arguments.ensemble_mean!r}.")
    return [arguments.model, *(arguments.ensemble or [])]


def chosen_loading_options(arguments: argparse.Namespace) -> dict:
    """Return arguments of `Generator.from_pretrained`."""
    options = {name: getattr(arguments, name) for name in _LOADING_NAMES}
    return options | {"ensemble_mean": arguments.ensemble_mean or "linear"}


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
    return complete_sampling(_given(arguments, GENERATION_OPTIONS))


def add_phrase_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for phrases that targets must or must not contain."""
    group = parser.add_argument_group("phrases")
    group.add_argument(
        "--must_contain",
        action="append",
        nargs="+",
        metavar="PHRASE",
        help="phrase that every target contains; of several phrases one is enough; may be given several times",
    )
    group.add_argument(
        "--never_contain", action="extend", nargs="+", metavar="PHRASE", help="phrases that no target contains"
    )


def chosen_phrase_options(arguments: argparse.Namespace) -> dict:
    """Return the phrases given on the command line."""
    return _given(arguments, ("must_contain", "never_contain"))


def _given(arguments: argparse.Namespace, names) -> dict:
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
