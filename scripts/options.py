"""Options of the command line that say which model decodes, and how it is loaded."""

import argparse

from metaphrase.decoding.options import add_language_options
from metaphrase.decoding.searches.ensemble import ENSEMBLE_MEANS
from metaphrase.inference.loading import ENGINES
from metaphrase.modeling.pipeline_support import DEFAULT_BATCH_SIZE, DEFAULT_MAX_TOKENS_PER_BATCH

_NAMES = (
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
    """Adds the model, and all that `chosen_loading_options` reads."""
    parser.add_argument("model", help="folder or Hub id of any encoder-decoder model")
    parser.add_argument(
        "--ensemble",
        nargs="+",
        metavar="MODEL",
        help="more models, which write each target together with the first",
    )
    parser.add_argument("--ensemble_mean", choices=ENSEMBLE_MEANS, help="of what they predict [linear]")
    add_language_options(parser)
    add_source_length(parser)
    parser.add_argument(
        "--batch_size", type=int, default=DEFAULT_BATCH_SIZE, help="most sources in a batch [%(default)s]"
    )
    parser.add_argument(
        "--max_tokens_per_batch",
        type=int,
        default=DEFAULT_MAX_TOKENS_PER_BATCH,
        help="most source tokens in a batch [%(default)s]",
    )
    parser.add_argument(
        "--engine",
        default=ENGINES[0],
        choices=ENGINES,
        help="what computes [%(default)s]; ctranslate2 takes an exported folder, or converts a Metaphrase model first",
    )
    parser.add_argument("--device", help="where to run; an accelerator by default, if there is one")
    parser.add_argument(
        "--dtype",
        default="auto",
        help="type of the weights [%(default)s: as saved]; int8 and float16 make a CPU faster",
    )
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run code that comes with the model or its tokenizer"
    )


def add_source_length(parser: argparse.ArgumentParser) -> None:
    """Adds `max_source_length`."""
    parser.add_argument(
        "--max_source_length",
        type=int,
        metavar="INT",
        help="most tokens of a source, end of sequence included; of longer ones the end is cut off, and they are counted "
        "[no limit]",
    )


def chosen_models(arguments: argparse.Namespace) -> list[str]:
    """The names of all models, the first one in front.

    Raises:
        ValueError: If a mean is given, but only one model.
    """
    if arguments.ensemble_mean is not None and arguments.ensemble is None:
        raise ValueError(f"`ensemble` must be given with `ensemble_mean`, got None and {arguments.ensemble_mean!r}.")
    return [arguments.model, *(arguments.ensemble or [])]


def chosen_loading_options(arguments: argparse.Namespace) -> dict:
    """Arguments of `Generator.from_pretrained`."""
    return {name: getattr(arguments, name) for name in _NAMES} | {"ensemble_mean": arguments.ensemble_mean or "linear"}
