"""Call options: what `generate()` is asked for in a call, in one form, however it was said.

Generation options: those arguments of `generate()` that a command line or a recipe can give, by its own names.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.hf_argparser import string_to_bool

from metaphrase.modeling.pipeline_support import generation_settings, override_lengths


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Each setting by its own name. What has this form already keeps it.

    The settings of a `generation_config` stand beside the others, which come first, as in `generate()`. A length takes the place
    of the other kind's, which the model or that config may have. No number of targets is one.

    Args:
        options: Arguments of `generate()`.

    Raises:
        ValueError: If `generation_config` is something else.
    """
    options = override_lengths(options)
    config = options.pop("generation_config", None)
    if config is not None:
        if not isinstance(config, GenerationConfig):
            raise ValueError(f"`generation_config` must be a GenerationConfig, got {type(config).__name__}.")
        settings = {name: value for name, value in vars(config).items() if value is not None and name[0] != "_"}
        settings.pop("transformers_version", None)
        # A copy of the model's own in which one of them was set holds both: new tokens come first, as in `generate()`.
        for length, new_tokens in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
            if new_tokens in settings:
                settings.pop(length, None)
        # What transformers does not know itself, a search of the caller's own may read.
        unknown = {name: settings.pop(name) for name in settings.keys() - generation_settings()}
        if unknown:
            options["generation_config"] = GenerationConfig(**unknown)
        options = override_lengths(settings) | options
    if options.get("num_return_sequences", 1) is None:
        options["num_return_sequences"] = 1
    for name, value in options.items():
        # `generate()` takes tensors, too.
        if name.endswith("_token_id") and isinstance(value, torch.Tensor):
            options[name] = value.tolist()
    return options


def _bool_or_never(word: str) -> bool | str:
    return word if word == "never" else string_to_bool(word)


GENERATION_OPTIONS: dict[str, tuple[Callable, str]] = {
    "max_length": (int, "most tokens of a target"),
    "max_new_tokens": (int, "most tokens of a target, the start token not counted"),
    "min_length": (int, "fewest tokens of a target"),
    "min_new_tokens": (int, "fewest tokens of a target, the start token not counted"),
    "num_beams": (int, "width of the beam; 1 is greedy search or sampling"),
    "length_penalty": (float, "exponent of the length by which a beam's score is divided"),
    "num_beam_groups": (int, "groups of beams that differ from one another: diverse beam search"),
    "diversity_penalty": (float, "what a token costs that beams of another group have just gone on with"),
    "early_stopping": (
        _bool_or_never,
        "stop a sentence as soon as it has num_beams candidates; never: only when no better one is possible",
    ),
    "do_sample": (bool, "sample instead of taking the most probable token"),
    "temperature": (float, "divides the logits before sampling"),
    "top_k": (int, "sample among the so many most probable tokens; candidates of contrastive search"),
    "top_p": (float, "sample among the most probable tokens that together have this probability (nucleus)"),
    "min_p": (float, "sample among tokens with at least this share of the highest probability"),
    "typical_p": (float, "sample among the most typical tokens that together have this probability"),
    "epsilon_cutoff": (float, "sample among tokens with at least this probability"),
    "eta_cutoff": (float, "likewise, or with less where the distribution is flat"),
    "top_h": (float, "sample among the most probable tokens whose entropy has at most this share of that of all"),
    "penalty_alpha": (float, "share of the unlikeness to earlier tokens in the choice: contrastive search, with top_k"),
    "repetition_penalty": (float, "divides the scores of tokens that were generated before"),
    "no_repeat_ngram_size": (int, "no n-gram of this size occurs twice"),
    "renormalize_logits": (bool, "probabilities add up to 1 again after the other options have changed them"),
    "forced_bos_token_id": (int, "id of the token that every target begins with, such as a language"),
    "forced_eos_token_id": (int, "id of the last token of a target that met the length limit"),
    "num_return_sequences": (int, "targets for each source"),
}
_COUNT = (lambda value: value >= 1, "at least 1")
_SHARE = (lambda value: 0 < value <= 1, "above 0 and at most 1")
_CUTOFF = (lambda value: 0 <= value < 1, "at least 0 and below 1")
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(("num_beams", "num_return_sequences"), _COUNT),
    **dict.fromkeys(("top_p", "typical_p"), _SHARE),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), _CUTOFF),
}
# Each of these means something only when sampling, so giving one asks for it; but `top_k` belongs to contrastive search too.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")


def add_language_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of models of many languages."""
    for side in ("source", "target"):
        words = f"code of the {side}s' language in a model of many (mBART, M2M100, NLLB), such as eng_Latn"
        parser.add_argument(f"--{side}_lang", metavar="CODE", help=words)


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """Adds a group with all generation options to a parser; what is not given is left to the model's own settings."""
    group = parser.add_argument_group("generation", "the names and meanings are those of transformers' generate()")
    for name, (kind, text) in GENERATION_OPTIONS.items():
        if kind in (bool, _bool_or_never):
            convert, metavar = (string_to_bool, "BOOL") if kind is bool else (kind, "BOOL|never")
            group.add_argument(f"--{name}", type=convert, nargs="?", const=True, metavar=metavar, help=text)
        else:
            group.add_argument(f"--{name}", type=kind, metavar=kind.__name__.upper(), help=text)


def add_phrase_options(parser: argparse.ArgumentParser) -> None:
    """Adds the phrases that targets must or must not contain."""
    group = parser.add_argument_group("phrases", "what targets contain")
    group.add_argument(
        "--must_contain",
        action="append",
        nargs="+",
        metavar="PHRASE",
        help="every target contains the phrase, or one of several; may be given more than once",
    )
    group.add_argument("--never_contain", action="extend", nargs="+", metavar="PHRASE", help="no target contains these")


def chosen_phrase_options(arguments: argparse.Namespace) -> dict:
    """The phrases that were given on the command line."""
    names = ("must_contain", "never_contain")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def chosen_generation_options(arguments: argparse.Namespace) -> dict:
    """The generation options that were given on the command line."""
    return complete_sampling(
        {name: getattr(arguments, name) for name in GENERATION_OPTIONS if getattr(arguments, name) is not None}
    )


def complete_sampling(options: dict) -> dict:
    """Turns sampling on where an option was given that means nothing without it."""
    names = [name for name in _SAMPLING if name != "top_k" or "penalty_alpha" not in options]
    if "do_sample" not in options and any(name in options for name in names):
        return {**options, "do_sample": True}
    return options


def check_ranges(options: Mapping[str, Any]) -> None:
    """Checks numbers of which `generate()` takes others too, and ignores them or fails at last.

    Raises:
        ValueError: If one that is given is out of range.
    """
    for name, (is_within, bounds) in _RANGES.items():
        value = options.get(name)
        if value is not None and not is_within(value):
            raise ValueError(f"`{name}` must be {bounds}, got {value}.")
