"""Options of `generate()` that commands, recipes, requests and saved settings share: type, range and meaning of each.

This file imports no library, so that the help of a command comes at once.
"""

import math
import numbers
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

from metaphrase.errors import MetaphraseError


class Option(NamedTuple):
    """A number from `low` to `high`, a truth value, or with the type `str` one of true, false and never."""

    type: type
    help: str
    low: float | None = None
    high: float | None = None


# A larger length or beam would fill the memory.
_MAX_LENGTH, _MAX_BEAMS = 2**20, 10_000
_LAST_ID = 2**31 - 1
GENERATION_OPTIONS: dict[str, Option] = {
    "max_length": Option(int, "maximum tokens of a target", 0, _MAX_LENGTH),
    "max_new_tokens": Option(int, "maximum tokens of a target, without the start token", 0, _MAX_LENGTH),
    "min_length": Option(int, "minimum tokens of a target", 0, _MAX_LENGTH),
    "min_new_tokens": Option(int, "minimum tokens of a target, without the start token", 0, _MAX_LENGTH),
    "num_beams": Option(int, "beam size; 1 is greedy search or sampling", 1, _MAX_BEAMS),
    "length_penalty": Option(float, "exponent of the length that divides the score of a beam", -10, 10),
    "early_stopping": Option(
        str, "stop at num_beams finished candidates; never: when no better one is possible [true with --num_beams]"
    ),
    "do_sample": Option(bool, "sample instead of taking the most probable token"),
    # With smaller or larger values, scores of float32 overflow or become equal.
    "temperature": Option(float, "divide the logits by this value before sampling", 1e-9, 1e9),
    "top_k": Option(int, "sample from the k most probable tokens", 0, _LAST_ID),
    "top_p": Option(
        float, "sample from the most probable tokens of this total probability (nucleus sampling)", 1e-9, 1
    ),
    "min_p": Option(float, "sample from tokens with at least this share of the highest probability", 0, 1),
    "typical_p": Option(float, "sample from the most typical tokens with this total probability", 1e-9, 1),
    "epsilon_cutoff": Option(float, "sample from tokens with at least this probability", 0, 1 - 1e-9),
    "eta_cutoff": Option(float, "as epsilon_cutoff, with a lower threshold for a flat distribution", 0, 1 - 1e-9),
    "top_h": Option(float, "sample from the most probable tokens with at most this share of the entropy", 0, 1),
    "repetition_penalty": Option(float, "divide the scores of earlier tokens by this value", 1e-3, 1e3),
    "no_repeat_ngram_size": Option(int, "forbid to repeat an n-gram of this size", 0, _LAST_ID),
    "renormalize_logits": Option(bool, "normalize the probabilities after the other options have changed them"),
    "forced_bos_token_id": Option(int, "id of the first token of every target, such as a language"),
    "forced_eos_token_id": Option(int, "id of the last token of a target at the length limit"),
    "num_return_sequences": Option(int, "number of targets for each source", 1, _MAX_BEAMS),
}
# Options that turn sampling on.
_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"}


def check_options(options: Mapping[str, Any], where: str = "") -> None:
    """Check options of `generate()`, which may silently ignore a wrong value or fail late.

    Options that this file does not describe, ids and None are not checked. `where` is the origin of the options, for the error.
    """
    for name, value in options.items():
        option = GENERATION_OPTIONS.get(name)
        if option is None or value is None or name.endswith("_token_id"):
            continue
        if option.low is None:
            # Numbers stand for truth values in many programs.
            if not isinstance(value, bool | numbers.Real) and not (option.type is str and value == "never"):
                words = "true, false or never" if option.type is str else "true or false"
                raise MetaphraseError(f"`{name}`{where} must be {words}, got {value!r}.")
            continue
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not option.low <= value <= option.high or (option.type is int and value != int(value)):
            kind = "a whole number" if option.type is int else "a number"
            raise MetaphraseError(
                f"`{name}`{where} must be {kind} from {option.low:.10g} to {option.high:.10g}, got {value!r}."
            )


def complete_sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Set `do_sample` if an option needs it and the caller has set neither it nor a loop, and then one beam if none are set.

    A model may have beams of its own, and sampling within beams is another search.
    """
    chosen = {name for name, value in options.items() if value is not None}
    if not chosen & {"do_sample", "custom_generate"} and chosen & _SAMPLING:
        beams = {} if "num_beams" in chosen else {"num_beams": 1}
        return {**options, "do_sample": True, **beams}
    return dict(options)


def use_floats(settings: MutableMapping[str, Any]) -> None:
    """Turn integers into floats where transformers refuses integers, such as a temperature of 2."""
    for name in ("temperature", "repetition_penalty", "encoder_repetition_penalty"):
        if type(settings.get(name)) is int:
            settings[name] = float(settings[name])


def resolve_settings(model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `generate()`: the arguments, then their generation config, then the model's."""
    config = arguments.get("generation_config")
    return model.generation_config.to_dict() | ({} if config is None else config.to_diff_dict()) | dict(arguments)


def length_limits(model: Any, arguments: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the least and most tokens of a target, with the start token, by the arguments of `generate()`."""
    settings = resolve_settings(model, arguments)
    limits = []
    for length, new_tokens in (("min_length", "min_new_tokens"), ("max_length", "max_new_tokens")):
        new = settings.get(new_tokens)
        limits.append(settings.get(length) if new is None else new + 1)
    return limits[0] or 0, limits[1]
